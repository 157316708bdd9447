"""Calls by address, as a framework makes them that has looked at its own arrays; and handles."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from world import each

from wholemem import Communicator, WholeTensor, _native, errors, handles

SUM = _native.op_code("sum")


def address(array: Any) -> int:
    return int(array.ctypes.data)


def filled() -> tuple[WholeTensor, np.ndarray]:
    (comm,) = Communicator.local(1, device="cpu")
    whole = np.arange(60, dtype=np.float32).reshape(20, 3)
    table = WholeTensor.create(comm, whole.shape, whole.dtype)
    table.write(0, whole)
    return table, whole


@pytest.mark.parametrize("wide", [True, False])
def test_rows_are_gathered_and_put_by_address(wide: bool) -> None:
    table, whole = filled()
    indices = np.array([4, 19, 4], np.int64 if wide else np.int32)
    out = np.full((3, 5), -1, np.float32)
    table.gather_at(address(indices), 3, wide, address(out), 20, None, -1, 0)
    np.testing.assert_array_equal(out[:, :3], whole[indices])
    assert (out[:, 3:] == -1).all()
    double = np.zeros((3, 3))
    table.gather_at(address(indices), 3, wide, address(double), 24, _native.dtype_code("float64"), -1, 0)
    np.testing.assert_array_equal(double, whole[indices])
    table.scatter_at(True, address(out), 20, None, address(indices), 3, wide, -1, 0)
    np.add.at(whole, indices, out[:, :3])
    np.testing.assert_array_equal(table.all().numpy(), whole)
    table.scatter_at(False, address(double), 24, _native.dtype_code("float64"), address(indices), 2, wide, -1, 0)
    whole[indices[:2]] = double[:2]
    np.testing.assert_array_equal(table.all().numpy(), whole)
    table.gather_at(0, 0, wide, 0, 0, None, -1, 0)
    table.scatter_at(True, 0, 12, None, 0, 0, wide, -1, 0)


def test_ranks_meet_by_address() -> None:
    def work(comm: Communicator) -> None:
        own = np.full(1000, comm.rank + 1, np.float32)
        out, every = np.zeros(1000, np.float32), np.zeros((2, 1000), np.float32)
        code = _native.dtype_code(own.dtype)
        comm.all_reduce_at(address(own), address(out), 1000, code, SUM, -1, 0)
        assert (out == 3).all()
        comm.all_gather_at(address(own), address(every), own.nbytes, -1, 0)
        assert (every == [[1], [2]]).all()
        comm.broadcast_at(address(own), address(out), own.nbytes, 1, -1, 0)
        assert (out == 2).all()
        # In a window, where the others read it.
        window = comm.mem_alloc(4000)
        mine = window.local("float32").numpy()
        mine[:] = own
        comm.all_reduce_at(address(mine), address(mine), 1000, code, SUM, -1, 0)
        assert (mine == 3).all()

    each(2, work)


def test_what_can_be_told_is_refused() -> None:
    table, _ = filled()
    (comm,) = Communicator.local(1, device="cpu")
    indices, out = np.array([20]), np.zeros((1, 3), np.float32)
    with pytest.raises(errors.BadIndex):
        table.gather_at(address(indices), 1, True, address(out), 12, None, -1, 0)
    with pytest.raises(errors.WrongDevice, match="the tensor is on cuda:1, and the communicator on cpu") as caught:
        table.gather_at(address(indices), 1, True, address(out), 12, None, 1, 0)
    assert caught.value.hint == "move it to cpu first"
    with pytest.raises(errors.WrongType, match="no type of elements has the code 99"):
        comm.all_reduce_at(address(out), address(out), 3, 99, SUM, -1, 0)
    with pytest.raises(errors.WrongValue, match="no reduction has the code 99"):
        comm.all_reduce_at(address(out), address(out), 3, 10, 99, -1, 0)
    with pytest.raises(errors.WrongType, match="cannot compute with bool"):
        _native.dtype_code("bool")
    with pytest.raises(errors.WrongValue, match="`median`"):
        _native.op_code("median")


def test_a_handle_finds_what_somebody_keeps() -> None:
    table, _ = filled()
    (comm,) = Communicator.local(1, device="cpu")
    handle = table.handle
    assert handle == table.handle and len({handle, comm.handle, table.rows(0, 1).handle}) == 3
    assert handles.find(handle, WholeTensor) is table
    with pytest.raises(errors.WrongType, match=f"handle {handle} is of a WholeTensor, and not of a Communicator"):
        handles.find(handle, Communicator)
    del table
    gc.collect()
    with pytest.raises(errors.Closed, match=f"the WholeTensor of handle {handle} is gone"):
        handles.find(handle, WholeTensor)


def test_a_table_like_another() -> None:
    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (10, 2), "bfloat16", kind="chunked", location="host", rows_of_each=[7, 3])
        like = table.like()
        assert (like.shape, like.dtype, like.kind, like.location) == ((10, 2), "bfloat16", "chunked", "host")
        assert like.local_rows == table.local_rows and like.device == table.device == "cpu"
        assert like.local().data_ptr() != table.local().data_ptr()
        assert not any(like.local().memoryview().tobytes())
        part = table.rows(5, 9).like()
        assert part.shape == (4, 2) and part.local_rows == [(0, 2), (2, 4)][comm.rank]
        like.barrier()

    each(2, work)
