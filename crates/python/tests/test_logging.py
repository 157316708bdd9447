"""Tests the log events that ``WHOLEMEM_LOG`` selects, which the package passes to ``logging``."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from launcher import launch, run

# Reduces an array of ordinary memory and an array in a window, on two ranks that are threads.
PROGRAM = """
import threading
import numpy, wholemem

def work(comm):
    with comm:
        window = comm.mem_alloc(1 << 20)
        y = window.local("float32", (10_000,))
        for _ in range(3):
            comm.all_reduce(numpy.ones(10_000, "float32"))
            comm.all_reduce(y, y)

ranks = wholemem.Communicator.local(2, device="cpu", timeout=30)
threads = [threading.Thread(target=work, args=(comm,)) for comm in ranks]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""

# Prints every record of the logger `wholemem` and its children.
PRINTED = """
import logging, sys
class Printer(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.name, record.getMessage())
logging.getLogger().addHandler(Printer())
"""


def run_with(filter: str, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("WHOLEMEM_LOG", "NCCL_DEBUG")}
    return run(text, env={**inherited, "WHOLEMEM_LOG": filter, **variables}, timeout=120)


def lines_of(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_records_have_the_logger_of_their_module() -> None:
    lines = lines_of(run_with("wholemem=debug", PRINTED + PROGRAM))
    names = {line.split()[1] for line in lines}
    assert {"wholemem.comm.bootstrap", "wholemem.communicator", "wholemem.collective"} <= names
    assert {line.split()[0] for line in lines} == {"DEBUG"}


def test_every_kind_of_call_is_logged_once_with_its_memory_path() -> None:
    lines = lines_of(run_with("wholemem.collective=debug", PRINTED + PROGRAM))
    for rank in range(2):
        start = f'DEBUG wholemem.collective first collective call of this kind rank={rank} call="all_reduce" dtype=f32 len=40000'
        calls = [line for line in lines if line.startswith(start)]
        staged, window = calls
        assert 'input="staged"' in staged and 'reason="the input is in no window, and not registered"' in staged
        assert 'input="window"' in window and 'reason="nothing is staged"' in window


def test_records_without_a_handler_are_written_to_stderr() -> None:
    ended = run_with("wholemem::communicator=debug", PROGRAM)
    assert (ended.returncode, ended.stdout) == (0, "")
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("DEBUG wholemem.communicator: created a communicator rank=") for line in lines)


def test_a_program_can_disable_a_logger() -> None:
    silenced = 'import logging; logging.getLogger("wholemem.comm").setLevel("ERROR")\n'
    lines = lines_of(run_with("wholemem=debug", PRINTED + silenced + PROGRAM))
    assert {line.split()[1] for line in lines} == {"wholemem.communicator", "wholemem.collective"}


def test_nothing_is_installed_without_the_variable() -> None:
    text = """
    import sys, wholemem, logging
    print("wholemem._logging" in sys.modules, logging.getLogger("wholemem").handlers)
    """
    assert lines_of(run_with("", text)) == ["False []"]


def test_an_invalid_filter_is_an_error_of_the_import() -> None:
    text = """
    try:
        import wholemem
    except RuntimeError as error:
        print(type(error).__name__, error)
    """
    (line,) = lines_of(run_with("loud", text))
    assert line == (
        "BadEnvironment the environment variable `WHOLEMEM_LOG` has the invalid value `loud`: `loud` is neither a level "
        "(off, error, warn, info, debug, trace) nor a target of wholemem, with or without a level, such as "
        "`wholemem::collective=debug` or `wholemem::collective`"
    )


def test_the_variable_of_nccl_is_read_if_ours_is_not_set() -> None:
    lines = lines_of(run_with("", PRINTED + PROGRAM, NCCL_DEBUG="INFO"))
    assert {line.split()[0] for line in lines} == {"DEBUG"}
    assert lines_of(run_with("error", PRINTED + PROGRAM, NCCL_DEBUG="INFO")) == []


def test_a_handler_that_calls_the_package_does_not_deadlock() -> None:
    # Every record of a rank makes a call that waits for no other rank, and which is logged itself.
    text = """
    import logging
    import wholemem
    calls = []
    class Caller(logging.Handler):
        def emit(self, record):
            calls.append(record.name)
            if len(calls) < 100:
                (comm,) = wholemem.Communicator.local(1, device="cpu")
                comm.close()
    logging.getLogger("wholemem").addHandler(Caller())
    (comm,) = wholemem.Communicator.local(1, device="cpu")
    comm.close()
    # The records that are left are delivered when the interpreter ends.
    import atexit
    atexit._run_exitfuncs()
    print(len(calls) >= 100)
    """
    assert lines_of(run_with("debug", text)) == ["True"]


def test_a_handler_whose_calls_are_logged_without_end_does_not_keep_the_interpreter_alive() -> None:
    text = """
    import logging
    import wholemem
    class Caller(logging.Handler):
        def emit(self, record):
            (comm,) = wholemem.Communicator.local(1, device="cpu")
            comm.close()
    logging.getLogger("wholemem").addHandler(Caller())
    (comm,) = wholemem.Communicator.local(1, device="cpu")
    comm.close()
    print("done")
    """
    assert lines_of(run_with("wholemem::communicator=debug", text)) == ["done"]


def test_a_forked_child_neither_hangs_nor_repeats_the_records_of_its_parent() -> None:
    text = """
    import os, sys
    import wholemem
    (comm,) = wholemem.Communicator.local(1, device="cpu")
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except wholemem.errors.Forked:
            sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    lines = lines_of(run_with("wholemem::communicator=debug", PRINTED + "\nif True:" + text))
    created = [line for line in lines if "created a communicator" in line]
    assert len(created) == 1 and lines[-1] == "7"


def test_ranks_of_a_launcher_log_with_their_prefix() -> None:
    text = """
    import wholemem
    with wholemem.Communicator.from_env(device="cpu") as comm:
        comm.barrier()
    """
    ended = launch(2, text, env={**os.environ, "WHOLEMEM_LOG": "wholemem::communicator=debug"})
    assert ended.returncode == 0
    for rank in range(2):
        assert f"wholemem.communicator: created a communicator rank={rank} ranks=2 device=host:0" in ended.stderr


@pytest.mark.parametrize("signal_at", [1, 3])
def test_an_exception_of_a_handler_is_raised_by_the_call(signal_at: int) -> None:
    text = f"""
    import logging, wholemem
    class Interrupting(logging.Handler):
        count = 0
        def emit(self, record):
            self.count += 1
            if self.count == {signal_at}:
                raise KeyboardInterrupt
    logging.getLogger("wholemem").addHandler(Interrupting())
    try:
        for _ in range(100):
            wholemem.Communicator.local(1, device="cpu")
    except KeyboardInterrupt:
        print("interrupted")
    """
    ended: Any = run_with("debug", text)
    # The delivery thread may have delivered the record; then the exception is written to stderr, as those of all threads.
    assert ended.stdout == "interrupted\n" or "KeyboardInterrupt" in ended.stderr
