"""All-reduce with the shortest path from Python to the launch: no operator, no DLPack capsule, no further objects."""

from __future__ import annotations

from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator, Optional, Sequence, Union

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._native import Communicator, Window
from .._native import ShortReduction as _ShortReduction
from ..errors import PeerLost, Unsupported, WrongStride, WrongType, WrongValue
from .shortcut import SHORTCUT
from .tensors import EXCHANGE, NUMBERS, as_tensor, as_torch_dtype, check_resolved, check_tensor, raw_stream

__all__ = ["FastAllreduce"]


class FastAllreduce(_ShortReduction):
    """Sums tensors over all ranks, for many short calls such as those between the layers of a model.

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
        # Windows that their tensors do not keep alive, by address and length.
        self._windows: dict[tuple[int, int], tuple[StorageWeakRef, Window]] = {}
        # Windows that captured graphs may use after their tensors are dropped.
        self._recorded: dict[int, Window] = {}
        # Allocates what the first collective needs, because a graph capture cannot.
        self.comm.stream_barrier(stream=raw_stream(self._number))
        if SHORTCUT is not None:
            self._use_shortcut(SHORTCUT)

    def _all_reduce(self, tensor: torch.Tensor, out: Optional[torch.Tensor]) -> torch.Tensor:
        """Implements :meth:`all_reduce` for tensors that are not plain, and raises errors."""
        check_tensor("the tensor", tensor)
        out = torch.empty_like(tensor) if out is None else out
        check_tensor("the output", out)
        check_resolved("the output", out)
        EXCHANGE.all_reduce(self.comm, tensor.resolve_neg(), out, "sum")
        return out

    def should_use(self, tensor: torch.Tensor) -> bool:
        """Returns whether to reduce a tensor with this object: the tensor is supported and not larger than ``max_size``.

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
        """Registers a tensor, so that the other ranks read it in place. All ranks call it, with tensors of the same size.

        Keep the tensor alive while it is reduced: otherwise its memory could be reused by another tensor on this rank, and the
        other ranks would read that. Memory that cannot be shared, such as most CPU memory, is replaced: the tensor moves to shared
        memory with its content, like ``share_memory_``. Existing views of it keep the old memory.

        Args:
            tensor: A contiguous tensor.

        Raises:
            wholemem.errors.WrongStride: The tensor is not contiguous.
        """
        check_tensor("the tensor", tensor)
        if not tensor.is_contiguous():
            raise WrongStride("the tensor is not contiguous", hint="use `contiguous()`")
        if tensor.numel() == 0:
            # An empty tensor is not read.
            return
        self._release_windows()
        try:
            window = self.comm.window_register(tensor.detach(), stream=raw_stream(self._number))
        except Unsupported:
            # If one rank raises this, all ranks do.
            window = self.comm.mem_alloc(tensor.nbytes)
            # The data of an inference tensor can be replaced only by an inference tensor.
            with torch.inference_mode(tensor.is_inference()):
                shared = as_tensor(window.local(tensor.dtype, tensor.shape))
                shared.copy_(tensor.detach())
                tensor.data = shared
            self._track_owned(tensor, window)
        else:
            self._track(tensor, window)

    def empty(
        self, shape: Union[int, Sequence[int]], dtype: Union[str, torch.dtype] = torch.float32
    ) -> torch.Tensor:
        """Creates a registered tensor filled with zeros. All ranks call it, with the same shape.

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
            # A window cannot be empty.
            return torch.empty(size, dtype=dtype, device=self.device)
        self._release_windows()
        window = self.comm.mem_alloc(size.numel() * dtype.itemsize)
        tensor = as_tensor(window.local(dtype, size))
        self._track_owned(tensor, window)
        return tensor

    def _track_owned(self, tensor: torch.Tensor, window: Window) -> None:
        """Remembers a window by a weak reference; the tensor over its memory keeps it alive."""
        if self._number >= 0:
            # Work of torch on the tensor may still run when the tensor is dropped.
            self._track(tensor, window)

    def _track(self, tensor: torch.Tensor, window: Window) -> None:
        """Holds a window while the storage of its tensor exists. An older window of the same memory is released."""
        self._windows[tensor.data_ptr(), tensor.nbytes] = (StorageWeakRef(tensor.untyped_storage()), window)

    def _release_windows(self) -> None:
        """Releases the windows whose tensors were dropped, after the work on them has run."""
        expired = [key for key, (storage, _) in self._windows.items() if storage.expired()]
        if expired and self._number >= 0:
            if torch.cuda.is_current_stream_capturing():
                # A capture cannot synchronize.
                return
            torch.cuda.synchronize(self._number)
        for key in expired:
            del self._windows[key]

    @contextmanager
    def capture(self) -> Iterator[FastAllreduce]:
        """Encloses the capture of CUDA graphs that contain calls of this object. All ranks capture the same calls.

        Graphs also read registered tensors in place, and nothing has to be registered after the capture. Windows that are
        registered when the block ends are held until :meth:`close`, because graphs do not keep their tensors alive. At the end, the
        block raises an error if a rank exited meanwhile, because captured calls do not detect it.

        Yields:
            This object.

        Raises:
            wholemem.errors.PeerLost: A rank exited.
        """
        self.comm.check()
        try:
            yield self
        finally:
            self._recorded.update((id(window), window) for _, window in self._windows.values())
        try:
            self.comm.check()
        except PeerLost as error:
            # A rank that has closed its object may have completed its capture earlier.
            if error.code != "peer-left":
                raise

    def close(self) -> None:
        """Leaves the group after the enqueued work has run. Registered memory stays valid while its tensor exists."""
        if not self.comm.closed:
            if self._number >= 0:
                torch.cuda.synchronize(self._number)
            self._windows.clear()
            self._recorded.clear()
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


def _device(requested: Union[None, str, int, torch.device]) -> str:
    """Returns the name of a device; by default torch's current one."""
    if requested is None:
        requested = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = torch.device(requested)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def _join(rank: int, world_size: int, group: Any, device: str, timeout: Optional[float]) -> Communicator:
    """Joins the ranks through torch's process group, alone, or through the launcher."""
    if group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Communicator.from_torch(group, device=device, timeout=timeout)
    if (rank, world_size) == (0, 1):
        (alone,) = Communicator.local(1, device=device, timeout=timeout)
        return alone
    return Communicator.from_env(device=device, timeout=timeout)
