"""What tests of ``wholemem.torch`` have in common. Without torch, whoever imports this is skipped."""

from __future__ import annotations

import faulthandler
import os
import subprocess
from typing import Any, Iterator, Sequence

import pytest
from world import PROGRAM, script

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

HAS_CUDA = torch.cuda.is_available()
# What is compiled takes its time: where the GPU is what is tried, only there.
ON_GPU = bool(os.environ.get("WHOLEMEM_REQUIRE_CUDA"))
DEVICES = ["cuda"] if ON_GPU else ["cpu", "cuda"] if HAS_CUDA else ["cpu"]
LIMIT = 300

# torch warns of itself.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="torch finds no GPU")


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends the run if a test waits for ever, and says where."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device that torch finds here."""
    return str(request.param)


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    """What one test has compiled is not another's."""
    yield
    torch.compiler.reset()


def ranks(size: int, text: str, *arguments: str) -> str:
    """What a program of Python prints that runs as so many ranks, one of which fails if it does."""
    command = [PROGRAM, "launch", "-n", str(size), "--", *script(text), *arguments]
    # Killed with all its ranks if it does not end.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT - 60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def alone(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of Python to its end."""
    return subprocess.run([*script(text), *arguments], capture_output=True, text=True, timeout=LIMIT - 60)


__all__: Sequence[str] = [
    "DEVICES",
    "HAS_CUDA",
    "alone",
    "device",
    "forget_what_was_compiled",
    "limit",
    "needs_cuda",
    "quiet",
    "ranks",
    "torch",
]
