"""Implements an all-reduce with a short path from Python to the kernel launch: without an operator, a DLPack capsule or other
objects.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Union

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._native import CaptureRecording, Communicator, Window
from .._native import ShortReduction as _ShortReduction
from ..errors import PeerLost, Unsupported, WrongStride, WrongType, WrongValue
from .shortcut import SHORTCUT
from .tensors import EXCHANGE, NUMBERS, as_tensor, as_torch_dtype, check_resolved, check_tensor, raw_stream

__all__ = ["FastAllreduce"]


class _Registered(NamedTuple):
    """The registration of a tensor: a window (memory that all ranks map) that consists of the tensor's memory."""

    storage: StorageWeakRef
    window: Window
    # The number of references that the registration itself holds to the storage.
    held: int


class FastAllreduce(_ShortReduction):
    """Sums tensors over all ranks (all-reduce), for many short calls such as those between the layers of a model.

    The ranks join through a process group of ``torch.distributed``, with any backend, if there is one; otherwise as a launcher
    started them (``torchrun``, ``wholemem launch``). Tensors are on the CPU or on one GPU, and of any size.

    Args:
        rank: The number of this rank.
        world_size: The number of ranks.
        max_size: The number of bytes up to which :meth:`should_use` recommends a call.
        group: The process group. ``None`` is the default group, if ``torch.distributed`` is initialized.
        device: The device of this rank. ``None`` is torch's current GPU, or the CPU if there is none.
        timeout: Seconds to wait for other ranks, now and in later calls. ``None`` uses ``WHOLEMEM_TIMEOUT``.

    Raises:
        wholemem.errors.Timeout: A rank did not join in time.
        wholemem.errors.WrongValue: The process group or launcher has another rank or number of ranks.

    >>> import torch
    >>> with FastAllreduce(0, 1, device="cpu") as fast:
    ...     x = fast.empty((2, 3))
    ...     y = fast.all_reduce(x.fill_(2))
    >>> y
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """

    rank: int
    world_size: int
    max_size: int
    comm: Communicator

    def __init__(
        self,
        rank: int,
        world_size: int,
        max_size: int = 8 << 20,
        *,
        group: Any = None,
        device: Union[None, str, int, torch.device] = None,
        timeout: Optional[float] = None,
    ) -> None:
        self.max_size = max_size
        self.comm = _join(rank, world_size, group, _device(device), timeout)
        self.rank, self.world_size = self.comm.rank, self.comm.size
        if (self.rank, self.world_size) != (rank, world_size):
            actual = f"rank {self.rank} of {self.world_size}"
            self.comm.close()
            raise WrongValue(
                f"this process is {actual}, not rank {rank} of {world_size}", hint="pass the rank and size of the group"
            )
        self.device = torch.device(self.comm.device)
        self._number = -1 if self.device.type == "cpu" else int(self.device.index)
        # The windows (memory that all ranks map) whose tensors do not keep them alive, by address and length of the tensor.
        self._windows: dict[tuple[int, int], _Registered] = {}
        # The windows (memory that all ranks map) that captured CUDA graphs may use after the registered tensors are dropped.
        self._recorded: dict[int, Window] = {}
        # The memory of captured CUDA graphs that was not registered before.
        self._recordings: list[CaptureRecording] = []
        # This first collective allocates buffers, because they cannot be allocated during a graph capture.
        self.comm.stream_barrier(stream=raw_stream(self._number))
        if SHORTCUT is not None:
            self._use_shortcut(SHORTCUT)

    def _all_reduce(self, tensor: torch.Tensor, out: Optional[torch.Tensor]) -> torch.Tensor:
        """Implements :meth:`all_reduce` for calls that cannot take the fast path, and raises the errors of invalid calls."""
        check_tensor("the tensor", tensor)
        out = torch.empty_like(tensor) if out is None else out
        check_tensor("the output", out)
        check_resolved("the output", out)
        EXCHANGE.all_reduce(self.comm, tensor.resolve_neg(), out, "sum")
        return out

    def should_use(self, tensor: torch.Tensor) -> bool:
        """Returns true if this object should reduce a tensor: the tensor is supported and not larger than ``max_size``.

        Args:
            tensor: The tensor.
        """
        check_tensor("the tensor", tensor)
        return (
            tensor.device == self.device
            and tensor.dtype in NUMBERS
            and tensor.is_contiguous()
            and 0 < tensor.nbytes <= self.max_size
        )

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Registers a tensor, so that calls can access the tensor and slices of it directly, without a staging copy. Every rank must
        call this method, with a tensor of the same size.

        A tensor on a GPU stays where it is. Its memory is from ``cudaMalloc`` (torch's default allocator), of
        :func:`wholemem.torch.pool.mem_pool`, or in expandable segments. CPU memory that other ranks cannot map, which is most, is
        replaced: the tensor moves to shared memory with its content, like ``share_memory_``. Existing views of it keep the old memory.

        The registration ends with the tensor and its views: the next calls that create or register tensors release the memory, after
        all ranks have released it.

        Args:
            tensor: A contiguous tensor.

        Raises:
            wholemem.errors.Unsupported: On some rank, the memory of a GPU tensor cannot be shared.
            wholemem.errors.WrongStride: The tensor is not contiguous.
        """
        check_tensor("the tensor", tensor)
        if not tensor.is_contiguous():
            raise WrongStride("the tensor is not contiguous", hint="use `contiguous()`")
        if tensor.numel() == 0:
            # No rank reads an empty tensor, so the tensor is not registered.
            return
        self._release_windows()
        storage = StorageWeakRef(tensor.untyped_storage())
        used = _uses_of(storage)
        try:
            window = self.comm.window_register(tensor.detach(), stream=raw_stream(self._number))
        except Unsupported:
            if self._number >= 0:
                raise
            # All ranks raise `Unsupported` together, so all of them allocate a window here.
            window = self.comm.mem_alloc(tensor.nbytes)
            # torch replaces the data of an inference tensor only by another inference tensor.
            with torch.inference_mode(tensor.is_inference()):
                shared = as_tensor(window.local(tensor.dtype, tensor.shape))
                shared.copy_(tensor.detach())
                tensor.data = shared
            self._track_owned(tensor, window)
        else:
            self._track(tensor, window, storage, max(_uses_of(storage) - used, 0))

    def empty(
        self, shape: Union[int, Sequence[int]], dtype: Union[str, torch.dtype] = torch.float32
    ) -> torch.Tensor:
        """Creates a zeroed tensor that is registered, so that the other ranks can read it directly, without a staging copy. Every
        rank must call this method with the same shape.

        Its memory is freed with the tensor and its views; on a GPU, by the next call that creates or registers a tensor.

        Args:
            shape: The shape, or one int.
            dtype: The dtype, or its name.

        Returns:
            The tensor.

        Raises:
            wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
            wholemem.errors.WrongType: The shape or dtype is not valid.
            wholemem.errors.WrongValue: A length is negative.
        """
        dtype = as_torch_dtype(dtype)
        try:
            size = torch.Size((shape,) if isinstance(shape, int) else shape)
        except TypeError:
            raise WrongType(f"`{shape}` is not a shape", hint="pass an int, or a tuple of ints") from None
        if any(length < 0 for length in size):
            raise WrongValue(f"a dimension of the shape {list(size)} is negative", hint="pass lengths that are not negative")
        if size.numel() == 0:
            # An empty tensor gets no window, because a window cannot be empty.
            return torch.empty(size, dtype=dtype, device=self.device)
        self._release_windows()
        window = self.comm.mem_alloc(size.numel() * dtype.itemsize)
        tensor = as_tensor(window.local(dtype, size))
        self._track_owned(tensor, window)
        return tensor

    def _track_owned(self, tensor: torch.Tensor, window: Window) -> None:
        """Holds the window in whose memory a GPU tensor lies. A CPU tensor itself keeps its window alive."""
        if self._number >= 0:
            # Work of torch on the GPU tensor may still run when the tensor is dropped.
            self._track(tensor, window, StorageWeakRef(tensor.untyped_storage()), 0)

    def _track(self, tensor: torch.Tensor, window: Window, storage: StorageWeakRef, held: int) -> None:
        """Holds a window while the storage of the window's tensor is in use. Releases an older window of the same memory."""
        self._windows[tensor.data_ptr(), tensor.nbytes] = _Registered(storage, window, held)

    def _release_windows(self) -> None:
        """Releases the windows whose tensors were dropped, after the GPU work on those tensors has run."""
        held: dict[int, int] = {}
        for registered in self._windows.values():
            held[registered.storage.cdata] = held.get(registered.storage.cdata, 0) + registered.held

        def is_dropped(registered: _Registered) -> bool:
            # A registration keeps the storage. If there is no other reference, the tensor and its views were dropped.
            storage = registered.storage
            return storage.expired() or 0 < _uses_of(storage) <= held[storage.cdata]

        expired = [key for key, registered in self._windows.items() if is_dropped(registered)]
        if expired and self._number >= 0:
            if torch.cuda.is_current_stream_capturing():
                # The GPU cannot be synchronized during a CUDA graph capture, so no window is released now.
                return
            torch.cuda.synchronize(self._number)
        for key in expired:
            del self._windows[key]

    @contextmanager
    def capture(self) -> Iterator[FastAllreduce]:
        """Returns a context manager for the capture of CUDA graphs that contain all-reduces of this object. All ranks must
        capture the same calls, and the end of the block is collective.

        Calls in the graphs can access the tensors directly, without a staging copy: when the block ends, it registers the tensors of
        the graphs that are not registered. Launch the graphs only afterwards. The memory of all ranks stays mapped until :meth:`close`,
        so that a replay never uses memory that is not mapped. The block raises an error if a rank exited meanwhile, because captured
        calls do not detect it.

        Yields:
            This object.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
            wholemem.errors.RanksDisagree: The ranks have captured different calls.
            wholemem.errors.Unsupported: On some rank, the memory of a captured tensor cannot be shared.
        """
        self.comm.check()
        # Calls are captured in graphs on GPUs only, so nothing is recorded on CPUs.
        recording = self.comm._record_captures() if self._number >= 0 else None
        try:
            yield self
        except BaseException:
            # The recording is cancelled explicitly, because the traceback may keep this frame and the recording alive.
            if recording is not None:
                recording.cancel()
            raise
        finally:
            self._recorded.update((id(registered.window), registered.window) for registered in self._windows.values())
        if recording is not None:
            recording.finish()
            self._recordings.append(recording)
        try:
            self.comm.check()
        except PeerLost as error:
            # If another rank has left the group, this is no error: that rank may have completed its capture before.
            if error.code != "peer-left":
                raise

    def close(self) -> None:
        """Leaves the group of ranks after the enqueued work has run. The memory of a registered tensor stays valid while the
        tensor exists.
        """
        if not self.comm.closed:
            if self._number >= 0:
                torch.cuda.synchronize(self._number)
            self._windows.clear()
            self._recorded.clear()
            self._recordings.clear()
            self.comm.close()

    def __enter__(self) -> FastAllreduce:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FastAllreduce(rank={self.rank}, world_size={self.world_size}, device={self.device})"


def _uses_of(storage: StorageWeakRef) -> int:
    """Returns the number of references to a storage, or 0 if this version of torch cannot report it. In that case, a registration
    that keeps the storage of a dropped tensor is released only by ``close``."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(storage.cdata))


def _device(requested: Union[None, str, int, torch.device]) -> str:
    """Returns the name of the requested device, or of torch's current device if none is requested."""
    if requested is None:
        requested = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = torch.device(requested)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def _join(rank: int, world_size: int, group: Any, device: str, timeout: Optional[float]) -> Communicator:
    """Creates the communicator of the ranks of torch's process group, if there is one; otherwise of this process alone, or of the
    ranks that a launcher started."""
    if group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Communicator.from_torch(group, device=device, timeout=timeout)
    if (rank, world_size) == (0, 1):
        (alone,) = Communicator.local(1, device=device, timeout=timeout)
        return alone
    return Communicator.from_env(device=device, timeout=timeout)
