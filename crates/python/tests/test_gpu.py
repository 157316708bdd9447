"""Tests arrays and tables on a GPU: exchanged without copies, ordered by streams, with the same results as on the host."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any, Iterator

import numpy as np
import pytest

import wholemem
from gpu import NUMBERS, NUMPY_TYPES, TORCH_TYPES, any_bits, bits, free_bytes, release_unused, torch
from wholemem import WholeTensor, errors
from launcher import descriptors, resident

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def comm() -> Iterator[wholemem.Communicator]:
    (comm,) = wholemem.Communicator.local(1, device="cuda")
    with comm:
        yield comm


class ByDlpack:
    """An object that supports only DLPack, and records the streams that consumers name."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.streams.append(kwargs.get("stream", "none"))
        return self.array.__dlpack__(**kwargs)


class ByInterface:
    """An object that supports only the CUDA array interface."""

    def __init__(self, array: Any, **overrides: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **overrides}
        self.keeps = array


# Tests of the import and export of arrays on a GPU.


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_a_torch_tensor_shares_memory_in_both_directions(dtype: str) -> None:
    there = any_bits((2, 3, 4), dtype)
    here = wholemem.asarray(there)
    assert (here.data_ptr(), here.shape, here.stride) == (there.data_ptr(), (2, 3, 4), (12, 4, 1))
    assert (here.dtype, here.device, here.readonly) == (dtype, "cuda:0", False)
    back = torch.from_dlpack(here)
    assert (back.data_ptr(), back.dtype, back.device) == (there.data_ptr(), there.dtype, there.device)
    assert (back.shape, back.stride()) == (there.shape, there.stride())


@pytest.mark.parametrize("cut", ["[::2]", "[:, 1:]", "[:, ::3]", ".T", "[1, 1:2]", "[:0]", "[0, 0, ...]"])
def test_strides_are_preserved(cut: str) -> None:
    there = eval(f"whole{cut}", {"whole": torch.arange(60, device="cuda").reshape(5, 12)})
    back = torch.from_dlpack(wholemem.asarray(there))
    assert torch.equal(back, there)
    if there.numel():
        assert back.data_ptr() == there.data_ptr()


@pytest.mark.parametrize("dtype", [dtype for dtype in NUMPY_TYPES])
def test_a_cupy_array_shares_memory_in_both_directions(dtype: str) -> None:
    cupy: Any = pytest.importorskip("cupy")
    there = cupy.arange(24).reshape(4, 6).astype(dtype)[1:, ::2]
    where, strides = there.data.ptr, tuple(step // there.itemsize for step in there.strides)
    for operand in [there, ByDlpack(there), ByInterface(there)]:
        here = wholemem.asarray(operand)
        assert (here.data_ptr(), here.shape, here.stride) == (where, there.shape, strides)
        assert (here.dtype, here.device) == (dtype, "cuda:0")
        for back in [cupy.from_dlpack(here), cupy.asarray(here)]:
            assert (back.data.ptr, back.strides, back.dtype) == (where, there.strides, there.dtype)
            cupy.testing.assert_array_equal(back, there)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "bfloat16", "float32"])
def test_a_jax_array_shares_memory_in_both_directions(dtype: str) -> None:
    jax: Any = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX works on the {jax.default_backend()} here")
    there = jax.numpy.arange(24).reshape(4, 6).astype(dtype)
    here = wholemem.asarray(there)
    assert (here.data_ptr(), here.shape, here.stride) == (there.unsafe_buffer_pointer(), (4, 6), (6, 1))
    assert (here.dtype, here.device) == (dtype, "cuda:0")
    back = jax.dlpack.from_dlpack(here)
    assert back.unsafe_buffer_pointer() == here.data_ptr()
    assert (back.dtype, back.tolist()) == (there.dtype, there.tolist())


def test_the_cuda_array_interface_describes_the_array(comm: wholemem.Communicator) -> None:
    local = WholeTensor.create(comm, (100, 4), "float32").local()
    interface = local.__cuda_array_interface__
    assert (interface["data"], interface["shape"], interface["typestr"]) == ((local.data_ptr(), False), (100, 4), "<f4")
    there = torch.as_tensor(local, device="cuda")
    assert (there.data_ptr(), there.shape) == (local.data_ptr(), (100, 4))


def test_the_driver_reports_the_device_of_an_interface_address() -> None:
    last = torch.cuda.device_count() - 1
    there = torch.arange(8, device=f"cuda:{last}")
    assert wholemem.asarray(ByInterface(there)).device == f"cuda:{last}"
    host = torch.arange(8).pin_memory()
    pointing = {"data": (host.data_ptr(), False)}
    assert wholemem.asarray(ByInterface(there, **pointing)).device.startswith("cuda:")
    lying = {"data": (np.zeros(8).__array_interface__["data"][0], False)}
    with pytest.raises(errors.WrongDevice, match="is not memory of a GPU"):
        wholemem.asarray(ByInterface(there, **lying))


def test_read_only_arrays_are_exported_as_read_only() -> None:
    array = wholemem.asarray(any_bits((8,), "int32")).as_readonly()
    assert array.readonly and array.__cuda_array_interface__["data"][1]
    assert wholemem.asarray(ByDlpack(array)).readonly
    with pytest.raises(errors.CannotExport, match="read-only"):
        array.__dlpack__()
    # torch ignores the read-only flag: it imports the memory of the array, and would write to it.
    assert torch.from_dlpack(array).data_ptr() == array.data_ptr()


def test_cpu_access_to_gpu_memory_is_rejected() -> None:
    array = wholemem.asarray(any_bits((8,), "int32"))
    for call in [array.numpy, array.memoryview]:
        with pytest.raises(errors.Unsupported, match="memory on cuda:0"):
            call()
    with pytest.raises((AttributeError, TypeError)):
        np.from_dlpack(ByInterface(any_bits((8,), "int32")))
    with pytest.raises(BufferError, match="is on cuda:0"):
        array.__dlpack__(dl_device=(1, 0))


def test_a_dlpack_copy_does_not_share_memory() -> None:
    there = any_bits((6, 4), "bfloat16")[::2]
    copied = torch.from_dlpack(wholemem.asarray(there), copy=True)
    assert copied.data_ptr() != there.data_ptr()
    assert (bits(copied) == bits(there)).all() and copied.shape == there.shape
    before = bits(there)
    copied.zero_()
    assert (bits(there) == before).all()


# Tests of the lifetimes of GPU memory.


def test_an_array_keeps_its_source_tensor_alive() -> None:
    release_unused()
    before = torch.cuda.memory_allocated()
    there = torch.full((1 << 20,), 7, device="cuda")
    here = wholemem.asarray(there)
    del there
    gc.collect()
    assert torch.cuda.memory_allocated() - before >= 8 << 20
    back = torch.from_dlpack(here)
    del here
    gc.collect()
    assert int(back.sum()) == 7 << 20
    del back
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_a_tensor_keeps_its_source_array_alive() -> None:
    (comm,) = wholemem.Communicator.local(1, device="cuda")
    before = free_bytes()
    table = WholeTensor.create(comm, (1 << 20, 32), "float32")
    table.write(0, torch.ones((1 << 20, 32), device="cuda"))
    comm.barrier()
    there = torch.from_dlpack(table.local())
    died = weakref.ref(table) if hasattr(table, "__weakref__") else None
    comm.close()
    del table, comm
    gc.collect()
    assert died is None or died() is None
    assert float(there.sum()) == 32 << 20
    assert before - free_bytes() >= 128 << 20
    del there
    assert before - free_bytes() < 32 << 20


# Tests of the order of work on several CUDA streams.


def test_work_waits_for_the_stream_that_wrote_an_array(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (64, 1024), "int32")
    made, used = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(made):
        there = torch.zeros((64, 1024), dtype=torch.int32, device="cuda")
        torch.cuda._sleep(400_000_000)
        there.fill_(7)
        operand = ByDlpack(there)
        table.write(0, operand, stream=used)
    assert operand.streams == [used.cuda_stream]
    used.synchronize()
    assert int(torch.from_dlpack(table.local()).sum()) == 7 * 64 * 1024


def test_a_consumer_waits_for_the_stream_that_writes_an_array(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (64, 1024), "int32")
    table.write(0, torch.full((64, 1024), 7, dtype=torch.int32, device="cuda"))
    comm.barrier()
    # The indices are an array of wholemem, which records the last stream that used it; a torch tensor does not.
    rows = wholemem.asarray(torch.arange(64, device="cuda"))
    torch.cuda.synchronize()
    wrote, took = torch.cuda.Stream(), torch.cuda.Stream()
    for take in [torch.from_dlpack, lambda array: torch.as_tensor(ByInterface(array), device="cuda")]:
        with torch.cuda.stream(wrote):
            torch.cuda._sleep(400_000_000)
            gathered = table.gather(rows, stream=wrote)
        assert gathered.__cuda_array_interface__["stream"] == wrote.cuda_stream
        if take is not torch.from_dlpack:
            # torch ignores the stream that `__cuda_array_interface__` names, so the CPU waits for the stream.
            wrote.synchronize()
        with torch.cuda.stream(took):
            sum = take(gathered).sum()
        took.synchronize()
        assert int(sum) == 7 * 64 * 1024


# Tests of gathers, scatters and copies of rows on a GPU.


def same(here: Any, there: Any) -> None:
    assert (bits(here) == bits(there)).all()


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_TYPES if dtype != "complex128"])
def test_gather_and_scatter_match_the_host(
    comm: wholemem.Communicator, dtype: str, index: str
) -> None:
    table = WholeTensor.create(comm, (1000, 12), dtype)
    whole = any_bits((1000, 12), dtype)
    table.write(0, whole)
    rng = np.random.default_rng(11)
    rows = rng.integers(0, 1000, 700).astype(index)
    gathered = table.gather(torch.from_numpy(rows).cuda())
    same(torch.from_dlpack(gathered), whole.cpu().view(torch.uint8)[torch.from_numpy(rows).long()])

    operand = torch.empty((700, 12), dtype=getattr(torch, dtype), device="cuda")
    assert table.gather(torch.from_numpy(rows).cuda(), operand) is operand
    same(operand, torch.from_dlpack(gathered))

    places = rng.permutation(1000)[:700].astype(index)
    table.scatter(torch.from_numpy(places).cuda(), operand)
    expected = whole.cpu().view(torch.uint8).clone()
    expected[torch.from_numpy(places).long()] = operand.cpu().view(torch.uint8)
    same(torch.from_dlpack(table.local()), expected)
    table.check()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_scatter_add_matches_the_host(comm: wholemem.Communicator, dtype: str) -> None:
    table = WholeTensor.create(comm, (50, 6), dtype)
    rng = np.random.default_rng(3)
    added = torch.from_numpy(rng.integers(0, 4, (300, 6))).to(getattr(torch, dtype))
    rows = torch.from_numpy(rng.integers(0, 50, 300))
    table.scatter_add(rows.cuda(), added.cuda())
    expected = np.zeros((50, 6), np.float64)
    np.add.at(expected, rows.numpy(), added.to(torch.float64).numpy())
    np.testing.assert_array_equal(torch.from_dlpack(table.local()).double().cpu().numpy(), expected)


def test_rows_are_converted(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (20, 8), "float32")
    whole = torch.randn((20, 8), device="cuda")
    table.write(0, whole)
    rows = torch.arange(19, -1, -1, device="cuda")
    same(torch.from_dlpack(table.gather(rows, dtype="bfloat16")), whole.flip(0).bfloat16())


def test_the_gpu_gathers_rows_in_host_memory(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (100, 4), "int64", location="host")
    table.local().numpy()[:] = np.arange(400).reshape(100, 4)
    gathered = torch.from_dlpack(table.gather(torch.tensor([99, 0, 99], device="cuda")))
    assert gathered[:, 0].tolist() == [396, 0, 396]


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_numpy_arrays_are_staged_through_the_gpu(comm: wholemem.Communicator, index: str) -> None:
    table = WholeTensor.create(comm, (100, 4), "float32")
    whole = np.arange(400, dtype=np.float32).reshape(100, 4)
    table.scatter(range(100), whole)
    rows = np.array([[99, 0], [7, 7]], index)
    gathered = table.gather(rows)
    assert type(gathered) is np.ndarray and (gathered == whole[rows]).all()
    out = np.zeros((2, 2, 4), np.float32)
    assert table.gather(rows, out) is out and (out == gathered).all()
    ours = table.gather([5, 6])
    assert ours.device == "cuda:0" and (torch.from_dlpack(ours).cpu().numpy() == whole[5:7]).all()
    table.scatter_add(rows[0], whole[:2])
    assert (table.gather(rows[0]) == whole[rows[0]] + whole[:2]).all()
    with pytest.raises(errors.BadIndex):
        table.gather(np.array([100]))


def test_torch_tensors_use_torchs_current_stream(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (64, 1024), "int32")
    table.write(0, torch.full((64, 1024), 7, dtype=torch.int32, device="cuda"))
    comm.barrier()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(400_000_000)
        rows = torch.arange(64, device="cuda")
        gathered = table.gather(rows)
        assert type(gathered) is torch.Tensor and int(gathered.sum()) == 7 * 64 * 1024


# Tests of errors on a GPU.


def test_mismatched_arguments_are_rejected(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (10, 4), "float32")
    rows = torch.zeros(3, dtype=torch.int64, device="cuda")
    fits = torch.zeros((3, 4), device="cuda")
    for kind, message, call in [
        (errors.WrongDevice, "is on cpu, but the communicator is on cuda:0", lambda: table.gather(rows.cpu())),
        (errors.WrongDevice, "is on cpu", lambda: table.scatter(rows, fits.cpu())),
        (errors.WrongType, "indices must be int32 or int64", lambda: table.gather(rows.float())),
        (errors.WrongType, "has the type float64, but the tensor has float32", lambda: table.scatter(rows, fits.double())),
        (errors.WrongStride, "not contiguous", lambda: table.gather(torch.zeros(6, dtype=int, device="cuda")[::2])),
        (errors.WrongStride, "are not contiguous", lambda: table.gather(rows, torch.zeros((4, 3), device="cuda").T)),
        (errors.WrongValue, "must have the shape", lambda: table.gather(rows, fits[:2])),
        (errors.ReadOnly, "read-only", lambda: table.gather(rows, wholemem.asarray(fits).as_readonly())),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            call()
    table.gather(rows, fits)


def test_a_bad_index_is_reported(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (10, 4), "float32")
    table.write(0, torch.ones((10, 4), device="cuda"))
    rows = torch.tensor([1, 10, -1], device="cuda")
    gathered = torch.from_dlpack(table.gather(rows))
    assert gathered[:, 0].tolist() == [1, 0, 0]
    with pytest.raises(errors.BadIndex) as caught:
        table.check()
    assert (caught.value.position, caught.value.index, caught.value.rows) == (1, None, 10)
    table.check()


# Tests of memory leaks on a GPU.


def test_ten_thousand_rounds_leak_nothing(comm: wholemem.Communicator) -> None:
    table = WholeTensor.create(comm, (1000, 64), "float32")
    rows = torch.arange(500, device="cuda")
    operand = torch.zeros((500, 64), device="cuda")

    def rounds(count: int) -> None:
        for _ in range(count):
            table.gather(rows, operand)
            torch.from_dlpack(wholemem.asarray(operand))
            torch.from_dlpack(table.local())
            wholemem.asarray(ByInterface(operand))
        for _ in range(count // 20):
            torch.from_dlpack(table.gather(rows))

    def left() -> tuple[int, int, int]:
        # The barrier releases the operands of the last calls, because it finds the stream idle.
        comm.barrier()
        return free_bytes(), resident(), descriptors()

    rounds(500)
    before = left()
    rounds(10_000)
    after = left()
    # If the new arrays leaked, the arrays on the GPU alone would occupy 64 MB.
    assert before[0] - after[0] <= 2 << 20
    assert after[1] - before[1] < 8 << 20
    assert after[2] == before[2]


def test_a_process_with_live_arrays_exits_cleanly() -> None:
    from launcher import run

    ended = run(
        """
        import sys, torch, wholemem
        (comm,) = wholemem.Communicator.local(1, device="cuda")
        table = wholemem.WholeTensor.create(comm, (100, 4), "float32")
        sys.keeps = [comm, table, table.local(), torch.from_dlpack(table.local()), table.local().__dlpack__()]
        sys.keeps += [wholemem.asarray(torch.zeros(8, device="cuda")), sys.keeps]
        """,
        timeout=60,
        env=dict(os.environ),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
