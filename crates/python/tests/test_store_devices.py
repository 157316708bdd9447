"""Tests objects on a GPU with the fake CUDA driver: arrays are put, got, drafted and mirrored on their GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Iterator

import pytest

from store_server import StoreServer
from launcher import run

FAKE = os.environ.get("WHOLEMEM_FAKE_CUDA")

BEGINNING = """
import sys
import numpy as np, wholemem
from wholemem import errors, store
(comm,) = wholemem.Communicator.local(1, device="cuda")
client = store.Client()
def on_gpu(values, comm=comm):
    values = np.ascontiguousarray(values)
    host = wholemem.WholeTensor.create(comm, values.shape, values.dtype, location="host")
    host.local().numpy()[:] = values
    there = wholemem.WholeTensor.create(comm, values.shape, values.dtype)
    there.write(0, host.local())
    comm.barrier()
    return there.local()
def values(array):
    with store.Mirror(array) as mirror:
        return mirror.array.numpy().copy()
def refused(kind, call):
    try:
        call()
    except kind as error:
        print(error)
"""

Program = Callable[[str], str]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """Starts a store, and returns a function that runs a Python program as a client of the store and returns its output. The store
    and the program use the fake CUDA driver."""
    if FAKE is None:
        pytest.skip("WHOLEMEM_FAKE_CUDA names no driver")
    (tmp_path / "libcuda.so.1").symlink_to(FAKE)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    with StoreServer(device_size="64MiB", env=environment) as served:

        def runs(text: str) -> str:
            ended = run(BEGINNING + text, env={**environment, "WHOLEMEM_SOCKET": served.socket})
            assert (ended.returncode, ended.stderr) == (0, "")
            return ended.stdout

        yield runs


def test_an_array_of_a_gpu_stays_on_it(program: Program) -> None:
    output = program(
        """
operand = np.arange(3 << 20, dtype=np.float32).reshape(-1, 4)
print(client.put("large", on_gpu(operand)), client.put("small", on_gpu(operand[:10])))
for name, expected in [("large", operand), ("small", operand[:10])]:
    array = client.get(name)
    print(array.device, array.shape, array.readonly, client.stat(name).device)
    assert (values(array) == expected).all()
    assert client.get(name).data_ptr() == array.data_ptr()
before = client.status()
client.delete("large")
print(before.host_used, before.device_used - client.status().device_used == operand.nbytes)
"""
    )
    assert output.splitlines() == [
        "1 1",
        "cuda:0 (786432, 4) True cuda",
        "cuda:0 (10, 4) True cuda",
        "0 True",
    ]


def test_element_types_that_numpy_lacks_are_preserved(program: Program) -> None:
    output = program(
        """
for dtype in ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64"]:
    table = wholemem.WholeTensor.create(comm, (6, 2), dtype)
    client.put("x", table.local())
    print(client.get("x").dtype, client.get("x").shape)
client.put("none", wholemem.WholeTensor.create(comm, (6, 2), "int8").rows(3, 3).local())
print(client.get("none").shape)
"""
    )
    assert output.splitlines() == [
        *(f"{dtype} (6, 2)" for dtype in ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64"]),
        "(0, 2)",
    ]


def test_a_pack_is_on_one_gpu(program: Program) -> None:
    output = program(
        """
operand = {f"layer{i}": np.full((1000 * i, 3), i, np.int16) for i in range(1, 40)}
client.put("model", {name: on_gpu(array) for name, array in operand.items()})
model = client.get("model")
for name, array in model.items():
    assert array.device == "cuda:0" and array.readonly
    assert (values(client.get("model/" + name)) == operand[name]).all()
print(len(model), client.stat("model").device)
(second,) = wholemem.Communicator.local(1, device="cuda:1")
refused(errors.WrongDevice, lambda: client.put("mixed", {"a": on_gpu(operand["layer1"]), "b": operand["layer2"]}))
refused(errors.WrongDevice, lambda: client.put("mixed", {
    "a": on_gpu(operand["layer1"]), "b": on_gpu(operand["layer2"], second)}))
refused(errors.WrongStride, lambda: client.put("cut", {
    "a": wholemem.WholeTensor.create(comm, (9, 9), "int8").columns(1, 3).local()}))
print(client.list("mixed"), client.list("cut"), client.status().unsealed)
"""
    )
    hint = "hint: a pack is on one device: move the arrays to one device, or put two packs"
    assert output.splitlines() == [
        "39 cuda",
        "`a` is on cuda:0, but `b` is on cpu",
        hint,
        "`a` is on cuda:0, but `b` is on cuda:1",
        hint,
        "`a` is not contiguous: it has strides [9, 1] and shape [9, 2]",
        "hint: make it contiguous first",
        "[] [] 0",
    ]


def test_drafts_on_a_gpu_are_written_in_place(program: Program) -> None:
    output = program(
        """
with client.create("drafted", (1000, 7), "int32", device="cuda") as draft:
    print(draft.array[0])
    other = wholemem.WholeTensor.create(comm, (1000, 7), "int32")
    other.write(0, on_gpu(np.full((1000, 7), 5, np.int32)))
    other.read(0, draft.array)
    comm.barrier()
print((values(client.get("drafted")) == 5).all())
with client.create("mirrored", (1 << 20,), "float32", device="cuda:1") as draft:
    with store.Mirror(draft, copy_in=False) as mirror:
        mirror.array.numpy()[:] = 7
array = client.get("mirrored")
print(array.device, (values(array) == 7).all())
with client.create_pack("pack", {"a": ((3,), "float64"), "b": ((4,), "bfloat16")}, device="cuda") as draft:
    print(draft["a"].device, draft["b"].dtype)
print(client.get("pack/b"))
draft = client.create("kept", (4,), "int8", device="cuda")
# On a GPU, remaining arrays of a draft do not prevent sealing, and stay valid.
array = draft.array
print(draft.seal(stream=0), client.publish("again", client.get("kept")))
refused(errors.WrongDevice, lambda: client.create("x", (1,), "int8", device="tpu"))
"""
    )
    assert output.splitlines() == [
        "Array([0, 0, 0, 0, 0, 0, 0], shape=(7,), dtype=int32, device=cuda:0)",
        "True",
        "cuda:1 True",
        "cuda:0 bfloat16",
        "Array([0., 0., 0., 0.], shape=(4,), dtype=bfloat16, device=cuda:0, readonly)",
        "1 1",
        "the device `tpu` does not exist",
        "hint: use `cpu`, `cuda`, or a number such as `cuda:1`",
    ]


def test_an_array_is_shared_without_a_copy(program: Program) -> None:
    output = program(
        """
operand = np.arange(3 << 20, dtype=np.float32).reshape(-1, 4)
array = on_gpu(operand)
print(client.share("shared", array), client.share("row", wholemem.asarray(array)))
there = client.get("shared")
assert (values(there) == operand).all() and there.data_ptr() != array.data_ptr()
print(there, wholemem._native.collect_shared())
# The object shares the memory of the array: a write of the creator, which is not allowed, is visible in the object.
zero = wholemem.WholeTensor.create(comm, (1 << 10, 4), "float32").local()
client.share("zero", zero)
wholemem.WholeTensor.create(comm, (1 << 10, 4), "float32").read(0, zero)
# The creator drops the arrays, but the store's objects keep the memory.
del array, zero
print((values(client.get("shared")) == operand).all())
client.delete("shared")
print(wholemem._native.collect_shared())
del there
client.delete("zero")
client.delete("row")
print(wholemem._native.collect_shared(), client.status().device_used)
"""
    )
    assert output.splitlines() == [
        "1 1",
        "Array(shape=(786432, 4), dtype=float32, device=cuda:0, readonly) 2",
        "True",
        "3",
        "0 0",
    ]


def test_memory_that_cannot_be_shared_is_rejected(program: Program) -> None:
    output = program(
        """
table = wholemem.WholeTensor.create(comm, (100, 4), "float32")
class Copying:
    def __dlpack_device__(self): return table.local().__dlpack_device__()
    def __dlpack__(self, **kwargs): return table.local().__dlpack__(**kwargs, copy=True)
for array in [np.zeros(4), Copying(), table.rows(5, 5).local()]:
    refused(errors.Unsupported, lambda: client.share("x", array))
refused(errors.WrongStride, lambda: client.share("x", table.columns(1, 3).local()))
print(client.list(), client.status().device_used)
"""
    )
    hint = "hint: create the tensor in `wholemem.torch.pool.mem_pool()`, or use `put`, which copies"
    lines = output.splitlines()
    assert lines[0] == "an array on cpu cannot be shared without a copy"
    assert lines[2].startswith("the memory of the array was not allocated to be shared")
    assert lines[1] == lines[3] == lines[5] == hint
    assert lines[-3].startswith("the array is not contiguous") and lines[-1] == "[] 0"


POOL = """
import ctypes
native = ctypes.CDLL(wholemem._native.__file__)
alloc, free = native.wholemem_torch_alloc, native.wholemem_torch_free
alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
class Tensor:
    def __init__(self, address, shape, typestr):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": typestr, "data": (address, False), "strides": None}
def fill(tensor, value):
    shape = tensor.__cuda_array_interface__["shape"]
    other = wholemem.WholeTensor.create(comm, shape, tensor.__cuda_array_interface__["typestr"][1:].replace("f4", "float32"))
    other.write(0, on_gpu(np.full(shape, value, np.float32)))
    other.read(0, tensor)
    comm.barrier()
"""


def test_tensors_of_the_pool_are_published_without_a_copy(program: Program) -> None:
    output = program(
        POOL
        + """
print(alloc(1 << 60, 0, None), alloc(4096, 99, None), alloc(-1, 0, None))
piece = alloc((20 << 20) - 5, 0, None)
assert wholemem.asarray(Tensor(piece, (4,), "<f4")).device == "cuda:0"
one, two = Tensor(piece, (1 << 20,), "<f4"), Tensor(piece + (8 << 20), (1000, 3), "<f4")
fill(one, 1), fill(two, 2)
print(client.share("one", one), client.status().device_used >> 20)
print(client.share("two", two), client.status().device_used >> 20)
# The tensor is shared again after its first object was deleted.
client.delete("one")
print(client.share("one", one), client.status().device_used >> 20)
client.delete("one")
client.delete("two")
print(wholemem._native.collect_shared(), client.status().device_used >> 20)
print(client.share("one", one), client.status().device_used >> 20)
# torch frees the memory segment, but the store keeps it for the object.
free(piece, 20 << 20, 0, None)
free(piece, 20 << 20, 0, None)
print((values(client.get("one")) == 1).all())
client.close()
"""
    )
    assert output.splitlines() == ["None None None", "1 20", "1 20", "1 20", "0 0", "1 20", "True"]


def test_shared_memory_outlives_its_process(program: Program) -> None:
    program(POOL + 'piece = alloc(2 << 20, 1, None)\nclient.share("left", wholemem.asarray(Tensor(piece, (7,), "<f4")))')
    output = program('print(client.get("left"))')
    assert output == "Array([0., 0., 0., 0., 0., 0., 0.], shape=(7,), dtype=float32, device=cuda:1, readonly)\n"


def test_the_device_quota_is_enforced(program: Program) -> None:
    output = program(
        """
refused(errors.OverQuota, lambda: client.put("x", wholemem.WholeTensor.create(comm, (65 << 20,), "int8").local()))
print(client.status().device_used)
"""
    )
    assert "hint: it is larger than the whole store, so waiting does not help" in output
    assert output.splitlines()[-1] == "0"


def test_a_store_without_gpus_rejects_gpu_arrays(tmp_path: Path, served: StoreServer) -> None:
    if FAKE is None:
        pytest.skip("WHOLEMEM_FAKE_CUDA names no driver")
    (tmp_path / "libcuda.so.1").symlink_to(FAKE)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "WHOLEMEM_SOCKET": served.socket}
    ended = run(BEGINNING + 'refused(errors.WrongDevice, lambda: client.put("x", on_gpu(np.zeros(4))))', env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "GPU" in ended.stdout or "device" in ended.stdout
