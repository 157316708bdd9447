"""Tests the store with several processes and threads: forks, Ctrl-C and concurrency."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from typing import Any, Callable, Optional

import numpy as np
import pytest

from store_server import StoreServer
from wholemem import errors, store
from launcher import script

LARGE = 3 << 20


def in_child(work: Callable[[], Any]) -> str:
    """Runs ``work`` in a forked child, and returns its result or exception as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            outcome = repr(work())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        outcome = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return outcome


def test_a_forked_child_gets_an_error_and_can_create_a_client(served: StoreServer, client: store.Client) -> None:
    client.put("forked", np.arange(LARGE, dtype=np.uint8))
    held = client.get("forked")
    draft = client.create("draft", (LARGE,), "uint8")
    watch = client.watch()
    uses = [
        lambda: client.get("forked"),
        lambda: client.put("x", b""),
        lambda: client.list(),
        lambda: client.watch(),
        lambda: client.status(),
        lambda: watch.next(),
        lambda: draft.seal(),
    ]
    for use in uses:
        assert in_child(use).startswith("Forked: ")
    assert "hint: create a client in the child process" in in_child(uses[0])
    # A forked child can read the arrays that it inherits, and can close the client.
    assert in_child(lambda: int(held.numpy()[251])) == "251"
    assert in_child(lambda: client.close()) == "None"

    def own() -> tuple[int, int]:
        with served.client() as mine:
            mine.put("of the child", np.array([7]))
            return int(mine.get("forked").numpy()[5]), int(mine.get("of the child").numpy()[0])

    assert in_child(own) == "(5, 7)"
    # The calls of forked children do not affect the parent's objects.
    assert client.get("of the child").numpy()[0] == 7
    client.delete("forked")
    assert client.status().retired == 1 and held.numpy()[251] == 251
    draft.seal()


def read_in_worker(socket: str) -> int:
    return int(store.Client(socket).get("shared").numpy().sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_pool_read_the_same_memory(served: StoreServer, client: store.Client, method: str) -> None:
    client.put("shared", np.ones(1000, np.int64))
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(read_in_worker, [served.socket] * 4) == [1000] * 4


@pytest.mark.parametrize(
    "wait",
    [
        'client.get("never", timeout=float("inf"))',
        "list(client.watch())",
        "client.watch().next(timeout=600)",
        'client.create("no room", (40 << 20,), "uint8", timeout=600)',
    ],
)
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    with StoreServer("64MiB") as served:
        mine = served.client()
        mine.put("first", np.zeros(40 << 20, np.uint8))
        text = f"""
            import numpy as np
            from wholemem import store
            client = store.Client({served.socket!r})
            try:
                {wait}
            except KeyboardInterrupt:
                client.put("after", np.array([1]))
                print("interrupted", client.get("after").numpy()[0])
            """
        process = subprocess.Popen(script(text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # Waits until the process has its two connections: that of its client, and the one on which the client waits.
        while mine.status().clients < 3:
            assert process.poll() is None, process.communicate()
        # Waits until the process sleeps (state `S`), so that the signal arrives while the process waits for a response.
        state = ""
        while state != "S":
            with open(f"/proc/{process.pid}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("interrupted 1\n", "")


def test_threads_share_a_client(client: store.Client) -> None:
    failed: list[BaseException] = []
    versions = [f"thread {number}" for number in range(6)]
    client.put("common", np.zeros(LARGE, np.uint8))

    def work(name: str) -> None:
        try:
            for number in range(150):
                client.put(name, np.full(50, number))
                assert client.get(name).numpy()[49] == number
                assert client.get("common").numpy()[number] in (0, 1)
                # The new draft is dropped immediately, while other threads make requests.
                client.create(f"{name} draft", (LARGE,), "uint8")
                if number % 10 == 0:
                    client.put("common", np.full(LARGE, number // 10 % 2, np.uint8))
                    client.list("thread")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    status = client.status()
    assert (status.unsealed, status.retired) == (0, 0)


def test_a_watch_is_used_by_one_thread_at_a_time(client: store.Client) -> None:
    watch = client.watch("own")

    def wait() -> None:
        while True:
            try:
                next(watch)
                return
            except errors.Busy:
                # The main thread was using the watch at that moment.
                pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    busy = None
    while busy is None:
        try:
            watch.next(timeout=0)
        except errors.Busy as error:
            busy = error
        except errors.Timeout:
            pass
    assert busy.hint
    # An event may arrive before the other thread waits, so events are published until that thread ends.
    while waiting.is_alive():
        client.put("own", b"")
    waiting.join()


def test_other_threads_run_during_a_wait(client: store.Client) -> None:
    waits = threading.Thread(target=lambda: client.get("for all", timeout=float("inf")))
    waits.start()
    # If the waiting thread held the GIL, this thread could not put the object.
    client.put("for all", b"")
    waits.join()


def test_deletions_during_reads_are_safe(served: StoreServer) -> None:
    writer, reader = served.client(), served.client()
    over = threading.Event()
    seen = []

    def read() -> None:
        while not over.is_set():
            try:
                array = reader.get("raced").numpy()
            except errors.NotFound:
                continue
            assert (array == array[0]).all()
            seen.append(int(array[0]))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(400):
        writer.put("raced", np.full(200 if number % 2 else 150_000, number))
        if number % 7 == 0:
            writer.delete("raced")
    while not seen:
        writer.put("raced", np.full(200, 400))
    over.set()
    thread.join()
    assert seen == sorted(seen)


@pytest.mark.parametrize("close", [lambda client, watch: watch.close(), lambda client, watch: client.close()])
@pytest.mark.parametrize("timeout", [None, 600])
def test_closing_a_watch_ends_the_wait_of_another_thread(served: StoreServer, close: Any, timeout: Optional[float]) -> None:
    client, other = served.client(), served.client()
    name = f"closed {timeout} {close}"
    watch = client.watch(name)
    seen: list[Any] = []

    def wait() -> None:
        if timeout is None:
            seen.extend(event.name for event in watch)
            seen.append("over")
        else:
            try:
                seen.append(watch.next(timeout).name)
                watch.next(timeout)
            except errors.Closed:
                seen.append("over")

    waiting = threading.Thread(target=wait)
    waiting.start()
    # The waiting thread receives one event, and then waits for the next one until the watch is closed.
    other.put(name, b"")
    while not seen:
        pass
    close(client, watch)
    waiting.join()
    assert seen == [name, "over"]
    assert list(watch) == []
    with pytest.raises(errors.Closed, match="the watch is closed") as caught:
        watch.next(timeout=0)
    assert caught.value.hint
    watch.close()


def test_closing_a_client_ends_the_wait_of_another_thread() -> None:
    with StoreServer() as served:
        mine, client = served.client(), served.client()
        raised: list[errors.Error] = []

        def wait() -> None:
            try:
                client.get("never", timeout=float("inf"))
            except errors.Error as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        # Waits until the store has three connections: those of two clients, and the one on which one of the clients waits.
        while mine.status().clients < 3:
            pass
        client.close()
        waiting.join()
        assert [type(error) for error in raised] == [errors.Closed] and raised[0].hint
