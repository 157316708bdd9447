"""Tests tables that are divided among ranks, and compares content, placement and errors with numpy."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launcher import descriptors, resident, run_ranks

import wholemem
from wholemem import ChunkedTensor, Communicator, WholeTensor, errors

KINDS = list(itertools.product(["continuous", "chunked"], ["device", "host"]))
TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]


def alone() -> Communicator:
    (comm,) = Communicator.local(1, device="cpu")
    return comm


@pytest.mark.parametrize(("kind", "location"), KINDS)
def test_every_rank_sees_the_rows_of_all(kind: str, location: str) -> None:
    shape = (1000, 3, 5)
    expected = np.arange(15_000, dtype=np.float32).reshape(shape)
    rng = np.random.default_rng(7)
    indices = rng.integers(0, 1000, 777)

    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, shape, np.float32, kind=kind, location=location)
        assert (table.shape, table.stride, table.dtype, len(table)) == (shape, (15, 5, 1), "float32", 1000)
        assert (table.kind, table.location) == (kind, location)
        (start, stop) = table.local_rows
        local = table.local()
        assert local.shape == (stop - start, 3, 5)
        local.numpy()[:] = expected[start:stop]
        comm.barrier()
        np.testing.assert_array_equal(table.gather(indices), expected[indices])
        np.testing.assert_array_equal(table.gather(indices.astype(np.int32)), expected[indices])
        for rank in range(comm.size):
            peer = table.rows_of(rank).numpy()
            assert np.isin(peer, expected).all()
        together = np.concatenate([table.rows_of(rank).numpy() for rank in range(comm.size)])
        np.testing.assert_array_equal(together, expected)
        if kind == "continuous":
            np.testing.assert_array_equal(np.from_dlpack(table.all()), expected)
        else:
            with pytest.raises(errors.WrongValue, match="cannot join two spans") as caught:
                table.all()
            assert "rows_of" in str(caught.value.hint)

    run_ranks(3, work)


def test_ranks_read_the_memory_that_another_rank_writes() -> None:
    def work(comm: Communicator) -> int:
        table = WholeTensor.create(comm, (10, 4), "int64")
        view = table.all().numpy()
        view[comm.rank * 5] = 100 + comm.rank
        comm.barrier()
        assert view[0, 0] == 100 and view[5, 0] == 101
        local = table.local()
        assert local.data_ptr() == view[table.local_rows[0] :].__array_interface__["data"][0]
        return local.data_ptr() - table.all().data_ptr()

    assert run_ranks(2, work) == [0, 5 * 4 * 8]


@pytest.mark.parametrize("dtype", TYPES)
def test_scatter_and_scatter_add_match_numpy(dtype: str) -> None:
    rng = np.random.default_rng(3)
    expected = np.zeros((50, 6), dtype)
    operand = [rng.integers(0, 4, (40, 6)).astype(dtype) for _ in range(2)]
    indices = [rng.integers(0, 50, 40) for _ in range(2)]
    for rank in range(2):
        np.add.at(expected, indices[rank], operand[rank])

    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (50, 6), dtype)
        table.scatter_add(indices[comm.rank], operand[comm.rank])
        comm.barrier()
        np.testing.assert_array_equal(table.all().numpy(), expected)
        comm.barrier()
        if comm.rank == 1:
            table.scatter(np.arange(5), operand[0][:5])
        comm.barrier()
        np.testing.assert_array_equal(table.gather(np.arange(5)), operand[0][:5])

    run_ranks(2, work)


def test_a_fixed_order_scatter_stores_the_last_row_of_the_last_rank() -> None:
    def work(comm: Communicator) -> float:
        table = WholeTensor.create(comm, (4, 1), "float64")
        rows = np.array([[10.0 * comm.rank + n] for n in range(3)])
        table.scatter(np.array([2, 2, 2]), rows, order="fixed")
        return float(table.gather(np.array([2]))[0, 0])

    assert run_ranks(3, work) == [22.0] * 3


def test_outputs_are_filled_in_place() -> None:
    table = WholeTensor.create(alone(), (9, 2), "int32")
    table.write(0, np.arange(18, dtype=np.int32).reshape(9, 2))
    out = np.full((4, 5), -1, np.int32)
    gaps = out[::2, 1:3]
    assert table.gather(np.array([8, 0]), gaps) is gaps
    assert out.tolist() == [[-1, 16, 17, -1, -1], [-1] * 5, [-1, 0, 1, -1, -1], [-1] * 5]
    square = table.gather(np.array([[1, 2], [3, 4]]))
    assert square.shape == (2, 2, 2) and square[1, 0].tolist() == [6, 7]
    part = np.zeros((3, 2), np.int32)
    table.read(6, part)
    assert part.tolist() == [[12, 13], [14, 15], [16, 17]]
    table.gather(np.zeros(0, np.int64), np.zeros((0, 2), np.int32))
    table.scatter(np.zeros(0, np.int64), np.zeros((0, 2), np.int32))
    table.write(3, np.zeros((0, 2), np.int32))


def test_elements_are_converted_on_request() -> None:
    table = WholeTensor.create(alone(), (4, 2), "float32")
    table.scatter(np.arange(4), np.full((4, 2), 1.5), convert=True)
    assert table.gather(np.array([3]), dtype=np.float64).dtype == np.float64
    out = np.zeros((1, 2), np.float16)
    table.gather(np.array([0]), out, convert=True)
    assert out.tolist() == [[1.5, 1.5]]
    assert table.gather(np.array([0]), dtype="bfloat16").memoryview().tobytes() == b"\xc0\x3f" * 2
    with pytest.raises(errors.WrongType, match="only floats to floats"):
        table.gather(np.array([0]), dtype="int32")


def test_non_numeric_types_are_gathered_but_not_added() -> None:
    for dtype in ["bool", "float8_e5m2", "complex64"]:
        table = WholeTensor.create(alone(), (4, 2), dtype)
        assert table.dtype == dtype == table.local().dtype == table.gather(np.array([1])).dtype
        with pytest.raises(errors.WrongType, match=f"cannot compute with {dtype}"):
            table.scatter_add(np.array([0]), wholemem.zeros((1, 2), dtype))
    with pytest.raises(errors.WrongType, match="tables cannot store complex128"):
        WholeTensor.create(alone(), (4, 2), "complex128")


def test_populated_rows_cause_no_page_faults() -> None:
    table = WholeTensor.create(alone(), (1 << 14, 1 << 10), "uint8")
    table.populate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert not table.local().numpy()[::4].any()
    # The table has 4096 pages of 4 KiB; without `populate`, reading it would cause a fault for each.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 512


def test_row_and_column_ranges_are_tables() -> None:
    table = WholeTensor.create(alone(), (10, 8), "int32")
    whole = np.arange(80, dtype=np.int32).reshape(10, 8)
    table.write(0, whole)
    part = table.rows(2, 7).columns(3, 5)
    assert (part.shape, part.stride) == ((5, 2), (8, 1))
    np.testing.assert_array_equal(part.all().numpy(), whole[2:7, 3:5])
    np.testing.assert_array_equal(part.local().numpy(), whole[2:7, 3:5])
    np.testing.assert_array_equal(part.gather(np.array([4, 0])), whole[[6, 2], 3:5])
    assert part.rows(1, 1).local().shape == (0, 2)
    for cut in [lambda: table.rows(5, 11), lambda: table.rows(3, 2), lambda: table.columns(0, 9)]:
        with pytest.raises(errors.WrongValue, match="cannot use"):
            cut()


def test_rows_are_partitioned_as_requested() -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        table = WholeTensor.create(comm, (10, 2), "int8", rows_of_each=[7, 0, 3])
        assert table.local().shape[0] == [7, 0, 3][comm.rank]
        return table.local_rows

    assert run_ranks(3, work) == [(0, 7), (0, 0), (7, 10)]


def test_saved_rows_are_loaded_by_any_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "features"
    expected = np.random.default_rng(1).random((123, 7), np.float32)

    def save(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (123, 7), "float32")
        (start, stop) = table.local_rows
        table.local().numpy()[:] = expected[start:stop]
        table.save(path)
        with pytest.raises(errors.BadFile, match="cannot save the tensor: the path exists already\nhint: enable overwriting"):
            table.save(path)
        table.save(path, overwrite=True)

    run_ranks(2, save)
    np.save(tmp_path / "features.npy", expected)

    def load(comm: Communicator) -> None:
        for source in [path, str(path) + ".npy"]:
            table = WholeTensor.load(comm, source, kind="chunked")
            assert (table.shape, table.dtype) == ((123, 7), "float32")
            np.testing.assert_array_equal(table.gather(np.arange(123)), expected)
        with pytest.raises(errors.BadFile, match="nothing"):
            WholeTensor.load(comm, tmp_path / "nothing.npy")

    run_ranks(3, load)


def test_ranks_that_load_different_saves_get_an_error(tmp_path: Path) -> None:
    for name in ["0", "1"]:
        WholeTensor.create(alone(), (10, 2), "float32").save(tmp_path / name)
        np.save(tmp_path / f"{name}.npy", np.zeros((10, 2), np.float32))

    def load(comm: Communicator) -> None:
        for ending in ["", ".npy"]:
            message = "^cannot load: rank 1 opened a different saved tensor, or a different version of the file"
            with pytest.raises(errors.RanksDisagree, match=message) as raised:
                WholeTensor.load(comm, tmp_path / f"{comm.rank}{ending}")
            assert raised.value.code == "1029"
            assert "load again" in str(raised.value.hint)
            WholeTensor.load(comm, tmp_path / f"0{ending}")

    run_ranks(2, load)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "bfloat16"])
def test_element_types_are_saved(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = WholeTensor.create(alone(), (5, 2), dtype)
    if dtype in ("bool", "complex64"):
        table.local().numpy()[:] = np.arange(10).reshape(5, 2) % 3
        np.save(tmp_path / "table.npy", table.local().numpy())
        read = WholeTensor.load(alone(), tmp_path / "table.npy")
        assert read.dtype == dtype
        np.testing.assert_array_equal(read.local().numpy(), table.local().numpy())
    table.save(path)
    loaded = WholeTensor.load(alone(), path)
    assert (loaded.dtype, loaded.like().dtype, loaded.rows(1, 3).dtype) == (dtype, dtype, dtype)


def test_element_types_are_read_from_foreign_files(tmp_path: Path) -> None:
    types = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64", "U8": "uint8"}
    for name, dtype in types.items():
        data = np.zeros(4, np.complex64 if name == "C64" else np.uint8).tobytes()
        header = json.dumps({"t": {"dtype": name, "shape": [2, 2], "data_offsets": [0, len(data)]}}).encode()
        (tmp_path / "t.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
        assert WholeTensor.load(alone(), tmp_path / "t.safetensors").dtype == dtype


def test_ranks_with_different_element_types_get_an_error() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(errors.RanksDisagree):
            WholeTensor.create(comm, (4, 2), ["bool", "uint8"][comm.rank])

    run_ranks(2, work)


def test_a_chunked_tensor_has_a_pointer_for_kernels() -> None:
    def work(comm: Communicator) -> None:
        table = ChunkedTensor(comm, (10, 3), "float32")
        assert (table.shape, table.stride, table.dtype) == ((10, 3), (3, 1), "float32")
        assert table.get_ptr() == table.get_ptr() != 0
        table.local().numpy()[:] = comm.rank
        comm.barrier()
        assert table.chunk(1 - comm.rank).numpy().tolist() == [[1.0 - comm.rank] * 3] * 5
        assert "ChunkedTensor(shape=(10, 3)" in repr(table)

    run_ranks(2, work)


def test_element_refs_address_the_rows_of_a_view() -> None:
    table = WholeTensor.create(alone(), (10, 8), "int32")
    part = table.rows(2, 7).columns(3, 5)
    (base, rows, _, stride, *_, row_len) = (ctypes.c_uint64 * 9).from_address(part.reference_ptr())
    assert (base, rows, stride) == (part.local().data_ptr(), 5, 32)
    # A row of the view has two columns of four bytes; a kernel needs this length to find an element.
    assert row_len == 8


def test_element_refs_count_elements_in_the_columns_of_a_view() -> None:
    table = WholeTensor.create(alone(), (10, 8), "int32")
    table.local().numpy()[:] = np.arange(80).reshape(10, 8)
    part = table.columns(3, 5)
    (base, _, _, stride, *_, row_len) = (ctypes.c_uint64 * 9).from_address(part.reference_ptr())

    def at(element: int) -> int:
        # Computes the address of an element as `PtrGen::At` does for a table with one chunk.
        (row, byte) = divmod(element * 4, row_len)
        return ctypes.c_int32.from_address(base + row * stride + byte).value

    assert [at(element) for element in range(4)] == [3, 4, 11, 12]
    assert [at(element) for element in range(20)] == part.local().numpy().flatten().tolist()


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        (np.array([0.5]), errors.WrongType, "indices must be int32 or int64, but are float64"),
        (np.array([1], np.uint64), errors.WrongType, "indices must be int32 or int64, but are uint64"),
        (np.arange(10)[::2], errors.WrongStride, "the array of indices is not contiguous"),
        ({1, 2}, errors.WrongType, "`set` is not an array"),
        (np.array([0, 5, 3]), errors.BadIndex, "^index 5 at position 1 is out of range: valid indices are 0..5$"),
        (np.array([0, 1, -1]), errors.BadIndex, "^index -1 at position 2 is out of range: valid indices are 0..5$"),
    ],
)
def test_bad_indices_are_rejected(indices: Any, kind: type, message: str) -> None:
    table = WholeTensor.create(alone(), (5, 2), "float32")
    with pytest.raises(kind, match=message) as caught:
        table.gather(indices)
    if isinstance(caught.value, errors.BadIndex):
        assert indices[caught.value.position] == caught.value.index
        assert (caught.value.index in (5, -1), caught.value.rows) == (True, 5)
        assert table.gather(indices, skip_bad=True).shape == (3, 2)
    table.check()
    table.gather(np.array([0]))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "kind", "message"),
    [
        (np.zeros((2, 2), np.float64), errors.WrongType, "the output has the type float64, but the tensor has float32"),
        (np.zeros((2, 3), np.float32), errors.WrongValue, r"must have the shape \[2, 2\], but has \[2, 3\]"),
        (np.zeros((3, 2), np.float32), errors.WrongValue, r"must have the shape \[2, 2\], but has \[3, 2\]"),
        (np.zeros((2, 4), np.float32)[:, ::2], errors.WrongStride, "the rows of the output are not contiguous"),
        (np.zeros((2, 2), np.float32)[::-1], errors.WrongStride, r"the rows of the output are not contiguous: it has strides \[-2, 1\]"),
        (np.broadcast_to(np.zeros(2, np.float32), (2, 2)), errors.ReadOnly, "cannot write to"),
        (read_only(np.zeros((2, 2), np.float32)), errors.ReadOnly, "cannot write to"),
        (b"12345678", errors.WrongValue, "must have the shape"),
        (7, errors.WrongType, "is not an array"),
    ],
)
def test_bad_outputs_are_rejected(out: Any, kind: type, message: str) -> None:
    table = WholeTensor.create(alone(), (5, 2), "float32")
    with pytest.raises(kind, match=message):
        table.gather(np.array([0, 1]), out)


def test_an_array_on_another_device_is_rejected() -> None:
    class OnGpu:
        __cuda_array_interface__ = {"version": 3, "shape": (1, 2), "typestr": "<f4", "data": (4096, False)}

    table = WholeTensor.create(alone(), (5, 2), "float32")
    with pytest.raises(errors.WrongDevice, match="is on cuda:0, but the communicator is on cpu") as caught:
        table.scatter(np.array([0]), OnGpu())
    assert caught.value.hint == "move it to cpu first"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"shape": ()}, errors.WrongValue, "at least one dimension"),
        ({"shape": (4, 0)}, errors.WrongValue, "the length of a row is 0 bytes"),
        ({"shape": (1 << 62, 8)}, errors.WrongValue, "exceed the address space"),
        ({"shape": (1.5, 2)}, errors.WrongType, r"^\(1.5, 2\) is not a shape\nhint: pass ints"),
        ({"shape": None}, errors.WrongType, "^None is not a shape\nhint: "),
        ({"shape": "abc"}, errors.WrongType, "^'abc' is not a shape\nhint: "),
        ({"shape": (2, -1)}, errors.WrongValue, "-1 is out of range"),
        ({"rows_of_each": [1, 2, 3]}, errors.WrongValue, "rows were given for 3 ranks"),
        ({"kind": "other"}, errors.WrongValue, "the kind `other` does not exist"),
        ({"location": "disk"}, errors.WrongValue, "the location `disk` does not exist"),
        ({"shape": (1 << 40, 8)}, errors.OutOfMemory, "available"),
    ],
)
def test_invalid_table_arguments_are_rejected(arguments: dict[str, Any], kind: type, message: str) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(kind, match=message):
            WholeTensor.create(comm, **{"shape": (4, 2), "dtype": "float32", **arguments})
        WholeTensor.create(comm, (4, 2), "float32")

    run_ranks(1, work)
    run_ranks(2, work)


def test_ranks_that_create_different_tables_get_an_error() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(errors.RanksDisagree, match="made another call than rank 0, or passed other arguments"):
            WholeTensor.create(comm, (4 + comm.rank, 2), "float32")

    run_ranks(2, work)


def test_memory_outlives_its_table_and_communicator() -> None:
    comm = alone()
    table = WholeTensor.create(comm, (1000, 4), "float32")
    local = table.local().numpy()
    comm.close()
    del comm, table
    gc.collect()
    local[:] = 7
    assert local.sum() == 28_000


def test_ten_thousand_tables_leak_nothing() -> None:
    comm = alone()
    indices = np.array([1, 2, 3])

    def cycle(times: int) -> None:
        for _ in range(times):
            table = WholeTensor.create(comm, (100, 4), "float32")
            table.gather(indices)
            table.local().numpy()[0] = 1

    cycle(200)
    gc.collect()
    (memory, open_files) = (resident(), descriptors())
    cycle(10_000)
    gc.collect()
    assert descriptors() == open_files
    assert resident() - memory < 8 << 20
