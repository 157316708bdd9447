"""The native half of the package. Its parts are used by the names they have in ``wholemem``."""

from os import PathLike
from types import TracebackType
from typing import Any, Callable, Iterator, Literal, Optional, Sequence, TypeVar, Union, final, overload

from numpy.typing import NDArray
from torch import Tensor

from ._native_store import Client as Client
from ._native_store import Draft as Draft
from ._native_store import Entry as Entry
from ._native_store import Event as Event
from ._native_store import Mirror as Mirror
from ._native_store import Pack as Pack
from ._native_store import PackDraft as PackDraft
from ._native_store import Status as Status
from ._native_store import Watch as Watch

VERSION: str

Kind = Literal["continuous", "chunked"]
Location = Literal["device", "host", "cpu"]
Order = Literal["any", "fixed"]
ReduceOp = Literal["sum", "avg", "min", "max", "prod", "and", "or", "xor"]
_Out = TypeVar("_Out")
_Ints = Union[int, list[int], tuple[int, ...], range]

@final
class Array:
    """A view of memory that keeps its owner, and that every framework takes without a copy.

    Ints and slices in ``[]`` select views, or a number; ``==``, ``bool``, iteration and printing are numpy's, which has to be
    installed for them. Values of a GPU's array are copied to the host, and the call waits for the work that uses the array; one of
    more than 1 MiB is printed without its values.

    >>> import numpy, wholemem
    >>> array = wholemem.zeros((2, 3), "float32")
    >>> array.numpy()[1, 2] = 7
    >>> array
    Array([[0., 0., 0.],
           [0., 0., 7.]], shape=(2, 3), dtype=float32, device=cpu)
    >>> array[1, 2], array[:, 2].tolist()
    (7.0, [0.0, 7.0])
    >>> float(numpy.from_dlpack(array).sum())
    7.0
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
    def lent(self) -> Array:
        """The same memory for a framework that cannot be told whether it may be written, such as JAX: its user promises
        not to. By DLPack an array of an object is given as it is then, not in a copy-on-write map."""
    def item(self) -> Any:
        """The only element, as a number of Python. A GPU's is copied to the host."""
    def tolist(self) -> Any:
        """The elements as numbers of Python, in lists of lists. A GPU's are copied to the host."""
    def __getitem__(self, key: Any) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object) -> Any: ...
    def __ne__(self, other: object) -> Any: ...
    __hash__: None  # type: ignore[assignment]
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
    def __array__(self, dtype: Any = None, *, copy: Optional[bool] = None) -> Any: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

def zeros(shape: Union[int, Sequence[int]], dtype: Any) -> Array:
    """New memory of this process, zero."""

def asarray(object: Any) -> Array:
    """A view of an array of any framework, or of a buffer of Python, without a copy."""

def element_types() -> list[tuple[str, bool, Optional[str]]]:
    """The types of a tensor's elements: name, whether they are numbers, and the format of the buffer protocol, if there is one.

    >>> from wholemem._native import element_types
    >>> [row for row in element_types() if row[0] in ("float32", "bfloat16", "bool")]
    [('bfloat16', True, None), ('float32', True, 'f'), ('bool', False, '?')]
    """

def unique_id() -> str:
    """What ranks find each other by: made by one of them, and passed on to the others."""

@final
class Exchange:
    """How tensors of a framework are looked at without a call of Python: by the functions that it publishes, if it does.

    >>> from wholemem._native import Exchange
    >>> Exchange.of(bytes) is None
    True
    """

    @staticmethod
    def of(kind: type, *others: type) -> Optional[Exchange]:
        """For tensors of exactly these types; ``None`` if their framework publishes nothing that is understood."""
    def gather(self, table: WholeTensor, indices: Any, out: Any) -> None:
        """Gathers rows of a table into a tensor, and converts them to its type."""
    def scatter(self, table: WholeTensor, indices: Any, values: Any, add: bool, order: str) -> None:
        """Writes rows of a table, or adds to them, converted to its type."""
    def all_reduce(self, comm: Communicator, input: Any, output: Any, op: str) -> None:
        """Reduces a tensor of all ranks to another, or in its place."""
    def all_gather(self, comm: Communicator, input: Any, output: Any) -> None:
        """Gives every rank's tensor to all ranks."""
    def broadcast(self, comm: Communicator, input: Any, output: Any, root: int) -> None:
        """Gives the root's tensor to all ranks."""

@final
class Shortcut:
    """The way around the dispatcher of a framework.

    It is for tensors that ``exchange`` knows, of the ``types``, and while nobody looks: neither ``first``, who are asked before a call
    is made, nor ``then``, who are asked while it runs, and may see it again. Each is a function that says so, or the names of a
    module, one of them, and what that is while nobody does. ``is_other`` tells of a tensor whether its elements are not those in its
    memory, and ``written`` is told which were written. ``new`` is a function that makes one of a size, strides, a type and a device's
    number, and, if there are such, two that do without the number, for the processor and for the GPU whose number the last one tells.

    >>> from wholemem._native import Shortcut
    >>> callable(Shortcut.gather)
    True
    """

    def __new__(
        cls,
        exchange: Exchange,
        *,
        first: Sequence[Union[Callable[[], Any], tuple[dict[str, Any], str, Any]]],
        then: Sequence[Union[Callable[[], Any], tuple[dict[str, Any], str, Any]]],
        types: Sequence[Any],
        is_other: Callable[[Any], Any],
        new: tuple[Callable[..., Any], Optional[tuple[Callable[..., Any], Callable[..., Any], Callable[[], int]]]],
        written: Callable[[tuple[Any, ...]], Any],
    ) -> Shortcut: ...
    def gather(self, table: Any, indices: Any, out: Any, dtype: Any) -> Any:
        """The rows of a table that the indices name, in ``out`` or in a new tensor; ``None`` if anything is not as usual."""
    def all_reduce(self, comm: Communicator, input: Any, output: Any) -> bool:
        """Sums a tensor over all ranks, into another tensor or in place, without torch's dispatcher. Returns ``False`` and does
        nothing if the tensors differ in shape or type, or if they are not plain strided tensors."""

@final
class ShortGather:
    """A gather that goes the short way where it can, and else calls the function that goes the long one.

    To those who hold it it is that function: it binds, pickles and is described as one.

    >>> from wholemem._native import ShortGather
    >>> callable(ShortGather)
    True
    """

    def __new__(cls, shortcut: Shortcut, function: Callable[..., Any]) -> ShortGather: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattribute__(self, name: str) -> Any: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any: ...

class ShortReduction:
    """Sums of all ranks' tensors that go the short way where they can: what a class has that knows the long one, and has the ranks as
    ``comm``.

    >>> from wholemem._native import ShortReduction
    >>> class Sums(ShortReduction):
    ...     def _all_reduce(self, tensor, out):
    ...         return "the long way"
    >>> Sums().all_reduce(None)
    'the long way'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...
    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """The sum of all ranks' tensors, in ``out``, of the same shape, or in a new tensor. All ranks call it.

        The outcome is the same to the bit on all of them. ``out`` may be ``tensor`` itself. A tensor that is registered, on all
        ranks, is read where it is; others are copied on the way.

        torch does not see the call: no gradient comes back through it, and a backward pass that needs what was in ``out`` is not
        told that it is gone. :func:`wholemem.torch.all_reduce` is for training, and for what is compiled.
        """
    def _go_short(self, shortcut: Shortcut) -> None:
        """Goes the short way from now on."""

@final
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
    def from_env(cls, *, device: Any = None, timeout: Optional[float] = None) -> Communicator:
        """Joins the group that a launcher started this process for: ``wholemem launch``, torchrun, srun or mpirun.

        If no ``device`` is given, or one without a number, the number is the launcher's local rank (``LOCAL_RANK``), else the
        rank, modulo the number of visible devices. ``timeout`` is in seconds, also for later calls; if none is given,
        ``WHOLEMEM_TIMEOUT`` says it. Ranks on several nodes are refused.
        """
    @classmethod
    def create(
        cls,
        unique_id: str,
        rank: int,
        size: int,
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> Communicator:
        """Joins the group of an id, and returns when all ranks have. ``timeout`` is in seconds, also for later calls."""
    @classmethod
    def from_torch(
        cls, group: Any = None, *, device: Any = None, timeout: Optional[float] = None
    ) -> Communicator:
        """Joins with the ranks of a group of ``torch.distributed``; of the default one, if none is given."""
    @classmethod
    def local(
        cls, size: int, *, device: Any = None, timeout: Optional[float] = None
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
    def _handle(self) -> int:
        """The number by which torch's operators find this object: see ``wholemem._handles``."""
    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
    def barrier(self, *, stream: Any = None) -> None:
        """Waits until all ranks are here, and what they have done so far, on that stream too, can be seen by all."""
    def stream_barrier(self, *, stream: Any = None) -> None:
        """A barrier for what is enqueued on a stream: on a GPU nobody waits but the streams."""
    def mem_alloc(self, nbytes: int) -> Window:
        """Makes a window of new memory, zero, with so many bytes on this rank. All ranks call it; a rank may have none."""
    def window_register(self, array: Any, *, stream: Any = None) -> Window:
        """Makes a window of memory that is there: of a GPU, mapped in segments. All ranks call it."""
    @overload
    def all_reduce(self, array: NDArray[Any], out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> NDArray[Any]: ...
    @overload
    def all_reduce(self, array: Array, out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> Array: ...
    @overload
    def all_reduce(self, array: Tensor, out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> Tensor: ...
    @overload
    def all_reduce(self, array: Any, out: _Out, *, op: ReduceOp = "sum", stream: Any = None) -> _Out:
        """Combines the elements of all ranks, and gives all of them the outcome, the same to the bit.

        ``op`` is ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``. The outcome is in ``out``,
        which may be ``array`` itself, or in a new array of the same framework: a tensor of torch for one of torch, an array of
        numpy for one of numpy, else an :class:`Array`. Arrays that lie in a window are read where they are; all ranks give
        such ones, at the same place, or none does.
        """
    @overload
    def all_gather(self, array: NDArray[Any], out: None = None, *, stream: Any = None) -> NDArray[Any]: ...
    @overload
    def all_gather(self, array: Array, out: None = None, *, stream: Any = None) -> Array: ...
    @overload
    def all_gather(self, array: Tensor, out: None = None, *, stream: Any = None) -> Tensor: ...
    @overload
    def all_gather(self, array: Any, out: _Out, *, stream: Any = None) -> _Out:
        """Gives every rank's array to all ranks, one after the other, in ``out`` or in a new array of the same framework."""
    def broadcast(self, array: _Out, root: int = 0, *, stream: Any = None) -> _Out:
        """Makes every rank's array what the root's is, and returns it."""
    def check(self) -> None:
        """Raises what keeps the group from going on, if anything does, without waiting."""
    def abort(self) -> None:
        """Ends the group for all ranks, from whichever thread."""
    def close(self) -> None:
        """Leaves the group. What waits for its ranks ends, but for kernels on GPUs, which wait their time. Memory stays."""
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Window:
    """Memory that every rank has, and that all of them reach. It stays while it, or an array made of it, lives.

    >>> import wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> window = comm.mem_alloc(1 << 20)
    >>> mine = window.local("float32", (4, 2))
    >>> comm.all_reduce(mine, mine) is mine
    True
    """

    @property
    def nbytes(self) -> int:
        """How many bytes this rank has of it."""
    def nbytes_of(self, rank: int) -> int:
        """How many bytes a rank has of it."""
    def local(
        self, dtype: Any = None, shape: Union[None, int, Sequence[int]] = None, *, offset: int = 0
    ) -> Array:
        """This rank's part from some byte on, as an array: of bytes, if nothing else is asked for."""
    def peer(
        self, rank: int, dtype: Any = None, shape: Union[None, int, Sequence[int]] = None, *, offset: int = 0
    ) -> Array:
        """A rank's part, as this rank reaches it."""

@final
class WholeTensor:
    """A tensor whose rows are divided among ranks: each stores its own, and reaches all.

    >>> import numpy, wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> table = wholemem.WholeTensor.create(comm, (1000, 4), "float32")
    >>> table.scatter_add([7, 7], numpy.ones((2, 4), "float32"))
    >>> table.gather(numpy.array([7, 8]))
    array([[2., 2., 2., 2.],
           [0., 0., 0., 0.]], dtype=float32)
    """

    @classmethod
    def create(
        cls,
        comm: Communicator,
        shape: Union[int, Sequence[int]],
        dtype: Any,
        *,
        kind: Kind = "continuous",
        location: Location = "device",
        rows_of_each: Optional[Sequence[int]] = None,
        equal_addresses: bool = False,
    ) -> WholeTensor:
        """Makes a tensor, zero. All ranks call it with the same arguments.

        ``kind`` is ``continuous``, one range of addresses, or ``chunked``, one for each rank. ``location`` is the
        ``device`` of each rank, or the ``host``. Rows are shared out evenly, or as ``rows_of_each`` says.
        """
    @classmethod
    def load(
        cls,
        comm: Communicator,
        path: Union[str, PathLike[str]],
        *,
        name: Optional[str] = None,
        kind: Kind = "continuous",
        location: Location = "device",
        rows_of_each: Optional[Sequence[int]] = None,
    ) -> WholeTensor:
        """Makes a tensor of a file: of what was saved, of a ``.npy``, or of a ``.safetensors``, where ``name`` says which.

        All ranks call it; each reads the rows that it has. If the file is replaced between two ranks, all of them raise
        :class:`~wholemem.errors.RanksDisagree`; if it is written while it is read, :class:`~wholemem.errors.BadFile`.
        """
    def save(self, path: Union[str, PathLike[str]], *, overwrite: bool = False) -> None:
        """Saves the tensor as a folder, which appears when it is complete. All ranks call it."""
    def like(self) -> WholeTensor:
        """Makes a tensor like this one, zero. All ranks call it."""
    def barrier(self, *, stream: Any = None) -> None:
        """Waits until all ranks are here, and what they have done to it so far, on that stream too, can be seen by all."""
    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements there are in each dimension, rows first."""
    @property
    def stride(self) -> tuple[int, ...]:
        """How many elements lie from one to the next in each dimension."""
    @property
    def dtype(self) -> str:
        """The type of the elements, by numpy's name."""
    @property
    def kind(self) -> str:
        """``continuous`` or ``chunked``."""
    @property
    def location(self) -> str:
        """``device`` or ``host``."""
    @property
    def device(self) -> str:
        """The device by which this rank reaches the rows."""
    @property
    def _handle(self) -> int:
        """The number by which torch's operators find this object: see ``wholemem._handles``."""
    @property
    def local_rows(self) -> tuple[int, int]:
        """The first of this rank's rows, and the one behind the last."""
    def __len__(self) -> int: ...
    def __array__(self, dtype: Any = None, *, copy: Optional[bool] = None) -> NDArray[Any]:
        """Called by numpy: all rows without a copy, if they are one range of addresses in host memory, as those of a continuous
        tensor are; any other tensor raises. It does not wait for work on a GPU: call ``barrier`` first."""
    def local(self) -> Array:
        """This rank's rows, without a copy."""
    def rows_of(self, rank: int) -> Array:
        """A rank's rows, as this rank reaches them, without a copy."""
    def all(self) -> Array:
        """All rows, without a copy: of a continuous tensor."""
    def rows(self, start: int, stop: int) -> WholeTensor:
        """Some of the rows, as a tensor."""
    def columns(self, start: int, stop: int) -> WholeTensor:
        """Some of the columns, as a tensor: a range of the second dimension."""
    def write(self, first: int, array: Any, *, stream: Any = None) -> None:
        """Copies the rows of an array to the rows from ``first`` on."""
    def read(self, first: int, out: Any, *, stream: Any = None) -> None:
        """Copies the rows from ``first`` on to the rows of an array."""
    @overload
    def gather(
        self,
        indices: NDArray[Any],
        out: None = None,
        *,
        dtype: Any = None,
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> NDArray[Any]: ...
    @overload
    def gather(
        self,
        indices: Union[Array, _Ints],
        out: None = None,
        *,
        dtype: Any = None,
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> Array: ...
    @overload
    def gather(
        self,
        indices: Tensor,
        out: None = None,
        *,
        dtype: Any = None,
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> Tensor: ...
    @overload
    def gather(
        self,
        indices: Any,
        out: _Out,
        *,
        dtype: Any = None,
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> _Out:
        """The rows that the indices name, in ``out`` or in a new array of the framework that the indices belong to.

        Indices are a tensor of torch, an array of numpy or of another framework, an int, or a list, tuple or range of ints. Indices
        of torch give a tensor of torch, on torch's current stream if no ``stream`` is given; indices of numpy give an array of
        numpy; others give an :class:`Array`, and so does numpy where it has no type like the tensor's. No stream of torch waits for
        another ``stream``: the caller orders them.

        If the tensor is on a GPU, indices in host memory are copied there, and an array of numpy is copied back: each is one copy,
        for which the call waits. Tensors of torch are not copied: one on another device raises.

        Rows are moved in no order: none may lie where ``out`` is, if that is a part of a tensor itself.

        Elements are converted where ``dtype`` or ``convert`` asks for it: floats to floats, integers to integers. An
        index that names no row raises :class:`~wholemem.errors.BadIndex`, of a GPU's work in the next call or in
        :meth:`check`; its row is zero, and nothing else is touched. With ``skip_bad`` nothing is raised.
        """
    def scatter(
        self,
        indices: Any,
        array: Any,
        *,
        order: Order = "any",
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> None:
        """Writes rows to where the indices say. Other ranks see them behind the next ``barrier``.

        Indices are what :meth:`gather` takes, and come first there and here. If the tensor is on a GPU, indices and rows in host
        memory are copied there, and the call waits for the copies; tensors of torch are not.

        Rows are moved in no order: none may go where ``array`` is, if that is a part of a tensor itself.

        Where several go to one place, the order ``fixed`` leaves the last of the last rank, and is a call of all ranks.
        """
    def scatter_add(
        self,
        indices: Any,
        array: Any,
        *,
        order: Order = "any",
        convert: bool = False,
        skip_bad: bool = False,
        stream: Any = None,
    ) -> None:
        """Adds rows to where the indices say. With the order ``fixed``, and at the ``host``, it is a call of all ranks.

        Its arguments are those of :meth:`scatter`.
        """
    def populate(self) -> None:
        """Enters all rows into the page table of this process at once, as large pages where the kernel can: worth it once they
        are written, before gathering from host memory. On a GPU's there is nothing to do."""
    def check(self) -> None:
        """Raises :class:`~wholemem.errors.BadIndex` if work that has run met an index that names no row."""
    def reference_ptr(self) -> int:
        """The address of the ``wholemem::ElementRef`` by which kernels find rows and elements, also those of a view of some rows
        and columns: a ``PtrGen`` made of it visits the elements of this tensor. It is good as long as this lives."""

def findings() -> list[
    tuple[
        str,
        Optional[str],
        list[tuple[int, str, int, list[tuple[str, bool, Optional[str]]]]],
    ]
]:
    """What :func:`wholemem.doctor` makes its report of."""

def collect_shared() -> int:
    """Lets arrays go that were shared with a store, and whose objects nobody has any more; how many are left."""
