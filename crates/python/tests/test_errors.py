"""Tests exceptions: their classes, messages and hints, and that they can be pickled."""

import builtins
import copy
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

import wholemem
from wholemem import ChunkedTensor, Communicator, WholeTensor, errors, store


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.PeerLost, ConnectionError),
        (errors.Timeout, TimeoutError),
        (errors.OutOfMemory, MemoryError),
        (errors.Unsupported, NotImplementedError),
        (errors.WrongValue, ValueError),
        (errors.WrongStride, ValueError),
        (errors.WrongDevice, ValueError),
        (errors.ReadOnly, ValueError),
        (errors.WrongType, TypeError),
        (errors.BadIndex, IndexError),
        (errors.OverQuota, MemoryError),
        (errors.NotFound, KeyError),
        (errors.NotAllowed, PermissionError),
        (errors.InUse, BufferError),
        (errors.ServerLost, ConnectionError),
        (errors.BadFile, OSError),
        (errors.Closed, ValueError),
        (errors.Forked, RuntimeError),
    ],
)
def test_every_exception_derives_from_error_and_a_builtin(kind: type, builtin: type) -> None:
    assert issubclass(kind, errors.Error)
    assert issubclass(kind, builtin)
    assert builtin in vars(builtins).values()


def test_all_exceptions_are_exported() -> None:
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours - {"_RankError"} == set(errors.__all__)


@pytest.mark.parametrize(
    "error",
    [
        errors.Error("it is gone", hint="look for it", code="7"),
        errors.PeerLost("rank 2 died", rank=2),
        errors.Timeout("no answer", missing=[1, 3], hint="wait longer"),
        errors.BadIndex("no row", position=5),
        errors.BadFile("no file"),
        errors.OutOfMemory("no room", hint="drop something"),
    ],
)
def test_exceptions_can_be_pickled(error: errors.Error) -> None:
    for there in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(there) is type(error)
        assert str(there) == str(error)
        assert vars(there) == vars(error)


@pytest.mark.parametrize("name", errors.__all__)
def test_exceptions_can_be_created_from_a_message_alone(name: str) -> None:
    error = getattr(errors, name)("first line\nsecond line")
    assert str(error) == "first line\nsecond line"
    assert not any(vars(error).values())
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_an_unknown_backend_error_lists_the_backends() -> None:
    with pytest.raises(errors.WrongValue, match="the backend `gpu` does not exist") as caught:
        wholemem.doctor().backend("gpu")
    assert caught.value.hint == "the backends are `cuda`, `host`"


def test_pickling_process_local_objects_raises(client: store.Client) -> None:
    (comm,) = Communicator.local(1, device="cpu")
    chunked = ChunkedTensor(comm, (5, 3), "float32")
    watch = client.watch("travel")
    client.put("travels", {"x": np.zeros(3)})
    draft = client.create("draft", (1 << 20,), "int8")
    here = [
        comm, chunked.tensor, chunked.local(), comm.mem_alloc(8), client, watch, draft, store.Mirror(draft),
        client.create_pack("pack", {}), client.get("travels"),
    ]  # fmt: skip
    for stays in here:
        for travel in (pickle.dumps, lambda it: pickle.dumps(it, 0), ForkingPickler.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(errors.WrongType, match=f"cannot pickle this `{type(stays).__name__}`") as caught:
                travel(stays)
            assert "main process" in str(caught.value) and "its own `store.Client`" in str(caught.value)
    for travel in (pickle.dumps, copy.deepcopy):
        with pytest.raises(errors.WrongType, match="cannot pickle this `WholeTensor`"):
            travel(chunked)
    # A shallow copy of a `ChunkedTensor` refers to the same table.
    assert copy.copy(chunked).tensor is chunked.tensor


def test_the_hint_is_on_its_own_line() -> None:
    assert str(errors.Error("it is gone", hint="look for it")) == "it is gone\nhint: look for it"
    assert str(errors.Error("it is gone")) == "it is gone"


def test_importing_loads_no_driver_and_starts_no_thread() -> None:
    script = """
import sys, os, wholemem
maps = open("/proc/self/maps").read()
assert "libcuda" not in maps, "the driver was loaded"
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started"
assert "numpy" not in sys.modules and "torch" not in sys.modules
print(wholemem.__version__)
"""
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == wholemem.__version__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm, table: WholeTensor.create(comm, (-1, 3), "float32"), "-1 is out of range"),
        (lambda comm, table: table.rows(-2, 5), "-2 is out of range"),
        (lambda comm, table: table.rows_of(-1), "-1 is out of range"),
        (lambda comm, table: table.write(-1, np.ones((1, 3), np.float32)), "-1 is out of range"),
        (lambda comm, table: comm.mem_alloc(-1), "-1 is out of range"),
        (lambda comm, table: comm.mem_alloc(1 << 70), "1180591620717411303424 is out of range"),
        (lambda comm, table: comm.broadcast(np.ones(2), -1), "-1 is out of range"),
        (lambda comm, table: Communicator.local(-1, device="cpu"), "-1 is out of range"),
        (lambda comm, table: wholemem.zeros((-3,), "int8"), "-3 is out of range"),
        (
            lambda comm, table: table.gather(np.array([0]), np.ones((1, 3), np.float32), dtype="float64"),
            "the output has the type float32, but `dtype` is float64",
        ),
        (lambda comm, table: comm.all_reduce(np.ones(2, "datetime64[s]")), "cannot be imported"),
    ],
)
def test_invalid_arguments_raise_with_a_hint(call: Any, message: str) -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (5, 3), "float32")
    with pytest.raises(errors.WrongValue, match=message) as caught:
        call(comm, table)
    assert caught.value.hint


def test_an_invalid_stream_is_rejected_on_the_cpu_too() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    with pytest.raises(errors.WrongType, match="`str` is not a stream"):
        comm.all_reduce(np.ones(2), stream="nonsense")
    assert comm.all_reduce(np.ones(2), stream=0).sum() == 2


def test_errors_of_closed_objects_have_a_hint() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    comm.close()
    with pytest.raises(errors.Closed, match="the communicator is closed") as caught:
        comm.barrier()
    assert caught.value.hint == "create another communicator"
