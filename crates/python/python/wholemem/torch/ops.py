"""The operators ``torch.ops.wholemem.*``, and the functions that call them.

Tables and communicators travel as handles, since operators take numbers and tensors. What an operator does to a table, torch
does not see; so all of them are declared to have an effect, in the order of the program. A compiler then threads a token
from each to the next: none is removed although nobody uses what it returns, none is merged with its like, and a gather
stays behind the scatter that came before it.

What an operator reads may lie in memory in any way, and is made contiguous where it is not: a compiler chooses strides of its
own for it, whatever the program says. What it writes is given as it is to be.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch.autograd.graph import increment_version

from .._native import Communicator, WholeTensor, op_code
from ..handles import find
from . import tensors
from .effects import ordered
from .order import check_determined, check_order
from .shortcut import gather_around, is_forward
from .tensors import (
    CODES,
    address_of,
    called,
    check_asked,
    check_indices,
    check_kind,
    check_like,
    check_no_gradient,
    check_op,
    check_own,
    check_rows,
    check_stride,
    check_tensor,
    conversion,
    dtype_of,
    gapless,
    raw_stream,
    stride_of,
)

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
        dtype = called(dtype)
    if out is None:
        check_tensor("the tensor of indices", indices)
        return OPS.gather(table.handle, indices, dtype)
    if not isinstance(out, torch.Tensor):
        check_tensor("the output", out)
        OPS.gather_into(table.handle, indices, out)
        return out
    if dtype is not None:
        check_asked("the output", out, dtype)
    check_no_gradient("the output", out)
    check_tensor("the tensor of indices", indices)
    if torch.compiler.is_compiling() or is_forward():
        # A tensor that is written cannot be in an operator whose order is kept; nor does one take its tangent along.
        rows = OPS.gather(table.handle, indices, out.dtype)
        # Fewer rows would be repeated, and those of another device copied.
        check_like("the output", out, rows)
        return out.copy_(rows)
    check_own("the output", out)
    OPS.gather_into(table.handle, indices, out)
    return out


def scatter(table: WholeTensor, values: torch.Tensor, indices: torch.Tensor, *, order: str = "any") -> None:
    """Writes rows to where the indices say. Other ranks see them behind the next barrier.

    Where several go to one place, the order ``fixed`` leaves the last of the last rank, and is a call of all ranks. Without it,
    this is refused under ``torch.use_deterministic_algorithms(True)``: nobody knows what other ranks write.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter(table.handle, values, indices, order)


def scatter_add(table: WholeTensor, values: torch.Tensor, indices: torch.Tensor, *, order: str = "any") -> None:
    """Adds rows to where the indices say, all ranks at the same time if they like.

    With the order ``fixed``, and at the ``host``, it is a call of all ranks, and floats are the same to the bit in every run.
    Other additions of floats are refused under ``torch.use_deterministic_algorithms(True)``.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter_add(table.handle, values, indices, order)


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """The elements of all ranks, combined: a new tensor, the same to the bit on every rank. All ranks call it.

    ``op`` is ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``.
    """
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    check_op(op)
    return OPS.all_reduce(comm.handle, tensor, op)


def all_gather(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, one after the other, as a new tensor with a dimension more. All ranks call it."""
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    return OPS.all_gather(comm.handle, tensor)


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The root's tensor, as a new one on every rank. All ranks call it, with tensors of one shape and type."""
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    return OPS.broadcast(comm.handle, tensor, root)


def _new_rows(table: WholeTensor, indices: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    shape = (*indices.shape, *table.shape[1:])
    return torch.empty(size=shape, dtype=dtype or dtype_of(table), device=indices.device)


def _gather(handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    table = find(handle, WholeTensor)
    check_indices(indices)
    out = _new_rows(table, indices, dtype)
    _fill(table, indices, out)
    return out


def _gather_fake(handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    table = find(handle, WholeTensor)
    check_indices(indices)
    out = _new_rows(table, indices, dtype)
    conversion("the output", out.dtype, dtype_of(table))
    return out


def _gather_vmap(
    info: Any, dims: tuple[Optional[int], ...], handle: int, indices: torch.Tensor, dtype: Optional[torch.dtype] = None
) -> tuple[torch.Tensor, int]:
    """Many tensors of indices, as ``torch.vmap`` has them, are one with a dimension more."""
    _, dim, *_ = dims
    return OPS.gather(handle, indices.movedim(dim, 0), dtype), 0


def _gather_into(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    table = find(handle, WholeTensor)
    check_indices(indices)
    check_rows("the output", out, indices, table)
    increment_version(out)
    _fill(table, indices, out)


def _gather_into_fake(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    table = find(handle, WholeTensor)
    check_indices(indices)
    check_rows("the output", out, indices, table)


def _fill(table: WholeTensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Gathers into a tensor of the right shape."""
    device, indices = indices.get_device(), gapless("the tensor of indices", indices)
    table.gather_at(
        indices.data_ptr(),
        indices.numel(),
        indices.dtype is torch.int64,
        address_of("the output", out),
        check_stride("the output", out, indices.dim()),
        conversion("the output", out.dtype, dtype_of(table)),
        device,
        raw_stream(device),
    )


def _check_put(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str) -> WholeTensor:
    table = find(handle, WholeTensor)
    check_order(order)
    check_indices(indices)
    check_rows("the tensor of values", values, indices, table)
    conversion("the tensor of values", values.dtype, dtype_of(table))
    return table


def put(add: bool, handle: int, values: torch.Tensor, indices: torch.Tensor, order: str) -> None:
    """Writes rows of a table, or adds to them."""
    table = _check_put(handle, values, indices, order)
    device, indices = indices.get_device(), gapless("the tensor of indices", indices)
    if order == "fixed":
        _put_in_order(add, table, gapless("the tensor of values", values), indices, device)
        return
    check_determined(table, add)
    stride = stride_of(values, indices.dim())
    if stride is None:
        values, stride = gapless("the tensor of values", values), 0
    table.scatter_at(
        add,
        address_of("the tensor of values", values),
        stride,
        conversion("the tensor of values", values.dtype, dtype_of(table)),
        indices.data_ptr(),
        indices.numel(),
        indices.dtype is torch.int64,
        device,
        raw_stream(device),
    )


def _put_in_order(add: bool, table: WholeTensor, values: torch.Tensor, indices: torch.Tensor, device: int) -> None:
    """The same as a call of all ranks, next to which the detour by arrays is nothing."""
    does = table.scatter_add if add else table.scatter
    does(values.detach(), indices, order="fixed", convert=True, stream=raw_stream(device))


def _put_fake(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    _check_put(handle, values, indices, order)


def _all_reduce(handle: int, input: torch.Tensor, op: str = "sum") -> torch.Tensor:
    comm = find(handle, Communicator)
    out = _all_reduce_fake(handle, input, op)
    device, input = input.get_device(), gapless("the tensor", input)
    stream, code = raw_stream(device), CODES[input.dtype]
    comm.all_reduce_at(input.data_ptr(), out.data_ptr(), input.numel(), code, op_code(op), device, stream)
    return out


def _all_reduce_fake(handle: int, input: torch.Tensor, op: str = "sum") -> torch.Tensor:
    op_code(op)
    tensors.check_number(input.dtype)
    return input.new_empty(input.shape)


def _all_gather(handle: int, input: torch.Tensor) -> torch.Tensor:
    comm = find(handle, Communicator)
    out = _all_gather_fake(handle, input)
    device, input = input.get_device(), gapless("the tensor", input)
    comm.all_gather_at(input.data_ptr(), out.data_ptr(), input.nbytes, device, raw_stream(device))
    return out


def _all_gather_fake(handle: int, input: torch.Tensor) -> torch.Tensor:
    return input.new_empty((find(handle, Communicator).size, *input.shape))


def _broadcast(handle: int, input: torch.Tensor, root: int = 0) -> torch.Tensor:
    comm = find(handle, Communicator)
    out = _broadcast_fake(handle, input, root)
    device, input = input.get_device(), gapless("the tensor", input)
    comm.broadcast_at(input.data_ptr(), out.data_ptr(), input.nbytes, root, device, raw_stream(device))
    return out


def _broadcast_fake(handle: int, input: torch.Tensor, root: int = 0) -> torch.Tensor:
    return input.new_empty(input.shape)


def _scatter(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    put(False, handle, values, indices, order)


def _scatter_add(handle: int, values: torch.Tensor, indices: torch.Tensor, order: str = "any") -> None:
    put(True, handle, values, indices, order)


for name, does, is_like in (
    ("gather", _gather, _gather_fake),
    ("gather_into", _gather_into, _gather_into_fake),
    ("scatter", _scatter, _put_fake),
    ("scatter_add", _scatter_add, _put_fake),
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
