"""Tests embeddings: the forward and backward passes are compared with torch's, with repeated indices, over several ranks."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import numpy as np
import pytest
from torch_world import alone, device, limit, quiet, ranks, reset_compiler, torch
from launcher import run_ranks

import wholemem.torch as wm
from wholemem import ChunkedTensor, Communicator, WholeTensor, errors

__all__ = ["device", "reset_compiler", "limit"]
pytestmark = quiet


def embedding_of(rows: Any, device: str, **how: Any) -> Any:
    (comm,) = Communicator.local(1, device=device)
    table = WholeTensor.create(comm, rows.shape, rows.dtype, **how)
    wm.as_tensor(table.local()).copy_(rows)
    return wm.Embedding(table)


def gradients(embedding: Any) -> Any:
    return wm.as_tensor(embedding.grad.local()).cpu()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("location", ["device", "host"])
def test_gradients_match_a_dense_embedding(device: str, is_compiled: bool, location: str) -> None:
    rows = torch.randn(40, 6, dtype=torch.float64)
    dense = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    ours = embedding_of(rows, device, location=location)
    weight = torch.randn(6, 3, dtype=torch.float64)

    def loss(embedding: Any, indices: Any, weight: Any) -> Any:
        # The loss uses the rows of the same indices twice: the gradients of both uses must be added.
        first, second = embedding(indices), embedding(indices)
        return ((first @ weight).sin() + (second * second) @ weight).sum()

    call = torch.compile(loss, fullgraph=True) if is_compiled else loss
    for _ in range(2):
        indices = torch.randint(0, 10, (4, 7))
        expected = loss(dense, indices, weight)
        found = call(ours, indices.to(device), weight.to(device))
        torch.testing.assert_close(found.detach().cpu(), expected.detach())
        expected.backward()
        found.backward()
    torch.testing.assert_close(gradients(ours), dense.weight.grad)


def test_gradients_match_finite_differences(device: str) -> None:
    rows = torch.randn(5, 2, dtype=torch.float64)
    ours = embedding_of(rows, device)
    indices = torch.tensor([3, 1, 3], device=device)
    loss = lambda: ours(indices).pow(3).sum()
    loss().backward()
    found, local, step = gradients(ours).clone(), wm.as_tensor(ours.table.local()), 1e-6
    for place in range(10):
        at = divmod(place, 2)
        with torch.no_grad():
            local[at] += step
            above = loss()
            local[at] -= 2 * step
            below = loss()
            local[at] += step
        assert abs((above - below).item() / (2 * step) - found[at].item()) < 1e-6


def test_a_step_updates_rows_and_clears_gradients(device: str) -> None:
    rows = torch.randn(20, 3)
    dense = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    ours = embedding_of(rows, device)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.25)
    for _ in range(3):
        indices = torch.randint(0, 20, (9,))
        optimizer.zero_grad()
        dense(indices).square().sum().backward()
        optimizer.step()
        ours(indices.to(device)).square().sum().backward()
        ours.step(0.25)
    torch.testing.assert_close(wm.as_tensor(ours.table.local()).cpu(), dense.weight.detach())
    assert (gradients(ours) == 0).all()
    ours(torch.tensor([1], device=device)).sum().backward()
    assert (gradients(ours)[1] == 1).all()
    ours.zero_grad()
    assert (gradients(ours) == 0).all()


def test_inference_creates_no_gradients(device: str) -> None:
    ours = embedding_of(torch.ones(5, 2), device)
    indices = torch.tensor([1], device=device)
    with torch.no_grad():
        assert not ours(indices).requires_grad
    assert not ours.eval()(indices).requires_grad
    ours.zero_grad()
    assert ours._gradients.created is None
    assert list(ours.parameters()) == [] and ours.state_dict() == {}
    assert "5, 2, dtype=float32" in repr(ours)
    with pytest.raises(errors.WrongType, match="the table of an embedding must hold floats, but has int64"):
        embedding_of(torch.ones(5, 2, dtype=torch.int64), device)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_frozen_embedding_has_no_gradients(device: str, is_compiled: bool) -> None:
    ours, indices = embedding_of(torch.ones(5, 2), device), torch.tensor([1], device=device)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if is_compiled else ours
    assert call(indices).requires_grad
    assert ours.requires_grad_(False) is ours
    assert not call(indices).requires_grad
    assert ours.requires_grad_() is ours
    call(indices).sum().backward()
    assert gradients(ours)[1].tolist() == [1, 1]


def test_a_surrounding_model_lists_its_embeddings() -> None:
    ours = embedding_of(torch.ones(5, 2), "cpu")
    model = torch.nn.Sequential(ours, torch.nn.Linear(2, 1))
    model(torch.tensor([1])).sum().backward()
    model.zero_grad()
    assert model[1].weight.grad is None and gradients(ours)[1].any()
    for module in model.modules():
        if isinstance(module, wm.Embedding):
            module.zero_grad()
    assert not gradients(ours).any()


def test_deepcopy_of_a_model_is_rejected() -> None:
    ours = embedding_of(torch.ones(5, 2), "cpu")
    model = torch.nn.Sequential(ours, torch.nn.Linear(2, 1))
    for operand in (ours, model):
        with pytest.raises(errors.WrongType, match="^cannot copy this `Embedding`: its rows belong to all ranks") as caught:
            copy.deepcopy(operand)
        assert caught.value.hint and "`copy.copy` shares the rows" in caught.value.hint
    assert copy.copy(ours).table is ours.table
    # `half`, `double` and `to` of a model neither move nor convert the rows of its embeddings.
    assert model.half().double().to("meta")[0](torch.tensor([1])).tolist() == [[1, 1]]
    assert "0.table" not in model.state_dict() and len(model.state_dict()) == 2


def test_a_different_order_of_embeddings_raises_with_a_hint() -> None:
    def work(comm: Communicator) -> None:
        tables = [WholeTensor.create(comm, (4, 1), "float32") for _ in range(2)]
        ours = wm.Embedding(tables[comm.rank])
        with pytest.raises(errors.RanksDisagree) as caught:
            ours(torch.tensor([0])).sum().backward()
        assert caught.value.hint == (
            "run the first backward pass on all ranks, with the embeddings in the same order, or pass `grad=table.like()`"
        )
        grads = [table.like() for table in tables]
        ours = wm.Embedding(tables[comm.rank], grads[comm.rank])
        ours(torch.tensor([0])).sum().backward()
        comm.barrier()
        assert [wm.gather(grad, torch.tensor([0])).item() for grad in grads] == [1, 1]
        comm.barrier()

    run_ranks(2, work)


def test_many_embeddings_compile_in_one_model() -> None:
    count = torch._dynamo.config.recompile_limit + 2
    model = torch.nn.ModuleList(embedding_of(torch.full((5, 2), float(n)), "cpu") for n in range(count))
    call = torch.compile(
        lambda indices: torch.stack([ours(indices) for ours in model]), fullgraph=True, backend="aot_eager"
    )
    assert call(torch.tensor([1]))[:, 0, 0].tolist() == list(range(count))


def test_wrong_argument_types_are_rejected() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (5, 2), "float32")
    for other in (torch.zeros(5, 2), None, ChunkedTensor(comm, (5, 2), "float32")):
        with pytest.raises(errors.WrongType, match=f"^the table is a `{type(other).__name__}`") as caught:
            wm.Embedding(other)  # type: ignore[arg-type]
        assert caught.value.hint == "pass a `wholemem.WholeTensor`"
    with pytest.raises(errors.WrongType, match="^the table of gradients is a `Tensor`") as caught:
        wm.Embedding(table, torch.zeros(5, 2))
    assert caught.value.hint == "pass a `wholemem.WholeTensor`"
    with pytest.raises(errors.WrongValue, match=r"gradients must have the shape \[5, 2\], but have \[4, 2\]"):
        wm.Embedding(table, WholeTensor.create(comm, (4, 2), "float32"))
    ours = wm.Embedding(table)
    for is_training in (True, False):
        for indices in ([1, 2], np.array([1, 2]), None):
            with pytest.raises(errors.WrongType, match="^the tensor of indices is a") as caught:
                ours.train(is_training)(indices)
            assert caught.value.hint == "pass a tensor: `torch.as_tensor(...)`"


def test_a_given_gradient_table_is_used() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (5, 2), "bfloat16")
    grad = WholeTensor.create(comm, (5, 2), "float32")
    ours = wm.Embedding(table, grad)
    rows = ours(torch.tensor([2, 2]))
    assert rows.dtype is torch.bfloat16
    rows.sum().backward()
    assert ours.grad is grad and wm.as_tensor(grad.local())[2].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "float8_e5m2"])
def test_unsuitable_gradient_tables_are_rejected(dtype: str) -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (5, 2), "float32")
    with pytest.raises(errors.WrongType, match=f"^gradients cannot be added to torch.{dtype}") as caught:
        wm.Embedding(table, WholeTensor.create(comm, (5, 2), dtype))
    assert caught.value.hint == "create it with `table.like()`"


def test_gradients_have_the_partition_of_the_rows() -> None:
    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (11, 1), "float32", rows_of_each=[4, 0, 7, 0])
        # The error is also raised on ranks that have the same rows in both tables.
        for others in ([4, 7, 0, 0], [4, 0, 6, 1], [0, 4, 7, 0], [11, 0, 0, 0]):
            grad = WholeTensor.create(comm, (11, 1), "float32", rows_of_each=others)
            with pytest.raises(errors.WrongValue, match=r"^the ranks have \[4, 0, 7\] rows of the table, but") as caught:
                wm.Embedding(table, grad)
            assert caught.value.hint == "create it with `table.like()`"
        for kind in ("continuous", "chunked"):
            grad = WholeTensor.create(comm, (11, 1), "float64", kind=kind, rows_of_each=[4, 0, 7, 0])
            wm.Embedding(table, grad)
        wm.Embedding(table.rows(2, 9), table.like().rows(2, 9))
        comm.barrier()

    run_ranks(4, work)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_backward_pass_keeps_its_gradients_alive(device: str, is_compiled: bool) -> None:
    (comm,) = Communicator.local(1, device=device)
    table, indices = WholeTensor.create(comm, (5, 2), "float32"), torch.tensor([2, 2], device=device)
    grad = table.like()

    def rows(embedding: Any) -> Any:
        return embedding(indices) * 3

    call = torch.compile(rows, fullgraph=True, backend="eager") if is_compiled else rows
    loss = call(wm.Embedding(table, grad)).sum()
    gc.collect()
    loss.backward()
    assert wm.as_tensor(grad.local())[2].tolist() == [6, 6]
    # Activation checkpointing recomputes the forward pass, but gradients are added only once.
    ours = wm.Embedding(table, grad)
    torch.utils.checkpoint.checkpoint(lambda: rows(ours), use_reentrant=False).sum().backward()
    assert wm.as_tensor(grad.local())[2].tolist() == [12, 12]


def test_concurrent_first_backward_passes_create_one_gradient_table() -> None:
    indices = torch.tensor([3])
    for _ in range(20):
        ours, start = embedding_of(torch.ones(2000, 64), "cpu"), threading.Barrier(4)

        def work() -> None:
            loss = ours(indices).sum()
            start.wait()
            loss.backward()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert gradients(ours)[3].unique().tolist() == [4]


def test_a_forked_child_does_not_wait_for_the_gradient_lock() -> None:
    ended = alone(
        """
        import os, threading, wholemem, wholemem.torch as wm
        (comm,) = wholemem.Communicator.local(1, device="cpu")
        ours = wm.Embedding(wholemem.WholeTensor.create(comm, (5, 2), "float32"))
        held, done = threading.Event(), threading.Event()

        def hold():
            with ours._gradients.lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            try:
                ours.grad
            except wholemem.errors.Forked:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join()
        print(os.waitstatus_to_exitcode(status), ours.grad.shape)
        """
    )
    assert ended.stdout == "0 (5, 2)\n", ended.stderr


def test_threads_train_one_table() -> None:
    rows, operand = torch.randn(30, 4), [torch.randint(0, 30, (12,)) for _ in range(3)]
    dense = torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    sum(dense(indices).square().sum() for indices in operand).backward()

    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (30, 4), "float32")
        start, stop = table.local_rows
        wm.as_tensor(table.local()).copy_(rows[start:stop])
        comm.barrier()
        ours = wm.Embedding(table)
        ours(operand[comm.rank]).square().sum().backward()
        comm.barrier()
        torch.testing.assert_close(wm.as_tensor(ours.grad.local()), dense.weight.grad[start:stop])
        ours.step(0.5)
        found = wm.gather(table, torch.arange(30))
        torch.testing.assert_close(found, (dense.weight - 0.5 * dense.weight.grad).detach())

    run_ranks(3, work)


PROCESSES = """
import sys, torch, wholemem, wholemem.torch as wm
device = sys.argv[1]
with wholemem.Communicator.from_env(device=device) as comm:
    table = wholemem.WholeTensor.create(comm, (101, 4), "float32")
    wm.as_tensor(table.local()).fill_(1)
    table.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)
    ours = wm.Embedding(table)
    call = torch.compile(lambda indices: (ours(indices) * 3).sum(), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        # Every rank uses row 100 twice, so the gradients of all ranks are added to this row.
        call(torch.tensor([comm.rank, 100, 100], device=device)).backward()
    ours.step(1)
    found = wm.gather(table, torch.tensor([0, 99, 100], device=device))
    assert found[:, 0].tolist() == [-5, 1, 1 - 12 * comm.size], found
    table.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)
    print("right", flush=True)
"""


def test_processes_train_one_table(device: str) -> None:
    assert ranks(2, PROCESSES, device).count("right") == 2
