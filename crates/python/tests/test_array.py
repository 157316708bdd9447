"""Tests that arrays are imported from every kind of producer and exported to every kind of consumer, without copies and leaks."""

import array as stdlib_array
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import wholemem
from wholemem import errors

NUMPY_TYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_numpy_and_back_is_the_same_memory(dtype: str) -> None:
    there = np.arange(24).reshape(2, 3, 4).astype(dtype)
    here = wholemem.asarray(there)
    assert (here.shape, here.dtype, here.device) == ((2, 3, 4), dtype, "cpu")
    assert here.stride == (12, 4, 1) and here.is_contiguous and not here.readonly
    assert (here.ndim, here.size, here.itemsize, len(here)) == (3, 24, there.itemsize, 2)
    assert here.nbytes == there.nbytes
    for back in [here.numpy(), np.from_dlpack(here), np.asarray(here), np.asarray(here.memoryview())]:
        assert address(back) == address(there) == here.data_ptr()
        if back.dtype == there.dtype:
            np.testing.assert_array_equal(back, there)
        else:
            # The buffer protocol exports an element type that has no buffer format as bytes.
            assert dtype in ("float16", "complex64", "complex128") and back.dtype == np.uint8


@pytest.mark.parametrize("cut", ["[::2]", "[:, 1:]", "[::-1]", "[:, ::-2]", ".T", "[1, 1:2]", "[:0]", "[0, 0, ...]"])
def test_strides_are_preserved(cut: str) -> None:
    whole = np.arange(60, dtype=np.int32).reshape(5, 12)
    there = eval(f"whole{cut}")
    here = wholemem.asarray(there)
    back = here.numpy()
    np.testing.assert_array_equal(back, there)
    np.testing.assert_array_equal(np.from_dlpack(here), there)
    if there.size:
        assert address(back) == address(there)


def test_an_array_without_dimensions_is_supported() -> None:
    here = wholemem.asarray(np.array(7.5))
    assert (here.shape, here.size, here.stride) == ((), 1, ())
    assert here.numpy() == 7.5
    with pytest.raises(errors.WrongType, match="an array without dimensions has no length"):
        len(here)


def test_read_only_is_preserved() -> None:
    there = np.arange(4)
    there.flags.writeable = False
    here = wholemem.asarray(there)
    assert here.readonly
    assert not here.numpy().flags.writeable
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert not np.from_dlpack(here).flags.writeable
    else:
        with pytest.raises(errors.CannotExport):
            np.from_dlpack(here)
    assert here.memoryview().readonly
    assert "readonly" in repr(here)
    assert wholemem.zeros((1,), "uint8").as_readonly().readonly


def test_a_read_only_array_is_not_exported_in_an_unversioned_capsule() -> None:
    array = wholemem.zeros((3,), "float32")
    assert '"dltensor"' in repr(array.__dlpack__())
    assert '"dltensor"' in repr(array.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(array.__dlpack__(max_version=(1, 0)))
    with pytest.raises(errors.CannotExport, match="read-only") as caught:
        array.as_readonly().__dlpack__()
    assert "array.lent()" in str(caught.value)
    lent = array.as_readonly().lent()
    assert lent.readonly and '"dltensor"' in repr(lent.__dlpack__())
    assert wholemem.asarray(Relay(lent)).readonly


def test_an_unsupported_export_raises_buffer_error() -> None:
    array = wholemem.zeros((3,), "float32")
    assert array.__dlpack_device__() == (1, 0)
    array.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match="is on cpu"):
        array.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("cut", ["[::2]", "[:, 1:]", "[::-1]", ".T", "[:0]", "[0, 0, ...]"])
def test_dlpack_exports_a_copy_on_request(cut: str) -> None:
    there = eval(f"whole{cut}", {"whole": np.arange(60, dtype=np.int32).reshape(5, 12)})
    here = wholemem.asarray(there)
    copied = wholemem.asarray(Copying(here))
    np.testing.assert_array_equal(copied.numpy(), there)
    assert copied.data_ptr() != here.data_ptr() and not copied.readonly
    if there.size:
        before = there.copy()
        copied.numpy()[...] = -1
        np.testing.assert_array_equal(there, before)
    # A copy of a read-only array is writable, so it can be exported in an unversioned capsule, which has no read-only flag.
    assert '"dltensor"' in repr(here.as_readonly().__dlpack__(copy=True))


class Copying:
    """An array that exports copies of itself through DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs, copy=True)


@pytest.mark.parametrize(
    ("value", "dtype", "readonly"),
    [
        (b"hello", "uint8", True),
        (bytearray(b"hello"), "uint8", False),
        (memoryview(b"hello"), "uint8", True),
        (stdlib_array.array("d", [1, 2]), "float64", False),
        (stdlib_array.array("l", [1, 2]), "int64", False),
        ((ctypes.c_float * 3)(), "float32", False),
        (mmap.mmap(-1, 4096), "uint8", False),
    ],
)
def test_buffers_are_imported(value: Any, dtype: str, readonly: bool) -> None:
    here = wholemem.asarray(value)
    assert (here.dtype, here.readonly) == (dtype, readonly)
    assert here.memoryview().tobytes() == bytes(memoryview(value).cast("B"))


def test_a_buffer_is_held_while_its_array_lives() -> None:
    value = bytearray(b"hello")
    here = wholemem.asarray(value)
    view = here.memoryview()
    with pytest.raises(BufferError):
        value.extend(b"!")
    del here
    with pytest.raises(BufferError):
        value.extend(b"!")
    del view
    gc.collect()
    value.extend(b"!")


class ByInterface:
    """An object that supports only numpy's array interface."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self.keeps = array


def test_the_array_interface_is_imported() -> None:
    there = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3]
    keeper = ByInterface(there)
    died = weakref.ref(keeper)
    here = wholemem.asarray(keeper)
    del keeper
    gc.collect()
    assert died() is not None
    np.testing.assert_array_equal(here.numpy(), there)
    del here
    gc.collect()
    assert died() is None


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (7, errors.WrongType, "`int` is not an array"),
        ([1, 2], errors.WrongType, "`list` is not an array"),
        (np.array(["text"]), errors.WrongType, "not supported"),
        (np.array([1, 2], dtype=">i4"), errors.WrongType, "not supported"),
        (np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]), errors.WrongType, "not supported"),
        (np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])["b"], errors.WrongStride, "8 bytes have a stride of 12 bytes"),
    ],
)
def test_objects_that_are_not_numeric_arrays_are_rejected(value: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        wholemem.asarray(value)
    assert caught.value.hint


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), "f32", "torch.float32"])
def test_element_types_are_parsed_from_many_forms(dtype: Any) -> None:
    assert wholemem.zeros((1,), dtype).dtype == "float32"


def test_element_types_that_numpy_lacks_are_supported() -> None:
    for dtype, itemsize in [("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1)]:
        array = wholemem.zeros((4,), dtype)
        assert (array.dtype, array.itemsize) == (dtype, itemsize)
        assert wholemem.asarray(Relay(array)).dtype == dtype
        assert not hasattr(array, "__array_interface__")
        with pytest.raises(errors.Unsupported, match=f"numpy has no type {dtype}"):
            array.numpy()
        assert array.memoryview().nbytes == 4 * itemsize
    with pytest.raises(errors.WrongType, match="the element type `float1` does not exist"):
        wholemem.zeros((1,), "float1")


class Relay:
    """An object that supports only DLPack, with a versioned or an unversioned capsule."""

    def __init__(self, array: Any, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.old and kwargs:
            raise TypeError("what is that?")
        return self.array.__dlpack__(**kwargs)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_dlpack_preserves_types_and_strides(dtype: str, old: bool) -> None:
    there = np.arange(24).astype(dtype).reshape(4, 6)[::-2, 1:5:3]
    here = wholemem.asarray(Relay(there, old))
    assert (here.shape, here.stride, here.dtype) == ((2, 2), (-12, 3), dtype)
    assert here.data_ptr() == address(there)
    np.testing.assert_array_equal(here.numpy(), there)


def test_dlpack_preserves_the_read_only_flag() -> None:
    array = wholemem.zeros((3,), "float32")
    assert not wholemem.asarray(Relay(array)).readonly
    assert wholemem.asarray(Relay(array.as_readonly())).readonly


@pytest.mark.parametrize("old", [False, True])
def test_a_chain_of_exports_keeps_the_first_array_alive(old: bool) -> None:
    there = np.arange(6, dtype=np.int16)
    died = weakref.ref(there)
    chain = wholemem.asarray(Relay(wholemem.asarray(Relay(there, old)), old))
    where = address(there)
    del there
    gc.collect()
    assert died() is not None
    last = np.from_dlpack(chain)
    del chain
    assert address(last) == where and last.tolist() == list(range(6))
    del last
    gc.collect()
    assert died() is None


def test_a_capsule_is_consumed_once() -> None:
    capsule = wholemem.zeros((1,), "int8").__dlpack__(max_version=(1, 0))

    class Twice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return capsule

    wholemem.asarray(Twice())
    with pytest.raises(errors.WrongType, match="consumed before"):
        wholemem.asarray(Twice())


def test_an_unconsumed_capsule_releases_its_array() -> None:
    there = np.arange(3)
    died = weakref.ref(there)
    array = wholemem.asarray(there)
    capsules = [array.__dlpack__(), array.__dlpack__(max_version=(1, 0))]
    del there, array
    gc.collect()
    assert died() is not None
    del capsules
    gc.collect()
    assert died() is None


def test_new_arrays_are_zero_and_aligned() -> None:
    array = wholemem.zeros((3, 5), "float64")
    assert array.data_ptr() % 64 == 0
    assert not array.numpy().any()
    assert wholemem.zeros((0, 5), "int8").size == 0
    for shape in [(-1,), (1 << 40, 1 << 40)]:
        with pytest.raises(errors.WrongValue):
            wholemem.zeros(shape, "int8")
    with pytest.raises(errors.OutOfMemory):
        wholemem.zeros((1 << 50,), "int8")


def test_arrays_can_be_dropped_on_any_thread() -> None:
    there = [np.arange(10) for _ in range(8)]
    died = [weakref.ref(array) for array in there]
    views = [[np.from_dlpack(wholemem.asarray(array)) for _ in range(50)] for array in there]
    del there
    threads = [threading.Thread(target=mine.clear) for mine in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [ref() for ref in died] == [None] * 8


def test_cycles_are_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.memory = np.zeros(1 << 16, dtype=np.uint8)
            self.array = wholemem.asarray(self.memory)
            self.view = self.array.numpy()
            self.me = self

    died = []
    for _ in range(10):
        node = Node()
        died.append(weakref.ref(node.memory))
        del node
    gc.collect()
    assert [ref() for ref in died] == [None] * 10


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_arrays_leak_nothing() -> None:
    there = np.zeros(4096, dtype=np.uint8)

    def cycle(times: int) -> None:
        for _ in range(times):
            array = wholemem.zeros((4096,), "uint8")
            np.from_dlpack(wholemem.asarray(array.numpy()))
            wholemem.asarray(Relay(array))
            wholemem.asarray(there).memoryview().release()
            array.__dlpack__(max_version=(1, 0))

    cycle(1000)
    gc.collect()
    (memory, descriptors) = (resident(), len(os.listdir("/proc/self/fd")))
    cycle(10_000)
    gc.collect()
    # If 10,000 arrays leaked, they would occupy 40 MB.
    assert resident() - memory < 4 << 20
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_arrays_alive_at_interpreter_exit_do_not_crash() -> None:
    script = """
import sys, numpy as np, wholemem
there = np.arange(10)
here = wholemem.asarray(there)
class Keeps:
    pass
keeps = Keeps()
keeps.all = [here, here.numpy(), np.from_dlpack(here), here.memoryview(), here.__dlpack__(), keeps]
keeps.buffer = wholemem.asarray(bytearray(10))
sys.keeps = keeps
"""
    ended = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_shapes_and_types_match_numpy() -> None:
    for shape, dtype in (((2, 3), float), (4, "float"), ((), int), ([2], bool), (5, np.float32)):
        made, like = wholemem.zeros(shape, dtype), np.zeros(shape, dtype)
        assert (made.shape, made.dtype) == (like.shape, like.dtype.name)
        assert made.data_ptr() % 64 == 0 and not made.numpy().any()


def test_new_memory_is_not_touched_before_it_is_used() -> None:
    before = resident()
    array = wholemem.zeros(1 << 28, "uint8")
    assert resident() - before < 1 << 26
    array.numpy()[:] = 1
    assert resident() - before > 1 << 27


def test_numpy_gets_the_dtype_that_it_requests() -> None:
    array = wholemem.zeros(3, "int32")
    for made in (np.asarray(array, dtype="float64"), array.__array__("float64"), array.__array__(dtype="float64")):
        assert made.dtype == np.float64
    assert array.__array__().ctypes.data == array.data_ptr()


def test_numpy_gets_an_error_for_a_type_that_it_lacks() -> None:
    with pytest.raises(errors.Unsupported, match="numpy has no type bfloat16") as caught:
        np.asarray(wholemem.zeros(3, "bfloat16"))
    assert "torch" in str(caught.value.hint)


def test_a_reference_cycle_through_an_array_is_collected() -> None:
    class Own(bytearray):
        array: wholemem.Array

    class Named:
        def __init__(self) -> None:
            self.rows = np.zeros(3)
            self.__array_interface__ = self.rows.__array_interface__
            self.array = wholemem.asarray(self)

    def make(views: int) -> "weakref.ref[Any]":
        own = Own(8)
        own.array = wholemem.asarray(own)
        others = [own.array.as_readonly() for _ in range(views)]
        gone = weakref.ref(own)
        del own
        gc.collect()
        assert gone() is not None or not others, "others have it still"
        return gone

    gone = [make(0), make(2), weakref.ref(Named())]
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
