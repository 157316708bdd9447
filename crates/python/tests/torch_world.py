"""Fixtures and helpers of the tests of ``wholemem.torch``. Without torch, modules that import this are skipped."""

from __future__ import annotations

import faulthandler
import os
import subprocess
from typing import Any, Iterator, Sequence

import pytest
from launcher import PROGRAM, script

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

HAS_CUDA = torch.cuda.is_available()
# Compilation takes long, so a run that requires a GPU tests only the GPU.
ON_GPU = bool(os.environ.get("WHOLEMEM_REQUIRE_CUDA"))
DEVICES = ["cuda"] if ON_GPU else ["cpu", "cuda"] if HAS_CUDA else ["cpu"]
LIMIT = 300

# The tests ignore warnings of torch about its own code.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")

needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="torch finds no GPU")


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ends the run and prints all stacks if a test hangs."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test once for each device that torch can use, and returns the name of the device."""
    return str(request.param)


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    """Discards torch's compiled code after each test, so that tests do not affect each other."""
    yield
    torch.compiler.reset()


def ranks(size: int, text: str, *arguments: str) -> str:
    """Runs a Python program as ``size`` ranks and returns its output. Fails if a rank fails."""
    command = [PROGRAM, "launch", "-n", str(size), "--", *script(text), *arguments]
    # The timeout kills the launcher and all its ranks.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT - 60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def alone(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program and waits for it."""
    return subprocess.run([*script(text), *arguments], capture_output=True, text=True, timeout=LIMIT - 60)


__all__: Sequence[str] = [
    "DEVICES",
    "HAS_CUDA",
    "alone",
    "device",
    "reset_compiler",
    "limit",
    "needs_cuda",
    "quiet",
    "ranks",
    "torch",
]
