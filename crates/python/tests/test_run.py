"""Tests ``wholemem.run``: functions of modules, scripts and notebooks run as ranks, and no process is left behind."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

import wholemem
from launcher import descriptors, run, script
from wholemem import Communicator, errors, launching

LIMIT = 60

ranks = functools.partial(wholemem.run, device="cpu", timeout=LIMIT, time_limit=LIMIT)


def total(comm: Communicator, scale: int = 1) -> tuple[int, int, int]:
    values = comm.all_reduce(np.array([scale * (comm.rank + 1)]))
    return comm.rank, int(values[0]), os.getpid()


def children() -> set[int]:
    """Returns the process ids of the children of this process, also of those that have ended."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for path in lists for child in path.read_text().split()}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = descriptors(), children()
    yield
    assert (descriptors(), children()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wholemem-rank")]


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_results_are_returned_in_the_order_of_the_ranks(size: int, threads: bool) -> None:
    results = ranks(total, 10, ranks=size, threads=threads)
    assert [(rank, value) for rank, value, _ in results] == [(rank, 5 * size * (size + 1)) for rank in range(size)]
    processes = {process for _, _, process in results}
    assert len(processes) == (1 if threads else size) and (os.getpid() in processes) == threads


@pytest.mark.parametrize("threads", [False, True])
def test_local_functions_and_their_variables_are_sent(threads: bool) -> None:
    scale, table = 3, np.arange(5)

    def factorial(number: int) -> int:
        return 1 if number == 0 else number * factorial(number - 1)

    def work(comm: Communicator, *values: int, offset: int = 2) -> Any:
        """Documented."""
        unassigned = [lambda: comm]
        return scale * comm.rank + offset + sum(values), table.sum(), factorial(5), len(unassigned), work.__doc__

    assert ranks(work, 1, 2, ranks=2, threads=threads) == [(5, 10, 120, 1, "Documented."), (8, 10, 120, 1, "Documented.")]
    assert ranks(lambda comm: comm.size, ranks=2, threads=threads) == [2, 2]
    assert ranks(functools.partial(total, scale=2), ranks=2, threads=threads)[1][:2] == (1, 6)


def test_ranks_have_the_variables_of_a_launcher() -> None:
    def work(comm: Communicator) -> Any:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        return [os.environ[name] for name in names], sys.stdin.read(), sys.argv

    results = ranks(work, ranks=2)
    assert results == [([str(rank), str(rank), "2", "2", "0", "127.0.0.1"], "", sys.argv) for rank in range(2)]
    assert "RANK" not in os.environ


def test_output_has_the_rank_as_prefix(capsys: Any) -> None:
    def work(comm: Communicator) -> None:
        for rank in range(comm.size):
            if rank == comm.rank:
                print("one\ntwo", comm.rank)
                print("without end", end="", file=sys.stderr)
            comm.barrier()

    ranks(work, ranks=2)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] one", "[0] two 0", "[1] one", "[1] two 1"]
    assert sorted(shown.err.splitlines()) == ["[0] without end", "[1] without end"]


def test_large_arguments_and_results_are_sent() -> None:
    large = np.random.default_rng(0).integers(0, 256, 5 << 20, np.uint8)
    for result in ranks(lambda comm, array: array + comm.rank, large, ranks=2):
        large_result = result
    np.testing.assert_array_equal(large_result, large + 1)


class Refused(Exception):
    """An exception with a constructor that pickle cannot call."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} {right}")


@pytest.mark.parametrize("threads", [False, True])
def test_an_exception_of_a_rank_is_raised_and_ends_the_other_ranks(threads: bool) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 1:
            raise LookupError("nothing here")
        comm.barrier()

    with pytest.raises(LookupError, match="^'?nothing here") as caught:
        ranks(work, ranks=3, threads=threads)
    if not threads:
        shown = str(caught.value.__cause__)
        assert "Traceback (most recent call last)" in shown and "in work" in shown and "_rank_process" not in shown
        assert shown.rstrip().endswith("LookupError: nothing here")
    if sys.version_info >= (3, 11):
        assert getattr(caught.value, "__notes__") == ["raised on rank 1"]


def test_exceptions_that_cannot_be_sent_are_described() -> None:
    def refuse(comm: Communicator) -> None:
        raise Refused(1, 2)

    with pytest.raises(errors.RankFailed, match="rank 0 failed: .*Refused: 1 2") as caught:
        ranks(refuse, ranks=1)
    assert caught.value.rank == 0 and "in refuse" in str(caught.value.__cause__)


@pytest.mark.parametrize("threads", [False, True])
def test_a_rank_that_calls_exit_has_failed(threads: bool) -> None:
    with pytest.raises(errors.RankFailed, match="rank 0 failed: ") as caught:
        ranks(lambda comm: sys.exit(3), ranks=1, threads=threads)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process of rank 1 was killed by SIGKILL"),
        (lambda: os._exit(7), "the process of rank 1 exited with the code 7"),
    ],
)
def test_a_process_that_ends_is_reported(end: Any, message: str) -> None:
    def work(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            end()
        comm.barrier()

    with pytest.raises(errors.PeerLost, match=message) as caught:
        ranks(work, ranks=3)
    assert caught.value.rank == 1


def test_the_time_limit_ends_ranks_that_do_not_return() -> None:
    def work(comm: Communicator) -> None:
        try:
            while comm.rank != 0:
                pass
        finally:
            print("cleaned up", flush=True)

    # On a busy machine, rank 0 has not returned either.
    with pytest.raises(errors.Timeout, match="^ranks (0, )?1, 2 did not return within 1.5 seconds") as caught:
        wholemem.run(work, ranks=3, device="cpu", time_limit=1.5)
    assert caught.value.missing[-2:] == (1, 2)


def test_threads_that_wait_for_a_rank_are_ended_by_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    running = []

    def work(comm: Communicator) -> None:
        running.append(threading.current_thread())
        comm.barrier() if comm.rank else release.wait()

    monkeypatch.setattr(launching, "_GRACE", 0.1)
    with pytest.raises(errors.Timeout, match="^ranks 0, 1 did not return within 0.2 seconds"):
        wholemem.run(work, ranks=2, device="cpu", threads=True, time_limit=0.2)
    release.set()
    for thread in running:
        thread.join()


def test_a_rank_that_ignores_interrupts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Communicator) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if comm.rank == 0:
            raise ValueError("failed")
        signal.pause()

    monkeypatch.setattr(launching, "_GRACE", 0.1)
    with pytest.raises(ValueError, match="failed"):
        ranks(work, ranks=2)


def test_children_of_ranks_are_ended_with_them(tmp_path: Path) -> None:
    def work(comm: Communicator) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    (child,) = ranks(work, ranks=1)
    # The child was killed with its session. Its new parent reaps it soon.
    for _ in range(10_000):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return
        threading.Event().wait(0.001)
    pytest.fail("the child of the rank is running")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda comm: threading.Lock(), "the result of rank 0 cannot be sent to this process: "),
        (lambda comm, lock=threading.Lock(): None, "the function and its arguments cannot be sent to another process: "),
    ],
)
def test_values_that_cannot_be_sent_are_named(function: Any, message: str) -> None:
    with pytest.raises(errors.WrongType, match=message) as caught:
        ranks(function, ranks=1)
    assert "threads=True" in str(caught.value.hint)


def test_wrong_arguments_are_rejected() -> None:
    with pytest.raises(errors.WrongValue, match="^0 ranks cannot be started"):
        wholemem.run(total, ranks=0)
    with pytest.raises(errors.WrongDevice):
        wholemem.run(total, ranks=1, device="tpu")


SCRIPT = """
import dataclasses, enum, math
import numpy as np
import wholemem
from typing import NamedTuple

SCALE = 10
state = {"calls": 0}

class Color(enum.Enum):
    RED = 1
    BLUE = 2

def helper(value):
    state["calls"] += 1
    return math.floor(value) * SCALE

@dataclasses.dataclass
class Point:
    x: int = SCALE
    color: Color = Color.RED

    def moved(self, by):
        return Point(self.x + helper(by), Color.BLUE)

class Pair(NamedTuple):
    point: Point
    rank: int

origin = Point(1)

def work(comm, unused):
    comm.barrier()
    return Pair(origin.moved(comm.rank + 0.5), comm.rank), state["calls"], __name__

results = wholemem.run(work, Color.RED, ranks=2, device="cpu", time_limit=60)
assert results == [(Pair(Point(1 + 10 * rank, Color.BLUE), rank), 1, "__main__") for rank in range(2)], results
assert state["calls"] == 0
print("passed")
"""


def test_functions_and_classes_of_a_script_are_sent_without_a_guard(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "passed\n", "")


NOTEBOOK = """
import linecache, sys, types

def play(cells):
    # As IPython does: the cells run in `__main__`, which has no file, and `linecache` has their source.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    for number, cell in enumerate(cells):
        name = f"<ipython-input-{number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), main.__dict__)

text = sys.argv[1]
first, second = text.split("state = ")
play([first, "state = " + second])
"""


def test_functions_and_classes_of_a_notebook_are_sent() -> None:
    ended = subprocess.run([*script(NOTEBOOK), SCRIPT], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "passed\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import threading\nlock = threading.Lock()\nwholemem.run(lambda comm: lock.locked(), ranks=1)",
            "the variable `lock` of `__main__`, which the function uses, cannot be sent to another process: ",
        ),
        (
            "exec('class Unknown: pass')\nwholemem.run(lambda comm: Unknown(), ranks=1)",
            "the class `Unknown` cannot be sent to another process: its source is not known",
        ),
        (
            "import functools\n@functools.lru_cache\ndef f(comm): pass\nwholemem.run(f, ranks=1)",
            "the function cannot be received in the process of the rank: ",
        ),
    ],
)
def test_what_cannot_be_sent_of_a_script_is_named(text: str, message: str) -> None:
    ended = run("import wholemem\n" + text, timeout=LIMIT)
    assert ended.returncode == 1 and f"WrongType: {message}" in ended.stderr, ended.stderr
    assert "hint: define it in a module" in ended.stderr


def test_an_unused_variable_of_a_script_is_not_sent() -> None:
    text = """
        import threading, wholemem
        class Holder: pass
        lock = threading.Lock()
        def work(comm):
            holder = Holder()
            holder.lock = comm.rank  # an attribute, not the variable
            return holder.lock
        print(wholemem.run(work, ranks=2, device="cpu"))
    """
    ended = run(text, timeout=LIMIT)
    assert ended.returncode == 1 and "its source is not known" in ended.stderr  # `python -c` has no source
    ended = run(text.replace("class Holder: pass", "from types import SimpleNamespace as Holder"), timeout=LIMIT)
    assert (ended.stdout, ended.stderr) == ("[0, 1]\n", "")


WAITING = """
import os, time, wholemem

def work(comm):
    print(f"{os.getpid()}\\n", end="", flush=True)  # in one piece, also if ranks are threads
    comm.barrier()
    {wait}

wholemem.run(work, ranks=3, device="cpu", threads={threads}, timeout=1000)
"""


@contextmanager
def started(wait: str, threads: bool = False) -> Iterator[tuple[Any, list[int]]]:
    """Starts a program whose three ranks wait, and yields it with the process ids of the ranks."""
    text = textwrap.dedent(WAITING).replace("{wait}", wait).replace("{threads}", str(threads))
    with subprocess.Popen(script(text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            yield program, [int(program.stdout.readline().split()[-1]) for _ in range(3)]
        finally:
            program.kill()


def assert_ended(processes: list[int]) -> None:
    for process in processes:
        try:
            pidfd = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], LIMIT)[0] == [pidfd], f"process {process} is running"
        os.close(pidfd)


@pytest.mark.parametrize("wait", ["time.sleep(1000)", "comm.barrier() if comm.rank else time.sleep(1000)", "while True: pass"])
def test_ctrl_c_ends_all_ranks(wait: str) -> None:
    with started(wait) as (program, processes):
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=LIMIT)
        assert program.returncode in (-signal.SIGINT, 130)
    assert_ended(processes)
    # Only the traceback of this process is shown, and not those of the ranks.
    assert err.count("KeyboardInterrupt") == 1 and "[0]" not in err


def test_ctrl_c_ends_ranks_that_are_threads() -> None:
    with started("comm.barrier() if comm.rank else time.sleep(0.1)", threads=True) as (program, _):
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=LIMIT)


def test_the_ranks_are_killed_with_the_process_that_started_them() -> None:
    with started("time.sleep(1000)") as (program, processes):
        program.kill()
        program.communicate(timeout=LIMIT)
    assert_ended(processes)
