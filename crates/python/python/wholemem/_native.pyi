"""The native half of the package. Its parts are used by the names they have in ``wholemem``."""

from types import TracebackType
from typing import Any, Optional, Sequence, Union

VERSION: str

class Array:
    """A view of memory that keeps its owner, and that every framework takes without a copy.

    >>> import numpy, wholemem
    >>> array = wholemem.zeros((2, 3), "float32")
    >>> numpy.from_dlpack(array)[1, 2] = 7
    >>> array.numpy().sum()
    np.float32(7.0)
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements there are in each dimension."""
    @property
    def stride(self) -> tuple[int, ...]:
        """How many elements lie from one to the next in each dimension."""
    @property
    def dtype(self) -> str:
        """The type of the elements, by numpy's name: ``float32``; also ``bfloat16`` and ``float8_e4m3fn``."""
    @property
    def device(self) -> str:
        """Where the memory is: ``cpu``, or ``cuda:0`` and so on."""
    @property
    def readonly(self) -> bool:
        """Whether the elements must not be written."""
    @property
    def ndim(self) -> int:
        """How many dimensions there are."""
    @property
    def size(self) -> int:
        """How many elements there are."""
    @property
    def itemsize(self) -> int:
        """How many bytes an element takes."""
    @property
    def nbytes(self) -> int:
        """How many bytes all elements take, without gaps."""
    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other without gaps, the last dimension fastest."""
    def data_ptr(self) -> int:
        """The address of the first element."""
    def numpy(self) -> Any:
        """The array as numpy has it, without a copy."""
    def memoryview(self) -> memoryview:
        """The array as a buffer of Python, without a copy."""
    def as_readonly(self) -> Array:
        """The same memory, of which frameworks are told that they must not write it."""
    def __len__(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

def zeros(shape: Sequence[int], dtype: Any) -> Array:
    """New memory of this process, zero."""

def asarray(object: Any) -> Array:
    """A view of an array of any framework, or of a buffer of Python, without a copy."""

def unique_id() -> str:
    """What ranks find each other by: made by one of them, and passed on to the others."""

class Communicator:
    """A rank's membership in a group of ranks, each with a device.

    Ranks are processes as a rule, or threads of one. What they do together, all of them call, in the same order. A rank
    that dies or does not come is an exception that names it. Used as a context, it leaves the group at the end; memory
    that was made through it stays until it is dropped.

    >>> import wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> with comm:
    ...     comm.barrier()
    ...     print(comm)
    Communicator(rank=0, size=1, device=cpu)
    """

    @classmethod
    def from_env(cls, *, device: Optional[str] = None) -> Communicator:
        """Joins the group that a launcher started this process for: ``wholemem launch``, torchrun, srun or mpirun."""
    @classmethod
    def create(
        cls,
        unique_id: str,
        rank: int,
        size: int,
        *,
        device: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> Communicator:
        """Joins the group of an id, and returns when all ranks have. ``timeout`` is in seconds, also for later calls."""
    @classmethod
    def from_torch(
        cls, group: Any = None, *, device: Optional[str] = None, timeout: Optional[float] = None
    ) -> Communicator:
        """Joins with the ranks of a group of ``torch.distributed``; of the default one, if none is given."""
    @classmethod
    def local(
        cls, size: int, *, device: Optional[str] = None, timeout: Optional[float] = None
    ) -> list[Communicator]:
        """A group within this process: a communicator for each thread that is a rank."""
    @property
    def rank(self) -> int:
        """This rank."""
    @property
    def size(self) -> int:
        """How many ranks there are."""
    @property
    def device(self) -> str:
        """This rank's device."""
    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
    def barrier(self) -> None:
        """Waits until all ranks are here, and what they have done so far can be seen."""
    def check(self) -> None:
        """Raises what keeps the group from going on, if anything does, without waiting."""
    def abort(self) -> None:
        """Ends the group for all ranks, from whichever thread."""
    def close(self) -> None:
        """Leaves the group."""
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...
