"""Exceptions: what they are, what they say, and that they travel."""

import builtins
import pickle
import subprocess
import sys

import pytest

import wholemem
from wholemem import errors


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
def test_each_is_ours_and_a_builtin(kind: type, builtin: type) -> None:
    assert issubclass(kind, errors.Error)
    assert issubclass(kind, builtin)
    assert builtin in vars(builtins).values()


def test_all_are_named() -> None:
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours - {"_OfRank"} == set(errors.__all__)


@pytest.mark.parametrize(
    "error",
    [
        errors.Error("it is gone", hint="look for it", code="7"),
        errors.PeerLost("rank 2 died", rank=2),
        errors.Timeout("no answer", missing=[1, 3], hint="wait longer"),
        errors.BadIndex("no row", position=5),
        errors.BadFile("no file"),
    ],
)
def test_they_travel_between_processes(error: errors.Error) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_the_hint_is_a_line_of_its_own() -> None:
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
