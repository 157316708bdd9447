"""Tests arrays that a forked child inherits: the child holds its own pins, or cannot read the arrays at all."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from store_server import StoreServer
from wholemem import errors, store
from launcher import run

HERE = Path(__file__).parent
COUNT = 1000
LARGE = 3 << 20


class Child:
    """A forked child that runs ``work`` on request and returns the result as text."""

    def __init__(self, work: Callable[[], Any]) -> None:
        (go, self.tell), (self.hear, say) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # A child that a signal kills writes neither a result nor a stack trace.
                faulthandler.disable()
                os.close(self.tell)
                os.close(self.hear)
                os.read(go, 1)
                os.write(say, repr(work()).encode())
            finally:
                os._exit(0)
        os.close(go)
        os.close(say)

    def run(self) -> str:
        """Starts the work of the child, and waits until the child exits. Returns the result, or the name of a signal."""
        os.write(self.tell, b"!")
        os.close(self.tell)
        with os.fdopen(self.hear) as file:
            output = file.read()
        _, status = os.waitpid(self.pid, 0)
        return output if status == 0 else signal.Signals(status & 0x7F).name


def refill(client: store.Client) -> None:
    """Puts so many objects into the store that all freed memory is reused."""
    for number in range(200):
        client.put(f"refill {number}", np.full(COUNT, 9, np.uint8))
    for number in range(200):
        client.delete(f"refill {number}")


def until_nothing_is_retired(client: store.Client) -> None:
    limit = time.monotonic() + 60
    while client.status().retired:
        assert time.monotonic() < limit, "what was held is free again"


def test_a_child_reads_objects_that_its_parent_dropped() -> None:
    with StoreServer() as served:
        client = served.client()
        client.put("small", np.full(COUNT, 5, np.uint8))
        client.put("packed", {"a": np.full(COUNT, 6, np.uint8)})
        held, packed = client.get("small"), client.get("packed")["a"]
        child = Child(lambda: (set(held.numpy().tolist()), set(packed.numpy().tolist()), set(np.from_dlpack(held).tolist())))
        del held, packed
        client.delete("small")
        client.delete("packed")
        refill(client)
        retired = client.status().retired
        assert (child.run(), retired) == ("({5}, {6}, {5})", 3)
        until_nothing_is_retired(client)


def test_a_child_reads_inherited_objects_after_its_parent_exits() -> None:
    with StoreServer() as served:
        client = served.client()
        client.put("small", np.full(COUNT, 5, np.uint8))
        (go, tell), (hear, say) = os.pipe(), os.pipe()
        text = f"""
        import os
        from wholemem import errors, store
        held = store.Client({served.socket!r}).get("small").numpy()
        if os.fork() == 0:
            # The child closes the standard streams, so that the reader of the parent's output does not wait for the child.
            os.closerange(0, 3)
            os.close({tell})
            os.read({go}, 1)
            os.write({say}, repr(set(held.tolist())).encode())
        os._exit(0)
        """
        assert run(text, cwd=HERE, pass_fds=[go, tell, say]).returncode == 0
        os.close(say)
        client.delete("small")
        refill(client)
        assert client.status().retired == 1
        os.close(go)
        os.close(tell)
        with os.fdopen(hear) as file:
            assert file.read() == "{5}"
        until_nothing_is_retired(client)
        assert client.status().clients == 1


def test_a_grandchild_reads_objects_that_its_ancestors_dropped() -> None:
    with StoreServer() as served, StoreServer() as other:
        client, other_client = served.client(), other.client()
        client.put("first", np.full(COUNT, 5, np.uint8))
        other_client.put("of another store", np.full(COUNT, 6, np.uint8))
        arrays = [client.get("first"), other_client.get("of another store")]
        (go, tell), (hear, say) = os.pipe(), os.pipe()
        if os.fork() == 0:
            own = served.client()
            own.put("second", np.full(COUNT, 7, np.uint8))
            arrays.append(own.get("second"))
            if os.fork() == 0:
                os.close(tell)
                os.read(go, 1)
                os.write(say, repr([set(array.numpy().tolist()) for array in arrays]).encode())
            os._exit(0)
        os.wait()
        os.close(say)
        arrays.clear()
        for name in ["first", "second"]:
            client.delete(name)
        other_client.delete("of another store")
        refill(client)
        refill(other_client)
        retired = client.status().retired, other_client.status().retired
        os.close(go)
        os.close(tell)
        with os.fdopen(hear) as file:
            assert (file.read(), retired) == ("[{5}, {6}, {7}]", (2, 1))
        until_nothing_is_retired(client)
        until_nothing_is_retired(other_client)


def test_a_child_holds_inherited_objects_without_a_descriptor(served: StoreServer, client: store.Client) -> None:
    client.put("small", np.full(COUNT, 5, np.uint8))
    held = client.get("small")

    def read() -> tuple[set[int], set[int]]:
        return set(os.listdir("/proc/self/fd")) - before, set(held.numpy().tolist())

    # Listing `/proc/self/fd` itself uses a descriptor, so low descriptor numbers are ignored.
    before = {*os.listdir("/proc/self/fd"), *(str(number) for number in range(100))}
    spare = [number for number in range(3, 1000) if str(number) not in before]
    child = Child(lambda: [os.closerange(spare[0], 1000), read()][1])
    del held
    client.delete("small")
    refill(client)
    assert child.run() == "(set(), {5})"
    until_nothing_is_retired(client)


def test_forked_workers_read_objects_of_their_parent(served: StoreServer, client: store.Client) -> None:
    import multiprocessing

    client.put("small", np.arange(COUNT))
    held = client.get("small").numpy()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=lambda: queue.put(int(held.sum()))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert (worker.exitcode, queue.get()) == (0, int(np.arange(COUNT).sum()))
    queue.close()


def until(holds: Callable[[], bool], thread: threading.Thread) -> None:
    """Waits until a condition holds that another thread makes true."""
    while not holds():
        assert thread.is_alive(), "the thread has ended"
        time.sleep(0.0001)


def test_children_hold_objects_while_threads_and_server_kills_race() -> None:
    with StoreServer() as served:
        client = served.client()
        stop = threading.Event()
        latest: list[Any] = []

        def replace() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                client.put("flipping", np.full(COUNT, number % 250, np.uint8))
                latest[:] = [(number % 250, client.get("flipping"))]

        thread = threading.Thread(target=replace)
        thread.start()

        def read(number: int, array: Any) -> bool:
            return bool((array.numpy() == number).all())

        try:
            for turn in range(20):
                until(lambda: bool(latest), thread)
                if turn % 5 == 4:
                    served.kill_server()
                number, array = latest[0]
                child = Child(lambda: read(number, array))
                del array
                # The name is published often enough that unprotected memory of the old object would be overwritten.
                before = client.stat("flipping").version
                until(lambda: client.stat("flipping").version >= before + 100, thread)
                assert child.run() == "True"
        finally:
            stop.set()
            thread.join()
        latest.clear()
        client.delete("flipping")
        until_nothing_is_retired(client)


def test_a_child_that_cannot_hold_small_objects_cannot_read_them() -> None:
    with StoreServer() as served:
        client = served.client()
        client.put("small", np.full(COUNT, 5, np.uint8))
        client.put("large", np.full(LARGE, 6, np.uint8))
        small, large = client.get("small"), client.get("large")
        exported = np.from_dlpack(small)
        # The socket is moved away, so that no process can connect to the store.
        os.rename(served.socket, served.socket + ".away")
        children = [Child(lambda: int(view[0])) for view in [small.numpy(), exported]]
        assert [child.run() for child in children] == ["SIGSEGV", "SIGSEGV"]
        assert Child(lambda: (int(large.numpy()[7]), int(np.from_dlpack(large)[7]))).run() == "(6, 6)"
        # If a child cannot connect to the store, a process that this child forks cannot read the arrays either.
        assert Child(lambda: Child(lambda: int(small.numpy()[0])).run()).run() == "'SIGSEGV'"
        os.rename(served.socket + ".away", served.socket)
        # The parent, and children that are forked later, can still read the arrays.
        assert int(small.numpy()[0]) == int(exported[0]) == 5
        assert Child(lambda: int(small.numpy()[0])).run() == "5"
        text = f"""
        import os
        from wholemem import errors, store
        small = store.Client({served.socket!r}).get("small").numpy()
        os.rename({served.socket!r}, {served.socket + ".away"!r})
        child = os.fork()
        if child == 0:
            small[3]
        os.waitpid(child, 0)
        os.rename({served.socket + ".away"!r}, {served.socket!r})
        """
        ended = run(text, cwd=HERE, env={**os.environ, "WHOLEMEM_FAULT_HANDLER": "1"})
        expected = "wholemem: access to byte 3 of `small`, which this process has inherited and does not hold (address 0x"
        assert (ended.returncode, ended.stderr[: len(expected)]) == (0, expected)


def test_arrays_of_a_killed_store_stay_valid_in_children() -> None:
    served = StoreServer()
    client = served.client()
    client.put("small", np.full(COUNT, 5, np.uint8))
    held = client.get("small")

    def read() -> int:
        return int(held.numpy()[0])

    forked_before = Child(lambda: (read(), Child(read).run()))
    os.kill(served.keeper.pid, signal.SIGSTOP)
    served.kill_server()
    served.keeper.kill()
    served.keeper.wait()
    assert forked_before.run() == "(5, '5')"
    with pytest.raises(errors.ServerLost):
        while True:
            client.list()
    served.close()
    assert Child(lambda: (read(), Child(read).run())).run() == "(5, '5')"


def test_a_fork_leaks_nothing_in_the_parent(served: StoreServer, client: store.Client) -> None:
    client.put("small", np.zeros(COUNT, np.uint8))
    held = client.get("small")
    clients, open_before = client.status().clients, os.listdir("/proc/self/fd")
    children = [Child(lambda: held.numpy().sum()) for _ in range(5)]
    assert client.status().clients == clients + 5
    for child in children:
        child.run()
    assert os.listdir("/proc/self/fd") == open_before
    limit = time.monotonic() + 60
    while client.status().clients > clients:
        assert time.monotonic() < limit, "children that have exited are forgotten"


def test_a_pin_page_cannot_be_claimed_without_its_secret(served: StoreServer, client: store.Client) -> None:
    def varint(number: int) -> bytes:
        return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])

    client.put("small", np.zeros(COUNT, np.uint8))
    held = client.get("small")
    child = Child(lambda: int(held.numpy()[0]))
    # The test tries all ids that the first server may have assigned to clients.
    for number in range(1 << 32, (1 << 32) + 20):
        for secret in [0, 1, 1 << 63]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(served.socket)
                stranger.send(b"\x02" + varint(1) + b"\x00" + varint(15) + varint(number) + varint(secret))
                # The server refuses request 1 and then ends the connection.
                assert stranger.recv(1024)[:3] == bytes([2, 1, 7])
                assert stranger.recv(1024) == b""
    assert child.run() == "0"
