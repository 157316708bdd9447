"""Tests tensors that are passed as raw addresses, whose strides and devices are checked in every call, and handles of objects."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from launcher import run_ranks

from wholemem import Communicator, WholeTensor, _handles, errors


class Stated:
    """An array that is known only by its address, and does not keep its memory alive."""

    def __init__(self, array: Any, **overrides: Any) -> None:
        self.__array_interface__ = {**array.__array_interface__, **overrides}


def filled() -> tuple[WholeTensor, np.ndarray]:
    (comm,) = Communicator.local(1, device="cpu")
    whole = np.arange(60, dtype=np.float32).reshape(20, 3)
    table = WholeTensor.create(comm, whole.shape, whole.dtype)
    table.write(0, whole)
    return table, whole


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_rows_are_gathered_and_scattered_by_address(dtype: Any) -> None:
    table, whole = filled()
    indices = np.array([4, 19, 4], dtype)
    wide = np.full((3, 5), -1, np.float32)
    out = wide[:, :3]
    table.gather(Stated(indices), Stated(out))
    np.testing.assert_array_equal(out, whole[indices])
    assert (wide[:, 3:] == -1).all()
    double = np.zeros((3, 3))
    table.gather(Stated(indices), Stated(double), convert=True)
    np.testing.assert_array_equal(double, whole[indices])
    table.scatter_add(Stated(indices), Stated(out))
    np.add.at(whole, indices, out)
    np.testing.assert_array_equal(table.all().numpy(), whole)
    table.scatter(Stated(indices[:2]), Stated(double[:2]), convert=True)
    whole[indices[:2]] = double[:2]
    np.testing.assert_array_equal(table.all().numpy(), whole)


def test_collectives_work_by_address() -> None:
    def work(comm: Communicator) -> None:
        own = np.full(1000, comm.rank + 1, np.float32)
        out, every = np.zeros(1000, np.float32), np.zeros((2, 1000), np.float32)
        comm.all_reduce(Stated(own), Stated(out))
        assert (out == 3).all()
        comm.all_gather(Stated(own), Stated(every))
        assert (every == [[1], [2]]).all()
        # The array is in a window, where other ranks read it in place.
        window = comm.mem_alloc(4000)
        mine = window.local("float32").numpy()
        mine[:] = own
        comm.all_reduce(Stated(mine), Stated(mine))
        assert (mine == 3).all()

    run_ranks(2, work)


def test_strides_without_contiguous_rows_are_rejected() -> None:
    table, _ = filled()
    indices, wide = np.array([1, 2]), np.zeros((2, 6), np.float32)
    for out, message in (
        (wide[:, ::2], r"the rows of the output are not contiguous: it has strides \[6, 2\] and shape \[2, 3\]"),
        (wide[::-1, :3], r"the rows of the output are not contiguous: it has strides \[-6, 1\] and shape \[2, 3\]"),
    ):
        with pytest.raises(errors.WrongStride, match=message) as caught:
            table.gather(indices, out)
        assert caught.value.hint == "pass a contiguous tensor, and copy from it"
    with pytest.raises(errors.WrongStride, match="the output is not contiguous") as caught:
        table.gather(indices.reshape(2, 1), wide[:, None, :3])
    # The stride of a single row has no meaning, and an empty array is contiguous.
    table.gather(indices[:1], wide[1:, :3])
    table.gather(indices[:0], wide[:0, ::2])


def test_a_tensor_without_memory_is_rejected() -> None:
    table, _ = filled()
    with pytest.raises(errors.WrongValue, match="the array interface has the invalid address 0x0"):
        table.gather(np.array([1]), Stated(np.zeros((1, 3), np.float32), data=(0, False)))


def test_a_handle_resolves_while_its_object_lives() -> None:
    table, _ = filled()
    (comm,) = Communicator.local(1, device="cpu")
    handle = table._handle
    assert handle == table._handle and len({handle, comm._handle, table.rows(0, 1)._handle}) == 3
    assert _handles.find(handle, WholeTensor) is table
    with pytest.raises(errors.WrongType, match=f"handle {handle} belongs to a WholeTensor, not a Communicator"):
        _handles.find(handle, Communicator)
    del table
    gc.collect()
    with pytest.raises(errors.Closed, match=f"the WholeTensor of handle {handle} was dropped"):
        _handles.find(handle, WholeTensor)


def test_like_creates_an_equal_table() -> None:
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

    run_ranks(2, work)
