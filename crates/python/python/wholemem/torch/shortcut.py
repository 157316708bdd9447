"""The way around torch's dispatcher, for calls that nobody but the caller has to see.

The dispatcher takes longer than a launch on a GPU. It is there for those who look at operators on their way: compilers and
tracers, profilers, modes, derivatives forward, and tensors that stand for others. Where there are none of these, tensors are
looked at in the native half, by the functions that torch publishes for it. What torch does not tell of is not noticed: an
``ExecutionTraceObserver`` without a profiler sees the operators only.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch.autograd import forward_ad, profiler

from .._native import Exchange

__all__ = ["EXCHANGE", "is_forward", "shortcut"]


def _exchange() -> Optional[Exchange]:
    try:
        watchers = [torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._is_tracing]
        # Read in every call.
        _ = profiler._is_profiler_enabled, forward_ad._current_level
    except AttributeError:
        # Another torch, which is not known well enough: its dispatcher is.
        return None
    return Exchange.of(torch.Tensor, torch.nn.Parameter, watchers=watchers)


EXCHANGE = _exchange()
"""How tensors are looked at, where torch tells."""


def shortcut() -> Optional[Exchange]:
    """How tensors are looked at, if nobody looks at operators now."""
    # Asked first, and here: a compiler knows the answer, and goes no further.
    if torch.compiler.is_compiling() or EXCHANGE is None:
        return None
    if profiler._is_profiler_enabled or forward_ad._current_level >= 0 or EXCHANGE.is_watched():
        return None
    return EXCHANGE


def is_forward() -> bool:
    """Whether derivatives are taken forward now: tensors have tangents beside them."""
    return bool(getattr(forward_ad, "_current_level", -1) >= 0)
