"""Tests that CUDA graphs replay gathers, scatters and all-reduces with new inputs and keep their operands alive. The tests need a
GPU.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch_world import limit, needs_cuda, quiet, ranks, reset_compiler, torch

import wholemem.torch as wm
from wholemem import Communicator, WholeTensor

__all__ = ["reset_compiler", "limit"]
pytestmark = [quiet, needs_cuda]

REPLAYS = 100


def joined() -> Communicator:
    (comm,) = Communicator.local(1, device="cuda")
    return comm


def filled(comm: Communicator, rows: Any) -> WholeTensor:
    table = WholeTensor.create(comm, rows.shape, rows.dtype)
    wm.as_tensor(table.local()).copy_(rows)
    comm.barrier(stream=torch.cuda.current_stream())
    return table


def recorded(work: Any) -> Any:
    """Runs ``work`` once, captures it in a graph, and returns the graph and the captured result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = work()
    return graph, outcome


def test_graphs_replay_gathers_with_new_indices_and_rows() -> None:
    whole = torch.randn(5000, 32, device="cuda")
    table = filled(joined(), whole)
    indices = torch.zeros(700, dtype=torch.int64, device="cuda")
    graph, rows = recorded(lambda: wm.gather(table, indices) * 2)
    for turn in range(REPLAYS):
        indices.copy_(torch.randint(0, 5000, (700,)))
        if turn % 10 == 0:
            whole[turn] = turn
            wm.scatter(table, torch.tensor([turn], device="cuda"), whole[turn : turn + 1])
        graph.replay()
        assert torch.equal(rows, whole[indices] * 2)


def test_graphs_replay_scatters() -> None:
    table = filled(joined(), torch.zeros(100, 8, device="cuda"))
    indices, values = torch.zeros(20, dtype=torch.int64, device="cuda"), torch.zeros(20, 8, device="cuda")
    graph, _ = recorded(lambda: wm.scatter_add(table, indices, values))
    expected = torch.zeros(100, 8, device="cuda")
    for _ in range(REPLAYS):
        indices.copy_(torch.randint(0, 100, (20,)))
        values.copy_(torch.randint(0, 5, (20, 8)))
        graph.replay()
        expected.index_add_(0, indices, values)
    assert torch.equal(wm.gather(table, torch.arange(100, device="cuda")), expected)


def test_captured_memory_is_not_reused() -> None:
    with wm.FastAllreduce(0, 1) as fast:
        buffer = fast.empty(64)
        place = buffer.data_ptr()
        del buffer
        # The memory of a tensor that no CUDA graph uses is reused.
        buffer = fast.empty(64)
        assert buffer.data_ptr() == place
        with fast.capture():
            graph, _ = recorded(lambda: fast.all_reduce(buffer, buffer.fill_(7)))
        del buffer
        others = [fast.empty(64) for _ in range(100)]
        graph.replay()
        torch.cuda.synchronize()
        assert not any(other.any() for other in others)


def test_a_graph_keeps_its_table_alive() -> None:
    comm = joined()
    indices = torch.tensor([3, 1], device="cuda")

    def record() -> Any:
        table = filled(comm, torch.arange(10.0, device="cuda").reshape(5, 2))
        return recorded(lambda: wm.gather(table, indices))

    graph, rows = record()
    gc.collect()
    # The CUDA graph keeps the memory of its table alive, so tables that are created later use other memory.
    others = [filled(comm, torch.full((5, 2), -1.0, device="cuda")) for _ in range(20)]
    for _ in range(REPLAYS):
        rows.zero_()
        graph.replay()
        assert rows.tolist() == [[6, 7], [2, 3]]
    del graph, others


# torch itself captures an empty graph first, and warns about it.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
def test_reduce_overhead_mode_gives_correct_results() -> None:
    whole = torch.randn(1000, 16, device="cuda")
    table = filled(joined(), whole)
    weight = torch.randn(16, 4, device="cuda")
    call = torch.compile(lambda indices: (wm.gather(table, indices) @ weight).relu(), fullgraph=True, mode="reduce-overhead")
    for _ in range(10):
        indices = torch.randint(0, 1000, (64,), device="cuda")
        torch.testing.assert_close(call(indices).clone(), (whole[indices] @ weight).relu(), rtol=1e-3, atol=1e-3)


ALL_REDUCES = """
import os, sys, torch, wholemem.torch as wm
rank, size, replays = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
torch.cuda.set_device(0)
torch.distributed.init_process_group("gloo")
with wm.FastAllreduce(rank, size) as fast:
    small = torch.zeros(1000, dtype=torch.bfloat16, device="cuda")
    registered = torch.zeros(300_000, device="cuda")
    fast.register_buffer(registered)
    large = torch.zeros(3_000_001, device="cuda")

    def work():
        first = fast.all_reduce(small)
        fast.all_reduce(registered, registered)
        return first, fast.all_reduce(large), fast.all_reduce(first * 2)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, staged = torch.cuda.CUDAGraph(), fast.comm.staged_calls
    with fast.capture(), torch.cuda.graph(graph):
        first, third, again = work()
    assert fast.comm.staged_calls == staged, "a captured call is staged"
    for turn in range(replays):
        small.fill_(rank + turn % 7)
        registered.fill_(rank + turn)
        large.fill_(rank * 2 + turn)
        graph.replay()
        total = sum(other + turn % 7 for other in range(size))
        assert (first == total).all() and (again == 2 * size * total).all(), turn
        assert (registered == sum(other + turn for other in range(size))).all(), turn
        assert (third == sum(2 * other + turn for other in range(size))).all(), turn
        # An eager all-reduce between two replays of the CUDA graph also gives the right sum.
        assert (fast.all_reduce(small) == total).all(), turn
    torch.cuda.synchronize()
    torch.distributed.barrier()
    del graph
torch.distributed.destroy_process_group()
print("right", flush=True)
"""


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("segments", ["False", "True"])
def test_graphs_replay_all_reduces(size: int, segments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, f"expandable_segments:{segments}")
    assert ranks(size, ALL_REDUCES, str(REPLAYS)).count("right") == size


RECAPTURES = """
import gc, os, torch, wholemem.torch as wm
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(0)
torch.distributed.init_process_group("gloo")
with wm.FastAllreduce(rank, size) as fast:
    for turn in range(5):
        # The ranks' allocators have allocated different memory before, so the offsets differ.
        other = torch.zeros(1000 * (rank + 1) * (turn + 1), device="cuda")
        tensor = torch.zeros(50_000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with fast.capture(), torch.cuda.graph(graph):
            doubled = fast.all_reduce(tensor * 2)
            fast.all_reduce(doubled, doubled)
        for value in range(3):
            tensor.fill_(value + rank)
            torch.cuda.synchronize()
            torch.distributed.barrier()
            graph.replay()
            assert (doubled == size * sum(2 * (value + other) for other in range(size))).all(), (turn, value)
            torch.cuda.synchronize()
            torch.distributed.barrier()
        del graph, doubled, tensor, other
        gc.collect()
        torch.cuda.empty_cache()
    assert fast.comm.staged_calls == 0
torch.distributed.destroy_process_group()
print("right", flush=True)
"""


@pytest.mark.parametrize("segments", ["False", "True"])
def test_graphs_are_captured_again_after_their_memory_was_freed(segments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, f"expandable_segments:{segments}")
    assert ranks(2, RECAPTURES).count("right") == 2
