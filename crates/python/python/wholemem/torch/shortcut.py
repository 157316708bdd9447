"""The way around torch's dispatcher, for calls that nobody but the caller has to see.

The dispatcher takes longer than a launch on a GPU. It is there for those who look at operators on their way: compilers and
tracers, profilers, modes, derivatives forward, and tensors that stand for others. Where there are none of these, tensors are
looked at in the native half, by the functions that torch publishes for it. What torch does not tell of is not noticed: an
``ExecutionTraceObserver`` without a profiler sees the operators only.
"""

from __future__ import annotations

from typing import Callable, Optional, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler

from .._native import Exchange, ShortGather, Shortcut
from .tensors import DTYPES

__all__ = ["SHORTCUT", "gather_around", "is_forward"]

Function = TypeVar("Function", bound=Callable[..., torch.Tensor])

# What compiled programs call to make tensors: on a GPU in half the time of `torch.empty`, and on the current one only.
_compiled = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_cpu = getattr(_compiled, "_empty_strided_cpu", None)
_empty_cuda = getattr(_compiled, "_empty_strided_cuda", None)
_current = getattr(torch._C, "_cuda_getDevice", None)


def _new(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
    """A tensor without gaps whose elements nobody has written."""
    if device < 0 and _empty_cpu:
        return _empty_cpu(size, strides, dtype)
    if device >= 0 and _empty_cuda and _current and _current() == device:
        return _empty_cuda(size, strides, dtype)
    return torch.empty(size=size, dtype=dtype, device="cpu" if device < 0 else device)


def _shortcut() -> Optional[Shortcut]:
    exchange = Exchange.of(torch.Tensor, torch.nn.Parameter)
    if exchange is None:
        return None
    forward = (forward_ad, "_current_level", -1)
    compiling = (torch.compiler, "_is_compiling_flag", False)
    profiling = (profiler, "_is_profiler_enabled", False)
    try:
        for module, name, _ in (forward, compiling, profiling):
            getattr(module, name)
        return Shortcut(
            exchange,
            # These tell of each call, and would tell of two.
            first=[profiling, torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack],
            then=[forward, compiling, torch._C._is_tracing],
            types=list(DTYPES.values()),
            is_other=torch._C.TensorBase.is_neg,
            new=_new,
            written=torch._C._increment_version,
        )
    except AttributeError:
        # Another torch, which is not known well enough: its dispatcher is.
        return None


SHORTCUT = _shortcut()
"""The way around the dispatcher, where it is known."""


def gather_around(function: Function) -> Function:
    """Makes a gather go around the dispatcher where it can; else, and where it is compiled, it is the function."""
    if SHORTCUT is None:
        return function
    short = ShortGather(SHORTCUT, function)
    # What is native cannot be compiled. These names say what to compile instead, and need no compiler to be imported: they are
    # those of `torch.jit.script_if_tracing`, whose functions are not traced themselves either.
    vars(short).update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return cast(Function, short)


def is_forward() -> bool:
    """Whether derivatives are taken forward now: tensors have tangents beside them."""
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)
