"""The way back through collectives: what a rank gave to all, all give back to it.

The backward passes are collectives too: all ranks take them, in the same order. They keep the communicator, which their user
may have dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from .._native import Communicator
from ..errors import Unsupported
from ..handles import find
from .ops import LIBRARY

OPS = torch.ops.wholemem


def _set_up_all_reduce(ctx: Any, inputs: tuple[int, torch.Tensor, str], output: torch.Tensor) -> None:
    handle, _, ctx.op = inputs
    ctx.comm = find(handle, Communicator)
    if ctx.op not in ("sum", "avg"):
        raise Unsupported(f"there is no gradient of `{ctx.op}` over ranks", hint="give a tensor by `detach()`")


def _all_reduce(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    return None, OPS.all_reduce(ctx.comm.handle, grad, ctx.op), None


def _set_up_all_gather(ctx: Any, inputs: tuple[int, torch.Tensor], output: torch.Tensor) -> None:
    ctx.comm = find(inputs[0], Communicator)


def _all_gather(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
    total = OPS.all_reduce(ctx.comm.handle, grad, "sum")
    return None, total[ctx.comm.rank].clone()


def _set_up_broadcast(ctx: Any, inputs: tuple[int, torch.Tensor, int], output: torch.Tensor) -> None:
    handle, _, ctx.root = inputs
    ctx.comm = find(handle, Communicator)


def _broadcast(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    total = OPS.all_reduce(ctx.comm.handle, grad, "sum")
    is_root = ctx.comm.rank == ctx.root
    return None, total if is_root else torch.zeros_like(total), None


for name, set_up, differentiate in (
    ("all_reduce", _set_up_all_reduce, _all_reduce),
    ("all_gather", _set_up_all_gather, _all_gather),
    ("broadcast", _set_up_broadcast, _broadcast),
):
    torch.library.register_autograd(f"wholemem::{name}", differentiate, setup_context=set_up, lib=LIBRARY)
