"""Tests ``FastAllreduce``: results for every type and size, registered tensors, and errors."""

from __future__ import annotations

import gc
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_server import map_of
from torch_world import alone, device, limit, needs_cuda, quiet, ranks, torch
from launcher import descriptors, resident

import wholemem.torch as wm
from wholemem import Communicator, errors
from wholemem.torch.shortcut import SHORTCUT

__all__ = ["device", "limit"]
pytestmark = quiet


def test_a_single_rank_gets_its_own_tensor(device: str) -> None:
    with wm.FastAllreduce(0, 1, device=device) as fast:
        tensor = torch.randn(3, 5, device=device)
        outcome = fast.all_reduce(tensor)
        assert outcome is not tensor and torch.equal(outcome, tensor)
        out = torch.empty_like(tensor)
        assert fast.all_reduce(tensor, out) is out and torch.equal(out, tensor)
        assert fast.all_reduce(tensor, tensor) is tensor and torch.equal(out, tensor)
        assert f"FastAllreduce(rank=0, world_size=1, device={device}" in repr(fast)
        with pytest.raises(errors.WrongType, match="cannot pickle this `FastAllreduce`"):
            pickle.dumps(fast)
    assert fast.comm.closed
    fast.close()
    with pytest.raises(errors.Closed, match="the communicator is closed"):
        fast.all_reduce(tensor)


def freed() -> torch.Tensor:
    """Returns a tensor whose storage was freed, as training frameworks do between two uses of a tensor."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


class Named(torch.Tensor):  # type: ignore[misc]
    """A tensor subclass, whose all-reduces must go through torch's dispatcher."""


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_of_every_dtype_and_size_are_summed(
    device: str, dtype: torch.dtype, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not published:
        monkeypatch.setattr("wholemem.torch.allreduce.SHORTCUT", None)
    tensor = torch.arange(24, device=device).to(dtype).reshape(2, 3, 4)
    kinds = [tensor, tensor[1], tensor[:, :0], tensor[1, 2, 3], tensor.as_subclass(Named)]
    if dtype.is_floating_point:
        kinds += [torch.nn.Parameter(tensor), tensor.clone().requires_grad_()]
    way = SHORTCUT if published else None
    assert way is not None or not published or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with wm.FastAllreduce(0, 1, device=device) as fast:
        for kind in kinds:
            if way is not None:
                seen = way.all_reduce(fast.comm, kind, kind.detach().clone())
                assert seen == (type(kind) is not Named)
            out = torch.full_like(kind.detach(), 7)
            assert torch.equal(fast.all_reduce(kind, out), kind)


def test_registered_tensors_are_read_in_place(device: str) -> None:
    if SHORTCUT is None:
        pytest.skip("torch does not tell how to look at tensors")
    with wm.FastAllreduce(0, 1, device=device) as fast:
        moved = torch.ones(1000, device=device)
        fast.register_buffer(moved)
        for tensor in (fast.empty((3, 5)), moved, moved[10:20]):
            assert SHORTCUT.all_reduce(fast.comm, tensor, tensor)


def test_new_outputs_are_like_their_inputs(device: str) -> None:
    with wm.FastAllreduce(0, 1, device=device) as fast:
        for shape in ((3, 1, 4), (5,), (), (0, 2)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                tensor = torch.ones(shape, dtype=dtype, device=device).requires_grad_(dtype.is_floating_point)
                out, like = fast.all_reduce(tensor), torch.empty_like(tensor)
                assert torch.equal(out, tensor.detach())
                assert out.data_ptr() != tensor.data_ptr() or out.numel() == 0
                assert (out.dtype, out.shape, out.stride()) == (like.dtype, like.shape, like.stride())
                assert (type(out), out.requires_grad, out.device) == (type(like), False, like.device)
        with torch.inference_mode():
            assert fast.all_reduce(torch.ones(3, device=device)).is_inference()


def test_a_subclass_may_override_the_fallback(device: str) -> None:
    class Twice(wm.FastAllreduce):
        def all_reduce(self, tensor: Any, out: Any = None) -> Any:
            return super().all_reduce(tensor, out).mul_(2)

    with Twice(0, 1, device=device) as twice:
        assert twice.all_reduce(torch.ones(2, device=device)).tolist() == [2, 2]
        assert wm.FastAllreduce.all_reduce(twice, torch.ones(2, device=device)).tolist() == [1, 1]
    # An object whose `__init__` did not run has no communicator: the fallback in Python raises the error.
    with pytest.raises(AttributeError, match="comm"):
        wm.FastAllreduce.__new__(wm.FastAllreduce).all_reduce(torch.ones(2, device=device))


def test_replacing_the_communicator_takes_effect(device: str) -> None:
    fast, tensor = wm.FastAllreduce(0, 1, device=device), torch.ones(3, device=device)
    fast.close()
    for is_made_again in (True, False):
        with pytest.raises(errors.Closed):
            fast.all_reduce(tensor)
        if is_made_again:
            fast.__init__(0, 1, device=device)  # type: ignore[misc]
        else:
            (fast.comm,) = Communicator.local(1, device=device)
        assert fast.all_reduce(tensor).tolist() == [1, 1, 1]
        fast.close()


def test_should_use_accepts_small_supported_tensors(device: str) -> None:
    with wm.FastAllreduce(0, 1, 1 << 10, device=device) as fast:
        fits = torch.zeros(256, device=device)
        assert fast.max_size == 1024 and fast.should_use(fits)
        unfit = [torch.zeros(257, device=device), fits[::2], fits[:0], fits.to(torch.complex64)]
        assert [fast.should_use(tensor) for tensor in unfit] == [False] * 4
        assert torch.equal(fast.all_reduce(unfit[0] + 1), unfit[0] + 1)


@pytest.mark.parametrize(
    ("tensor", "out", "kind", "message"),
    [
        (torch.ones(4)[::2], None, errors.WrongStride, "the tensor is not contiguous"),
        (torch.ones(4, dtype=torch.bool), None, errors.WrongType, "cannot compute with bool"),
        (torch.ones(4), torch.ones(5), errors.WrongValue, r"the output must have the shape \[4\], but has \[5\]"),
        (torch.ones(4), torch.ones(2, 2), errors.WrongValue, r"the output must have the shape \[4\], but has \[2, 2\]"),
        (torch.ones(3, 4).t(), None, errors.WrongStride, r"the tensor is not contiguous: it has strides \[1, 4\]"),
        (torch.empty(4, device="meta"), None, errors.WrongValue, "the tensor has no usable memory"),
        (torch.empty(4, device="meta"), torch.ones(4), errors.WrongValue, "the tensor has no usable memory"),
        (freed(), torch.ones(4), errors.WrongValue, "the tensor has no memory"),
        (torch.ones(4), torch.ones(8)[::2], errors.WrongStride, "the output is not contiguous"),
        (torch.ones(4), torch.ones(4).double(), errors.WrongType, "the output has the type float64, but the tensor has float32"),
        ([1.0], None, errors.WrongType, "the tensor is a `list`"),
        ([1.0], torch.ones(1), errors.WrongType, "the tensor is a `list`"),
        (torch.ones(1), [1.0], errors.WrongType, "the output is a `list`"),
    ],
)
def test_bad_tensors_are_rejected(tensor: Any, out: Any, kind: type, message: str) -> None:
    with wm.FastAllreduce(0, 1, device="cpu") as fast:
        with pytest.raises(kind, match=message):
            fast.all_reduce(tensor, out)
        memory = torch.zeros(10)
        with pytest.raises(errors.WrongValue, match="overlap"):
            fast.all_reduce(memory[:5], memory[3:8])
        with pytest.raises(errors.WrongStride):
            fast.register_buffer(memory[::2])
        assert fast.all_reduce(torch.ones(1)).tolist() == [1]


@needs_cuda
def test_a_tensor_on_another_device_is_rejected() -> None:
    with wm.FastAllreduce(0, 1, device="cuda") as fast:
        with pytest.raises(errors.WrongDevice, match="the tensor is on cpu, but the communicator is on cuda:0"):
            fast.all_reduce(torch.ones(4))
        with pytest.raises(errors.WrongDevice, match="the output is on cpu"):
            fast.all_reduce(torch.ones(4, device="cuda"), torch.ones(4))
        assert not fast.should_use(torch.ones(4))


def is_shared(fast: wm.FastAllreduce, tensor: Any) -> bool:
    """Returns true if other ranks can map the memory of a tensor."""
    if tensor.is_cuda:
        return (tensor.data_ptr(), tensor.nbytes) in fast._windows
    return map_of(tensor.data_ptr())[0] == "rw-s"


def test_a_registered_tensor_keeps_its_content_and_is_a_window(device: str) -> None:
    with wm.FastAllreduce(0, 1, device=device) as fast:
        tensor = torch.arange(6.0, device=device).reshape(2, 3)
        fast.register_buffer(tensor)
        assert tensor.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert is_shared(fast, tensor)
        assert torch.equal(fast.all_reduce(tensor), tensor)
        new = fast.empty((4, 4), torch.bfloat16)
        assert (new == 0).all() and new.dtype is torch.bfloat16 and new.device.type == device
    # The memory of registered tensors outlives the group.
    tensor += 1
    assert tensor.sum().item() == 21


@needs_cuda
def test_a_registered_gpu_tensor_stays_where_it_is_and_is_released_with_its_views() -> None:
    with wm.FastAllreduce(0, 1, device="cuda") as fast:
        tensor = torch.arange(1000.0, device="cuda")
        address, view = tensor.data_ptr(), tensor[10:20]
        fast.register_buffer(tensor)
        assert tensor.data_ptr() == address and is_shared(fast, tensor)
        for part in (tensor, view, tensor[3:].view(torch.int32)):
            fast.all_reduce(part, part)
        assert fast.comm.staged_calls == 0
        fast.all_reduce(tensor.clone(), tensor)
        assert fast.comm.staged_calls == 1
        del tensor, part
        fast.empty(1)
        assert (address, 4000) in fast._windows, "a view of the tensor exists"
        del view
        # The barrier releases the operands of the last calls, because it finds the stream idle.
        fast.comm.barrier()
        fast.empty(1)
        assert (address, 4000) not in fast._windows


@needs_cuda
def test_freed_memory_of_a_registered_tensor_is_not_used() -> None:
    with wm.FastAllreduce(0, 1, device="cuda") as fast:
        tensor = torch.ones(4 << 20, device="cuda")
        fast.register_buffer(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        others = [torch.full((4 << 20,), 7.0, device="cuda") for _ in range(4)]
        for other in others:
            assert (fast.all_reduce(other, other) == 7).all()
        tensor.untyped_storage().resize_(nbytes)
        tensor.fill_(3)
        assert (fast.all_reduce(tensor) == 3).all() and all((other == 7).all() for other in others)


def test_arguments_that_are_not_tensors_are_rejected() -> None:
    with wm.FastAllreduce(0, 1, device="cpu") as fast:
        for other in (None, np.ones(3)):
            for call in (fast.register_buffer, fast.should_use):
                with pytest.raises(errors.WrongType, match=f"the tensor is a `{type(other).__name__}`") as caught:
                    call(other)
                assert caught.value.hint == "pass a tensor: `torch.as_tensor(...)`"
        for shape in (None, "x", (2.5,)):
            with pytest.raises(errors.WrongType, match="is not a shape") as caught:
                fast.empty(shape)  # type: ignore[arg-type]
            assert caught.value.hint == "pass an int, or a tuple of ints"
        with pytest.raises(errors.WrongType, match="torch has no type `float31`"):
            fast.empty((2,), "float31")
        for shape in (-1, (2, -1), (0, -3), (-2, -2)):
            with pytest.raises(errors.WrongValue, match=r"^a dimension of the shape \[.*\] is negative"):
                fast.empty(shape)
        new = fast.empty(5, "float16")
        assert (new.shape, new.dtype) == ((5,), torch.float16)
        with pytest.raises(errors.WrongStride, match="the output is not contiguous") as caught:
            fast.all_reduce(torch.ones(4), torch.ones(8)[::2])
        assert caught.value.hint == "pass a contiguous tensor, and copy from it"


def test_empty_tensors_are_supported(device: str) -> None:
    with wm.FastAllreduce(0, 1, device=device) as fast:
        for shape in (0, (0, 3), (2, 0)):
            new = fast.empty(shape, "float16")
            assert (new.numel(), new.dtype, new.device) == (0, torch.float16, fast.device)
            assert new.shape == (shape if isinstance(shape, tuple) else (shape,))
            fast.register_buffer(new)
            assert fast.all_reduce(new).shape == new.shape
        assert fast.empty(()).shape == () and fast.empty(3).shape == (3,)


SIZE = 4 << 20


def test_memory_is_freed_with_its_tensor() -> None:
    with wm.FastAllreduce(0, 1, device="cpu") as fast:

        def grown(work: Any) -> int:
            work()
            gc.collect()
            before = resident()
            for _ in range(20):
                work()
            return resident() - before

        def twice() -> None:
            fast.register_buffer(tensor)
            assert fast.all_reduce(tensor)[-1] == 7 and is_shared(fast, tensor)

        tensor = torch.full((SIZE // 4,), 7.0)
        assert grown(lambda: fast.empty(SIZE // 4).fill_(1)) < 10 * SIZE
        assert grown(lambda: fast.register_buffer(torch.ones(SIZE // 4))) < 10 * SIZE
        assert grown(twice) < 10 * SIZE
        # A view of a registered tensor also keeps the shared memory alive.
        view = fast.empty(SIZE // 4).fill_(3)[10:20]
        gc.collect()
        assert is_shared(fast, view) and fast.all_reduce(view).tolist() == [3] * 10
        last = fast.empty(SIZE // 4).fill_(1)
    before = resident()
    assert (last == 1).all() and (tensor == 7).all()
    del last, tensor
    gc.collect()
    assert resident() < before - SIZE


def test_a_registered_storage_is_held_once_and_while_it_exists() -> None:
    with wm.FastAllreduce(0, 1, device="cpu") as fast:
        comm, made = fast.comm, []

        def register(tensor: Any, stream: int) -> Any:
            # This function returns a window that does not keep the tensor's memory alive, as on a GPU.
            made.append(comm.mem_alloc(tensor.nbytes))
            return made[-1]

        fast.comm = SimpleNamespace(window_register=register, mem_alloc=comm.mem_alloc)  # type: ignore[assignment]
        one, other = torch.ones(10), torch.ones(10)
        for tensor in (one, one, one[2:4], other):
            fast.register_buffer(tensor)
        kept = [registered.window for registered in fast._windows.values()]
        assert kept == [made[1], made[2], made[3]]
        view = one[5:]
        del one, tensor
        fast.empty(1)
        assert len(fast._windows) == 3
        del view
        fast.empty(1)
        assert [registered.window for registered in fast._windows.values()] == [made[3]]
        fast.comm = comm


IN_PLACE = """
import os
# With the algorithm `one-shot`, an output of its own rank is never staged.
os.environ["WHOLEMEM_ALGO"] = "one-shot"
import gc, torch, wholemem.torch as wm
from wholemem import errors
rank = int(os.environ["RANK"])
with wm.FastAllreduce(rank, 2, device="cpu") as fast:
    moved = torch.zeros(2000)
    for _ in range(2):
        fast.register_buffer(moved)
    made = fast.empty(2000)
    for name, tensor in (("made", made), ("moved", moved), ("copied", torch.zeros(2000))):
        tensor[:1000], tensor[1000:] = 1 + rank, 10 + 10 * rank
        gc.collect()
        staged = fast.comm.staged_calls
        total = fast.all_reduce(tensor[1000:])
        print(name, total.unique().tolist(), fast.comm.staged_calls - staged, flush=True)
    try:
        fast.all_reduce(made[1000 * rank :][:1000])
    except errors.RanksDisagree as error:
        print("offsets differ", f"rank {1 - rank} called" in str(error), flush=True)
"""


def test_created_and_moved_tensors_are_read_in_place() -> None:
    reported = ranks(2, IN_PLACE).splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in reported if line.startswith(f"[{rank}] ")]
        assert mine == ["made [30.0] 0", "moved [30.0] 0", "copied [30.0] 1", "offsets differ True"]


def test_inference_tensors_can_be_registered(device: str) -> None:
    with wm.FastAllreduce(0, 1, device=device) as fast:
        for is_inference in (True, False):
            with torch.inference_mode(is_inference):
                tensor = torch.arange(3.0, device=device)
            for within in (True, False):
                with torch.inference_mode(within):
                    fast.register_buffer(tensor)
                assert tensor.is_inference() == is_inference and tensor.tolist() == [0, 1, 2]
                assert fast.all_reduce(tensor).tolist() == [0, 1, 2]


def test_a_wrong_rank_or_world_size_is_rejected() -> None:
    ended = alone(
        """
        import os, wholemem.torch as wm
        from wholemem import errors
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        try:
            wm.FastAllreduce(1, 2, device="cpu")
        except errors.BadEnvironment as error:
            print("no environment", bool(error.hint) or str(error))
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
        try:
            wm.FastAllreduce(1, 2, device="cpu")
        except errors.WrongValue as error:
            print(error)
        """
    )
    assert ended.stdout.splitlines()[1:] == [
        "this process is rank 0 of 1, not rank 1 of 2",
        "hint: pass the rank and size of the group",
    ], ended.stderr


SUMS = """
import os, sys, torch, wholemem.torch as wm
device, through = sys.argv[1:3]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if through == "gloo":
    torch.distributed.init_process_group("gloo")

def operand(shape, dtype, turn, of):
    # All values are integers, and their sums stay below 256, so the sums are exact in every dtype.
    return ((torch.arange(torch.Size(shape).numel()) + 3 * of + turn) % 20).reshape(shape).to(dtype).to(device)

with wm.FastAllreduce(rank, size, max_size=1 << 20, device=device) as fast:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
        registered, made = operand((37,), dtype, 0, rank), fast.empty((37,), dtype)
        fast.register_buffer(registered)
        for turn in range(3):
            for shape in ((1,), (37,), (50, 41), (700_001,)):
                mine = operand(shape, dtype, turn, rank)
                total = sum(operand(shape, dtype, turn, other) for other in range(size))
                assert torch.equal(fast.all_reduce(mine), total), (dtype, shape)
                out = torch.empty_like(mine)
                fast.all_reduce(mine, out)
                assert torch.equal(out, total)
                fast.all_reduce(mine, mine)
                assert torch.equal(mine, total)
            total = sum(operand((37,), dtype, turn, other) for other in range(size))
            for tensor in (registered, made):
                tensor.copy_(operand((37,), dtype, turn, rank))
                assert torch.equal(fast.all_reduce(tensor), total)
                fast.all_reduce(tensor, tensor)
                assert torch.equal(tensor, total)
    assert not fast.should_use(torch.zeros(700_001, device=device))
if through == "gloo":
    torch.distributed.destroy_process_group()
print("right", flush=True)
"""


@pytest.mark.parametrize("through", ["gloo", "environment"])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_sum_tensors(device: str, through: str, size: int) -> None:
    assert ranks(size, SUMS, device, through).count("right") == size


DEATH = """
import os, signal, sys, torch, wholemem.torch as wm
from wholemem import errors
rank = int(os.environ["RANK"])
fast = wm.FastAllreduce(rank, 2, device="cpu")
tensor = torch.ones(4)
fast.all_reduce(tensor)
if rank == 1:
    os._exit(0)
try:
    while True:
        fast.all_reduce(tensor)
except errors.PeerLost as error:
    print("lost", error.rank, bool(error.hint), flush=True)
"""


def test_a_lost_rank_is_reported() -> None:
    assert "lost 1 True" in ranks(2, DEATH)


LATE = """
import os, sys, time, torch, wholemem.torch as wm
from wholemem import errors
rank, through = int(os.environ["RANK"]), sys.argv[1]
if through == "gloo":
    torch.distributed.init_process_group("gloo")
fast = wm.FastAllreduce(rank, 2, device="cpu", timeout=1)
if rank == 0:
    try:
        fast.all_reduce(torch.ones(4))
    except errors.Timeout as error:
        print("missing", error.missing, flush=True)
elif through == "environment":
    # This rank runs until the other rank has left the group, but does not call `all_reduce`.
    try:
        while True:
            fast.comm.check()
    except errors.Error:
        pass
if through == "gloo":
    torch.distributed.barrier()
"""


def test_the_timeout_limits_waits() -> None:
    for through in ("gloo", "environment"):
        assert ranks(2, LATE, through).splitlines() == ["[0] missing (1,)"]
    wm.FastAllreduce(0, 1, device="cpu", timeout=1).close()
    with pytest.raises(errors.WrongValue, match="^a timeout of -1 seconds is not valid"):
        wm.FastAllreduce(0, 1, device="cpu", timeout=-1)


CAPTURE = """
import os, sys, torch, wholemem.torch as wm
from wholemem import errors
rank, tensor = int(os.environ["RANK"]), torch.ones(4)
fast = wm.FastAllreduce(rank, 2, device="cpu")
if rank == 1:
    with fast.capture():
        fast.all_reduce(tensor)
        if sys.argv[1] == "dies":
            os._exit(0)
    fast.close()
    sys.exit()

def is_there():
    try:
        fast.comm.check()
    except errors.PeerLost:
        return False
    return True

try:
    with fast.capture():
        assert fast.all_reduce(tensor).tolist() == [2, 2, 2, 2]
        while is_there():
            pass
    print("captured", flush=True)
    fast.comm.check()
except errors.PeerLost as error:
    print("lost", error.rank, error.code, flush=True)
"""


def test_a_rank_may_leave_after_capture_but_not_die() -> None:
    assert ranks(2, CAPTURE, "leaves").splitlines() == ["[0] captured", "[0] lost 1 peer-left"]
    assert ranks(2, CAPTURE, "dies").splitlines() == ["[0] lost 1 peer-lost"]


def test_a_forked_child_gets_an_error_and_its_parent_continues() -> None:
    ended = alone(
        """
        import os, torch, wholemem.torch as wm
        from wholemem import errors
        fast, tensor = wm.FastAllreduce(0, 1, device="cpu"), torch.ones(4)
        child = os.fork()
        if child == 0:
            try:
                fast.all_reduce(tensor, tensor)
            except errors.Forked as error:
                os._exit(0 if "spawn" in error.hint else 2)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), fast.all_reduce(tensor).tolist())
        """
    )
    assert ended.stdout == "0 [1.0, 1.0, 1.0, 1.0]\n", ended.stderr


def test_many_instances_leak_nothing() -> None:
    def cycle(times: int) -> None:
        for _ in range(times):
            with wm.FastAllreduce(0, 1, device="cpu") as fast:
                fast.all_reduce(fast.empty((10,)))

    cycle(5)
    gc.collect()
    before = descriptors()
    cycle(100)
    gc.collect()
    assert descriptors() == before
