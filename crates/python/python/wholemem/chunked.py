"""Tensors in chunks, for kernels of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Union

from ._native import Array, Communicator, WholeTensor

if TYPE_CHECKING:
    from ._native import Location

__all__ = ["ChunkedTensor"]


class ChunkedTensor:
    """A tensor of which every rank has a chunk, handed to kernels as one pointer.

    What :meth:`get_ptr` points to is a ``wholemem::ElementRef`` (``wholemem/global_ref.cuh``), of which a kernel makes a
    ``PtrGen`` (``wholemem/ptr_gen.cuh``): it finds the address of every element, on this rank's device, whichever rank
    has it. Everything else is as with :class:`~wholemem.WholeTensor`, which is ``tensor``.

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
        """How many elements there are in each dimension, rows first."""
        return self.tensor.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """How many elements lie from one to the next in each dimension, within a chunk."""
        return self.tensor.stride

    @property
    def dtype(self) -> str:
        """The type of the elements."""
        return self.tensor.dtype

    def get_ptr(self) -> int:
        """What kernels are given. It is good as long as this lives."""
        return self.tensor.reference_ptr()

    def local(self) -> Array:
        """This rank's chunk."""
        return self.tensor.local()

    def chunk(self, rank: int) -> Array:
        """The chunk of a rank, as this one reaches it."""
        return self.tensor.rows_of(rank)

    def __repr__(self) -> str:
        return f"ChunkedTensor(shape={self.shape}, dtype={self.dtype}, location={self.tensor.location})"
