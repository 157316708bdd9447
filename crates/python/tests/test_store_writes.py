"""Tests frameworks that write to read-only objects: exports are copy-on-write, and the report of a fault names the object."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_server import StoreServer, address, map_of
from wholemem import errors, store
from launcher import run

HERE = Path(__file__).parent
LARGE = 3 << 20

TYPES = {np.dtype("uint8"): (1, 8), np.dtype("int64"): (0, 64)}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


READ_ONLY = 1

pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Careless:
    """A framework that writes to what it imports, as torch does: it ignores the read-only flag, or does not know it."""

    def __init__(self, array: store.Array, max_version: Any = (1, 0), **kwargs: Any) -> None:
        self.capsule = array.__dlpack__(max_version=max_version, **kwargs)
        if max_version is None:
            tensor = Tensor.from_address(pointer_of(self.capsule, b"dltensor"))
            self.flags = None
        else:
            versioned = Versioned.from_address(pointer_of(self.capsule, b"dltensor_versioned"))
            self.flags, tensor = versioned.flags, versioned.tensor
        self.address = tensor.data + tensor.byte_offset
        shape = [tensor.shape[n] for n in range(tensor.ndim)]
        size = int(np.prod(shape, dtype=np.int64)) * (tensor.bits // 8)
        kind = {value: key for key, value in TYPES.items()}[(tensor.code, tensor.bits)]
        memory: Any = (ctypes.c_uint8 * size).from_address(self.address)
        memory.capsule = self.capsule
        self.elements = np.frombuffer(memory, kind).reshape(shape)


@pytest.mark.parametrize("max_version", [None, (1, 0), (1, 3)])
@pytest.mark.parametrize("count", [10, 5000, LARGE])
def test_writes_of_a_framework_stay_in_its_own_tensor(client: store.Client, count: int, max_version: Any) -> None:
    expected = np.arange(count, dtype=np.uint8)
    client.put("before", np.full(count, 7, np.uint8))
    client.put("written", expected)
    client.put("behind", np.full(count, 8, np.uint8))
    array = client.get("written")
    first, second = Careless(array, max_version), Careless(array, max_version)
    assert first.flags == (None if max_version is None else READ_ONLY)
    np.testing.assert_array_equal(first.elements, expected)
    first.elements += 1
    np.testing.assert_array_equal(first.elements, expected + 1)
    others = [second.elements, Careless(array, max_version).elements, array.numpy(), client.get("written").numpy()]
    for other in others:
        np.testing.assert_array_equal(other, expected)
    assert (client.get("before").numpy() == 7).all() and (client.get("behind").numpy() == 8).all()


def test_writing_an_exported_pack_member_does_not_change_others(client: store.Client) -> None:
    client.put("several", {"a": np.arange(3), "b": np.arange(1000), "c": np.arange(5)})
    pack = client.get("several")
    for name in ["a", "b", "c"]:
        for array in [pack[name], client.get(f"several/{name}")]:
            careless = Careless(array)
            np.testing.assert_array_equal(careless.elements, np.arange(len(array)))
            careless.elements[:] = -1
    for name, count in {"a": 3, "b": 1000, "c": 5}.items():
        np.testing.assert_array_equal(pack[name].numpy(), np.arange(count))


def test_an_export_keeps_its_object_alive(client: store.Client) -> None:
    before = client.status().retired
    client.put("exported", np.full(1000, 5, np.uint8))
    careless = Careless(client.get("exported"))
    client.delete("exported")
    assert client.status().retired == before + 1
    for _ in range(20):
        client.put("next", np.zeros(1000, np.uint8))
    assert (careless.elements == 5).all(), "what was not written is the object's"
    del careless
    assert client.status().retired == before


def test_all_protocols_but_dlpack_share_read_only_memory(client: store.Client) -> None:
    client.put("shared", np.arange(5))
    array = client.get("shared")
    for view in [array.numpy(), np.asarray(array), np.asarray(array.memoryview())]:
        assert address(view) == array.data_ptr() and not view.flags.writeable
    exported = np.from_dlpack(array)
    assert not exported.flags.writeable
    # A copy-on-write export shares the memory of the object until it is written.
    assert map_of(array.data_ptr()) == ("r--s", map_of(address(exported))[1])
    assert map_of(address(exported))[0] == "rw-p"
    # With `lent()`, the caller promises not to write, so DLPack exports the memory of the object directly.
    assert Careless(array.lent(), None).address == Careless(array.lent()).address == array.data_ptr()
    # A copy has its own memory, so it is exported without the read-only flag.
    assert Careless(array, copy=True).flags == 2


def test_read_only_memory_without_a_file_is_exported_directly(client: store.Client) -> None:
    import wholemem

    array = wholemem.zeros((3,), "int64").as_readonly()
    assert Careless(array).address == array.data_ptr() and Careless(array).flags == READ_ONLY
    with pytest.raises(errors.CannotExport, match="the array is read-only, and DLPack before version 1 has no read-only flag"):
        array.__dlpack__()


def test_torch_writes_to_its_own_copy(client: store.Client) -> None:
    torch = pytest.importorskip("torch")
    client.put("of torch", np.arange(LARGE, dtype=np.float32))
    array = client.get("of torch")
    first, second = torch.from_dlpack(array), torch.from_dlpack(array)
    first.add_(1)
    assert float(first[7]) == 8 and float(second[7]) == 7 and array.numpy()[7] == 7


WRITES = """
import ctypes, os
from wholemem import store
client = store.Client(os.environ["SOCKET"])
small, other, array = (client.get(name) for name in ["small", "other", "large"])
{before}
ctypes.memset({where}, 1, 1)
"""


def fault(served: StoreServer, where: str, before: str = "", **environment: str) -> tuple[int, str]:
    """Runs a process that writes one byte to a memory address, and returns the exit status and the stderr of the process."""
    text = WRITES.format(where=where, before=before)
    ended = run(text, cwd=HERE, env={**os.environ, "SOCKET": served.socket, **environment})
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "where, named",
    [
        ("array.data_ptr() + 40", "byte 40 of `large`"),
        ("other.data_ptr()", "byte 0 of `other`"),
        ("small.data_ptr() + 9", "byte 9 of `small`"),
    ],
)
def test_a_write_fault_names_its_object_if_enabled(
    served: StoreServer, client: store.Client, where: str, named: str
) -> None:
    client.put("small", np.zeros(10, np.uint8))
    client.put("other", np.zeros(10, np.uint8))
    client.put("large", np.zeros(LARGE, np.uint8))
    code, output = fault(served, where, WHOLEMEM_FAULT_HANDLER="1")
    first, *rest = output.splitlines()
    assert first.startswith(f"wholemem: write to {named}, which is read-only (address 0x") and code == -signal.SIGSEGV
    # Python's own fault handler was installed before that of wholemem, and prints its message after it.
    assert rest[0] == "Fatal Python error: Segmentation fault"
    for environment in [{}, {"WHOLEMEM_FAULT_HANDLER": "0"}]:
        code, output = fault(served, where, **environment)
        assert (code, output.splitlines()[0]) == (-signal.SIGSEGV, "Fatal Python error: Segmentation fault")


def test_unrelated_faults_name_no_object(served: StoreServer, client: store.Client) -> None:
    for name in ["small", "other", "large"]:
        client.put(name, np.zeros(10, np.uint8))
    for where, before in [("16", ""), ("at", "at = small.data_ptr(); del small")]:
        code, output = fault(served, where, before, WHOLEMEM_FAULT_HANDLER="1")
        assert (code, output.splitlines()[0]) == (-signal.SIGSEGV, "Fatal Python error: Segmentation fault")
