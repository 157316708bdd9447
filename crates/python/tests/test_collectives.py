"""Tests windows and collectives, and compares the results with numpy."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from launcher import descriptors, resident, run_ranks

import wholemem
from wholemem import Communicator, errors

OPS = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def inputs(size: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, 5, shape).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["int8", "uint64", "float32", "float64"])
def test_all_reduce_matches_numpy(op: str, dtype: str) -> None:
    operand = inputs(3, (7, 11), dtype)

    def work(comm: Communicator) -> Any:
        return comm.all_reduce(operand[comm.rank], op=op)

    if dtype.startswith("float") and op in ("and", "or", "xor"):
        with pytest.raises(errors.WrongType, match="bitwise operations need integers"):
            run_ranks(3, work)
        return
    with np.errstate(all="ignore"):
        expected = OPS[op](np.stack(operand), axis=0, **({"dtype": dtype} if op in ("sum", "prod") else {}))
    for outcome in run_ranks(3, work):
        assert outcome.dtype == dtype
        np.testing.assert_array_equal(outcome, expected)


@pytest.mark.parametrize("count", [0, 1, 3, 1000, 300_000])
def test_all_reduce_works_in_place_and_with_an_output_of_any_length(count: int) -> None:
    operand = inputs(2, (count,), "int32")
    expected = operand[0] + operand[1]

    def work(comm: Communicator) -> None:
        mine, out = operand[comm.rank].copy(), np.zeros(count, np.int32)
        assert comm.all_reduce(mine, out) is out
        np.testing.assert_array_equal(out, expected)
        assert comm.all_reduce(mine, mine, op="sum") is mine
        np.testing.assert_array_equal(mine, expected)

    run_ranks(2, work)


def test_all_gather_and_broadcast_return_the_expected_arrays() -> None:
    operand = inputs(3, (2, 5), "float32")

    def work(comm: Communicator) -> None:
        all_of_them = comm.all_gather(operand[comm.rank])
        assert all_of_them.shape == (3, 2, 5)
        np.testing.assert_array_equal(all_of_them, np.stack(operand))
        out = np.empty((3, 2, 5), np.float32)
        assert comm.all_gather(operand[comm.rank], out) is out
        np.testing.assert_array_equal(out, np.stack(operand))
        mine = operand[comm.rank].copy()
        assert comm.broadcast(mine, 2) is mine
        np.testing.assert_array_equal(mine, operand[2])
        comm.stream_barrier()
        with pytest.raises(errors.WrongValue, match="rank 3 does not exist: the group has 3 ranks"):
            comm.broadcast(mine, 3)

    run_ranks(3, work)


def test_half_precision_is_reduced_in_single_precision() -> None:
    ones = np.full(8, 0x3F80, np.uint16).view(np.uint8)  # 1 in bfloat16

    def work(comm: Communicator) -> bytes:
        window = comm.mem_alloc(16)
        array = window.local("bfloat16")
        assert array.shape == (8,)
        window.local().numpy()[:] = ones
        comm.all_reduce(array, array)
        return bytes(window.local().memoryview())

    assert run_ranks(2, work) == [b"\x00\x40" * 8] * 2


def test_all_ranks_share_the_memory_of_a_window() -> None:
    def work(comm: Communicator) -> None:
        window = comm.mem_alloc(4096)
        assert (window.nbytes, window.nbytes_of(1 - comm.rank)) == (4096, 4096)
        peer = window.peer(1 - comm.rank, np.int32, (8, 4), offset=256)
        assert peer.data_ptr() % 4096 == 256
        peer.numpy()[:] = comm.rank
        comm.barrier()
        mine = window.local("int32", (8, 4), offset=256)
        assert (mine.numpy() == 1 - comm.rank).all()
        assert window.local("float64", offset=8).shape == (511,)
        assert "Window(nbytes=4096" in repr(window)

    run_ranks(2, work)


def test_arrays_in_a_window_are_recognised_after_conversions() -> None:
    def work(comm: Communicator) -> None:
        window = comm.mem_alloc(1 << 20)
        mine = window.local("int32", (1000,), offset=4096)
        # Rank 0 passes an array of the window, and rank 1 a numpy view of that array.
        operand = mine if comm.rank == 0 else mine.numpy()
        mine.numpy()[:] = comm.rank + 1
        comm.all_reduce(operand, operand)
        assert (mine.numpy() == 3).all()
        out = comm.all_reduce(operand)
        assert type(out) is type(operand) and (np.asarray(out) == 6).all()

    run_ranks(2, work)


def test_invalid_parts_of_a_window_are_rejected() -> None:
    def work(comm: Communicator) -> None:
        window = comm.mem_alloc(4096 if comm.rank == 0 else 0)
        assert window.nbytes_of(0) == 4096 and window.nbytes_of(1) == 0
        with pytest.raises(errors.WrongValue, match="cannot use 8 bytes at offset 4090"):
            window.peer(0, "uint8", (8,), offset=4090)
        with pytest.raises(errors.WrongValue, match="cannot use 8 bytes at offset 0 of rank 1"):
            window.peer(1, "float64", (1,))
        with pytest.raises(errors.WrongValue, match="cannot begin at offset 2"):
            window.peer(0, "float32", (1,), offset=2)
        for call in (window.peer, window.nbytes_of):
            with pytest.raises(errors.WrongValue, match="rank 2 does not exist: the group has 2 ranks"):
                call(2)
        with pytest.raises(errors.WrongValue, match="no bytes on any rank"):
            comm.mem_alloc(0)
        with pytest.raises(errors.Unsupported) as caught:
            comm.window_register(np.zeros(4096, np.uint8))
        assert "`mem_alloc` creates a window" in (caught.value.hint or "")

    run_ranks(2, work)


def test_collectives_on_registered_arrays_are_in_place() -> None:
    def work(comm: Communicator) -> None:
        table = wholemem.WholeTensor.create(comm, (4000, 8), "int32")
        mine = table.local().numpy()[100 * comm.rank :][:500]
        window = comm.window_register(mine)
        assert (window.nbytes, window.local().data_ptr()) == (mine.nbytes, mine.ctypes.data)
        for part in (mine, mine[7:9], mine[-1]):
            part[:] = comm.rank + 1
            comm.barrier()
            assert comm.all_reduce(part, part) is part
            assert (part == 3).all() and comm.staged_calls == 0
            comm.barrier()
        # This rank can also read the other rank's part of the window, which it has mapped.
        mine[:] = comm.rank
        comm.barrier()
        assert (window.peer(1 - comm.rank, "int32").numpy() == 1 - comm.rank).all()
        comm.barrier()
        comm.all_reduce(mine, np.empty_like(mine), op="max")
        staged = comm.staged_calls
        comm.all_reduce(np.ones(3))
        assert comm.staged_calls == staged + 1
        del window
        comm.all_reduce(mine, mine)
        assert comm.staged_calls == staged + 2
        with pytest.raises(errors.ReadOnly):
            comm.window_register(table.local().as_readonly())
        with pytest.raises(errors.WrongStride):
            comm.window_register(mine[:, ::2])

    run_ranks(2, work)


def test_captures_are_recorded_once_at_a_time() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    recording = comm._record_captures()
    with pytest.raises(errors.WrongValue, match="a recording of the memory of captured calls is active already"):
        comm._record_captures()
    array = np.ones(3)
    comm.all_reduce(array, array)
    assert (recording.finish(), recording.finish(), comm.staged_calls) == (0, 0, 1)
    del recording
    comm._record_captures()
    canceled = comm._record_captures()
    canceled.cancel()
    assert (canceled.finish(), comm._record_captures().finish()) == (0, 0)
    comm.check()


def test_a_registration_keeps_its_array_until_all_ranks_have_dropped_it() -> None:
    def work(comm: Communicator) -> None:
        array = comm.mem_alloc(1 << 16).local("uint8").numpy()
        address = array.ctypes.data
        window = comm.window_register(array)
        del array
        gc.collect()
        comm.barrier()
        view = window.local().numpy()
        view[:] = 1
        comm.barrier()
        comm.all_reduce(view, view)
        assert (view == 2).all() and view.ctypes.data == address and comm.staged_calls == 0
        comm.barrier()

    run_ranks(2, work)
    (comm,) = Communicator.local(1, device="cpu")
    before = descriptors()
    for _ in range(100):
        comm.window_register(comm.mem_alloc(1 << 16).local())
    comm.mem_alloc(1)
    gc.collect()
    assert descriptors() < before + 10


def test_an_array_keeps_its_window_alive() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    before = descriptors()
    array = comm.mem_alloc(1 << 16).local("uint8").numpy()
    gc.collect()
    array[:] = 7
    comm.all_reduce(array, array)
    assert array.sum() == 7 << 16
    comm.close()
    del comm
    gc.collect()
    assert array.sum() == 7 << 16
    del array
    gc.collect()
    assert descriptors() <= before


def test_windows_leak_nothing() -> None:
    (comm,) = Communicator.local(1, device="cpu")

    def cycle(times: int) -> None:
        for _ in range(times):
            array = comm.mem_alloc(4096).local("float32")
            comm.all_reduce(array, array)

    cycle(200)
    gc.collect()
    (memory, open_files) = (resident(), descriptors())
    cycle(10_000)
    gc.collect()
    assert descriptors() == open_files
    assert resident() - memory < 8 << 20


@pytest.mark.parametrize(
    ("array", "out", "kind", "message"),
    [
        (np.zeros(8, np.float32)[::2], None, errors.WrongStride, "the array is not contiguous"),
        (np.zeros(4, np.float32), np.zeros(8, np.float32)[::2], errors.WrongStride, "the output is not contiguous"),
        (np.zeros(4, np.float32), np.zeros(5, np.float32), errors.WrongValue, "must have the shape"),
        (np.zeros(4, np.float32), np.zeros(4, np.float64), errors.WrongType, "the output has the type float64"),
        (np.zeros(4, np.complex64), None, errors.WrongType, "cannot compute with complex64"),
        (np.zeros(4, bool), None, errors.WrongType, "cannot compute with bool"),
        (b"1234", b"1234", errors.ReadOnly, "cannot write to"),
        ("text", None, errors.WrongType, "`str` is not an array"),
    ],
)
def test_bad_arrays_are_rejected(array: Any, out: Any, kind: type, message: str) -> None:
    (comm,) = Communicator.local(1, device="cpu")
    with pytest.raises(kind, match=message):
        comm.all_reduce(array, out)
    with pytest.raises(errors.WrongValue, match="`median`"):
        comm.all_reduce(np.zeros(1), op="median")
    with pytest.raises(errors.WrongType, match="the operation is a `int`, not a str\nhint: pass its name"):
        comm.all_reduce(np.zeros(1), op=3)  # type: ignore[arg-type]
    assert comm.all_reduce(np.ones(1)) == [1]


def test_the_hint_for_strided_arrays_depends_on_the_operand() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    whole, cut = np.zeros(4, np.float32), np.zeros(8, np.float32)[::2]
    with pytest.raises(errors.WrongStride) as caught:
        comm.all_reduce(cut, whole)
    assert caught.value.hint == "make it contiguous first"
    with pytest.raises(errors.WrongStride) as caught:
        comm.all_reduce(whole, cut)
    assert caught.value.hint == "pass a contiguous tensor, and copy from it"
    with pytest.raises(errors.WrongStride) as caught:
        comm.broadcast(cut)
    assert caught.value.hint == "pass a contiguous tensor, and copy from it"


def test_partly_overlapping_arrays_are_rejected() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    memory = np.zeros(10, np.float32)
    with pytest.raises(errors.WrongValue, match="overlap"):
        comm.all_reduce(memory[:5], memory[3:8])
    with pytest.raises(errors.ReadOnly):
        comm.broadcast(wholemem.zeros((1,), "int8").as_readonly())


def test_a_split_group_is_ordered_by_key_and_works_by_itself() -> None:
    def work(comm: Communicator) -> Any:
        # The even ranks form a group in reverse order, and rank 1 a group of its own; rank 3 joins no group.
        part = comm.split(None if comm.rank == 3 else comm.rank % 2, key=10 - comm.rank)
        if part is None:
            return None
        with part:
            total = part.all_reduce(np.array([comm.rank]))
            outcome = (part.rank, part.size, part.device, total.item())
        # Closing the new group does not end the original group, and closing the original group does not end the new one.
        return outcome

    assert run_ranks(5, work) == [(2, 3, "cpu", 6), (0, 1, "cpu", 1), (1, 3, "cpu", 6), None, (0, 3, "cpu", 6)]


def test_both_groups_of_a_split_can_be_used() -> None:
    def work(comm: Communicator) -> Any:
        part = comm.split(comm.rank // 2)
        assert part is not None
        window = part.mem_alloc(64)
        window.local("int64").numpy()[:] = comm.rank
        part.barrier()
        seen = int(window.peer(1 - part.rank, "int64").numpy()[0])
        part.close()
        return seen, comm.all_reduce(np.array([1])).item()

    assert run_ranks(4, work) == [(1, 4), (0, 4), (3, 4), (2, 4)]


@pytest.mark.parametrize("color", [-1, 1 << 32])
def test_a_color_that_is_out_of_range_is_rejected(color: int) -> None:
    (comm,) = Communicator.local(1, device="cpu")
    with comm, pytest.raises(errors.WrongValue, match=f"{color} is out of range"):
        comm.split(color)


def test_a_host_window_is_a_window_of_host_memory() -> None:
    def work(comm: Communicator) -> Any:
        window = comm.mem_alloc_on_host(4096 * (comm.rank + 1))
        mine = window.local("float32", (1000,))
        mine.numpy()[:] = comm.rank + 1
        comm.all_reduce(mine, mine)
        sizes = [window.nbytes_of(rank) for rank in range(comm.size)]
        return mine.device, mine.numpy()[999], sizes

    assert run_ranks(2, work) == [("cpu", 3.0, [4096, 8192])] * 2


def test_a_host_window_without_bytes_on_any_rank_is_rejected() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    with comm, pytest.raises(errors.WrongValue, match="the window has no bytes on any rank"):
        comm.mem_alloc_on_host(0)
