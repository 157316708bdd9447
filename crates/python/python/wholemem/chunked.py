"""Chunked tables for users' CUDA kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._native import Array, Communicator, WholeTensor

if TYPE_CHECKING:
    from ._native import Location

__all__ = ["ChunkedTensor"]


class ChunkedTensor:
    """A chunked table that kernels access through one pointer.

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
        """The length of each dimension, rows first."""
        return self.tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of each dimension within a chunk, in elements."""
        return self.tensor.stride

    @property
    def dtype(self) -> str:
        """The name of the element type."""
        return self.tensor.dtype

    def get_ptr(self) -> int:
        """Returns the pointer for kernels. It is valid while this object lives."""
        return self.tensor.reference_ptr()

    def local(self) -> Array:
        """Returns this rank's rows, without a copy."""
        return self.tensor.local()

    def chunk(self, rank: int) -> Array:
        """Returns a rank's rows, which this rank accesses directly, without a copy.

        Args:
            rank: The rank.
        """
        return self.tensor.rows_of(rank)

    def __repr__(self) -> str:
        return f"ChunkedTensor(shape={self.shape}, dtype={self.dtype}, location={self.tensor.location})"
