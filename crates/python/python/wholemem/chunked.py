"""Provides :class:`ChunkedTensor`, a table with one range of addresses for each rank, which CUDA kernels of the user access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._native import Array, Communicator, WholeTensor

if TYPE_CHECKING:
    from ._native import Location

__all__ = ["ChunkedTensor"]


class ChunkedTensor:
    """A chunked table (one range of addresses for each rank) that CUDA kernels access through one pointer.

    :meth:`get_ptr` returns the address of a ``wholemem::ElementRef`` (``wholemem/global_ref.cuh``). A kernel creates a ``PtrGen``
    (``wholemem/ptr_gen.cuh``) from it, which computes the address of every element of all ranks, valid on this rank's device.
    ``tensor`` is the :class:`~wholemem.WholeTensor`.

    Args:
        comm: The communicator.
        shape: The shape, rows first.
        dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
        location: ``device`` is the device of each rank, ``host`` is host memory.
        rows_of_each: The number of rows of each rank. ``None`` divides them evenly.

    Raises:
        wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
        wholemem.errors.RanksDisagree: Ranks passed different arguments.

    >>> from wholemem import Communicator
    >>> (comm,) = Communicator.local(1, device="cpu")
    >>> table = ChunkedTensor(comm, (1000, 16), "float32")
    >>> table.shape, table.stride, table.dtype
    ((1000, 16), (16, 1), 'float32')
    >>> table.get_ptr() % 64
    0
    """

    tensor: WholeTensor

    def __init__(
        self,
        comm: Communicator,
        shape: Union[int, Sequence[int]],
        dtype: Any,
        *,
        location: Location = "device",
        rows_of_each: Optional[Sequence[int]] = None,
    ) -> None:
        self.tensor = WholeTensor.create(
            comm, shape, dtype, kind="chunked", location=location, rows_of_each=rows_of_each
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table: the length of each dimension, rows first."""
        return self.tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of each dimension of the table within a chunk (the rows of one rank), in elements."""
        return self.tensor.stride

    @property
    def dtype(self) -> str:
        """The name of the table's element type."""
        return self.tensor.dtype

    def get_ptr(self) -> int:
        """Returns the pointer by which CUDA kernels access the table. The pointer is valid while this object lives."""
        return self.tensor.reference_ptr()

    def local(self) -> Array:
        """Returns an array of the table's rows that this rank stores, without a copy."""
        return self.tensor.local()

    def chunk(self, rank: int) -> Array:
        """Returns an array of the table's rows that a rank stores, without a copy. This rank accesses them directly.

        Args:
            rank: The rank.
        """
        return self.tensor.rows_of(rank)

    def __repr__(self) -> str:
        return f"ChunkedTensor(shape={self.shape}, dtype={self.dtype}, location={self.tensor.location})"
