"""The operators ``torch.ops.wholemem.*`` and the functions that call them.

Operators accept only tensors and plain values, so tables and communicators are passed as handles. torch does not see what an
operator does to a table, so every operator is declared to have an ordered effect. A compiler then threads a token through them:
none is eliminated if its result is unused, none is merged with an equal call, and a gather stays after an earlier scatter.

Inputs may have any strides, because a compiler chooses its own, and are made contiguous. Outputs must be contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch.autograd.graph import increment_version

from .._handles import find
from .._native import Communicator, WholeTensor
from ..errors import BadIndex
from .effects import register_ordered
from .order import check_deterministic, check_order
from .shortcut import bypass_dispatcher, is_forward_ad
from .tensors import (
    EXCHANGE,
    as_torch_dtype,
    check_indices,
    check_kind,
    check_like,
    check_no_gradient,
    check_number,
    check_op,
    check_requested_dtype,
    check_resolved,
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


@bypass_dispatcher
def gather(
    table: WholeTensor,
    indices: torch.Tensor,
    *,
    out: Optional[torch.Tensor] = None,
    dtype: Union[None, str, torch.dtype] = None,
) -> torch.Tensor:
    """Copies the rows of a table at the given indices to a tensor (gather).

    Args:
        table: The table.
        indices: A tensor of int32 or int64.
        out: The output tensor. The rows are converted to its dtype. ``None`` creates it.
        dtype: The dtype of the output, or its name. ``None`` is the dtype of the table, or of ``out``.

    Returns:
        ``out``, or the new tensor.

    Raises:
        wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or ``table.check()`` raises it.
        wholemem.errors.Unsupported: ``out`` requires a gradient.
        wholemem.errors.WrongDevice: A tensor is on another device.
        wholemem.errors.WrongType: The types cannot be converted, or the indices are not integers.
        wholemem.errors.WrongValue: ``out`` has another shape, or another dtype than ``dtype``.
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
        check_requested_dtype("the output", out, dtype)
    check_no_gradient("the output", out)
    check_tensor("the tensor of indices", indices)
    if torch.compiler.is_compiling() or is_forward_ad():
        # A compiled operator with an ordered effect cannot write to an argument, and forward-mode AD would lose the tangent of
        # `out`, so the rows are copied to `out`.
        rows = OPS.gather(table._handle, indices, out.dtype)
        # Without this check, `copy_` would broadcast rows to a larger output, and copy between devices.
        check_like("the output", out, rows)
        return out.copy_(rows)
    check_resolved("the output", out)
    OPS.gather_into(table._handle, indices, out)
    return out


def scatter(table: WholeTensor, indices: torch.Tensor, values: torch.Tensor, *, order: Order = "any") -> None:
    """Writes rows of a tensor to the rows of a table at the given indices (scatter). Other ranks see the writes after the next
    barrier.

    Args:
        table: The table.
        indices: A tensor of int32 or int64.
        values: One row for each index.
        order: If several rows go to one index, ``any`` stores one of them. ``fixed`` stores the last row of the last rank; it is a
            collective call.

    Raises:
        wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or ``table.check()`` raises it.
        wholemem.errors.Unsupported: The order is ``any``, and ``torch.use_deterministic_algorithms(True)`` is set.
        wholemem.errors.WrongValue: ``values`` has another shape, or the order does not exist.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter(table._handle, values, indices, order)


def scatter_add(table: WholeTensor, indices: torch.Tensor, values: torch.Tensor, *, order: Order = "any") -> None:
    """Adds rows of a tensor to the rows of a table at the given indices (scatter-add). Several ranks may add to a row at the same
    time.

    With the order ``fixed``, and for a table in host memory, it is a collective call, and sums of floats are bitwise reproducible.

    Args:
        table: The table.
        indices: A tensor of int32 or int64.
        values: One row for each index.
        order: ``any`` or ``fixed``.

    Raises:
        wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or ``table.check()`` raises it.
        wholemem.errors.Unsupported: Floats are added in the order ``any`` on a GPU, and
            ``torch.use_deterministic_algorithms(True)`` is set.
        wholemem.errors.WrongValue: ``values`` has another shape, or the order does not exist.
    """
    check_kind("the table", table, WholeTensor)
    check_tensor("the tensor of values", values)
    check_tensor("the tensor of indices", indices)
    check_order(order)
    OPS.scatter_add(table._handle, values, indices, order)


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
    """Reduces the tensors of all ranks element by element. Every rank must call this function, and gets a bitwise equal result.

    Args:
        comm: The communicator.
        tensor: The tensor of this rank.
        op: ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``.

    Returns:
        A new tensor.

    Raises:
        wholemem.errors.PeerLost: A rank exited.
        wholemem.errors.Timeout: A rank did not call in time.
        wholemem.errors.WrongType: The dtype does not support the operation.
    """
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    check_op(op)
    return OPS.all_reduce(comm._handle, tensor, op)


def all_gather(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Concatenates the tensors of all ranks along a new first dimension. Every rank must call this function.

    Args:
        comm: The communicator.
        tensor: The tensor of this rank.

    Returns:
        A new tensor of the shape ``(comm.size, *tensor.shape)``.

    Raises:
        wholemem.errors.PeerLost: A rank exited.
        wholemem.errors.Timeout: A rank did not call in time.
    """
    check_kind("the communicator", comm, Communicator)
    check_tensor("the tensor", tensor)
    return OPS.all_gather(comm._handle, tensor)


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Returns the tensor of the root rank on every rank. Every rank must call this function, with tensors of one shape and dtype.

    Args:
        comm: The communicator.
        tensor: The tensor of this rank.
        root: The rank whose tensor is returned.

    Returns:
        A new tensor.

    Raises:
        wholemem.errors.PeerLost: A rank exited.
        wholemem.errors.Timeout: A rank did not call in time.
    """
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
    """Implements ``torch.vmap`` of a gather: the batch of index tensors is gathered as one tensor with an additional first
    dimension.
    """
    _, dim, *_ = dims
    return OPS.gather(handle, indices.movedim(dim, 0), dtype), 0


def _gather_into(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    table = find(handle, WholeTensor)
    try:
        EXCHANGE.gather(table, contiguous("the tensor of indices", indices), out)
    except BadIndex:
        # If an index is bad, the gather still writes the rows of the other indices to `out`.
        increment_version(out)
        raise
    increment_version(out)


def _gather_into_fake(handle: int, indices: torch.Tensor, out: torch.Tensor) -> None:
    check_like("the output", out, _gather_fake(handle, indices, out.dtype))


def _scatter_rows(add: bool, handle: int, values: torch.Tensor, indices: torch.Tensor, order: str) -> None:
    scatter_rows(add, find(handle, WholeTensor), values, indices, order)


def scatter_rows(add: bool, table: WholeTensor, values: torch.Tensor, indices: torch.Tensor, order: str) -> None:
    """Scatters rows to a table: writes the rows at the given indices, or adds to them.

    Args:
        add: Whether to add.
        table: The table.
        values: One row for each index.
        indices: A tensor of int32 or int64.
        order: ``any`` or ``fixed``.
    """
    if order != "fixed":
        check_deterministic(table, add)
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


for name, kernel, fake in (
    ("gather", _gather, _gather_fake),
    ("gather_into", _gather_into, _gather_into_fake),
    ("scatter", _scatter, _scatter_fake),
    ("scatter_add", _scatter_add, _scatter_fake),
    ("all_reduce", _all_reduce, _all_reduce_fake),
    ("all_gather", _all_gather, _all_gather_fake),
    ("broadcast", _broadcast, _broadcast_fake),
):
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"wholemem::{name}", fake, lib=LIBRARY)
    if name != "gather_into":
        register_ordered(f"wholemem::{name}")

torch.library.register_vmap("wholemem::gather", _gather_vmap, lib=LIBRARY)
