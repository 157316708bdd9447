"""The operators ``torch.ops.wholemem.*``, and the functions that call them.

Tables and communicators travel as handles, since operators take numbers and tensors. What an operator does to a table, torch
does not see; so all of them are declared to have an effect, in the order of the program. A compiler then threads a token
from each to the next: none is removed although nobody uses what it returns, none is merged with its like, and a gather
stays behind the scatter that came before it.

What an operator reads may lie in memory in any way, and is made contiguous where it is not: a compiler chooses strides of its
own for it, whatever the program says. What it writes is given as it is to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch.autograd.graph import increment_version

from .._handles import find
from .._native import Communicator, WholeTensor
from ..errors import BadIndex
from .effects import ordered
from .order import check_determined, check_order
from .shortcut import gather_around, is_forward
from .tensors import (
    EXCHANGE,
    as_torch_dtype,
    check_asked,
    check_indices,
    check_kind,
    check_like,
    check_no_gradient,
    check_number,
    check_op,
    check_own,
    check_tensor,
    contiguous,
    dtype_of,
)

if TYPE_CHECKING:
    from .._native import Order, ReduceOp

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "scatter", "scatter_add"]

LIBRARY = torch.library.Library("wholemem", "DEF")

LIBRARY.define("gather(int table, Tensor indices, ScalarType? dtype=None) -> Tensor")
LIBRARY.define("gather_into(int table, Tensor indices, Tensor(a!) out) -> ()")
LIBRARY.define("scatter(int table, Tensor values, Tensor indices, str order='any') -> ()")
LIBRARY.define("scatter_add(int table, Tensor values, Tensor indices, str order='any') -> ()")
LIBRARY.define("all_reduce(int comm, Tensor input, str op='sum') -> Tensor")
LIBRARY.define("all_gather(int comm, Tensor input) -> Tensor")
LIBRARY.define("broadcast(int comm, Tensor input, int root=0) -> Tensor")

OPS = torch.ops.wholemem


@gather_around
def gather(
    table: WholeTensor,
    indices: torch.Tensor,
    *,
    out: Optional[torch.Tensor] = None,
    dtype: Union[None, str, torch.dtype] = None,
) -> torch.Tensor:
    """The rows that the indices name, in ``out`` or in a new tensor; converted where ``dtype``, or ``out``'s type, asks for it.

    An index that names no row raises :class:`~wholemem.errors.BadIndex`; on a GPU, in the next call or in ``table.check()``.
    """
    check_kind("the table", table, WholeTensor)
    if dtype is not None:
        dtype = as_torch_dtype(dtype)
    if out is None:
        check_tensor("the tensor of indices", indices)
        return OPS.gather(table._handle, indices, dtype)
    if not isinstance(out, torch.Tensor):
        check_tensor("the output", out)
        OPS.gather_into(table._handle, indices, out)
        return out
    if dtype is not None:
        check_asked("the output", out, dtype)
    check_no_gradient("the output", out)
    check_tensor("the tensor of indices", indices)
    if torch.compiler.is_compiling() or is_forward():
        # A tensor that is written cannot be in an operator whose order is kept; nor does one take its tangent along.
        rows = OPS.gather(table._handle, indices, out.dtype)
        # Fewer rows would be repeated, and those of another device copied.
        check_like("the output", out, rows)
        return out.copy_(rows)
    check_own("the output", out)
    OPS.gather_into(table._handle, indices, out)
    return out


def scatter(table: WholeTensor, indices: torch.Tensor, values: torch.Tensor, *, order: Order = "any") -> None:
    """Writes rows to where the indices say. Other ranks see them behind the next barrier. Indices come first, as in :func:`gather`.

    Where several go to one place, the order ``fixed`` leaves the last of the last rank, and is a call of all ranks. Without it,
    this is refused under ``torch.use_deterministic_algorithms(True)``: nobody knows what other ranks write.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter(table._handle, values, indices, order)


def scatter_add(table: WholeTensor, indices: torch.Tensor, values: torch.Tensor, *, order: Order = "any") -> None:
    """Adds rows to where the indices say, all ranks at the same time if they like. Indices come first, as in :func:`gather`.

    With the order ``fixed``, and at the ``host``, it is a call of all ranks, and floats are the same to the bit in every run.
    Other additions of floats are refused under ``torch.use_deterministic_algorithms(True)``.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter_add(table._handle, values, indices, order)


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
    """The elements of all ranks, combined: a new tensor, the same to the bit on every rank. All ranks call it.

    ``op`` is ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``.
    """
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    check_op(op)
    return OPS.all_reduce(comm._handle, tensor, op)


def all_gather(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, one after the other, as a new tensor with a dimension more. All ranks call it."""
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    return OPS.all_gather(comm._handle, tensor)


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's tensor, as a new one on every rank. All ranks call it, with tensors of one shape and type."""
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    return OPS.broadcast(comm._handle, tensor, root)


def _new_rows(table: WholeTensor, indices: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    shape = (*indices.shape, *table.shape[1:])
    return torch.empty(size=shape, dtype=dtype or dtype_of(table), device=indices.device)


def _gather(handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    out = _gather_fake(handle, indices, dtype)
    EXCHANGE.gather(find(handle, WholeTensor), contiguous("the tensor of indices", indices), out)
    return out


def _gather_fake(handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    check_indices(indices)
    return _new_rows(find(handle, WholeTensor), indices, dtype)


def _gather_vmap(
    info: Any, dims: tuple[Optional[int], ...], handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None
) -> tuple[torch.Tensor, int]:
    """Many tensors of indices, as ``torch.vmap`` has them, are one with a dimension more."""
    _, dim, *_ = dims
    return OPS.gather(handle, indices.movedim(dim, 0), dtype), 0


def _gather_into(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    table = find(handle, WholeTensor)
    try:
        EXCHANGE.gather(table, contiguous("the tensor of indices", indices), out)
    except BadIndex:
        # The other rows were written.
        increment_version(out)
        raise
    increment_version(out)


def _gather_into_fake(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    check_like("the output", out, _gather_fake(handle, indices, out.dtype))


def _scatter_rows(add: bool, handle: int, values: torch.Tensor, indices: torch.Tensor, order: str) -> None:
    scatter_rows(add, find(handle, WholeTensor), values, indices, order)


def scatter_rows(add: bool, table: WholeTensor, values: torch.Tensor, indices: torch.Tensor, order: str) -> None:
    """Writes rows of a table, or adds to them."""
    if order != "fixed":
        check_determined(table, add)
    indices, values = contiguous("the tensor of indices", indices), contiguous("the tensor of values", values, indices.dim())
    EXCHANGE.scatter(table, indices, values, add, order)


def _scatter_fake(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    check_order(order)
    check_like("the tensor of values", values, _gather_fake(handle, indices, values.dtype))


def _all_reduce(handle: int, input: torch.Tensor, op: str = "sum") -> torch.Tensor:
    out = _all_reduce_fake(handle, input, op)
    EXCHANGE.all_reduce(find(handle, Communicator), contiguous("the tensor", input), out, op)
    return out


def _all_reduce_fake(handle: int, input: torch.Tensor, op: str = "sum") -> torch.Tensor:
    check_number(input.dtype)
    return input.new_empty(input.shape)


def _all_gather(handle: int, input: torch.Tensor) -> torch.Tensor:
    out = _all_gather_fake(handle, input)
    EXCHANGE.all_gather(find(handle, Communicator), contiguous("the tensor", input), out)
    return out


def _all_gather_fake(handle: int, input: torch.Tensor) -> torch.Tensor:
    return input.new_empty((find(handle, Communicator).size, *input.shape))


def _broadcast(handle: int, input: torch.Tensor, root: int = 0) -> torch.Tensor:
    out = _broadcast_fake(handle, input, root)
    EXCHANGE.broadcast(find(handle, Communicator), contiguous("the tensor", input), out, root)
    return out


def _broadcast_fake(handle: int, input: torch.Tensor, root: int = 0) -> torch.Tensor:
    return input.new_empty(input.shape)


def _scatter(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    _scatter_rows(False, handle, values, indices, order)


def _scatter_add(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    _scatter_rows(True, handle, values, indices, order)


for name, does, is_like in (
    ("gather", _gather, _gather_fake),
    ("gather_into", _gather_into, _gather_into_fake),
    ("scatter", _scatter, _scatter_fake),
    ("scatter_add", _scatter_add, _scatter_fake),
    ("all_reduce", _all_reduce, _all_reduce_fake),
    ("all_gather", _all_gather, _all_gather_fake),
    ("broadcast", _broadcast, _broadcast_fake),
):
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, does, key)
    torch.library.register_fake(f"wholemem::{name}", is_like, lib=LIBRARY)
    if name != "gather_into":
        ordered(f"wholemem::{name}")

torch.library.register_vmap("wholemem::gather", _gather_vmap, lib=LIBRARY)
