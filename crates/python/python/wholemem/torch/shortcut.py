"""Fast path for gathers and all-reduces that bypasses torch's dispatcher.

The dispatcher takes longer than a kernel launch. It exists for observers of operators: compilers, tracers, profilers, modes,
forward-mode AD and tensor subclasses. If none of them is active, the native half reads the tensors through torch's exchange API.
Observers that torch does not report are not detected: an ``ExecutionTraceObserver`` without a profiler records only calls that go
through the dispatcher.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable, Optional, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler
from torch.utils import _python_dispatch

from .._native import ShortGather, Shortcut
from .tensors import DTYPES, EXCHANGE

__all__ = ["SHORTCUT", "bypass_dispatcher", "is_forward_ad"]

Function = TypeVar("Function", bound=Callable[..., torch.Tensor])


def _new(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
    """Creates an uninitialised contiguous tensor on the CPU or on a GPU."""
    return torch.empty(size=size, dtype=dtype, device="cpu" if device < 0 else device)


def _fast_factories() -> Optional[tuple[Any, Any, Any]]:
    """Returns the private functions of torch by which compiled code creates tensors, or ``None`` if this version of torch lacks
    them.

    On a GPU they take half the time of ``torch.empty``, but they use only the current GPU.
    """
    try:
        compiled = torch._C._dynamo.guards
        current = getattr(torch._C, "_cuda_getDevice", _no_device)
        return compiled._empty_strided_cpu, compiled._empty_strided_cuda, current
    except AttributeError:
        return None


def _no_device() -> int:
    """Returns -1 as the number of the current GPU, for a version of torch without CUDA."""
    return -1


def _flag(module: ModuleType, name: str, inactive: object) -> tuple[dict[str, Any], str, object]:
    """Returns a module variable that an observer of calls (such as a profiler) replaces, and the value of the variable without an
    observer.
    """
    if name not in vars(module):
        raise AttributeError(f"`{module.__name__}` has no `{name}`")
    return vars(module), name, inactive


def _shortcut() -> Optional[Shortcut]:
    try:
        functions, operators = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
        profiling = _flag(profiler, "_is_profiler_enabled", False)
        # This flag is a fast check for dispatch modes of all threads; the mode stack of this thread is checked during the call.
        dispatching = _flag(_python_dispatch, "_is_in_torch_dispatch_mode", False)
        forward = _flag(forward_ad, "_current_level", -1)
        compiling = _flag(torch.compiler, "_is_compiling_flag", False)
        return Shortcut(
            EXCHANGE,
            # The observers in `checked_before` record every call, and would record a call twice if it were repeated by the
            # dispatcher.
            checked_before=[profiling, dispatching, functions],
            checked_during=[forward, compiling, operators, torch._C._is_tracing],
            types=list(DTYPES.values()),
            is_negated=torch._C.TensorBase.is_neg,
            factories=(_new, _fast_factories()),
            mark_written=torch._C._increment_version,
        )
    except AttributeError:
        # This version of torch does not have the required functions: all calls go through the dispatcher.
        return None


SHORTCUT = _shortcut()
"""The fast path; ``None`` if this version of torch is not supported."""


def bypass_dispatcher(function: Function) -> Function:
    """Decorates a gather function so that calls bypass torch's dispatcher if possible. Compilers see the undecorated function.

    Args:
        function: The gather, which calls the operator.
    """
    if SHORTCUT is None:
        return function
    return cast(Function, ShortGather(SHORTCUT, function))


def is_forward_ad() -> bool:
    """Returns true if forward-mode automatic differentiation is active."""
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)
