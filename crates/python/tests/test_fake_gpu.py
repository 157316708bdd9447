"""Tests arrays on a GPU with the fake CUDA driver: the devices that arrays report, and the streams that are passed to the
``__dlpack__`` of imported arrays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launcher import run

FAKE = os.environ.get("WHOLEMEM_FAKE_CUDA")

BEGINNING = """
import numpy as np, wholemem
from wholemem import errors
(comm,) = wholemem.Communicator.local(1, device="cuda")
table = wholemem.WholeTensor.create(comm, (100, 4), "float32")

class Relay:
    streams = []
    def __init__(self, array): self.array = array
    def __dlpack_device__(self): return self.array.__dlpack_device__()
    def __dlpack__(self, **kwargs):
        self.streams.append(kwargs.pop("stream", "none"))
        return self.array.__dlpack__(**kwargs)

def refused(kind, call):
    try:
        call()
    except kind as error:
        print(error)
"""


def on_a_gpu(tmp_path: Path, text: str) -> str:
    """Runs a program with the fake CUDA driver, and returns its output."""
    if FAKE is None:
        pytest.skip("WHOLEMEM_FAKE_CUDA names no driver")
    (tmp_path / "libcuda.so.1").symlink_to(FAKE)
    ended = run(BEGINNING + text, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_an_array_on_a_gpu_reports_its_device(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
local = table.local()
print(comm.device, local.device, local.__dlpack_device__(), hasattr(local, "__array_interface__"))
interface = local.__cuda_array_interface__
assert interface["data"] == (local.data_ptr(), False)
print(interface["version"], interface["shape"], interface["typestr"], interface["strides"], interface["stream"])
print(table.columns(1, 3).local().__cuda_array_interface__["strides"])
again = wholemem.asarray(Relay(local))
assert (again.data_ptr(), again.device) == (local.data_ptr(), "cuda:0")
refused(errors.Unsupported, local.numpy)
refused(errors.Unsupported, local.memoryview)
""",
    )
    assert output.splitlines() == [
        "cuda:0 cuda:0 (2, 0) False",
        "3 (100, 4) <f4 None None",
        "(16, 4)",
        "numpy cannot access memory on cuda:0",
        "hint: use torch or CuPy: `torch.from_dlpack(array)`",
        "the CPU cannot access memory on cuda:0",
    ]


def test_dlpack_producers_get_the_stream_of_the_call(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
other = wholemem.WholeTensor.create(comm, (3, 4), "float32")
class Stream:
    cuda_stream = 9
class NewStream:
    def __cuda_stream__(self): return (0, 11)
operand = Relay(other.local())
table.write(0, operand)
comm.barrier()
# The streams do not exist: the driver reports an error after the producer of the array has received the stream.
for stream in [7, Stream(), NewStream()]:
    refused(errors.Error, lambda: table.write(0, operand, stream=stream))
print(Relay.streams)
refused(errors.WrongType, lambda: table.write(0, operand, stream="fast"))
""",
    )
    assert "[1, 7, 9, 11]" in output
    assert output.splitlines()[-2:] == ["`str` is not a stream", "hint: pass a stream of torch or CuPy, or its handle as an int"]


def test_an_exported_array_is_ordered_after_its_last_stream(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
array = wholemem.WholeTensor.create(comm, (3, 4), "float32").local()
stream = lambda: array.__cuda_array_interface__["stream"]
print(stream(), repr(array.__dlpack__(stream=7, max_version=(1, 0)))[:36])
table.write(0, array)
print(stream(), array.as_readonly().__cuda_array_interface__["stream"])
# An export for the last stream of the array, or for -1, does not wait. For a stream that does not exist, the driver reports an
# error.
for same in [None, 0, 1, -1]:
    array.__dlpack__(stream=same)
refused(errors.Error, lambda: array.__dlpack__(stream=7))
refused(errors.Error, lambda: table.write(0, array, stream=7))
print(stream())
""",
    )
    assert output.splitlines()[:2] == ['None <capsule object "dltensor_versioned"', "1 1"]
    assert output.splitlines()[2:] and output.splitlines()[-1] == "1"


def test_the_driver_reports_the_device_of_an_interface_address(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
(second,) = wholemem.Communicator.local(1, device="cuda:1")
class WithInterface:
    def __init__(self, array, **overrides):
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **overrides}
        self.keeps = array
local = wholemem.WholeTensor.create(second, (10, 4), "float32").local()
again = wholemem.asarray(WithInterface(local))
print(again.device, again.shape, again.data_ptr() == local.data_ptr())
refused(errors.WrongDevice, lambda: table.write(0, again.as_readonly()))
own = np.zeros(8)
refused(errors.WrongDevice, lambda: wholemem.asarray(WithInterface(local, data=(own.ctypes.data, False))))
wholemem.asarray(WithInterface(local, stream=1))
refused(errors.Error, lambda: wholemem.asarray(WithInterface(local, stream=7)))
""",
    ).splitlines()
    assert output[:2] == ["cuda:1 (10, 4) True", "the array is on cuda:1, but the communicator is on cuda:0"]
    assert output[3].endswith("is not memory of a GPU") and len(output) > 5


def test_a_dlpack_copy_runs_on_the_consumers_stream(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
class Copying:
    def __init__(self, array): self.array = array
    def __dlpack_device__(self): return self.array.__dlpack_device__()
    def __dlpack__(self, **kwargs): return self.array.__dlpack__(**kwargs, copy=True)
other = wholemem.WholeTensor.create(comm, (2, 4), "float32", location="host")
other.local().numpy()[:] = 5
table.write(0, other.local())
comm.barrier()
copied = wholemem.asarray(Copying(table.rows(0, 2).local()))
print(copied.device, copied.shape, copied.data_ptr() != table.local().data_ptr(), copied.readonly)
other.local().numpy()[:] = 0
other.write(0, copied)
comm.barrier()
print(other.local().numpy().tolist())
""",
    )
    assert output.splitlines() == ["cuda:0 (2, 4) True False", "[[5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]]"]


def test_host_tables_of_a_gpu_rank_are_cpu_memory(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
table = wholemem.WholeTensor.create(comm, (10, 2), "int32", location="host")
local = table.local()
print(local.device, local.__dlpack_device__())
local.numpy()[:] = 7
assert np.from_dlpack(local).sum() == 140
""",
    )
    assert output == "cuda_host (1, 0)\n"


def test_a_host_tensor_is_rejected_by_a_gpu_table(tmp_path: Path) -> None:
    output = on_a_gpu(tmp_path, 'refused(errors.WrongDevice, lambda: table.write(0, np.zeros((1, 4), "float32")))')
    assert output == "the array is on cpu, but the communicator is on cuda:0\nhint: move it to cuda:0 first\n"


def test_arrays_of_every_kind_of_memory_are_registered_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Collective kernels do nothing on the fake driver, so the test checks only which calls are staged.
    monkeypatch.setenv("WHOLEMEM_FAKE_CUDA_SKIP_KERNELS", "1")
    output = on_a_gpu(
        tmp_path,
        """
import threading
failed = []
def work(comm):
    try:
        table = wholemem.WholeTensor.create(comm, (1000, 4), "float32")
        # The output of a call without `out` is memory of `cudaMalloc`; that of a table is virtual memory.
        for array in [comm.all_reduce(table.rows(0, 100).local()), table.rows(0, 100).local()]:
            staged = comm.staged_calls
            comm.all_reduce(array, array)
            assert comm.staged_calls == staged + 1
            window = comm.window_register(array)
            assert window.local().data_ptr() == array.data_ptr() and window.nbytes == 1600
            comm.all_reduce(array, array)
            assert comm.staged_calls == staged + 1
            del window
            comm.all_reduce(array, array)
            assert comm.staged_calls == staged + 2
        host = wholemem.WholeTensor.create(comm, (10, 2), "int32", location="host")
        refused(errors.Error, lambda: comm.window_register(host.local()))
        refused(errors.ReadOnly, lambda: comm.window_register(table.local().as_readonly()))
        comm.barrier()
    except BaseException as error:
        failed.append(error)
        comm.abort()
threads = [threading.Thread(target=work, args=(comm,)) for comm in wholemem.Communicator.local(1, device="cuda")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
print("registered")
""",
    )
    assert output.splitlines()[-1] == "registered"


def test_the_local_rank_selects_a_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**described, "WHOLEMEM_RENDEZVOUS": tmp_path.name, "WHOLEMEM_FAKE_CUDA_DEVICES": "2"}.items():
        monkeypatch.setenv(name, value)
    output = on_a_gpu(
        tmp_path,
        """
for device in (None, "cuda", "cuda:0"):
    with wholemem.Communicator.from_env(device=device) as joined:
        print(joined.device)
""",
    )
    assert output.split() == ["cuda:1", "cuda:1", "cuda:0"]
