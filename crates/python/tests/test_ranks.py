"""Tests communicators whose ranks join, leave, die, fork and are interrupted."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from launcher import PROGRAM, descriptors, launch, run, run_ranks

import wholemem
from wholemem import Communicator, WholeTensor, errors


def test_threads_can_be_ranks() -> None:
    def work(comm: Communicator) -> tuple[int, int, str]:
        assert not comm.closed
        comm.check()
        comm.barrier()
        return comm.rank, comm.size, comm.device

    assert run_ranks(3, work) == [(0, 3, "cpu"), (1, 3, "cpu"), (2, 3, "cpu")]
    with pytest.raises(errors.WrongValue, match="at least one rank"):
        Communicator.local(0, device="cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:one", "cuda:-1", ""])
def test_unknown_devices_are_rejected(name: str) -> None:
    with pytest.raises(errors.WrongDevice, match="the device `.*` does not exist"):
        Communicator.local(1, device=name)


def test_a_device_number_out_of_range_is_in_the_error() -> None:
    with pytest.raises(errors.WrongDevice, match="there is no device 99 on the host backend"):
        Communicator.local(1, device="cpu:99")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_an_invalid_timeout_is_rejected(timeout: float) -> None:
    with pytest.raises(errors.WrongValue, match="a timeout of"):
        Communicator.local(1, device="cpu", timeout=timeout)


def test_a_closed_communicator_leaves_while_its_memory_stays_valid() -> None:
    left, stays = threading.Event(), threading.Event()

    def work(comm: Communicator) -> None:
        table = WholeTensor.create(comm, (4, 2), "float32")
        window = comm.mem_alloc(64)
        table.local().numpy()[:] = 1.0
        comm.barrier()
        if comm.rank == 0:
            assert left.wait(60)
            with pytest.raises(errors.PeerLost, match="rank 1 has closed") as caught:
                comm.barrier()
            assert caught.value.rank == 1
            stays.set()
        else:
            comm.close()
            left.set()
            assert stays.wait(60)
        assert table.gather(np.array([3])).tolist() == [[1.0, 1.0]]
        assert window.nbytes == 64
        for call in (table.like, table.barrier):
            with pytest.raises(errors.PeerLost if comm.rank == 0 else errors.Closed):
                call()

    run_ranks(2, work)


def test_a_wait_ends_when_its_communicator_is_closed() -> None:
    first, second = Communicator.local(2, device="cpu")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.barrier)
        first.close()
        with pytest.raises(errors.Closed):
            waits.result(60)
    with pytest.raises(errors.PeerLost):
        second.barrier()


def test_collectives_end_when_a_rank_leaves() -> None:
    ones = np.ones(3)
    for leaves in range(2):
        ranks = Communicator.local(2, device="cpu")
        with ThreadPoolExecutor(2) as pool:
            for sums in [pool.submit(comm.all_reduce, ones) for comm in ranks]:
                assert sums.result(60).tolist() == [2, 2, 2]
            waits = pool.submit(ranks[0].all_reduce, ones)
            ranks[leaves].close()
            with pytest.raises(errors.Closed if leaves == 0 else errors.PeerLost) as caught:
                waits.result(50)
            assert caught.value.code == ("closed" if leaves == 0 else "peer-left")


@pytest.mark.parametrize("verb", ["close", "abort"])
def test_an_exception_of_a_signal_handler_ends_a_wait(verb: str) -> None:
    ended = run(
        f"""
        import signal, threading, numpy as np, wholemem
        from wholemem import errors
        comm, other = wholemem.Communicator.local(2, device="cpu")
        first = threading.Thread(target=other.all_reduce, args=(np.ones(3),))
        first.start()
        comm.all_reduce(np.ones(3))
        first.join()
        signal.signal(signal.SIGALRM, lambda *_: comm.{verb}())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            comm.all_reduce(np.ones(3))
        except (errors.Closed, errors.Aborted) as error:
            print(error.code)
        """
    )
    assert ended.stdout.strip() == ("closed" if verb == "close" else "aborted"), ended.stderr


def test_abort_does_not_deadlock_with_threads_that_wait_for_the_gil() -> None:
    ended = run(
        """
        import sys, threading, time, numpy as np, wholemem
        from wholemem import errors
        comm, other = wholemem.Communicator.local(2, device="cpu")
        first = threading.Thread(target=other.all_reduce, args=(np.ones(3),))
        first.start()
        comm.all_reduce(np.ones(3))
        first.join()
        def wait():
            try:
                comm.all_reduce(np.ones(3))
            except errors.Aborted:
                print("aborted")
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        # With a long switch interval, the main thread keeps the GIL, which the waiting thread requests at intervals.
        sys.setswitchinterval(1000)
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            pass
        comm.abort()
        sys.setswitchinterval(0.005)
        thread.join()
        """
    )
    assert (ended.stdout, ended.returncode) == ("aborted\n", 0), ended.stderr


def test_a_closed_communicator_raises_closed() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    with comm as same:
        assert same is comm
        table = WholeTensor.create(comm, (2, 2), "int8")
    assert comm.closed and "closed" in repr(comm)
    comm.close()
    uses = [comm.barrier, comm.check, comm.abort, lambda: comm.mem_alloc(1), lambda: comm.all_reduce(np.zeros(1))]
    for use in [*uses, lambda: WholeTensor.create(comm, (1, 1), "int8")]:
        with pytest.raises(errors.Closed, match="the communicator is closed"):
            use()
    assert table.gather(np.array([1])).shape == (1, 2)


def test_a_missing_rank_is_reported_when_joining_by_id() -> None:
    unique_id = wholemem.unique_id()
    with pytest.raises(errors.Timeout) as caught:
        Communicator.create(unique_id, 0, 2, device="cpu", timeout=0.2)
    assert caught.value.missing == (1,)
    assert caught.value.code == "timeout" and caught.value.hint
    with pytest.raises(errors.WrongValue, match="unique id"):
        Communicator.create("nonsense", 0, 1)
    with pytest.raises(errors.WrongValue, match="rank 2 does not exist: the group has 2 ranks"):
        Communicator.create(unique_id, 2, 2)
    joined = Communicator.create(wholemem.unique_id(), 0, 1, device="cpu")
    joined.barrier()


class Torch(ModuleType):
    """A substitute for the functions of torch by which ranks join, for ranks that are threads. The real torch is too large for
    this test.
    """

    def __init__(self, size: int) -> None:
        super().__init__("torch")
        self.size = size
        self.met = threading.Barrier(size)
        self.objects: list[Any] = [None] * size
        self.rank = threading.local()
        self.cuda = self.distributed = self

    def is_initialized(self) -> bool:
        return False

    def get_rank(self, group: Any) -> int:
        if group != "group":
            raise ValueError("Default process group has not been initialized")
        return int(self.rank.number)

    def get_world_size(self, group: Any) -> int:
        return self.size

    def all_gather_object(self, all_of_them: list[Any], mine: Any, *, group: Any) -> None:
        self.objects[self.rank.number] = mine
        self.met.wait()
        all_of_them[:] = self.objects


def test_ranks_of_torch_distributed_join(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(3)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    sums: list[float] = []

    def work(rank: int) -> None:
        torch.rank.number = rank
        with Communicator.from_torch("group", device="cpu") as comm:
            assert (comm.rank, comm.size) == (rank, 3)
            sums.append(comm.all_reduce(np.array([2.0**rank]))[0])
            comm.barrier()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [7.0] * 3
    with pytest.raises(errors.WrongValue, match="has not been initialized\nhint: call `torch.distributed.init_process_group`"):
        Communicator.from_torch(device="cpu")


def test_torch_ranks_on_several_nodes_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = Torch(2)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    # Rank 1 has sent the boot id of another node; rank 0 is the last to call.
    torch.objects[1] = (None, "another kernel")
    torch.met = threading.Barrier(1)
    torch.rank.number = 0
    with pytest.raises(errors.BadEnvironment, match="the 2 ranks are on several nodes\\b.*\nhint: pass a group"):
        Communicator.from_torch("group", device="cpu", timeout=3600)


def test_launched_ranks_on_several_nodes_need_an_address_and_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for name, value in {**described, "WHOLEMEM_TIMEOUT": "3600"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.BadEnvironment, match="address of rank 0 is not known: set `WHOLEMEM_ADDR`") as caught:
        Communicator.from_env(device="cpu")
    assert caught.value.code == "discovery"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(errors.BadEnvironment, match="need a secret: set `WHOLEMEM_SECRET_FILE`"):
        Communicator.from_env(device="cpu")


def test_ranks_on_several_nodes_share_bytes_and_no_memory(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    program = """
import wholemem
with wholemem.Communicator.from_env(device="cpu") as comm:
    comm.barrier()
    for share in (lambda: wholemem.WholeTensor.create(comm, (8, 2), "float32"), lambda: comm.mem_alloc(4096)):
        try:
            share()
        except wholemem.errors.Unsupported as error:
            print(error)
"""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "WHOLEMEM_ADDR": address, "WHOLEMEM_RENDEZVOUS": "test"}
    variables = {**os.environ, **common, "WHOLEMEM_SECRET": "0123456789abcdef", "WHOLEMEM_TIMEOUT": "60"}
    # Ranks that use different folders for their sockets are on different nodes.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**variables, "RANK": str(rank), "WHOLEMEM_SOCKET_DIR": str(tmp_path / str(rank))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0 and output.count("over 2 nodes") == 2, output


def test_wholemem_timeout_sets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLEMEM_TIMEOUT", "0.25")
    first, _ = Communicator.local(2, device="cpu")
    with pytest.raises(errors.Timeout, match="within 250ms"):
        first.barrier()
    first, _ = Communicator.local(2, device="cpu", timeout=0.125)
    with pytest.raises(errors.Timeout, match="within 125ms"):
        first.barrier()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "WHOLEMEM_RENDEZVOUS": "waited-for"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.Timeout, match="within 125ms") as caught:
        Communicator.from_env(device="cpu", timeout=0.125)
    assert caught.value.missing == (1,)
    monkeypatch.setenv("WHOLEMEM_TIMEOUT", "soon")
    with pytest.raises(errors.BadEnvironment, match="WHOLEMEM_TIMEOUT"):
        Communicator.local(1, device="cpu")


def test_a_rank_missing_from_a_barrier_is_reported() -> None:
    ranks = Communicator.local(2, device="cpu", timeout=5)
    with pytest.raises(errors.Timeout, match="no answer from rank 1") as caught:
        ranks[0].barrier()
    assert caught.value.missing == (1,)
    # After a timeout, every later call on the communicator raises a timeout.
    with pytest.raises(TimeoutError):
        ranks[0].check()
    with pytest.raises(TimeoutError):
        WholeTensor.create(ranks[0], (1, 1), "int8")


def test_a_rank_missing_from_a_collective_is_reported() -> None:
    reported = threading.Event()

    def work(comm: Communicator) -> None:
        comm.all_reduce(np.ones(4))
        if comm.rank == 1:
            reported.wait()
            return
        try:
            with pytest.raises(errors.Timeout) as caught:
                comm.all_reduce(np.ones(4))
            assert caught.value.missing == (1,)
        finally:
            reported.set()

    run_ranks(2, work, timeout=5)


def test_abort_ends_the_wait_of_another_thread() -> None:
    ranks = Communicator.local(2, device="cpu")
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ranks[0].barrier()
        except errors.Aborted as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ranks[1].abort()
    thread.join()
    assert [getattr(error, "rank", None) for error in caught] == [1]


def test_a_rank_without_a_device_fails_on_all_ranks() -> None:
    unique_id = wholemem.unique_id()
    caught: list[BaseException] = []

    def join(rank: int, device: str) -> None:
        try:
            Communicator.create(unique_id, rank, 2, device=device)
        except errors.Error as error:
            caught.append(error)

    threads = [threading.Thread(target=join, args=args) for args in [(0, "cpu"), (1, "cpu:99")]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(error).__name__ for error in caught) == ["PeerLost", "WrongDevice"]


def test_ranks_in_different_calls_get_an_error() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises((errors.RanksDisagree, errors.PeerLost)):
            if comm.rank == 0:
                comm.barrier()
            else:
                WholeTensor.create(comm, (1, 1), "int8")

    run_ranks(2, work)


def test_a_missing_environment_variable_is_named() -> None:
    ended = run(
        """
        import wholemem
        try:
            wholemem.Communicator.from_env()
        except wholemem.errors.BadEnvironment as error:
            print(error)
        """,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    )
    assert ended.stdout.startswith("`RANK` is not set"), ended.stderr


def test_processes_can_be_ranks() -> None:
    ended = launch(
        3,
        """
        import numpy as np, wholemem
        with wholemem.Communicator.from_env(device="cpu") as comm:
            table = wholemem.WholeTensor.create(comm, (300, 8), "float32")
            table.local().numpy()[:] = comm.rank
            window = comm.mem_alloc(4096)
            window.peer((comm.rank + 1) % 3, "int32", (4,)).numpy()[:] = comm.rank
            comm.barrier()
            seen = table.gather(np.array([0, 100, 299]))[:, 0].tolist()
            total = comm.all_reduce(np.array([comm.rank + 1.0]))[0]
            print(comm.rank, seen, window.local("int32", (1,)).numpy()[0], total, flush=True)
            comm.barrier()
        """,
    )
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line.split("]", 1)[-1].strip() if line.startswith("[") else line for line in ended.stdout.splitlines())
    seen = [line[line.index(f"{rank} [") :] for rank, line in enumerate(lines)]
    assert seen == [f"{rank} [0.0, 1.0, 2.0] {(rank - 1) % 3} 6.0" for rank in range(3)]


def survive(unique_id: str, rank: int, ready: Any, outcome: Any) -> None:
    comm = Communicator.create(unique_id, rank, 2, device="cpu")
    comm.barrier()
    if rank == 1:
        ready.set()
        signal.pause()
    try:
        while True:
            comm.barrier()
    except errors.PeerLost as error:
        outcome.put((error.rank, error.hint))


def test_a_killed_rank_is_reported() -> None:
    context = multiprocessing.get_context("spawn")
    ready, outcome, unique_id = context.Event(), context.Queue(), wholemem.unique_id()
    ranks = [context.Process(target=survive, args=(unique_id, rank, ready, outcome)) for rank in range(2)]
    for process in ranks:
        process.start()
    ready.wait()
    ranks[1].kill()
    assert outcome.get() == (1, "create a new communicator of the remaining ranks")
    for process in ranks:
        process.join()


def test_a_forked_child_gets_an_error_and_its_parent_continues() -> None:
    ended = run(
        """
        import os, sys, numpy as np, wholemem
        from wholemem import errors
        (comm,) = wholemem.Communicator.local(1, device="cpu")
        table = wholemem.WholeTensor.create(comm, (10, 2), "float32")
        window = comm.mem_alloc(4096)
        local = table.local().numpy()
        local[:] = 7
        indices = np.array([1])
        child = os.fork()
        if child == 0:
            reported = 0
            for use in [
                comm.barrier,
                comm.check,
                lambda: comm.mem_alloc(1),
                lambda: comm.all_reduce(np.zeros(1)),
                lambda: table.gather(indices),
                lambda: table.write(0, np.zeros((1, 2), np.float32)),
                lambda: wholemem.WholeTensor.create(comm, (1, 1), "int8"),
            ]:
                try:
                    use()
                except errors.Forked as error:
                    reported += bool(error.hint)
            # A forked child shares the mapped memory with its parent, and only the parent frees the memory.
            fine = reported == 7 and local.sum() == 140
            comm.close()
            del table, window, local, comm
            os._exit(0 if fine else 1)
        _, status = os.waitpid(child, 0)
        comm.barrier()
        assert table.gather(indices).tolist() == [[7, 7]]
        comm.all_reduce(window.local("int32"))
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert (ended.stdout, ended.returncode) == ("0\n", 0), ended.stderr


def test_a_forked_child_exits_cleanly_with_inherited_objects() -> None:
    ended = run(
        """
        import os, sys, wholemem
        ranks = wholemem.Communicator.local(3, device="cpu")
        arrays = [wholemem.zeros((10,), "int8").numpy()]
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status))
        """
    )
    assert (ended.stdout, ended.returncode) == ("0\n", 0), ended.stderr


INTERRUPTED = """
import os, signal, threading, numpy as np, wholemem

def wait_for(comm):
    {wait}

ranks = wholemem.Communicator.local(2, device="cpu")
{prepare}
seen = []
interrupted = threading.Event()

def handle(number, frame):
    # Only the fourth signal raises, because one or two signals may arrive before the wait begins. A wait continues if a handler
    # does not raise.
    if frame.f_code.co_name == "wait_for" and not interrupted.is_set():
        seen.append(number)
        if len(seen) == 4:
            interrupted.set()
            raise KeyboardInterrupt

def interrupt():
    while not interrupted.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, handle)
thread = threading.Thread(target=interrupt)
thread.start()
try:
    wait_for(ranks[0])
except KeyboardInterrupt:
    print("interrupted")
finally:
    interrupted.set()
    thread.join()
"""


@pytest.mark.parametrize(
    ("wait", "prepare"),
    [
        ("comm.barrier()", ""),
        ("wholemem.WholeTensor.create(comm, (1, 1), 'int8')", ""),
        ("wholemem.Communicator.create(wholemem.unique_id(), 0, 2, device='cpu')", ""),
        ("comm.all_reduce(np.zeros(1))", ""),
        (
            "comm.all_reduce(np.zeros(1))",
            "ts = [threading.Thread(target=c.stream_barrier) for c in ranks]; "
            "[t.start() for t in ts]; [t.join() for t in ts]",
        ),
    ],
)
def test_ctrl_c_ends_a_wait(wait: str, prepare: str) -> None:
    ended = run(INTERRUPTED.format(wait=wait, prepare=prepare))
    assert ended.stdout == "interrupted\n", ended.stderr


def test_a_signal_handler_may_block_and_its_exception_is_raised_once() -> None:
    (alone,) = Communicator.local(1, device="cpu")
    handled, is_last, raises = threading.Semaphore(0), False, False

    def handle(number: int, frame: Any) -> None:
        alone.barrier()
        handled.release()
        if is_last and raises:
            raise LookupError

    def others(rank: Communicator) -> None:
        nonlocal is_last
        # Each signal is handled before the next is sent, so the last one interrupts a wait that has begun.
        for is_last in (False, False, False, True):
            os.kill(os.getpid(), signal.SIGUSR1)
            handled.acquire()
        if not raises:
            rank.barrier()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for raises in (False, True, False):
            ranks = Communicator.local(2, device="cpu")
            thread = threading.Thread(target=others, args=(ranks[1],))
            thread.start()
            if raises:
                with pytest.raises(LookupError):
                    ranks[0].barrier()
            else:
                ranks[0].barrier()
            thread.join()
            alone.barrier()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_run_during_a_wait() -> None:
    ranks = Communicator.local(2, device="cpu")
    thread = threading.Thread(target=ranks[0].barrier)
    thread.start()
    # The main thread reaches the barrier only if the waiting thread releases the GIL.
    ranks[1].barrier()
    thread.join()
    ranks[0].check()


def test_communicators_leak_nothing() -> None:
    def cycle(times: int) -> None:
        for _ in range(times):
            for comm in Communicator.local(2, device="cpu"):
                comm.close()

    cycle(5)
    gc.collect()
    (open_files, threads) = (descriptors(), len(os.listdir("/proc/self/task")))
    cycle(50)
    gc.collect()
    assert descriptors() == open_files
    assert len(os.listdir("/proc/self/task")) == threads


def test_objects_can_be_dropped_in_any_order() -> None:
    ended = run(
        """
        import gc, itertools, os, numpy as np, wholemem
        threads = os.listdir("/proc/self/task")
        def make():
            (comm,) = wholemem.Communicator.local(1, device="cpu")
            table = wholemem.WholeTensor.create(comm, (10, 2), "float32")
            window = comm.mem_alloc(4096)
            return [comm, table, window, table.local(), window.local().numpy()]
        for order in itertools.permutations(range(5)):
            things = make()
            for which in order:
                things[which] = None
        class Cycle:
            pass
        for _ in range(10):
            cycle = Cycle()
            cycle.me, cycle.things = cycle, make()
            del cycle
        gc.collect()
        print(os.listdir("/proc/self/task") == threads)
        last = Cycle()
        last.me, last.things = last, make()
        """
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True\n", "", 0)


def test_doctor_reports_the_same_as_the_program() -> None:
    report = dataclasses.asdict(wholemem.doctor())
    program = json.loads(subprocess.run([PROGRAM, "doctor", "--json"], capture_output=True, check=True).stdout)
    assert json.loads(json.dumps(report)) == program
