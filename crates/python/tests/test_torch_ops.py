"""Tests the operators of ``wholemem.torch``, eager and compiled, and compares them with torch."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from torch_world import alone, device, limit, needs_cuda, quiet, ranks, reset_compiler, torch
from launcher import run_ranks

import wholemem
import wholemem.torch as wm
from wholemem import Communicator, WholeTensor, errors

__all__ = ["device", "reset_compiler", "limit"]
pytestmark = quiet


def joined(device: Any) -> Communicator:
    (comm,) = Communicator.local(1, device=device)
    return comm


def filled(comm: Communicator, rows: Any, **how: Any) -> WholeTensor:
    table = WholeTensor.create(comm, rows.shape, rows.dtype, **how)
    table.write(0, rows.to(comm.device))
    comm.barrier()
    return table


def traced(call: Any, **how: Any) -> Any:
    """Compiles a function with torch's tracing only. Code generation is omitted, because it would take most of the time of the
    test."""
    return torch.compile(call, fullgraph=True, backend="aot_eager", **how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "uint8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_gather_matches_torch(device: str, dtype: str, index: str) -> None:
    whole = torch.randint(0, 2, (50, 6)).to(getattr(torch, dtype))
    table = filled(joined(device), whole)
    indices = torch.tensor([[3, 3, 49], [0, 7, 12]], dtype=getattr(torch, index), device=device)
    rows = wm.gather(table, indices)
    assert (rows.shape, rows.dtype, rows.device.type) == ((2, 3, 6), whole.dtype, device)
    assert torch.equal(rows.cpu().view(torch.uint8), whole[indices.cpu().long()].view(torch.uint8))
    assert wm.gather(table, indices[:0]).shape == (0, 3, 6)


def test_elements_are_converted_and_outputs_are_filled_in_place(device: str) -> None:
    whole = torch.randn(20, 4)
    table = filled(joined(device), whole)
    indices = torch.tensor([5, 1], device=device)
    assert torch.equal(wm.gather(table, indices, dtype=torch.float64).cpu(), whole[[5, 1]].double())
    wide = torch.full((4, 10), -1.0, dtype=torch.float16, device=device)
    part = wide[::2, 3:7]
    assert wm.gather(table, indices, out=part) is part
    assert torch.equal(part.cpu(), whole[[5, 1]].half())
    assert (wide[1::2] == -1).all() and (wide[:, :3] == -1).all() and (wide[:, 7:] == -1).all()
    wm.scatter(table, indices, torch.ones(2, 4, dtype=torch.bfloat16, device=device))
    assert (wm.gather(table, indices) == 1).all()


def test_scatter_and_scatter_add_match_torch(device: str) -> None:
    whole = torch.randint(0, 9, (30, 5)).float()
    table = filled(joined(device), whole)
    indices = torch.tensor([4, 29, 4, 4], device=device)
    values = torch.randint(0, 9, (4, 5)).float()
    wm.scatter_add(table, indices, values.to(device))
    whole.index_add_(0, indices.cpu(), values)
    everything = torch.arange(30, device=device)
    assert torch.equal(wm.gather(table, everything).cpu(), whole)
    wm.scatter(table, indices[:2], values[:2].to(device))
    whole[indices[:2].cpu()] = values[:2]
    assert torch.equal(wm.gather(table, everything).cpu(), whole)
    # The rows of the values tensor have gaps between them.
    wide = torch.ones(4, 9, device=device)
    wm.scatter_add(table, indices, wide[:, 2:7])
    whole.index_add_(0, indices.cpu(), torch.ones(4, 5))
    assert torch.equal(wm.gather(table, everything).cpu(), whole)


def test_a_compiler_preserves_the_order_of_table_operators(device: str) -> None:
    table = filled(joined(device), torch.ones(10, 4))
    indices = torch.tensor([1, 2], device=device)

    def work(values: Any) -> Any:
        wm.gather(table, indices)
        before = wm.gather(table, indices)
        wm.scatter(table, indices, values)
        after = wm.gather(table, indices)
        wm.scatter_add(table, indices, values * 2)
        wm.scatter_add(table, indices, values * 2)
        out = torch.empty_like(after)
        return before * 1, after * 1, wm.gather(table, indices, out=out), out

    # The function goes through all stages of the compiler, because the last stage could reorder operators.
    work = torch.compile(work, fullgraph=True)
    for value in (5.0, 7.0):
        start = wm.gather(table, indices)
        before, after, out, same = work(torch.full((2, 4), value, device=device))
        assert torch.equal(before, start)
        assert (after == value).all() and (out == 5 * value).all() and (same == 5 * value).all()


def test_compiled_code_is_specialised_by_table(device: str) -> None:
    comm = joined(device)
    tables = [filled(comm, torch.full((10, 2), float(n))) for n in range(3)]
    call = traced(lambda table, indices: wm.gather(table, indices) + 1)
    for _ in range(2):
        for number, table in enumerate(tables):
            assert (call(table, torch.tensor([3], device=device)) == number + 1).all()


def test_dynamic_shapes_compile_once(device: str) -> None:
    whole = torch.randn(100, 3)
    table = filled(joined(device), whole)
    call = traced(lambda indices: wm.gather(table, indices), dynamic=True)
    assert torch.equal(call(torch.arange(2, device=device)).cpu(), whole[:2])
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (5, 17):
            assert torch.equal(call(torch.arange(count, device=device)).cpu(), whole[:count])


@pytest.mark.parametrize("name", ["gather", "scatter", "scatter_add", "all_reduce", "all_gather", "broadcast"])
def test_operators_pass_opcheck(device: str, name: str) -> None:
    comm = joined(device)
    table = filled(comm, torch.ones(10, 4))
    indices, values = torch.tensor([1, 2], device=device), torch.ones(2, 4, device=device)
    arguments = {
        "gather": (table._handle, indices, torch.float64),
        "scatter": (table._handle, values, indices),
        "scatter_add": (table._handle, values, indices),
    }
    operator = getattr(torch.ops.wholemem, name).default
    operand = arguments.get(name, (comm._handle, values))
    torch.library.opcheck(operator, operand, test_utils=("test_schema", "test_faketensor"))


def test_threads_run_collectives() -> None:
    def work(comm: Communicator) -> None:
        mine = torch.arange(6).reshape(2, 3) + 10 * comm.rank
        every = torch.stack([torch.arange(6).reshape(2, 3) + 10 * rank for rank in range(3)])
        assert torch.equal(wm.all_reduce(comm, mine), every.sum(0))
        assert torch.equal(wm.all_reduce(comm, mine, "max"), every[2])
        assert torch.equal(wm.all_gather(comm, mine), every)
        assert torch.equal(wm.broadcast(comm, mine, 1), every[1])
        assert torch.equal(mine, every[comm.rank])
        halves = torch.full((1000,), comm.rank + 1, dtype=torch.bfloat16)
        assert (wm.all_reduce(comm, halves, op="avg") == 2).all()

    run_ranks(3, work)


# The compiled case has one rank: the compiler has a global lock, on which the threads of a collective would deadlock.
@pytest.mark.parametrize(("size", "is_traced"), [(3, False), (1, True)])
def test_collectives_are_differentiable(size: int, is_traced: bool) -> None:
    sums, rows, roots = torch.randn(size, 4), torch.randn(size, size, 4), torch.randn(size, 4)

    def work(comm: Communicator) -> None:
        rank, root, x = comm.rank, comm.size - 1, torch.ones(4, requires_grad=True)

        def loss(x: Any) -> Any:
            total = wm.all_reduce(comm, x * 1) + 2 * wm.all_reduce(comm, x * 1, "avg")
            every, one = wm.all_gather(comm, x * 1), wm.broadcast(comm, x * 1, root)
            return (total * sums[rank]).sum() + (every * rows[rank]).sum() + (one * roots[rank]).sum()

        (traced(loss) if is_traced else loss)(x).backward()
        expected = sums.sum(0) + 2 * sums.mean(0) + rows[:, rank].sum(0) + (roots.sum(0) if rank == root else 0)
        torch.testing.assert_close(x.grad, expected)
        with pytest.raises(errors.Unsupported, match="`max` over ranks is not differentiable"):
            wm.all_reduce(comm, x, "max")
        assert torch.equal(wm.all_reduce(comm, x.detach(), "max"), torch.ones(4))

    run_ranks(size, work)


# The compiled case has one rank, in the main thread: torch 2.11 crashes if it compiles in a second thread.
@pytest.mark.parametrize(("size", "is_traced"), [(3, False), (1, True)])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_collectives_are_differentiable(size: int, is_traced: bool, dtype: str) -> None:
    rows, roots = (torch.randn(size, *rest, 4, dtype=getattr(torch, dtype)) for rest in ((size,), ()))

    def work(comm: Communicator) -> None:
        rank, x = comm.rank, torch.ones(4, dtype=rows.dtype, requires_grad=True)

        def loss(x: Any) -> Any:
            # Some gradients of this loss are lazily conjugated, others are not.
            every, one = wm.all_gather(comm, x * 1j), wm.broadcast(comm, x * 1)
            return (every * rows[rank]).real.sum() + (one.conj() * roots[rank]).imag.sum()

        (traced(loss) if is_traced else loss)(x).backward()
        y = torch.ones(4, dtype=rows.dtype, requires_grad=True)
        ours = (y * 1j * rows[:, rank].sum(0)).real.sum()
        (ours + ((y.conj() * roots.sum(0)).imag.sum() if rank == 0 else 0)).backward()
        torch.testing.assert_close(x.grad, y.grad)

    if is_traced:
        work(joined("cpu"))
    else:
        run_ranks(size, work)


def test_non_differentiable_collectives_raise_in_the_forward_pass() -> None:
    comm, x = joined("cpu"), torch.ones(2).to(torch.float8_e4m3fn).requires_grad_()
    for op in (wm.all_gather, wm.broadcast):
        with pytest.raises(errors.Unsupported, match="^torch.float8_e4m3fn over ranks is not differentiable") as caught:
            op(comm, x)
        assert caught.value.hint == "pass `tensor.detach()`"
        assert op(comm, x.detach()).numel() == 2


def test_a_backward_pass_keeps_its_communicator_alive(device: str) -> None:
    for op in (wm.all_reduce, wm.all_gather, wm.broadcast):
        x = torch.ones(3, device=device, requires_grad=True)
        loss = op(joined(device), x).sum()
        gc.collect()
        loss.backward()
        assert x.grad.tolist() == [1, 1, 1]


COLLECTIVES = """
import sys, torch, wholemem, wholemem.torch as wm
device = sys.argv[1]
with wholemem.Communicator.from_env(device=device) as comm:
    table = wholemem.WholeTensor.create(comm, (300, 8), "float32")
    wm.as_tensor(table.local()).fill_(comm.rank)
    comm.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)

    def work(x, indices):
        rows = wm.gather(table, indices)
        return wm.all_reduce(comm, x * 2), wm.all_gather(comm, x), wm.broadcast(comm, x, comm.size - 1), rows

    for call in (work, torch.compile(work, fullgraph=True, backend="aot_eager")):
        x = torch.full((1000,), comm.rank + 1.0, device=device)
        indices = torch.tensor([0, 150, 299], device=device)
        total, every, last, rows = call(x, indices)
        assert (total == comm.size * (comm.size + 1)).all()
        assert every[:, 0].tolist() == [rank + 1.0 for rank in range(comm.size)]
        assert (last == comm.size).all()
        assert rows[:, 0].tolist() == [150 * n * comm.size // 300 if n < 2 else comm.size - 1 for n in range(3)]
    comm.barrier(stream=torch.cuda.current_stream() if device == "cuda" else None)
    print("right", flush=True)
"""


@pytest.mark.parametrize("size", [2, 3])
def test_processes_run_collectives(device: str, size: int) -> None:
    assert ranks(size, COLLECTIVES, device).count("right") == size


def test_host_tables_are_supported(device: str) -> None:
    whole = torch.randn(20, 4)
    comm = joined(device)
    table = WholeTensor.create(comm, (20, 4), "float32", location="host")
    wm.as_tensor(table.local()).copy_(whole)
    indices = torch.tensor([1, 19, 1], device=device)
    assert torch.equal(wm.gather(table, indices).cpu(), whole[indices.cpu()])
    wm.scatter_add(table, indices, torch.ones(3, 4, device=device))
    assert torch.allclose(wm.gather(table, indices).cpu(), whole[indices.cpu()] + torch.tensor([[2.0], [1.0], [2.0]]))


def test_as_tensor_shares_memory(device: str) -> None:
    comm = joined(device)
    table = WholeTensor.create(comm, (10, 4), "bfloat16")
    local = wm.as_tensor(table.local())
    assert (local.data_ptr(), local.device.type, local.dtype) == (table.local().data_ptr(), device, torch.bfloat16)
    local.fill_(3)
    del table, comm
    gc.collect()
    assert (local == 3).all()


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        (torch.tensor([0.5]), errors.WrongType, "indices must be int32 or int64, but are torch.float32"),
        (torch.tensor([0, 5]), errors.BadIndex, "index 5 at position 1 is out of range: valid indices are 0..5"),
    ],
)
def test_bad_indices_are_rejected(indices: Any, kind: type, message: str) -> None:
    table = filled(joined("cpu"), torch.ones(5, 2))
    with pytest.raises(kind, match=message):
        wm.gather(table, indices)
    assert wm.gather(table, torch.tensor([0])).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        (torch.ones(3, 2), errors.WrongValue, r"must have the shape \[2, 2\], but has \[3, 2\]"),
        (torch.ones(2, 2, dtype=torch.int32), errors.WrongType, "cannot convert i32 to f32: only floats to floats"),
    ],
)
def test_bad_values_are_rejected(values: Any, kind: type, message: str) -> None:
    table = filled(joined("cpu"), torch.ones(5, 2))
    for put in (wm.scatter, wm.scatter_add):
        with pytest.raises(kind, match=message) as caught:
            put(table, torch.tensor([0, 1]), values)
        assert caught.value.hint or kind is errors.WrongValue
    assert (wm.gather(table, torch.arange(5)) == 1).all()


def test_inputs_may_have_any_strides(device: str) -> None:
    comm = joined(device)
    held = torch.arange(60.0, device=device).reshape(20, 3)
    numbers = torch.arange(12, device=device).reshape(3, 4)
    for indices in (numbers.T, numbers[:, 1], numbers[::2, ::3], numbers[0, 0].expand(4)):
        table = filled(comm, held)
        assert torch.equal(wm.gather(table, indices), held[indices])
        out = torch.zeros((*indices.shape, 3), device=device)
        assert torch.equal(wm.gather(table, indices, out=out), held[indices])
        once = indices.contiguous().unique()
        for rows in (torch.ones(3, len(once), device=device).T, torch.ones(3, device=device).expand(len(once), 3)):
            wm.scatter(table, once, rows * 0.5)
            wm.scatter_add(table, once, rows)
            assert (wm.gather(table, once) == 1.5).all()
    part = held[::2, 1:]
    for op in (wm.all_reduce, wm.broadcast):
        assert torch.equal(op(comm, part), part) and op(comm, part).is_contiguous()
    assert torch.equal(wm.all_gather(comm, part)[0], part)
    weights = part.clone().T.requires_grad_()
    wm.all_reduce(comm, weights).T.sum().backward()
    assert torch.equal(weights.grad, torch.ones_like(weights))


# The compiler may choose other strides for a tensor that is contiguous in the program.
def test_a_compiler_may_choose_the_strides_of_inputs(device: str) -> None:
    comm = joined(device)
    held = torch.arange(60.0, device=device).reshape(20, 3)
    table, numbers = filled(comm, held), torch.arange(12, device=device).reshape(3, 4)

    def work(numbers: Any) -> Any:
        requested = (numbers.T + 1).contiguous()
        rows = wm.gather(table, requested)
        wm.scatter_add(table, requested, rows.flip(2).contiguous())
        sums = wm.all_reduce(comm, (numbers.T * 2.0).contiguous())
        many = torch.vmap(lambda one: wm.gather(table, one), in_dims=1)(numbers)
        return rows, sums, many, wm.all_gather(comm, numbers.T.contiguous()), wm.broadcast(comm, numbers.T.clone())

    rows, sums, many, *others = torch.compile(work, fullgraph=True)(numbers)
    requested, now = numbers.T + 1, held.clone()
    now[requested] += held[requested].flip(2)
    assert torch.equal(rows, held[requested]) and torch.equal(sums, numbers.T * 2.0)
    assert torch.equal(many, now[numbers.T])
    assert torch.equal(others[0][0], numbers.T) and torch.equal(others[1], numbers.T)


def test_bad_outputs_are_rejected() -> None:
    table, indices = filled(joined("cpu"), torch.ones(5, 2)), torch.tensor([0, 1])
    for gaps in (torch.ones(2, 4)[:, ::2], torch.ones(1, 2).expand(2, 2)):
        with pytest.raises(errors.WrongStride, match="the rows of the output are not contiguous") as caught:
            wm.gather(table, indices, out=gaps)
        # The hint does not suggest a contiguous copy of the output, because the copy would be filled and dropped.
        assert caught.value.hint == "pass a contiguous tensor, and copy from it"
    with pytest.raises(errors.WrongValue, match="must have the shape"):
        wm.gather(table, indices, out=torch.ones(2, 3))
    with pytest.raises(errors.WrongValue, match="but `dtype` is torch.float32"):
        wm.gather(table, indices, out=torch.ones(2, 2).double(), dtype=torch.float32)
    with pytest.raises(errors.WrongType, match="cannot convert f32 to i8"):
        wm.gather(table, indices, dtype=torch.int8)
    table = filled(joined("cpu"), torch.ones(5, 2, dtype=torch.bool))
    with pytest.raises(errors.WrongType, match="cannot compute with bool"):
        wm.gather(table, indices, dtype=torch.int32)
    with pytest.raises(errors.WrongType, match="cannot compute with bool"):
        wm.scatter_add(table, indices, torch.ones(2, 2, dtype=torch.bool))


def test_compiled_outputs_are_not_broadcast() -> None:
    table, indices = filled(joined("cpu"), torch.ones(5, 2)), torch.tensor([1])
    compiled = torch.compile(lambda requested, out: wm.gather(table, requested, out=out), backend="eager", fullgraph=True)
    for bad in (torch.zeros(3, 2), torch.zeros(2), torch.zeros(1, 2, device="meta")):
        with pytest.raises(Exception, match="(?i)wrong(value|device)"):
            compiled(indices, bad)
        kind = errors.WrongDevice if bad.is_meta else errors.WrongValue
        with torch.autograd.forward_ad.dual_level(), pytest.raises(kind, match="^the output (must have|is on)"):
            wm.gather(table, indices, out=bad)
        assert bad.is_meta or not bad.any()
    out = torch.zeros(1, 2, dtype=torch.float64)
    assert compiled(indices, out) is out and out.all()


def test_dtypes_can_be_given_by_name(device: str) -> None:
    table, indices = filled(joined(device), torch.ones(5, 2)), torch.tensor([1], device=device)
    compiled = traced(lambda requested: wm.gather(table, requested, dtype="float16"))
    for rows in (wm.gather(table, indices, dtype="float16"), compiled(indices)):
        assert rows.dtype is torch.float16 and rows.all()
    out = torch.zeros(1, 2, dtype=torch.float16, device=device)
    assert wm.gather(table, indices, out=out, dtype="float16") is out and out.all()
    with pytest.raises(errors.WrongValue, match="the output has the type torch.float16, but `dtype` is torch.float32"):
        wm.gather(table, indices, out=out, dtype="float32")
    for other in ("half a float", np.float16, 5):
        with pytest.raises(errors.WrongType, match="torch has no type `") as caught:
            wm.gather(table, indices, dtype=other)  # type: ignore[arg-type]
        assert caught.value.hint == "pass a name such as `float32`, or a `torch.dtype`"


def test_as_tensor_rejects_objects_that_are_not_arrays() -> None:
    comm = joined("cpu")
    table, window = filled(comm, torch.ones(5, 2)), comm.mem_alloc(16)
    for whole in (table, window, wholemem.ChunkedTensor(comm, (5, 2), "float32")):
        with pytest.raises(errors.WrongType, match=f"a `{type(whole).__name__}` is not an array") as caught:
            wm.as_tensor(whole)
        assert caught.value.hint == "pass this rank's part of it: `local()`"
    for other in (None, comm, [1.0]):
        with pytest.raises(errors.WrongType, match="is not an array") as caught:
            wm.as_tensor(other)
        assert caught.value.hint == "pass an array of wholemem"
    for array in (table.local(), np.ones((5, 2)), torch.ones(5, 2), torch.ones(5, 2).__dlpack__()):
        assert wm.as_tensor(array).all()


def test_bad_tensors_are_rejected() -> None:
    comm = joined("cpu")
    with pytest.raises(errors.WrongType, match="the operation is a `(RedOpType|ReduceOp)`") as caught:
        wm.all_reduce(comm, torch.ones(4), torch.distributed.ReduceOp.SUM)
    assert "`sum`, `avg`" in (caught.value.hint or "")
    with pytest.raises(errors.WrongType, match="cannot compute with torch.complex64"):
        wm.all_reduce(comm, torch.ones(2, dtype=torch.complex64))
    with pytest.raises(errors.WrongValue, match="`median`"):
        wm.all_reduce(comm, torch.ones(4), "median")
    with pytest.raises(errors.WrongValue, match="rank 3 does not exist: the group has 1 ranks"):
        wm.broadcast(comm, torch.ones(4), 3)


@needs_cuda
def test_a_tensor_on_another_device_is_rejected() -> None:
    table = filled(joined("cpu"), torch.ones(5, 2))
    with pytest.raises(errors.WrongDevice, match="the array of indices is on cuda:0, but the communicator is on cpu") as caught:
        wm.gather(table, torch.tensor([0], device="cuda"))
    assert caught.value.hint == "move it to cpu first"
    with pytest.raises(errors.WrongDevice, match="the array of indices is on cuda:0, but the communicator is on cpu"):
        wm.scatter(table, torch.tensor([0], device="cuda"), torch.ones(1, 2))


def test_dropped_and_closed_objects_raise_closed(device: str) -> None:
    comm = joined(device)
    table = filled(comm, torch.ones(5, 2))
    handle, indices = table._handle, torch.tensor([0], device=device)
    assert table._handle == handle != comm._handle
    with pytest.raises(errors.WrongType, match="belongs to a Communicator, not a WholeTensor"):
        torch.ops.wholemem.gather(comm._handle, indices)
    del table
    gc.collect()
    with pytest.raises(errors.Closed, match=f"the WholeTensor of handle {handle} was dropped") as caught:
        torch.ops.wholemem.gather(handle, indices)
    assert caught.value.hint == "keep it alive while code that was compiled with it runs"
    comm.close()
    with pytest.raises(errors.Closed, match="the communicator is closed"):
        wm.all_reduce(comm, torch.ones(1, device=device))


def test_importing_loads_no_driver_and_wholemem_imports_no_torch() -> None:
    ended = alone(
        """
        import sys, wholemem
        driver = lambda: "libcuda.so" in open("/proc/self/maps").read()
        assert "torch" not in sys.modules and not driver()
        import torch
        loaded = driver()  # If there is a GPU, importing torch loads the driver.
        import wholemem.torch
        assert not torch.cuda.is_initialized() and driver() == loaded
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_data_loader_worker_gets_an_error() -> None:
    class Rows(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __init__(self, location: str) -> None:
            self.table = WholeTensor.create(joined("cpu"), (10, 2), "float32", location=location)
            wm.as_tensor(self.table.local()).copy_(torch.arange(20).reshape(10, 2))

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            try:
                return wm.gather(self.table, torch.tensor([index]))
            except errors.Forked as error:
                assert error.hint and all(word in error.hint for word in ("spawn", "main process", "store.Client"))
                return torch.tensor([[-1.0, -1.0]])

    for location in ("device", "host"):
        rows = Rows(location)
        loader = torch.utils.data.DataLoader(rows, batch_size=5, num_workers=2, multiprocessing_context="fork")
        assert torch.cat(list(loader)).unique().tolist() == [-1]
        assert wm.gather(rows.table, torch.tensor([9])).tolist() == [[18, 19]]
        alone_in_the_main_process = torch.utils.data.DataLoader(rows, batch_size=5)
        np.testing.assert_array_equal(torch.cat(list(alone_in_the_main_process)).reshape(10, 2), np.arange(20).reshape(10, 2))


class Failing(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """A dataset each of whose items raises an exception of wholemem, to test that worker processes pass it on."""

    failures = (errors.BadIndex("no row", position=5), errors.PeerLost("rank 2 died", rank=2), errors.NotFound("no name"))

    def __len__(self) -> int:
        return len(self.failures)

    def __getitem__(self, index: int) -> Any:
        raise self.failures[index]


def test_data_loader_workers_preserve_the_exception_class() -> None:
    for index, error in enumerate(Failing.failures):
        loader = torch.utils.data.DataLoader(
            Failing(), sampler=[index], num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(type(error), match=f"in DataLoader worker process 0(.|\n)*: {error}"):
            list(loader)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_table_cannot_be_sent_to_a_spawned_worker() -> None:
    table = WholeTensor.create(joined("cpu"), (10, 2), "float32")
    loader = torch.utils.data.DataLoader([table], num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(errors.WrongType, match="cannot pickle this `WholeTensor`") as caught:
        next(iter(loader))
    assert caught.value.hint and all(word in caught.value.hint for word in ("main process", "store.Client"))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_and_lazy_tensors_are_rejected_by_all_calls() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    comm = joined(torch.device("cpu"))
    with FakeTensorMode():
        fake = torch.ones(3)
    negative = (torch.ones(1, dtype=torch.complex64) * 2j).conj().imag
    for tensor, message in (
        (fake, "the array has no memory"),
        (torch.ones(3, device="meta"), "cannot be imported"),
        (torch.nn.Parameter(torch.ones(3)), "cannot be imported"),
        (negative, "the tensor is a lazily negated view of its memory"),
    ):
        for call in (comm.all_reduce, wholemem.asarray):
            with pytest.raises(errors.WrongValue, match=message) as caught:
                call(tensor)
            assert caught.value.hint
