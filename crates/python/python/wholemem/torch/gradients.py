"""The gradients of the collectives: each backward pass runs the matching collective.

All ranks run the backward passes in the same order. The autograd context holds the communicator, which the user may have
dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from .._handles import find
from .._native import Communicator
from ..errors import Unsupported
from .ops import LIBRARY
from .tensors import NUMBERS

OPS = torch.ops.wholemem


def _set_up_all_reduce(ctx: Any, inputs: tuple[int, torch.Tensor, str], output: torch.Tensor) -> None:
    handle, _, ctx.op = inputs
    ctx.comm = find(handle, Communicator)
    if ctx.op not in ("sum", "avg"):
        raise Unsupported(f"`{ctx.op}` over ranks is not differentiable", hint="pass `tensor.detach()`")


def _all_reduce(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    return None, OPS.all_reduce(ctx.comm._handle, grad, ctx.op), None


def _check_sum(tensor: torch.Tensor) -> None:
    """Raises ``Unsupported`` unless gradients of a tensor can be added. Forward passes call this check, because the forward pass
    itself copies tensors of any dtype.
    """
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if dtype not in NUMBERS:
        raise Unsupported(f"{tensor.dtype} over ranks is not differentiable", hint="pass `tensor.detach()`")


def _sum(comm: Communicator, grad: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all ranks' gradients. Complex gradients are added as pairs of real numbers."""
    if not grad.is_complex():
        return OPS.all_reduce(comm._handle, grad, "sum")
    pairs = torch.view_as_real(grad.resolve_conj())
    return torch.view_as_complex(OPS.all_reduce(comm._handle, pairs, "sum"))


def _set_up_all_gather(ctx: Any, inputs: tuple[int, torch.Tensor], output: torch.Tensor) -> None:
    handle, tensor = inputs
    _check_sum(tensor)
    ctx.comm = find(handle, Communicator)


def _all_gather(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
    total = _sum(ctx.comm, grad)
    return None, total[ctx.comm.rank].clone()


def _set_up_broadcast(ctx: Any, inputs: tuple[int, torch.Tensor, int], output: torch.Tensor) -> None:
    handle, tensor, ctx.root = inputs
    _check_sum(tensor)
    ctx.comm = find(handle, Communicator)


def _broadcast(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
    total = _sum(ctx.comm, grad)
    is_root = ctx.comm.rank == ctx.root
    return None, total if is_root else torch.zeros_like(total), None


for name, set_up, differentiate in (
    ("all_reduce", _set_up_all_reduce, _all_reduce),
    ("all_gather", _set_up_all_gather, _all_gather),
    ("broadcast", _set_up_broadcast, _broadcast),
):
    torch.library.register_autograd(f"wholemem::{name}", differentiate, setup_context=set_up, lib=LIBRARY)
