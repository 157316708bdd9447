"""The native module of the package ``wholemem``. The package re-exports the public names of this module."""

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
    """An array: a view of memory that keeps the owner of the memory alive, and that every framework imports without a copy.

    Ints and slices in ``[]`` select views, or a number. ``==``, ``bool``, iteration and printing require numpy. Values on a
    GPU are copied to the host, and the call waits for the work that uses the array. An array on a GPU with more than 1 MiB is
    printed without its values.

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
        """The shape of the array: the length of each dimension."""
    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of each dimension of the array, in elements."""
    @property
    def dtype(self) -> str:
        """The name of the array's element type: a name of numpy such as ``float32``, or of a type that numpy does not have,
        such as ``bfloat16``.
        """
    @property
    def device(self) -> str:
        """The device that holds the array's memory: ``cpu``, ``cuda:0`` and so on."""
    @property
    def readonly(self) -> bool:
        """True if the array is read-only."""
    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
    @property
    def size(self) -> int:
        """The number of elements of the array."""
    @property
    def itemsize(self) -> int:
        """The size of one element of the array in bytes."""
    @property
    def nbytes(self) -> int:
        """The size of all elements of the array in bytes, without the gaps between them."""
    @property
    def is_contiguous(self) -> bool:
        """True if the elements of the array are contiguous in C order (the last dimension is the fastest)."""
    def data_ptr(self) -> int:
        """Returns the address of the first element of the array."""
    def numpy(self) -> Any:
        """Returns a numpy array that shares the memory of this array.

        Raises:
            wholemem.errors.Unsupported: The memory is on a GPU, or numpy does not have the element type.
        """
    def memoryview(self) -> memoryview:
        """Returns a ``memoryview`` of the memory of this array.

        Raises:
            wholemem.errors.Unsupported: The memory is on a GPU.
            wholemem.errors.WrongStride: The array is not contiguous.
        """
    def as_readonly(self) -> Array:
        """Returns an array that shares the memory of this array and is exported as read-only."""
    def lent(self) -> Array:
        """Returns an array that shares the memory of this array, for a framework without a read-only flag, such as JAX. The
        caller promises not to write to the memory.

        DLPack then exports a read-only object directly instead of as a copy-on-write map.
        """
    def item(self) -> Any:
        """Returns the only element of the array as a Python number. An element on a GPU is copied to the host.

        Raises:
            wholemem.errors.WrongValue: The array does not have exactly one element.
        """
    def tolist(self) -> Any:
        """Returns the elements of the array as nested lists of Python numbers. Elements on a GPU are copied to the host."""
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
    """Creates an array of zeros in host memory.

    Args:
        shape: The length of each dimension, or one int.
        dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.

    Returns:
        A writable array.

    Raises:
        wholemem.errors.OutOfMemory: The memory cannot be allocated.
        wholemem.errors.WrongType: The element type does not exist.
        wholemem.errors.WrongValue: The shape has a negative or too large length.
    """

def asarray(object: Any) -> Array:
    """Returns an array that is a view of another framework's array, or of a buffer, without a copy.

    Args:
        object: An object with DLPack, the buffer protocol or numpy's array interface.

    Returns:
        An array that keeps ``object`` alive.

    Raises:
        wholemem.errors.Unsupported: The object uses a DLPack version that is not supported.
        wholemem.errors.WrongType: The object is not an array, or its element type is not supported.
        wholemem.errors.WrongValue: The array cannot be imported, for example because it has no memory.
    """

def element_types() -> list[tuple[str, bool, Optional[str]]]:
    """Lists the element types that tables support: the name, whether arithmetic is supported, and the format in Python's
    buffer protocol.

    Returns:
        One tuple for each type. The format is ``None`` if the buffer protocol has none.

    >>> from wholemem._native import element_types
    >>> [row for row in element_types() if row[0] in ("float32", "bfloat16", "bool")]
    [('bfloat16', True, None), ('float32', True, 'f'), ('bool', False, '?')]
    """

def unique_id() -> str:
    """Creates a unique id, with which ranks join a group. One rank creates the id and sends it to the other ranks.

    Returns:
        The id as text. It contains a secret.
    """

@final
class Exchange:
    """Reads tensors of a framework through DLPack's C exchange API, without calls into Python.

    >>> from wholemem._native import Exchange
    >>> Exchange.of(bytes) is None
    True
    """

    @staticmethod
    def of(kind: type, *others: type) -> Optional[Exchange]:
        """Opens a framework's DLPack C exchange API, by which native code reads tensors.

        Args:
            kind: The tensor class, which publishes ``__dlpack_c_exchange_api__``.
            others: Further classes whose tensors are accepted.

        Returns:
            The exchange API for instances of exactly these classes; ``None`` if the framework does not publish a supported
            version, or if the classes publish different ones.
        """
    def gather(self, table: WholeTensor, indices: Any, out: Any) -> None:
        """Gathers rows of a table into a tensor, and converts the elements to the tensor's type.

        Args:
            table: The table.
            indices: A tensor of int32 or int64.
            out: The output tensor.

        Raises:
            wholemem.errors.BadIndex: An index is outside the table.
            wholemem.errors.WrongDevice: A tensor is on another device.
            wholemem.errors.WrongType: The types cannot be converted.
            wholemem.errors.WrongValue: ``out`` has another shape.
        """
    def scatter(self, table: WholeTensor, indices: Any, values: Any, add: bool, order: str) -> None:
        """Scatters rows to a table: writes or adds them, converted to the table's element type.

        Args:
            table: The table.
            indices: A tensor of int32 or int64.
            values: One row for each index.
            add: Whether to add instead of write.
            order: ``any`` or ``fixed``.

        Raises:
            wholemem.errors.BadIndex: An index is outside the table.
            wholemem.errors.WrongDevice: A tensor is on another device.
            wholemem.errors.WrongType: The types cannot be converted.
            wholemem.errors.WrongValue: ``values`` has another shape, or the order does not exist.
        """
    def all_reduce(self, comm: Communicator, input: Any, output: Any, op: str) -> None:
        """Reduces the tensors of all ranks element by element (all-reduce).

        Args:
            comm: The communicator.
            input: The tensor of this rank.
            output: The output tensor, which may be ``input``.
            op: The name of the operation.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def all_gather(self, comm: Communicator, input: Any, output: Any) -> None:
        """Concatenates the tensors of all ranks along a new first dimension (all-gather).

        Args:
            comm: The communicator.
            input: The tensor of this rank.
            output: The output tensor.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def broadcast(self, comm: Communicator, input: Any, output: Any, root: int) -> None:
        """Copies the tensor of the root rank to all ranks (broadcast).

        Args:
            comm: The communicator.
            input: The tensor that the root sends.
            output: The output tensor.
            root: The rank whose tensor is copied.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """

@final
class Shortcut:
    """The fast path: runs gathers and all-reduces of a framework's tensors without the framework's dispatcher.

    A call takes the fast path only if no observer (mode, profiler, tracer) is active and the tensors are plain: of the classes
    that ``exchange`` accepts, contiguous and without lazy negation.

    Args:
        exchange: Reads the tensors.
        checked_before: Observers that are checked before a call. Each is a function that returns whether the observer is active,
            or a tuple of a module's ``__dict__``, the name of a variable and the value it has while the observer is inactive.
        checked_during: Observers that are checked while a call runs, because they may see it again. As ``checked_before``.
        types: The framework's dtypes that are supported.
        is_negated: A function that returns whether a tensor is a lazily negated view of its memory.
        factories: A function that creates a tensor from size, strides, dtype and device number (-1 for the CPU), and ``None``
            or a tuple of two functions without the device number, for the CPU and for the current GPU, and one that returns the
            number of the current GPU.
        mark_written: A function that is called with a tuple of the tensors that were written.

    >>> from wholemem._native import Shortcut
    >>> callable(Shortcut.gather)
    True
    """

    def __new__(
        cls,
        exchange: Exchange,
        *,
        checked_before: Sequence[Union[Callable[[], Any], tuple[dict[str, Any], str, Any]]],
        checked_during: Sequence[Union[Callable[[], Any], tuple[dict[str, Any], str, Any]]],
        types: Sequence[Any],
        is_negated: Callable[[Any], Any],
        factories: tuple[Callable[..., Any], Optional[tuple[Callable[..., Any], Callable[..., Any], Callable[[], int]]]],
        mark_written: Callable[[tuple[Any, ...]], Any],
    ) -> Shortcut: ...
    def gather(self, table: Any, indices: Any, out: Any, dtype: Any) -> Any:
        """Gathers rows of a table without going through the framework's dispatcher.

        Args:
            table: A :class:`wholemem.WholeTensor`.
            indices: A tensor of int32 or int64.
            out: The output tensor; ``None`` creates one.
            dtype: The requested dtype; ``None`` is the dtype of the table.

        Returns:
            The rows, or ``None`` if the call must go through the dispatcher.
        """
    def all_reduce(self, comm: Communicator, input: Any, output: Any) -> bool:
        """Sums a tensor over all ranks, into another tensor or in place, without going through torch's dispatcher.

        Args:
            comm: The communicator.
            input: The tensor of this rank.
            output: The output tensor, which may be ``input``.

        Returns:
            ``False``, without any effect, if the tensors differ in shape or type or are not plain strided tensors.
        """

@final
class ShortGather:
    """A gather function that bypasses torch's dispatcher if possible, and otherwise calls the wrapped Python function.

    It binds, pickles and is documented like the wrapped function.

    Args:
        shortcut: The fast path.
        function: The function that goes through the dispatcher.

    >>> from wholemem._native import ShortGather
    >>> callable(ShortGather)
    True
    """

    def __new__(cls, shortcut: Shortcut, function: Callable[..., Any]) -> ShortGather: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattribute__(self, name: str) -> Any: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any: ...

@final
class CaptureRecording:
    """A recording of the memory of captured collectives, which ``Communicator._record_captures`` starts.

    If it is dropped or canceled after a collective was captured, the group is aborted, because the graph cannot be used.

    >>> import wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> comm._record_captures().finish()
    0
    """

    def finish(self) -> int:
        """Ends the recording, and registers the memory of the captured collectives on all ranks. Every rank must call this method,
        after it has captured the same collectives. The memory of all ranks stays mapped while this object exists.

        Returns:
            The number of arrays that were registered.

        Raises:
            wholemem.errors.RanksDisagree: The ranks have captured different collectives.
            wholemem.errors.Unsupported: On some rank, the memory of an array cannot be shared.
        """
    def cancel(self) -> None:
        """Ends the recording without registering anything, after a capture has failed. Aborts the group if a collective was captured."""

class ShortReduction:
    """Base class of objects that sum tensors over all ranks and bypass torch's dispatcher if possible.

    A subclass has the communicator as ``comm``, and the method ``_all_reduce``, which goes through the dispatcher.

    >>> from wholemem._native import ShortReduction
    >>> class Sums(ShortReduction):
    ...     def _all_reduce(self, tensor, out):
    ...         return "dispatched"
    >>> Sums().all_reduce(None)
    'dispatched'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any: ...
    def all_reduce(self, tensor: Tensor, out: Optional[Tensor] = None) -> Tensor:
        """Returns the sum of the tensors of all ranks. Every rank must call this method.

        The result is bitwise equal on all ranks. A tensor that is registered on all ranks is read directly; other tensors are
        staged. torch does not see the call: it is not differentiable, and autograd does not notice that ``out`` was overwritten.
        Use :func:`wholemem.torch.all_reduce` for training and in compiled code.

        Args:
            tensor: The tensor of this rank.
            out: The output tensor, of the same shape. It may be ``tensor``. ``None`` creates one.

        Returns:
            ``out``, or the new tensor.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def _use_shortcut(self, shortcut: Shortcut) -> None:
        """Enables the fast path, which bypasses torch's dispatcher.

        Args:
            shortcut: The fast path of this process.
        """

@final
class Communicator:
    """A rank's membership in a group of ranks. Each rank has one device; several ranks may share a device.

    A rank is usually a process; :meth:`local` makes threads ranks. All ranks make collective calls in the same order. If a
    rank exits or does not respond, calls raise an exception with its number. As a context manager, it leaves the group at the
    end. Tables and windows that were created through it stay valid until they are dropped.

    >>> import wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> with comm:
    ...     comm.barrier()
    ...     print(comm)
    Communicator(rank=0, size=1, device=cpu)
    """

    @classmethod
    def from_env(cls, *, device: Any = None, timeout: Optional[float] = None) -> Communicator:
        """Joins the group for which a launcher started this process: ``wholemem launch``, torchrun, srun or mpirun.

        Ranks on several nodes join over TCP, with a secret and the address of rank 0. Tables, windows and collectives on arrays need one
        node.

        Args:
            device: ``cpu``, ``cuda`` or ``cuda:1``. Without a number, it is the launcher's local rank (``LOCAL_RANK``), else the
                rank, modulo the number of visible devices. ``None`` selects the backend too.
            timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.

        Returns:
            The communicator of this rank.

        Raises:
            wholemem.errors.BadEnvironment: The launcher's variables are missing or invalid, or ranks on several nodes have no secret or no address.
            wholemem.errors.Timeout: A rank did not join in time.
            wholemem.errors.WrongDevice: The device does not exist.
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
        """Joins the group of a unique id, and returns when all ranks have joined.

        Args:
            unique_id: The id that one rank created with :func:`unique_id`.
            rank: The number of this rank.
            size: The number of ranks.
            device: ``cpu``, ``cuda`` or ``cuda:1``. ``None`` selects one.
            timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.

        Returns:
            The communicator of this rank.

        Raises:
            wholemem.errors.RanksDisagree: Ranks were given different sizes, or the same number.
            wholemem.errors.Timeout: A rank did not join in time.
            wholemem.errors.WrongDevice: The device does not exist.
        """
    @classmethod
    def from_torch(
        cls, group: Any = None, *, device: Any = None, timeout: Optional[float] = None
    ) -> Communicator:
        """Creates a communicator of the ranks of a ``torch.distributed`` process group, which is used only to exchange the
        unique id.

        Args:
            group: The process group. ``None`` is the default group.
            device: ``cpu``, ``cuda`` or ``cuda:1``. ``None`` selects one.
            timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.

        Returns:
            The communicator of this rank.

        Raises:
            wholemem.errors.BadEnvironment: The ranks are on several nodes.
            wholemem.errors.Timeout: A rank did not join in time.
        """
    @classmethod
    def local(
        cls, size: int, *, device: Any = None, timeout: Optional[float] = None
    ) -> list[Communicator]:
        """Creates a group whose ranks are threads of this process, and returns the communicator of each rank.

        Args:
            size: The number of ranks.
            device: ``cpu``, ``cuda`` or ``cuda:1``. Without a number, ranks use the devices round-robin.
            timeout: Seconds to wait for other ranks. ``None`` uses ``WHOLEMEM_TIMEOUT``.

        Returns:
            One communicator for each rank.

        Raises:
            wholemem.errors.WrongDevice: The device does not exist.
            wholemem.errors.WrongValue: ``size`` is 0.
        """
    def split(self, color: Optional[int], key: int = 0) -> Optional[Communicator]:
        """Splits the group: the ranks with the same color form a new group, in which every rank keeps its device. Every rank must
        call this method.

        Args:
            color: The color of this rank. A rank with ``None`` joins no new group.
            key: Ranks of a new group are ordered by key, and by rank if keys are equal.

        Returns:
            The communicator of the new group, or ``None`` without a color. Both groups can be used.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    @property
    def rank(self) -> int:
        """The number of this rank in the group, counted from 0."""
    @property
    def size(self) -> int:
        """The number of ranks in the group."""
    @property
    def device(self) -> str:
        """The device of this rank."""
    @property
    def _handle(self) -> int:
        """The integer handle by which torch operators refer to this communicator: see ``wholemem._handles``."""
    @property
    def closed(self) -> bool:
        """True if this communicator was closed."""
    def barrier(self, *, stream: Any = None) -> None:
        """Waits until all ranks have called this method, and makes the earlier writes of each rank visible to all ranks.

        Args:
            stream: The CUDA stream whose earlier work is included. ``None`` is the default stream.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def stream_barrier(self, *, stream: Any = None) -> None:
        """Enqueues a barrier of all ranks on a stream. Every rank must call this method.

        On a GPU the streams wait and the call returns immediately, except that the first collective call of a communicator waits for
        all ranks. On a CPU the call waits.

        Args:
            stream: The CUDA stream. ``None`` is the default stream.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
        """
    def mem_alloc(self, nbytes: int) -> Window:
        """Allocates a window: zeroed memory of which every rank has a part, and which all ranks map. Every rank must call this
        method.

        Args:
            nbytes: The size of this rank's part. It may be 0.

        Returns:
            The window.

        Raises:
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
            wholemem.errors.PeerLost: A rank exited.
        """
    def mem_alloc_on_host(self, nbytes: int) -> Window:
        """Allocates a window of host memory, which CPUs and the GPUs of all ranks access. Every rank must call this method.

        The part of each rank is on the NUMA node of its GPU. GPUs access it over the bus. Without a GPU it is the same as
        :meth:`mem_alloc`.

        Args:
            nbytes: The size of this rank's part. It may be 0.

        Returns:
            The window. Its arrays are host memory, which numpy imports.

        Raises:
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
            wholemem.errors.PeerLost: A rank exited.
        """
    def window_register(self, array: Any, *, stream: Any = None) -> Window:
        """Registers the memory of an array as a window (memory that all ranks map), so that collectives can access the array and
        its parts directly, without a staging copy. The address of the array does not change. Every rank must call this method.

        The registration ends when the window and its arrays are dropped. The array's memory is kept until every rank has dropped its
        window, which the ranks tell each other in the next call that creates or registers a window.

        Args:
            array: A contiguous, writable array on this rank's device. On a GPU: memory from ``cudaMalloc`` (torch's default
                allocator, CuPy), of :func:`wholemem.torch.pool.mem_pool`, or in torch's expandable segments. On the CPU: an array of a
                window or of a table.
            stream: The CUDA stream that used the array last. ``None`` is the default stream.

        Returns:
            The window.

        Raises:
            wholemem.errors.ReadOnly: The array is read-only.
            wholemem.errors.Unsupported: On some rank, the memory cannot be shared.
            wholemem.errors.WrongStride: The array is not contiguous.
        """
    @overload
    def all_reduce(self, array: NDArray[Any], out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> NDArray[Any]: ...
    @overload
    def all_reduce(self, array: Array, out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> Array: ...
    @overload
    def all_reduce(self, array: Tensor, out: None = None, *, op: ReduceOp = "sum", stream: Any = None) -> Tensor: ...
    @overload
    def all_reduce(self, array: Any, out: _Out, *, op: ReduceOp = "sum", stream: Any = None) -> _Out:
        """Reduces the arrays of all ranks element by element. Every rank must call this method, and gets a bitwise equal
        result.

        If the input is in a window or registered on all ranks, at the same offset, it is read directly. It must be so on all ranks
        or on none.

        Args:
            array: The array of this rank.
            out: The output, of the same shape and type. It may be ``array``. ``None`` creates an array of the same framework: a
                torch tensor, a numpy array, or an :class:`Array`.
            op: ``sum``, ``avg``, ``min``, ``max``, ``prod``, ``and``, ``or`` or ``xor``.
            stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.

        Returns:
            ``out``, or the new array.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
            wholemem.errors.WrongType: The element type does not support the operation.
        """
    @overload
    def all_gather(self, array: NDArray[Any], out: None = None, *, stream: Any = None) -> NDArray[Any]: ...
    @overload
    def all_gather(self, array: Array, out: None = None, *, stream: Any = None) -> Array: ...
    @overload
    def all_gather(self, array: Tensor, out: None = None, *, stream: Any = None) -> Tensor: ...
    @overload
    def all_gather(self, array: Any, out: _Out, *, stream: Any = None) -> _Out:
        """Concatenates the arrays of all ranks along a new first dimension, in rank order. Every rank must call this method.

        Args:
            array: The array of this rank.
            out: The output, of the shape ``(size, *array.shape)``. ``None`` creates an array of the same framework.
            stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.

        Returns:
            ``out``, or the new array.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def broadcast(self, array: _Out, root: int = 0, *, stream: Any = None) -> _Out:
        """Copies the array of the root rank to the arrays of all ranks. Every rank must call this method.

        Args:
            array: The array of this rank, which is overwritten except on the root.
            root: The rank whose array is copied.
            stream: The CUDA stream of the work. ``None`` is torch's current stream for torch tensors, else the default stream.

        Returns:
            ``array``.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    def _record_captures(self) -> CaptureRecording:
        """Starts to record the memory of collectives that are captured in CUDA graphs and whose arrays are not registered.

        Returns:
            The recording.

        Raises:
            wholemem.errors.WrongValue: Another recording is not finished.
        """
    @property
    def staged_calls(self) -> int:
        """The number of collectives whose data were staged so far, because their arrays are not in a window and not registered."""
    def check(self) -> None:
        """Raises the error with which the group of ranks failed, if it has failed. Does not wait for other ranks.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Aborted: A rank aborted the group.
            wholemem.errors.Timeout: A call timed out.
        """
    def abort(self) -> None:
        """Aborts the group on all ranks: the calls of every rank end with an error. Any thread may call this method."""
    def close(self) -> None:
        """Leaves the group. Calls of other ranks that wait for this rank end with an error; their GPU kernels end at the
        timeout. Memory of the group stays valid.
        """
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Window:
    """A window: memory of which every rank has a part, and which all ranks have mapped. A rank's mappings are released when its
    window and the last array of it are dropped; the memory is freed after all ranks have dropped theirs.

    >>> import wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> window = comm.mem_alloc(1 << 20)
    >>> mine = window.local("float32", (4, 2))
    >>> comm.all_reduce(mine, mine) is mine
    True
    """

    @property
    def nbytes(self) -> int:
        """The size of this rank's part of the window in bytes."""
    def nbytes_of(self, rank: int) -> int:
        """Returns the size of a rank's part of the window in bytes.

        Args:
            rank: The rank.

        Raises:
            wholemem.errors.WrongValue: The rank does not exist.
        """
    def local(
        self, dtype: Any = None, shape: Union[None, int, Sequence[int]] = None, *, offset: int = 0
    ) -> Array:
        """Returns an array that is a view of this rank's part of the window.

        Args:
            dtype: The element type. ``None`` is ``uint8``.
            shape: The shape. ``None`` is one dimension, up to the end of the part.
            offset: The first byte.

        Returns:
            An array that shares the memory and keeps the window alive.

        Raises:
            wholemem.errors.WrongValue: The array does not fit in the part, or ``offset`` is not aligned.
        """
    def peer(
        self, rank: int, dtype: Any = None, shape: Union[None, int, Sequence[int]] = None, *, offset: int = 0
    ) -> Array:
        """Returns an array that is a view of another rank's part of the window, which this rank accesses directly.

        Args:
            rank: The rank.
            dtype: The element type. ``None`` is ``uint8``.
            shape: The shape. ``None`` is one dimension, up to the end of the part.
            offset: The first byte.

        Returns:
            An array that shares the memory and keeps the window alive.

        Raises:
            wholemem.errors.WrongValue: The rank does not exist, the array does not fit in the part, or ``offset`` is not
                aligned.
        """

@final
class WholeTensor:
    """A table: a tensor whose rows are divided among ranks. Each rank stores its own rows and can access all rows.

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
        """Creates a table filled with zeros. Every rank must call this method with the same arguments.

        Args:
            comm: The communicator.
            shape: The shape, rows first.
            dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
            kind: ``continuous`` has one range of addresses, ``chunked`` one range for each rank.
            location: ``device`` is the device of each rank, ``host`` is host memory.
            rows_of_each: The number of rows of each rank. ``None`` divides them evenly.
            equal_addresses: Whether the table has the same address on all ranks.

        Returns:
            The table.

        Raises:
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
            wholemem.errors.RanksDisagree: Ranks passed different arguments.
            wholemem.errors.WrongType: Tables cannot store the element type.
            wholemem.errors.WrongValue: The shape, kind, location or partition is invalid.
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
        """Creates a table from a file: a saved table, a ``.npy`` file or a tensor of a ``.safetensors`` file.

        All ranks call it; each reads its own rows.

        Args:
            comm: The communicator.
            path: The file, or the folder of a saved table.
            name: The tensor in a ``.safetensors`` file.
            kind: ``continuous`` has one range of addresses, ``chunked`` one range for each rank.
            location: ``device`` is the device of each rank, ``host`` is host memory.
            rows_of_each: The number of rows of each rank. ``None`` divides them evenly.

        Returns:
            The table.

        Raises:
            wholemem.errors.BadFile: The file cannot be read, is invalid, or changed while it was read.
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
            wholemem.errors.RanksDisagree: The file was replaced, and ranks opened different versions; or ranks passed different
                arguments.
        """
    def save(self, path: Union[str, PathLike[str]], *, overwrite: bool = False) -> None:
        """Saves the table as a folder, which appears only when it is completely written. Every rank must call this method.

        Args:
            path: The folder.
            overwrite: Whether to replace an existing saved table.

        Raises:
            wholemem.errors.BadFile: The folder exists or cannot be written.
        """
    def like(self) -> WholeTensor:
        """Creates a zeroed table with the shape, type, kind, location and partition of this table. Every rank must call this
        method.

        Returns:
            The new table.

        Raises:
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
        """
    def barrier(self, *, stream: Any = None) -> None:
        """Waits until all ranks have called this method, and makes their earlier writes to the table visible to all ranks.

        Args:
            stream: The CUDA stream whose earlier work is included. ``None`` is the default stream.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.Timeout: A rank did not call in time.
        """
    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the table: the length of each dimension, rows first."""
    @property
    def stride(self) -> tuple[int, ...]:
        """The stride of each dimension of the table, in elements."""
    @property
    def dtype(self) -> str:
        """The name of the table's element type, as in numpy."""
    @property
    def kind(self) -> str:
        """The kind of the table: ``continuous`` (one range of addresses for all rows) or ``chunked`` (one range for each
        rank's rows).
        """
    @property
    def location(self) -> str:
        """The location of the table's rows: ``device`` memory or ``host`` memory."""
    @property
    def device(self) -> str:
        """The device with which this rank accesses the rows of the table."""
    @property
    def _handle(self) -> int:
        """The integer handle by which torch operators refer to this table: see ``wholemem._handles``."""
    @property
    def local_rows(self) -> tuple[int, int]:
        """The range of the table's rows that this rank stores: the first row, and one past the last row."""
    def __len__(self) -> int: ...
    def __array__(self, dtype: Any = None, *, copy: Optional[bool] = None) -> NDArray[Any]:
        """Returns all rows to numpy without a copy if the table is continuous and in host memory; otherwise raises. Does not
        wait for work on a GPU: call ``barrier`` first.
        """
    def local(self) -> Array:
        """Returns an array of the table's rows that this rank stores, without a copy."""
    def rows_of(self, rank: int) -> Array:
        """Returns an array of the table's rows that another rank stores, without a copy. This rank accesses them directly.

        Args:
            rank: The rank.

        Returns:
            An array that shares the memory.

        Raises:
            wholemem.errors.WrongValue: The rank does not exist.
        """
    def all(self) -> Array:
        """Returns an array of all rows of a continuous table, without a copy.

        Raises:
            wholemem.errors.WrongValue: The table is chunked.
        """
    def rows(self, start: int, stop: int) -> WholeTensor:
        """Returns a range of this table's rows as a table that shares the memory of this table.

        Args:
            start: The first row.
            stop: One past the last row.

        Raises:
            wholemem.errors.WrongValue: The range is not inside the table.
        """
    def columns(self, start: int, stop: int) -> WholeTensor:
        """Returns a range of this table's columns (the second dimension) as a table that shares the memory of this table.

        Args:
            start: The first column.
            stop: One past the last column.

        Raises:
            wholemem.errors.WrongValue: The range is not inside the table, or the table has one dimension.
        """
    def write(self, first: int, array: Any, *, stream: Any = None) -> None:
        """Copies the rows of an array to consecutive rows of the table.

        Args:
            first: The first row of the table.
            array: The rows, contiguous and of the table's element type, on this rank's device.
            stream: The CUDA stream of the copy. ``None`` is the default stream.

        Raises:
            wholemem.errors.WrongStride: The array is not contiguous.
            wholemem.errors.WrongType: The element types differ.
            wholemem.errors.WrongValue: The shape differs, or the rows are not inside the table.
        """
    def read(self, first: int, out: Any, *, stream: Any = None) -> None:
        """Copies consecutive rows of the table to an array.

        Args:
            first: The first row of the table.
            out: The output, contiguous and of the table's element type, on this rank's device.
            stream: The CUDA stream of the copy. ``None`` is the default stream.

        Raises:
            wholemem.errors.WrongStride: The output is not contiguous.
            wholemem.errors.WrongType: The element types differ.
            wholemem.errors.WrongValue: The shape differs, or the rows are not inside the table.
        """
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
        """Copies the rows of the table at the given indices to an array (gather).

        Indices of torch return a torch tensor, and the work runs on torch's current stream unless ``stream`` is given. Indices of
        numpy return a numpy array, or an :class:`Array` if numpy does not have the element type. Other indices return an
        :class:`Array`. If ``stream`` is given, torch's streams do not wait for it: the caller orders them.

        If the table is on a GPU, indices in host memory are copied to it and a numpy output is copied back; the call waits for
        each copy. torch tensors are not copied: a tensor on another device raises an error.

        Rows are copied in any order. If ``out`` is part of a table, it must not overlap the gathered rows.

        Args:
            indices: An array or tensor of int32 or int64, an int, or a list, tuple or range of ints.
            out: The output, of the shape of the indices followed by the shape of a row. ``None`` creates it.
            dtype: The element type of the output. Floats convert to floats, and integers to integers.
            convert: Whether to convert to the element type of ``out``.
            skip_bad: Whether to ignore bad indices. Their rows are zero.
            stream: The CUDA stream of the work.

        Returns:
            ``out``, or the new array.

        Raises:
            wholemem.errors.BadIndex: An index is outside the table. Its row is zero, and the other rows are valid. On a GPU, the
                next call or :meth:`check` raises it.
            wholemem.errors.WrongDevice: A tensor is on another device.
            wholemem.errors.WrongType: The element types differ, or the indices are not integers.
            wholemem.errors.WrongValue: ``out`` has another shape, or another type than ``dtype``.
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
        """Writes rows of an array to the rows of the table at the given indices (scatter). Other ranks see the writes after
        the next :meth:`barrier`.

        If the table is on a GPU, indices and rows in host memory are copied to it, and the call waits for the copies. torch
        tensors are not copied. Rows are written in any order. If ``array`` is part of a table, it must not overlap the written
        rows.

        Args:
            indices: As for :meth:`gather`.
            array: One row for each index.
            order: If several rows go to one index, ``any`` stores one of them. ``fixed`` stores the last row of the last rank; it
                is a collective call.
            convert: Whether to convert the rows to the element type of the table.
            skip_bad: Whether to ignore bad indices.
            stream: The CUDA stream of the work.

        Raises:
            wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or :meth:`check` raises it.
            wholemem.errors.WrongDevice: A tensor is on another device.
            wholemem.errors.WrongType: The element types differ, or the indices are not integers.
            wholemem.errors.WrongValue: ``array`` has another shape.
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
        """Adds rows of an array to the rows of the table at the given indices (scatter-add). Other ranks see the sums after
        the next :meth:`barrier`.

        With the order ``fixed``, and for a table in host memory, it is a collective call. Otherwise it behaves as
        :meth:`scatter`.

        Args:
            indices: As for :meth:`gather`.
            array: One row for each index.
            order: ``any`` adds in any order. ``fixed`` adds in a fixed order, so that sums are bitwise reproducible.
            convert: Whether to convert the rows to the element type of the table.
            skip_bad: Whether to ignore bad indices.
            stream: The CUDA stream of the work.

        Raises:
            wholemem.errors.BadIndex: An index is outside the table. On a GPU, the next call or :meth:`check` raises it.
            wholemem.errors.WrongDevice: A tensor is on another device.
            wholemem.errors.WrongType: The element types differ, or are not numbers, or the indices are not integers.
            wholemem.errors.WrongValue: ``array`` has another shape.
        """
    def populate(self) -> None:
        """Maps all rows of the table into the page table of this process, as huge pages if the kernel supports them.

        Call it after the rows are written and before gathers from host memory. It has no effect on GPU memory.
        """
    def check(self) -> None:
        """Raises an error if finished work on the table had an index outside the table.

        Raises:
            wholemem.errors.BadIndex: An index was outside the table.
        """
    def reference_ptr(self) -> int:
        """Returns the address of a ``wholemem::ElementRef``, through which CUDA kernels of users access the elements of this
        table.

        A ``PtrGen`` of it computes the addresses of elements, also for a table that is a range of rows and columns. The address
        is valid while this object lives.
        """

def start_logging() -> Optional[str]:
    """Passes log events to ``wholemem._logging`` from now on, if the environment selects any.

    Returns:
        The name of the most verbose level that is selected, or ``None`` if nothing is logged.

    Raises:
        wholemem.errors.BadEnvironment: ``WHOLEMEM_LOG`` is invalid.
    """

def stop_logging() -> None:
    """Delivers all log records, and ends the thread that delivers them. The package registers it with ``atexit``, because a
    thread must not wait for the GIL when the interpreter ends. Records that handlers emit meanwhile are delivered too, except if
    their number does not end: after 10,000 records, the rest is dropped.
    """

def findings() -> list[
    tuple[
        str,
        Optional[str],
        list[tuple[int, str, int, list[tuple[str, bool, Optional[str]]]]],
    ]
]:
    """Tests the capabilities (optional features) of this machine's devices, for :func:`wholemem.doctor`.

    Returns:
        One tuple for each backend: name, the reason if it is not available, and its devices. A device is a tuple of number,
        name, bytes of memory and capabilities; a capability is a tuple of name, whether it works, and the reason if not.
    """

def die_with_parent(parent: int) -> None:
    """Requests that the kernel kills this process when the thread that started it ends.

    Args:
        parent: The process id of the parent.

    Raises:
        wholemem.errors.Error: The parent has ended.
    """

def collect_shared() -> int:
    """Releases GPU arrays that were published to a store without a copy and whose objects the store has freed.

    Returns:
        The number of shared arrays that are still held.
    """
