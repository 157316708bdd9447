"""The way around torch's dispatcher, for calls that nobody but the caller has to see.

The dispatcher takes longer than a launch on a GPU. It is there for those who look at operators on their way: compilers and
tracers, profilers, modes, and tensors that stand for others. Where there are none of these, tensors are looked at in the
native half, by the functions that torch publishes for it.
"""

from __future__ import annotations

from typing import Optional

import torch

from .._native import Exchange

__all__ = ["EXCHANGE", "shortcut"]

EXCHANGE = Exchange.of(
    torch.Tensor,
    torch.nn.Parameter,
    unless=torch.Tensor.is_neg,
    watchers=[
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch.autograd._profiler_enabled,
        torch._C._is_tracing,
    ],
)
"""How tensors are looked at, where torch is new enough to tell. Those that are yet to be negated are not what they seem."""


def shortcut() -> Optional[Exchange]:
    """How tensors are looked at, if nobody looks at operators now."""
    # Asked first, and here: a compiler knows the answer, and goes no further.
    if torch.compiler.is_compiling() or EXCHANGE is None or EXCHANGE.is_watched():
        return None
    return EXCHANGE
