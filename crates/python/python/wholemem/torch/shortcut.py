"""The way around torch's dispatcher, for calls that nobody but the caller has to see.

The dispatcher takes longer than a launch on a GPU. It is there for those who look at operators on their way: compilers and
tracers, profilers, modes, derivatives forward, and tensors that stand for others. Where there are none of these, tensors are
looked at in the native half, by the functions that torch publishes for it. What torch does not tell of is not noticed: an
``ExecutionTraceObserver`` without a profiler sees the operators only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable, Optional, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler
from torch.utils import _python_dispatch

from .._native import ShortGather, Shortcut
from .tensors import DTYPES, EXCHANGE

__all__ = ["SHORTCUT", "gather_around", "is_forward"]

Function = TypeVar("Function", bound=Callable[..., torch.Tensor])


def _new(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
    """A tensor without gaps whose elements nobody has written."""
    return torch.empty(size=size, dtype=dtype, device="cpu" if device < 0 else device)


def _quick() -> Optional[tuple[Any, Any, Any]]:
    """What compiled programs call to make tensors: on a GPU in half the time of `torch.empty`, and on the current one only."""
    try:
        compiled = torch._C._dynamo.guards
        current = getattr(torch._C, "_cuda_getDevice", _no_device)
        return compiled._empty_strided_cpu, compiled._empty_strided_cuda, current
    except AttributeError:
        return None


def _no_device() -> int:
    """The current GPU, for a torch that was built without."""
    return -1


def _flag(module: ModuleType, name: str, quiet: object) -> tuple[dict[str, Any], str, object]:
    """A name of a module, and what it is while nobody looks."""
    if name not in vars(module):
        raise AttributeError(f"`{module.__name__}` has no `{name}`")
    return vars(module), name, quiet


def _shortcut() -> Optional[Shortcut]:
    try:
        functions, operators = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
        profiling = _flag(profiler, "_is_profiler_enabled", False)
        # Of all threads at once, and quickly; each is asked for its own while the call runs.
        dispatching = _flag(_python_dispatch, "_is_in_torch_dispatch_mode", False)
        forward = _flag(forward_ad, "_current_level", -1)
        compiling = _flag(torch.compiler, "_is_compiling_flag", False)
        return Shortcut(
            EXCHANGE,
            # These tell of each call, and would tell of two.
            first=[profiling, dispatching, functions],
            then=[forward, compiling, operators, torch._C._is_tracing],
            types=list(DTYPES.values()),
            is_other=torch._C.TensorBase.is_neg,
            new=(_new, _quick()),
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
    return cast(Function, ShortGather(SHORTCUT, function))


def is_forward() -> bool:
    """Whether derivatives are taken forward now: tensors have tangents beside them."""
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)
