"""Arrays of a GPU, over a driver without one: where they say they are, and which stream they are asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from world import run

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
    def __dlpack__(self, **asked):
        self.streams.append(asked.pop("stream", "none"))
        return self.array.__dlpack__(**asked)

def refused(kind, call):
    try:
        call()
    except kind as error:
        print(error)
"""


def on_a_gpu(tmp_path: Path, text: str) -> str:
    """What a program prints that finds the driver which has no GPU."""
    if FAKE is None:
        pytest.skip("WHOLEMEM_FAKE_CUDA names no driver")
    (tmp_path / "libcuda.so.1").symlink_to(FAKE)
    ended = run(BEGINNING + text, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_an_array_of_a_gpu_says_so(tmp_path: Path) -> None:
    said = on_a_gpu(
        tmp_path,
        """
local = table.local()
print(comm.device, local.device, local.__dlpack_device__(), hasattr(local, "__array_interface__"))
says = local.__cuda_array_interface__
assert says["data"] == (local.data_ptr(), False)
print(says["version"], says["shape"], says["typestr"], says["strides"], says["stream"])
print(table.columns(1, 3).local().__cuda_array_interface__["strides"])
again = wholemem.asarray(Relay(local))
assert (again.data_ptr(), again.device) == (local.data_ptr(), "cuda:0")
refused(errors.Unsupported, local.numpy)
refused(errors.Unsupported, local.memoryview)
""",
    )
    assert said.splitlines() == [
        "cuda:0 cuda:0 (2, 0) False",
        "3 (100, 4) <f4 None None",
        "(16, 4)",
        "numpy does not reach memory of cuda:0",
        "hint: take it with torch or CuPy: `torch.from_dlpack(array)`",
        "the processor does not reach memory of cuda:0",
    ]


def test_arrays_are_asked_for_the_stream_that_uses_them(tmp_path: Path) -> None:
    said = on_a_gpu(
        tmp_path,
        """
other = wholemem.WholeTensor.create(comm, (3, 4), "float32")
class Stream:
    cuda_stream = 9
class NewStream:
    def __cuda_stream__(self): return (0, 11)
given = Relay(other.local())
table.write(0, given)
comm.barrier()
# No such streams: the driver is asked, and the array was asked before.
for stream in [7, Stream(), NewStream()]:
    refused(errors.Error, lambda: table.write(0, given, stream=stream))
print(Relay.streams)
refused(errors.WrongType, lambda: table.write(0, given, stream="fast"))
""",
    )
    assert "[1, 7, 9, 11]" in said
    assert said.splitlines()[-2:] == ["`str` is no stream", "hint: give a stream of torch or CuPy, or its number"]


def test_memory_of_the_machine_is_the_processors_too(tmp_path: Path) -> None:
    said = on_a_gpu(
        tmp_path,
        """
table = wholemem.WholeTensor.create(comm, (10, 2), "int32", location="host")
local = table.local()
print(local.device, local.__dlpack_device__())
local.numpy()[:] = 7
assert np.from_dlpack(local).sum() == 140
""",
    )
    assert said == "cuda_host (1, 0)\n"


def test_an_array_of_the_machine_is_refused(tmp_path: Path) -> None:
    said = on_a_gpu(tmp_path, 'refused(errors.WrongDevice, lambda: table.write(0, np.zeros((1, 4), "float32")))')
    assert said == "the array is on cpu, and the communicator on cuda:0\nhint: move it to cuda:0 first\n"
