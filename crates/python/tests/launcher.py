"""Ranks for tests: threads of this process, or processes that a launcher starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import Any, Callable, Sequence

import wholemem
from wholemem import Communicator

PROGRAM = os.environ.get("WHOLEMEM_PROGRAM", "wholemem")


def run_ranks(size: int, work: Callable[[Communicator], Any], *, timeout: float = 60) -> list[Any]:
    """Runs ``work`` as every rank of a new group of threads, and returns the results; raises the first exception."""
    outcomes: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(comm: Communicator) -> None:
        try:
            with comm:
                outcomes[comm.rank] = work(comm)
        except BaseException as error:
            errors.append(error)

    ranks = Communicator.local(size, device="cpu", timeout=timeout)
    threads = [threading.Thread(target=run, args=(comm,)) for comm in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outcomes


def script(text: str) -> list[str]:
    """Returns the command that runs a Python program."""
    return [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text)]


def run(text: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a Python program and waits for it."""
    return subprocess.run(script(text), capture_output=True, text=True, **options)


def launch(
    size: int, text: str, *, arguments: Sequence[str] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program as ``size`` ranks."""
    command = [PROGRAM, "launch", "-n", str(size), "--", *script(text), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


__all__ = ["PROGRAM", "descriptors", "run_ranks", "launch", "resident", "run", "script", "wholemem"]
