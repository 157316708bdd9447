"""All-reduce with nothing between Python and the launch: no operator, no capsule, no object that is not needed."""

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
from .tensors import EXCHANGE, NUMBERS, as_tensor, as_torch_dtype, check_own, check_tensor, raw_stream

__all__ = ["FastAllreduce"]


class FastAllreduce(_ShortReduction):
    """Sums of all ranks' tensors, for calls that are short and many: those between the layers of a model.

    The ranks meet through a group of ``torch.distributed``, of whichever backend, if there is one; or as a launcher has
    started them (``torchrun``, ``wholemem launch``). Tensors are of the processor or of one GPU, and of any size: those of up to
    ``max_size`` bytes are what this is made for, and :meth:`should_use` says so. Who waits longer than ``timeout`` seconds for
    another rank gets a :class:`~wholemem.errors.Timeout`; if none is given, ``WHOLEMEM_TIMEOUT`` says it.

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
            found = f"rank {self.rank} of {self.world_size}"
            self.comm.close()
            raise WrongValue(
                f"this process is {found}, and not rank {rank} of {world_size}", hint="give the group's own numbers"
            )
        self.device = torch.device(self.comm.device)
        self._number = -1 if self.device.type == "cpu" else int(self.device.index)
        # Those that their tensors do not keep, by address and length.
        self._windows: dict[tuple[int, int], tuple[StorageWeakRef, Window]] = {}
        # Those that graphs may use, whatever becomes of their tensors.
        self._recorded: dict[int, Window] = {}
        # What the first call would make is made now: no graph can record that.
        self.comm.stream_barrier(stream=raw_stream(self._number))
        if SHORTCUT is not None:
            self._go_short(SHORTCUT)

    def _all_reduce(self, tensor: torch.Tensor, out: Optional[torch.Tensor]) -> torch.Tensor:
        """The same as :meth:`all_reduce`, for tensors that are not plain, and to say what is wrong."""
        check_tensor("the tensor", tensor)
        out = torch.empty_like(tensor) if out is None else out
        check_tensor("the output", out)
        check_own("the output", out)
        EXCHANGE.all_reduce(self.comm, tensor.resolve_neg(), out, "sum")
        return out

    def should_use(self, tensor: torch.Tensor) -> bool:
        """Whether this is the way to reduce a tensor: it can be, and is not larger than ``max_size``."""
        check_tensor("the tensor", tensor)
        return (
            tensor.device == self.device
            and tensor.dtype in NUMBERS
            and tensor.is_contiguous()
            and 0 < tensor.nbytes <= self.max_size
        )

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Makes the other ranks read a tensor where it is, from now on. All ranks call it, with tensors of one size.

        It is kept while it is reduced: its place may become another tensor's, on this rank alone, which the others would not
        know. Memory that cannot be shared, as most of a processor's, is left for memory that can: the tensor moves there, as by
        ``share_memory_``, with what it holds. Views that were made of it before stay behind.
        """
        check_tensor("the tensor", tensor)
        if not tensor.is_contiguous():
            raise WrongStride("the tensor is not contiguous", hint="make it so by `contiguous()`")
        if tensor.numel() == 0:
            # There is nothing to read.
            return
        self._let_go()
        try:
            window = self.comm.window_register(tensor.detach(), stream=raw_stream(self._number))
        except Unsupported:
            # On all ranks, if on one.
            window = self.comm.mem_alloc(tensor.nbytes)
            # A tensor of inference moves to another such only.
            with torch.inference_mode(tensor.is_inference()):
                shared = as_tensor(window.local(tensor.dtype, tensor.shape))
                shared.copy_(tensor.detach())
                tensor.data = shared
            self._made(tensor, window)
        else:
            self._keep(tensor, window)

    def empty(
        self, shape: Union[int, Sequence[int]], dtype: Union[str, torch.dtype] = torch.float32
    ) -> torch.Tensor:
        """A new tensor that is registered already, zero. All ranks call it, with the same shape.

        Its memory goes with the tensor, and with its views: on a GPU in the next call that makes or registers one.
        """
        dtype = as_torch_dtype(dtype)
        try:
            size = torch.Size((shape,) if isinstance(shape, int) else shape)
        except TypeError:
            raise WrongType(f"`{shape}` is no shape", hint="give a number, or a tuple of numbers") from None
        if any(length < 0 for length in size):
            raise WrongValue(f"a dimension of the shape {list(size)} is negative", hint="give lengths from zero on")
        if size.numel() == 0:
            # There is no window of nothing.
            return torch.empty(size, dtype=dtype, device=self.device)
        self._let_go()
        window = self.comm.mem_alloc(size.numel() * dtype.itemsize)
        tensor = as_tensor(window.local(dtype, size))
        self._made(tensor, window)
        return tensor

    def _made(self, tensor: torch.Tensor, window: Window) -> None:
        """Takes note of a tensor in memory of a window, which it keeps."""
        if self._number >= 0:
            # What torch has enqueued for the tensor may still run when that is dropped.
            self._keep(tensor, window)

    def _keep(self, tensor: torch.Tensor, window: Window) -> None:
        """Keeps a window for as long as there is the memory of its tensor. Another of the same memory is given up."""
        self._windows[tensor.data_ptr(), tensor.nbytes] = (StorageWeakRef(tensor.untyped_storage()), window)

    def _let_go(self) -> None:
        """Gives up the windows whose tensors are gone, once what was enqueued for them has run."""
        gone = [place for place, (memory, _) in self._windows.items() if memory.expired()]
        if gone and self._number >= 0:
            if torch.cuda.is_current_stream_capturing():
                # Nobody can wait there.
                return
            torch.cuda.synchronize(self._number)
        for place in gone:
            del self._windows[place]

    @contextmanager
    def capture(self) -> Iterator[FastAllreduce]:
        """Around the capture of CUDA graphs whose calls are to be made here. All ranks capture the same calls.

        The calls need nothing else: what is registered is read where it is by graphs as well, and nothing has to be
        registered afterwards. What was registered until the end of it stays until :meth:`close`, since graphs do not keep their
        tensors. At the end it is found out whether a rank has died meanwhile, which no call tells that is only
        recorded.
        """
        self.comm.check()
        try:
            yield self
        finally:
            self._recorded.update((id(window), window) for _, window in self._windows.values())
        try:
            self.comm.check()
        except PeerLost as error:
            # Who has closed it was through with its own, and may be before this one.
            if error.code != "peer-left":
                raise

    def close(self) -> None:
        """Leaves the group, once what was enqueued has run. What was registered stays as long as its tensor."""
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


def _device(given: Union[None, str, int, torch.device]) -> str:
    """The name of a device; if none is given, of torch's current one."""
    if given is None:
        given = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = torch.device(given)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)


def _join(rank: int, world_size: int, group: Any, device: str, timeout: Optional[float]) -> Communicator:
    """The ranks that are to reduce together."""
    if group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Communicator.from_torch(group, device=device, timeout=timeout)
    if (rank, world_size) == (0, 1):
        (alone,) = Communicator.local(1, device=device, timeout=timeout)
        return alone
    return Communicator.from_env(device=device, timeout=timeout)
