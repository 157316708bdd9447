"""Runs a function as every rank of a new group: in processes, also from notebooks, or in threads."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from . import _by_value
from ._native import Communicator, unique_id
from ._rank_process import LENGTH, READY, Report
from .errors import Aborted, Error, PeerLost, RankFailed, Timeout, WrongValue

__all__ = ["run"]

# The seconds that a rank has after an interrupt, to end by itself.
_GRACE = 5.0

# The seconds for which other errors are awaited after an error that another rank caused.
_CAUSE = 2.0

# The longest wait in seconds. A signal that arrives just before a wait does not end it, so its handler runs after the wait.
_SLICE = 0.2

_CHILD = "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); from wholemem._rank_process import main; main(*sys.argv[1:])"


class _RankTraceback(Exception):
    """The traceback of an exception on a rank, as the cause of the exception that :func:`run` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    device: Optional[str] = None,
    threads: bool = False,
    timeout: Optional[float] = None,
    time_limit: Optional[float] = None,
) -> List[Any]:
    """Calls a function as every rank of a new group, and returns the results in the order of the ranks.

    Every rank is a new process, which calls ``function(comm, *arguments)`` with its communicator. The function may be defined in a
    script, without ``if __name__ == "__main__"``, or in a notebook: it is sent with the functions, classes and variables of
    ``__main__`` that it uses. The ranks print through this process, each line with the rank as prefix. The variables of a launcher
    are set, so ``torch.distributed`` and :class:`wholemem.torch.FastAllreduce` find the ranks too.

    If a rank raises an exception, the other ranks are ended and the exception is raised here; its cause is the traceback of the
    rank. Ctrl-C ends all ranks. When the call returns or raises, no process that it started is left; if this process is killed, so
    are the ranks.

    Args:
        function: The function.
        arguments: The arguments of the function after the communicator. Each process gets a copy.
        ranks: The number of ranks.
        device: ``cpu``, ``cuda`` or ``cuda:1``. Without a number, ranks use the devices round-robin. ``None`` selects one.
        threads: Whether the ranks are threads of this process instead. They share its variables, and Python runs one at a time; a
            thread that does not return cannot be ended.
        timeout: Seconds that ranks wait for each other. ``None`` uses ``WHOLEMEM_TIMEOUT``.
        time_limit: Seconds after which all ranks are ended and an exception is raised. ``None`` is no limit.

    Returns:
        The results, one for each rank.

    Raises:
        wholemem.errors.PeerLost: The process of a rank was killed or exited.
        wholemem.errors.RankFailed: A rank raised an exception that cannot be sent to this process.
        wholemem.errors.Timeout: The time limit expired; ``missing`` lists the ranks that had not returned.
        wholemem.errors.WrongType: The function or the result cannot be sent to another process.
        wholemem.errors.WrongValue: The number of ranks is not positive.

    >>> import numpy, wholemem
    >>> def total(comm, scale):
    ...     return int(comm.all_reduce(numpy.array([comm.rank * scale]))[0])
    >>> wholemem.run(total, 10, ranks=3, device="cpu", threads=True)
    [30, 30, 30]
    """
    if ranks < 1:
        raise WrongValue(f"{ranks} ranks cannot be started", hint="pass `ranks=1` or more")
    group: Any = _Threads if threads else _Processes
    return list(group(function, arguments, ranks, device, timeout).results(time_limit))


def _is_consequence(rank: int, error: BaseException) -> bool:
    """Returns whether the error of a rank only reports that another rank failed."""
    return isinstance(error, (PeerLost, Aborted, RankFailed)) and error.rank != rank


def _cause(failures: Iterable[Tuple[int, BaseException]]) -> BaseException:
    """Returns the error of the rank that failed first, with the rank in its printed form in Python 3.11 and newer."""
    rank, error = min(failures, key=lambda failure: _is_consequence(*failure))
    if hasattr(error, "add_note"):
        error.add_note(f"raised on rank {rank}")
    return error


def _exited(rank: int, error: SystemExit) -> RankFailed:
    return RankFailed(f"rank {rank} failed: it called `sys.exit({error.code!r})`", rank=rank)


def _over_time(seconds: float, missing: List[int]) -> Timeout:
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return Timeout(f"{who} did not return within {seconds:g} seconds", missing=missing, hint="the ranks were ended")


class _Threads:
    """Ranks that are threads of this process."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        size: int,
        device: Optional[str],
        timeout: Optional[float],
    ) -> None:
        self._function, self._arguments = function, arguments
        self._comms = Communicator.local(size, device=device, timeout=timeout)
        self._results: List[Any] = [None] * size
        self._errors: List[tuple[int, BaseException]] = []
        self._running = set(range(size))
        self._changed = threading.Condition()

    def _work(self, rank: int) -> None:
        try:
            self._results[rank] = self._function(self._comms[rank], *self._arguments)
        except BaseException as error:
            with self._changed:
                self._errors.append((rank, _exited(rank, error) if isinstance(error, SystemExit) else error))
        with self._changed:
            self._running.discard(rank)
            self._changed.notify_all()

    def results(self, time_limit: Optional[float]) -> List[Any]:
        threads = [
            threading.Thread(target=self._work, args=(rank,), name=f"wholemem-rank-{rank}", daemon=True)
            for rank in range(len(self._comms))
        ]
        for thread in threads:
            thread.start()
        late: List[int] = []
        try:
            self._wait(lambda: bool(self._errors), time_limit)
            late = sorted(self._running)
        finally:
            # The errors of ranks that are aborted now are not the cause.
            failures = list(self._errors)
            if self._running:
                self._abort()
                self._wait(lambda: False, _GRACE)
            for comm in self._comms:
                comm.close()
        if failures:
            raise _cause(failures)
        if late:
            assert time_limit is not None
            raise _over_time(time_limit, late)
        return self._results

    def _abort(self) -> None:
        for comm in self._comms:
            try:
                comm.abort()
            except Error:
                pass  # the function has closed it

    def _wait(self, is_over: Callable[[], bool], seconds: Optional[float]) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._running and not is_over():
                left = _SLICE if end is None else min(end - time.monotonic(), _SLICE)
                if left <= 0:
                    break
                self._changed.wait(left)


class _Process:
    """The process of a rank, with the descriptors that its parent uses.

    Args:
        rank: The rank.
        arguments: The descriptor of the memory file with the function and its arguments.
        environment: The variables of the launcher.
    """

    def __init__(self, rank: int, arguments: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.report, report = os.pipe()
        release, closed_to_release = os.pipe()
        self.release: Optional[int] = closed_to_release
        numbers = [str(number) for number in (arguments, report, release, os.getpid())]
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *numbers, json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                pass_fds=(arguments, report, release),
                start_new_session=True,
            )
        except BaseException:
            os.close(self.report)
            self.let_leave()
            raise
        finally:
            os.close(report)
            os.close(release)
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.is_running = True
        self.message = b""
        # The beginnings of lines that are not complete yet.
        self.partial = {"stdout": b"", "stderr": b""}

    def pipes(self) -> Dict[str, int]:
        """Returns the descriptors from which output and the report are read."""
        assert self.popen.stdout is not None and self.popen.stderr is not None
        return {"report": self.report, "stdout": self.popen.stdout.fileno(), "stderr": self.popen.stderr.fileno()}

    def outcome(self) -> Optional[Report]:
        """Returns the report of the rank if it is complete."""
        first = len(READY) + LENGTH.size
        header = self.message[len(READY) : first]
        if len(header) < LENGTH.size or len(self.message) - first < LENGTH.unpack(header)[0]:
            return None
        report: Report = pickle.loads(self.message[first:])
        return report

    def interrupt(self) -> None:
        """Interrupts the function, or kills the process if it does not run the function yet."""
        self.popen.send_signal(signal.SIGINT if self.message else signal.SIGKILL)

    def let_leave(self) -> None:
        """Lets a rank that has returned leave the group, and exit."""
        if self.release is not None:
            os.close(self.release)
            self.release = None

    def reap(self) -> None:
        """Ends what is left of the session of the exited rank. Its process id is not reused before it is waited for."""
        self.is_running = False
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()

    def close(self) -> None:
        """Kills the process if it is running, and closes the descriptors."""
        if self.is_running:
            self.popen.kill()
            self.reap()
        for file in (self.popen.stdout, self.popen.stderr):
            assert file is not None
            file.close()
        self.let_leave()
        for descriptor in (self.report, self.pidfd):
            os.close(descriptor)


class _Processes:
    """Ranks that are processes of this machine."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        size: int,
        device: Optional[str],
        timeout: Optional[float],
    ) -> None:
        main = vars(sys.modules["__main__"])
        named = {name: main[name] for name in ("__file__", "__package__", "__doc__") if isinstance(main.get(name), str)}
        settings = {"device": device, "timeout": timeout, "argv": sys.argv, "main": named}
        self._payload = pickle.dumps((settings, _by_value.dumps((function, arguments))))
        self._size = size
        self._ranks: List[_Process] = []
        self._failures: Dict[int, BaseException] = {}
        self._results: Dict[int, Any] = {}

    def results(self, time_limit: Optional[float]) -> List[Any]:
        over_at = None if time_limit is None else time.monotonic() + time_limit
        with selectors.DefaultSelector() as selector:
            try:
                self._start(selector)
                self._supervise(selector, over_at)
            finally:
                self._end(selector)
        if self._failures:
            raise _cause(self._failures.items())
        if len(self._results) < self._size:
            assert time_limit is not None
            raise _over_time(time_limit, [rank for rank in range(self._size) if rank not in self._results])
        return [self._results[rank] for rank in range(self._size)]

    def _start(self, selector: selectors.BaseSelector) -> None:
        arguments = os.memfd_create("wholemem-run")
        try:
            with open(arguments, "wb", closefd=False) as file:
                file.write(self._payload)
            environment = _launcher_variables(self._size)
            for rank in range(self._size):
                process = _Process(rank, arguments, environment)
                self._ranks.append(process)
                selector.register(process.pidfd, selectors.EVENT_READ, (process, "exit"))
                for name, descriptor in process.pipes().items():
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ, (process, name))
        finally:
            os.close(arguments)

    def _supervise(self, selector: selectors.BaseSelector, over_at: Optional[float]) -> None:
        """Forwards output and collects results, until all ranks have returned, one has failed, or the time is over."""
        cause_until: Optional[float] = None
        while len(self._results) + len(self._failures) < self._size:
            if self._failures and cause_until is None:
                cause_until = time.monotonic() + _CAUSE
            if any(not _is_consequence(rank, error) for rank, error in self._failures.items()):
                return
            ends = [end for end in (over_at, cause_until) if end is not None]
            left = min(ends) - time.monotonic() if ends else None
            if left is not None and left <= 0:
                return
            self._turn(selector, left)

    def _turn(self, selector: selectors.BaseSelector, seconds: Optional[float]) -> None:
        for key, _ in selector.select(_SLICE if seconds is None else min(seconds, _SLICE)):
            process, kind = key.data
            if key.fd not in selector.get_map():
                continue  # the process has exited in this turn
            if kind == "exit":
                selector.unregister(key.fd)
                self._drain(selector, process)
                process.reap()
                self._on_exit(process)
            elif self._read(process, kind, key.fd) == 0:
                selector.unregister(key.fd)

    def _read(self, process: _Process, kind: str, descriptor: int) -> Optional[int]:
        """Reads a part of a report or of output. Returns its length: 0 at the end, and ``None`` if there is nothing yet."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return None
        if kind == "report":
            process.message += data
            self._on_report(process)
        else:
            *lines, process.partial[kind] = (process.partial[kind] + data).split(b"\n")
            _print(process.rank, kind, lines)
        return len(data)

    def _drain(self, selector: selectors.BaseSelector, process: _Process) -> None:
        """Reads what an exited rank has left in its pipes, which its descendants may hold open."""
        for name, descriptor in process.pipes().items():
            if descriptor in selector.get_map():
                while self._read(process, name, descriptor):
                    pass
                selector.unregister(descriptor)
        for name, line in process.partial.items():
            _print(process.rank, name, [line] if line else [])

    def _on_report(self, process: _Process) -> None:
        report = process.outcome()
        if report is None or process.rank in self._results or process.rank in self._failures:
            return
        result, error, last, text = report
        if result is not None:
            self._results[process.rank] = pickle.loads(result)
        else:
            self._failures[process.rank] = _error_of(process.rank, error, last, text)

    def _on_exit(self, process: _Process) -> None:
        if process.rank in self._results or process.rank in self._failures:
            return
        code = process.popen.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with the code {code}"
        self._failures[process.rank] = PeerLost(f"the process of rank {process.rank} {how}", rank=process.rank)

    def _end(self, selector: selectors.BaseSelector) -> None:
        """Ends all ranks: those that have returned leave the group, and the others are interrupted, and killed after a while."""
        failures = dict(self._failures)
        try:
            for process in self._ranks:
                if process.is_running and process.rank not in self._results and process.rank not in failures:
                    process.interrupt()
                process.let_leave()
            # Ranks that have all returned may take any time for what they do at exit.
            kill_at = None if len(self._results) == self._size else time.monotonic() + _GRACE
            while any(process.is_running for process in self._ranks):
                left = None if kill_at is None else kill_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._turn(selector, left)
        finally:
            # How interrupted ranks ended is no failure of theirs.
            self._failures = failures
            for process in self._ranks:
                process.close()


def _print(rank: int, name: str, lines: Sequence[bytes]) -> None:
    if lines:
        file = sys.stdout if name == "stdout" else sys.stderr
        file.write("".join(f"[{rank}] {line.decode(errors='replace')}\n" for line in lines))
        file.flush()


def _error_of(rank: int, pickled: Optional[bytes], last: str, text: str) -> BaseException:
    """Returns the exception of a rank, with the traceback as its cause."""
    error: BaseException = RankFailed(f"rank {rank} failed: {last}", rank=rank)
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:
            pass  # a class that only the rank has
    error.__cause__ = _RankTraceback(text)
    return error


def _launcher_variables(size: int) -> Dict[str, str]:
    """Returns the variables that a launcher sets for all ranks, as ``wholemem launch`` does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WHOLEMEM_ID": unique_id(),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"wholemem-{os.getpid()}-{port}",
    }
