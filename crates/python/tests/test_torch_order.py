"""Tests the fixed order of scatters, and ``torch.use_deterministic_algorithms``, which requires the fixed order."""

from __future__ import annotations

import warnings
from typing import Any, Iterator

import pytest
from torch_world import device, limit, quiet, ranks, reset_compiler, torch
from launcher import run_ranks

import wholemem.torch as wm
from wholemem import Communicator, WholeTensor, errors

__all__ = ["device", "reset_compiler", "limit"]
pytestmark = quiet

HINT = 'pass order="fixed", which is a collective call'
PUTS = [wm.scatter, wm.scatter_add]


def joined(device: str) -> Communicator:
    (comm,) = Communicator.local(1, device=device)
    return comm


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Enables torch's deterministic algorithms during a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operand(rank: int, count: int = 2000) -> tuple[Any, Any]:
    """Returns rows and their indices. Many rows have the same index, and their sum depends on the order of additions."""
    of = torch.Generator().manual_seed(rank)
    return torch.randn(count, 8, generator=of), torch.randint(0, 4, (count,), generator=of)


def added_in_order(size: int) -> Any:
    """Returns the expected table after a scatter-add of all ranks in fixed order: adds row after row, rank by rank."""
    total = torch.zeros(4, 8)
    for rank in range(size):
        for row, place in zip(*operand(rank)):
            total[place] += row
    return total


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("location", ["device", "host"])
def test_fixed_order_sums_are_bitwise_reproducible(location: str) -> None:
    expected = added_in_order(2)

    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (4, 8), "float32", location=location)
        wm.scatter_add(table, *reversed(operand(comm.rank)), order="fixed")
        comm.barrier()
        assert torch.equal(wm.gather(table, torch.arange(4)), expected)

    run_ranks(2, work)


@pytest.mark.usefixtures("deterministic")
def test_fixed_order_gradients_are_bitwise_reproducible() -> None:
    expected = added_in_order(2)

    def work(comm: Communicator) -> None:
        ours = wm.Embedding(WholeTensor.create(comm, (4, 8), "float32"), order="fixed")
        weights, indices = operand(comm.rank)
        ours(indices).mul(weights).sum().backward()
        comm.barrier()
        assert torch.equal(wm.gather(ours.grad, torch.arange(4)), expected)

    run_ranks(2, work)


def test_a_fixed_order_scatter_stores_the_last_row_of_the_last_rank() -> None:
    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (6, 2), "float32")
        # The last rank has fewer rows than the other rank, and its rows are written last.
        indices = torch.tensor([5, 5, 1] if comm.rank == 0 else [5])
        values = torch.arange(len(indices))[:, None].expand(-1, 2) + 10.0 * comm.rank
        wm.scatter(table, indices, values, order="fixed")
        nothing = torch.zeros(0, dtype=torch.int64)
        wm.scatter(table, nothing, torch.ones(0, 2), order="fixed")
        comm.barrier()
        assert wm.gather(table, torch.tensor([1, 5]))[:, 0].tolist() == [2, 10]

    run_ranks(2, work)


def test_fixed_order_inputs_may_be_strided_and_are_converted(device: str) -> None:
    table = WholeTensor.create(joined(device), (10, 3), "float32")
    numbers = torch.arange(6, device=device).reshape(2, 3)
    for indices in (numbers.T, numbers[:, 1].int(), numbers[0, 2]):
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.ones((3, *indices.shape), dtype=dtype, device=device).movedim(0, -1)
            wm.scatter(table, indices, rows, order="fixed")
            wm.scatter_add(table, indices, rows.requires_grad_() * 2, order="fixed")
            assert (wm.gather(table, indices) == 3).all()


@pytest.mark.parametrize("dtype", ["bool", "complex64", "float8_e4m3fn"])
def test_fixed_order_scatters_support_every_type(device: str, dtype: str) -> None:
    table = WholeTensor.create(joined(device), (5, 2), dtype)
    rows, indices = torch.ones(1, 2, device=device).to(getattr(torch, dtype)), torch.tensor([3], device=device)
    wm.scatter(table, indices, rows, order="fixed")
    found, expected = wm.as_tensor(table.local()), torch.zeros(5, 2, dtype=rows.dtype, device=device)
    expected[3] = rows[0]
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("order", ["any", "fixed"])
@pytest.mark.parametrize("name", ["scatter", "scatter_add"])
def test_ordered_operators_pass_opcheck(device: str, name: str, order: str) -> None:
    table = WholeTensor.create(joined(device), (10, 4), "float32")
    arguments = table._handle, torch.ones(2, 4, device=device), torch.tensor([1, 2], device=device), order
    operator = getattr(torch.ops.wholemem, name).default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


COMPILED = """
import sys, torch, wholemem, wholemem.torch as wm
device = sys.argv[1]
torch.use_deterministic_algorithms(True)
with wholemem.Communicator.from_env(device=device) as comm:
    table = wholemem.WholeTensor.create(comm, (10, 2), "float32")
    ours = wm.Embedding(table, order="fixed")
    indices = torch.tensor([3, 3], device=device)

    def work(values):
        wm.scatter(table, indices, values, order="fixed")
        before = wm.gather(table, indices)
        wm.scatter_add(table, indices, values, order="fixed")
        return before * 1, (ours(indices) * 3).sum()

    work = torch.compile(work, fullgraph=True, backend="aot_eager")
    for turn in range(2):
        before, loss = work(torch.full((2, 2), comm.rank + 1.0, device=device))
        assert (before == 2).all(), before
        # The scatter writes 2 to the row; rank 0 then adds two rows of ones, and rank 1 two rows of twos.
        assert loss.item() == 3 * 2 * 2 * (2 + 2 * 1 + 2 * 2), loss
        loss.backward()
    table.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)
    assert wm.gather(ours.grad, indices).unique().tolist() == [2 * 2 * 3 * 2]
    table.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)
    print("right", flush=True)
"""


def test_a_compiler_preserves_the_order_of_collectives(device: str) -> None:
    assert ranks(2, COMPILED, device).count("right") == 2


@pytest.mark.parametrize("order", ["backwards", "", None, 1])
def test_unknown_orders_are_rejected(order: Any) -> None:
    table = WholeTensor.create(joined("cpu"), (5, 2), "float32")
    values, indices = torch.ones(1, 2), torch.tensor([1])
    calls = [lambda put=put: put(table, indices, values, order=order) for put in PUTS]
    calls += [lambda: wm.Embedding(table, order=order)]
    if isinstance(order, str):
        calls += [lambda: torch.ops.wholemem.scatter(table._handle, values, indices, order)]
    for call in calls:
        with pytest.raises(errors.WrongValue, match=f"^the order `{order}` does not exist") as caught:
            call()
        assert caught.value.hint == "use `any`, or `fixed`: the same result in every run, by a collective call"
    assert not wm.as_tensor(table.local()).any()


@pytest.mark.usefixtures("deterministic")
def test_any_order_is_rejected_with_deterministic_algorithms(device: str) -> None:
    table = WholeTensor.create(joined(device), (5, 2), "float32")
    values, indices = torch.ones(1, 2, device=device), torch.tensor([1], device=device)
    with pytest.raises(errors.Unsupported, match="^a scatter-add of float32 in any order is not deterministic, which") as caught:
        wm.scatter_add(table, indices, values)
    assert caught.value.hint == HINT
    with pytest.raises(errors.Unsupported, match="^a scatter in any order is not deterministic") as caught:
        wm.scatter(table, indices, values)
    assert caught.value.hint == HINT
    with pytest.raises(errors.Unsupported, match="^a scatter-add of float32 in any order is not deterministic") as caught:
        wm.Embedding(table)(indices).sum().backward()
    assert caught.value.hint == HINT
    compiled = torch.compile(lambda: wm.scatter_add(table, indices, values), fullgraph=True, backend="aot_eager")
    with pytest.raises(errors.Unsupported, match="^a scatter-add of float32 in any order is not deterministic"):
        compiled()
    assert not wm.gather(table, indices).any()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for put in PUTS:
        with pytest.warns(UserWarning, match="is not deterministic, which(.|\n)*hint: pass order"):
            put(table, indices, values)
    assert (wm.gather(table, indices) == 2).all()


@pytest.mark.usefixtures("deterministic")
def test_order_independent_additions_are_accepted_with_deterministic_algorithms(device: str) -> None:
    comm, indices = joined(device), torch.tensor([1, 1], device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype, location in ((torch.int64, "device"), (torch.uint8, "device"), (torch.float32, "host")):
            table = WholeTensor.create(comm, (5, 2), dtype, location=location)
            wm.scatter_add(table, indices, torch.ones(2, 2, dtype=dtype, device=device))
            assert (wm.gather(table, indices) == 2).all()
        ours = wm.Embedding(WholeTensor.create(comm, (5, 2), "float32", location="host"))
        ours(indices).sum().backward()
        assert wm.as_tensor(ours.grad.local())[1].tolist() == [2, 2]
        # A scatter-add of a type that cannot be added raises the usual error.
        table = WholeTensor.create(comm, (5, 2), "float8_e4m3fn")
        with pytest.raises(errors.WrongType, match="cannot compute with float8_e4m3fn"):
            wm.scatter_add(table, indices, torch.ones(2, 2, device=device).to(torch.float8_e4m3fn))
