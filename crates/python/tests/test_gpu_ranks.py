"""Tests collectives, windows and tables between processes that share a GPU, or have one GPU each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpu import torch  # noqa: F401
from launcher import PROGRAM, script

pytestmark = pytest.mark.gpu

BEGINNING = """
import numpy as np, torch, wholemem
from wholemem import Communicator, WholeTensor, errors
comm = Communicator.from_env(device="cuda")
rank, size = comm.rank, comm.size
torch.cuda.set_device(comm.device)
def mine(of, shape=(1000, 7), dtype=torch.float32):
    values = np.random.default_rng(of).integers(-3, 4, shape)
    return torch.from_numpy(values).to(dtype).cuda()
def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")
"""


def ranks(size: int, text: str, **environment: str) -> None:
    """Runs a program as ranks. Every rank must succeed."""
    command = [PROGRAM, "launch", "-n", str(size), "--", *script(BEGINNING + text)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes) as launched:
        try:
            output, _ = launched.communicate(timeout=50)
        except BaseException:
            # When the launcher is terminated, it ends the ranks that it started.
            launched.terminate()
            raise
    sys.stdout.write(output)
    assert launched.returncode == 0, output


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_return_the_expected_arrays(size: int) -> None:
    ranks(
        size,
        """
for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64]:
    operand = mine(rank, dtype=dtype)
    expected = sum(mine(of, dtype=torch.float64) for of in range(size)).to(dtype)
    total = torch.from_dlpack(comm.all_reduce(operand))
    assert total.dtype == dtype and torch.equal(total, expected), dtype
    out = torch.empty_like(operand)
    assert comm.all_reduce(operand, out, op="max") is out
    assert torch.equal(out, torch.stack([mine(of, dtype=dtype) for of in range(size)]).amax(0))
    comm.all_reduce(operand, operand)
    assert torch.equal(operand, expected)
for dtype in [torch.uint8, torch.bfloat16, torch.float8_e4m3fn]:
    operand = torch.full((33,), float(rank + 1), device="cuda").to(dtype)
    every = torch.from_dlpack(comm.all_gather(operand))
    assert every.shape == (size, 33) and every.float()[:, 5].tolist() == [of + 1 for of in range(size)]
    assert comm.broadcast(operand, size - 1) is operand
    assert operand.float().unique().tolist() == [size]
comm.stream_barrier()
comm.barrier()
comm.check()
""",
    )


def test_collectives_run_on_the_given_stream() -> None:
    ranks(
        2,
        """
stream = torch.cuda.Stream()
comm.all_reduce(mine(rank))
for turn in range(20):
    with torch.cuda.stream(stream):
        operand = mine(rank + turn)
        torch.cuda._sleep(20_000_000)
        operand += 1
        total = torch.from_dlpack(comm.all_reduce(operand, stream=stream))
        expected = sum(mine(of + turn) + 1 for of in range(size))
        assert torch.equal(total, expected), turn
""",
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_accesses_a_window(size: int) -> None:
    ranks(
        size,
        """
window = comm.mem_alloc(1 << 20)
here = torch.from_dlpack(window.local("float32", (1000, 7)))
assert here.data_ptr() == window.local("float32", (1000, 7)).data_ptr()
here.copy_(mine(rank))
comm.barrier()
for of in range(size):
    there = torch.from_dlpack(window.peer(of, "float32", (1000, 7)))
    assert torch.equal(there, mine(of)), of
comm.barrier()
# The tensor is in a window, so every rank reads the tensors of the other ranks in place.
comm.all_reduce(here, here)
assert torch.equal(here, sum(mine(of) for of in range(size)))
comm.barrier()
""",
    )


@pytest.mark.parametrize("kind", ["continuous", "chunked"])
def test_every_rank_accesses_the_rows_of_all_ranks(kind: str) -> None:
    ranks(
        4,
        f"""
table = WholeTensor.create(comm, (1001, 16), "bfloat16", kind="{kind}")
whole = mine(1, (1001, 16), torch.bfloat16)
first, last = table.local_rows
table.write(first, whole[first:last].contiguous())
comm.barrier()
rows = torch.from_numpy(np.random.default_rng(rank).integers(0, 1001, 500)).cuda()
assert torch.equal(torch.from_dlpack(table.gather(rows)), whole[rows])
comm.barrier()
table.scatter_add(torch.arange(1001, device="cuda"), torch.ones((1001, 16), dtype=torch.bfloat16, device="cuda"))
comm.barrier()
assert torch.equal(torch.from_dlpack(table.local()), whole[first:last] + size)
comm.barrier()
""",
    )


def test_ranks_with_different_arguments_get_an_error() -> None:
    ranks(
        2,
        """
refused(errors.WrongDevice, lambda: comm.all_reduce(torch.zeros(4)))
refused(errors.WrongStride, lambda: comm.all_reduce(torch.zeros((4, 4), device="cuda").T))
refused(errors.WrongType, lambda: comm.all_reduce(torch.zeros(4, dtype=torch.complex64, device="cuda")))
refused(errors.WrongType, lambda: comm.all_reduce(mine(0), torch.zeros((1000, 7), dtype=torch.int32, device="cuda")))
comm.barrier()
assert torch.equal(torch.from_dlpack(comm.all_reduce(mine(rank))), mine(0) + mine(1))
comm.barrier()
""",
    )


REGISTERED = """
import gc
from contextlib import nullcontext
from wholemem.torch import pool
place = torch.cuda.use_mem_pool(pool.mem_pool()) if os.environ["POOL"] == "yes" else nullcontext()
with place:
    # The offset of the array in its block differs between the ranks.
    others = [torch.zeros(700, device="cuda") for _ in range(3 * rank)]
    operands = [mine(rank, (1 << 20, 3)), mine(rank, (500, 3)), mine(rank, (5, 3))]
for operand in operands:
    address, shape = operand.data_ptr(), tuple(operand.shape)
    window = comm.window_register(operand)
    assert operand.data_ptr() == address == window.local().data_ptr()
    for of in range(size):
        assert torch.equal(torch.from_dlpack(window.peer(of, "float32", shape)), mine(of, shape)), of
    comm.barrier()
    expected = sum(mine(of, shape) for of in range(size))
    for _ in range(3):
        operand.copy_(mine(rank, shape))
        comm.barrier()
        comm.all_reduce(operand, operand)
        assert torch.equal(operand, expected)
        comm.barrier()
        part = operand[1:4]
        part.fill_(rank + 1)
        comm.barrier()
        comm.all_reduce(part, part)
        assert (part == size * (size + 1) // 2).all()
        comm.barrier()
    assert comm.staged_calls == 0
# A registration keeps the memory of its array, so torch does not use the memory for other tensors.
operand = mine(rank, (1 << 20, 3))
address, window = operand.data_ptr(), comm.window_register(operand)
del operand, part
gc.collect()
assert all(mine(rank, (1 << 20, 3)).data_ptr() != address for _ in range(3))
view = torch.from_dlpack(window.local("float32", (1 << 20, 3)))
comm.barrier()
comm.all_reduce(view, view)
assert torch.equal(view, sum(mine(of, (1 << 20, 3)) for of in range(size))) and comm.staged_calls == 0
comm.barrier()
del window, view
comm.mem_alloc(1)
comm.mem_alloc(1)
comm.check()
comm.barrier()
"""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["default", "expandable", "pool"])
def test_collectives_on_registered_tensors_are_in_place(kind: str, size: int) -> None:
    segments = f"expandable_segments:{kind == 'expandable'}"
    ranks(
        size,
        "import os\n" + REGISTERED,
        POOL="yes" if kind == "pool" else "no",
        PYTORCH_CUDA_ALLOC_CONF=segments,
        PYTORCH_ALLOC_CONF=segments,
    )


def test_segments_that_grow_are_registered_again() -> None:
    ranks(
        2,
        """
kept = []
for turn in range(12):
    # Each tensor is longer than those before, so torch extends its segments.
    operand = mine(rank, (1 << (10 + turn), 3))
    kept.append((operand, comm.window_register(operand)))
    for tensor, _ in kept:
        tensor.fill_(rank + turn)
        comm.barrier()
        comm.all_reduce(tensor, tensor)
        assert (tensor == 2 * turn + 1).all(), turn
        comm.barrier()
assert comm.staged_calls == 0
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


def test_memory_of_expandable_segments_can_be_registered() -> None:
    ranks(
        2,
        """
operand = mine(rank, (1 << 20, 3))
window = comm.window_register(operand)
for of in range(size):
    assert torch.equal(torch.from_dlpack(window.peer(of, "float32", (1 << 20, 3))), mine(of, (1 << 20, 3))), of
comm.barrier()
comm.all_reduce(operand, operand)
assert torch.equal(operand, mine(0, (1 << 20, 3)) + mine(1, (1 << 20, 3)))
comm.barrier()
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


def test_a_host_window_is_accessed_by_cpus_and_gpus() -> None:
    ranks(
        2,
        """
window = comm.mem_alloc_on_host(1 << 20)
array = window.local("float32", (1000,))
array.numpy()[:] = rank + 1
comm.barrier()
comm.all_reduce(array, array)
comm.barrier()
assert array.device == "cuda_host" and (array.numpy() == 3).all(), array.device
assert (window.peer(1 - rank, "float32", (1000,)).numpy() == 3).all()
""",
    )


def test_a_split_group_reduces_on_the_same_gpus() -> None:
    ranks(
        4,
        """
part = comm.split(rank % 2, key=-rank % 4)
assert (part.size, part.device) == (2, comm.device)
total = torch.from_dlpack(part.all_reduce(torch.full((100,), float(rank), device="cuda")))
assert (total == sum(range(rank % 2, 4, 2))).all()
order = torch.from_dlpack(part.all_gather(torch.full((1,), rank, device="cuda"))).flatten().tolist()
assert order == sorted(order, key=lambda rank: -rank % 4), order
part.close()
assert (torch.from_dlpack(comm.all_reduce(torch.ones(10, device="cuda"))) == 4).all()
""",
    )
