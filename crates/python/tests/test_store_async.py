"""Tests the asyncio client of a store: waits are cancelled, closed and interrupted, without a thread for each and without losing events."""

from __future__ import annotations

import asyncio
import doctest
import gc
import os
import signal
import subprocess
import sys
import threading
from typing import Any, Awaitable, Callable, Iterator

import numpy as np
import pytest

from launcher import descriptors, run, script
from store_server import StoreServer
from wholemem import errors, store
from wholemem.store import aio
from wholemem.store.aio import AsyncClient

LIMIT = 60

Work = Callable[[AsyncClient], Awaitable[Any]]


def play(served: StoreServer, work: Work) -> Any:
    """Runs a coroutine with a connected client, and fails if it does not end."""

    async def main() -> Any:
        async with AsyncClient(served.socket) as client:
            return await asyncio.wait_for(work(client), LIMIT)

    return asyncio.run(main())


async def turns(count: int = 3) -> None:
    """Lets all other tasks of the event loop run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wholemem-store")]


@pytest.fixture(autouse=True)
def no_thread_or_descriptor_is_left(served: StoreServer) -> Iterator[None]:
    gc.collect()
    before = descriptors()
    yield
    # Exceptions that a test caught refer to its frames.
    gc.collect()
    assert (threads(), descriptors()) == ([], before)


def test_calls_return_what_the_calls_of_the_other_client_return(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        sync = client.sync
        assert await client.put("a", np.arange(6).reshape(2, 3)[:, ::-1]) == 1
        assert (await client.get("a")).tolist() == [[2, 1, 0], [5, 4, 3]]
        assert await client.publish("b", await client.get("a")) == 1
        assert (await client.get("a")).data_ptr() == (await client.get("b")).data_ptr()
        assert await client.keys() == sync.keys() == ["a", "b"]
        assert await client.list("b") == sync.list("b") == [await client.stat("b")]
        assert (await client.status()).objects == 2
        draft = await client.create("drafted", (1 << 20,), "float32")
        assert [entry.name for entry in await client.drafts()] == ["drafted"]
        with draft:
            draft.array.numpy()[:] = 7
        with await client.create_pack("pack", {"x": ((2,), "int8")}) as pack:
            pack["x"].numpy()[:] = 1
        assert (await client.get("pack"))["x"].tolist() == [1, 1]
        for name in ["a", "b", "drafted", "pack"]:
            await client.delete(name)
        assert await client.keys() == [] and not client.closed
        assert repr(client) == f"AsyncClient('{served.socket}')" == "Async" + repr(sync)
        with pytest.raises(errors.NotFound):
            await client.delete("a")
        with pytest.raises(errors.NotFound, match="there is no object named `a`"):
            await client.get("a")
        assert await client.get("a", default=5) == 5

    play(served, work)


def test_a_get_waits_for_its_name(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        waiting = [asyncio.create_task(client.get("later", timeout=LIMIT)) for _ in range(20)]
        other = asyncio.create_task(client.get("later than", timeout=0.05, default="none"))
        await until(lambda: len(client._watches) == 21)
        await client.put("late", b"no")
        await client.put("later", b"yes")
        assert [bytes(array.memoryview()) for array in await asyncio.gather(*waiting)] == [b"yes"] * 20
        assert await other == "none"
        with pytest.raises(errors.Timeout, match="the name `never` did not appear within 0.01 seconds") as caught:
            await client.get("never", 0.01)
        assert caught.value.code == "no-such-name"
        with pytest.raises(errors.WrongValue, match="a timeout of -1 seconds"):
            await client.get("never", -1)
        assert not client._watches

    play(served, work)


def test_many_waits_need_no_threads(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        watches = [client.watch("many") for _ in range(50)]
        events = [asyncio.create_task(watch.next()) for watch in watches]
        await until(lambda: all(watch._waiting is not None for watch in watches))
        assert len(threads()) <= 4
        assert not client._requests, "a request waits in a thread"
        await client.put("many", b"")
        assert {(event.name, event.kind) for event in await asyncio.gather(*events)} == {("many", "published")}

    play(served, work)


def test_a_watch_yields_events_in_order_and_ends_when_it_is_closed(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        seen = []

        async def follow(watch: aio.AsyncWatch) -> None:
            async for event in watch:
                seen.append((event.name, event.kind, event.version, event.previous))

        async with client.watch("w/") as watch:
            following = asyncio.create_task(follow(watch))
            for _ in range(2):
                await client.put("w/1", b"")
            await client.put("other", b"")
            await client.delete("w/1")
            await until(lambda: len(seen) == 3)
            with pytest.raises(errors.Busy, match="another task is waiting"):
                await watch.next()
            assert not following.done()
        await following
        assert seen == [
            ("w/1", "published", 1, None),
            ("w/1", "replaced", 2, 1),
            ("w/1", "deleted", 2, None),
        ]
        with pytest.raises(errors.Closed, match="the watch is closed"):
            await watch.next()
        with pytest.raises(errors.Timeout, match="no event arrived in time"):
            await client.watch().next(timeout=0.001)

    play(served, work)


def test_a_watch_is_resumed_behind_a_revision(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        async with client.watch("w/") as watch:
            await client.put("w/1", b"")
            last = await watch.next(LIMIT)
        await client.put("w/2", b"")
        await client.put("w/3", b"")
        async with client.watch("w/", after=last.revision) as watch:
            assert [(await watch.next(LIMIT)).name for _ in range(2)] == ["w/2", "w/3"]
        # The server has no event 1, so events after it may be lost.
        async with client.watch("w/", after=0) as watch:
            await client.put("w/4", b"")
            assert [(await watch.next(LIMIT)).kind for _ in range(2)] == ["missed", "published"]
        with pytest.raises(errors.WrongValue, match="-1 is out of range"):
            await client.watch("w/", after=-1).next(LIMIT)

    play(served, work)


def test_a_get_waits_for_an_array_of_a_pack(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        for number, name in enumerate(["first", "second"]):
            waiting = asyncio.create_task(client.get(f"pack/{name}", timeout=LIMIT))
            await until(lambda: any(watch._waiting is not None for watch in client._watches))
            # The event has the name of the pack, which the second time is replaced.
            assert await client.put("pack", {name: b"bytes"}) == number + 1
            assert (await waiting).nbytes == 5

    play(served, work)


def test_a_cancelled_wait_loses_no_event(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        async with client.watch("c") as watch:
            names = []
            for number in range(60):
                waiting = asyncio.create_task(watch.next())
                await turns()
                if number % 2:
                    client.sync.put(f"c{number}", b"")
                    await turns(number % 5)
                waiting.cancel()
                try:
                    names.append((await waiting).name)
                except asyncio.CancelledError:
                    pass
            while len(names) < 30:
                names.append((await watch.next(LIMIT)).name)
            assert names == [f"c{number}" for number in range(1, 60, 2)]

    play(served, work)


def test_a_cancelled_get_ends_and_leaves_the_client_usable(served: StoreServer) -> None:
    async def work(client: AsyncClient) -> None:
        waiting = asyncio.create_task(client.get("cancelled", timeout=float("inf")))
        await until(lambda: len(client._watches) == 1)
        for _ in range(2):
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.get("cancelled", timeout=LIMIT), 0.01)
        assert not client._watches
        await client.put("cancelled", b"")
        assert (await client.get("cancelled")).nbytes == 0

    play(served, work)


def test_closing_ends_waits_and_calls(served: StoreServer) -> None:
    async def main() -> None:
        client = AsyncClient(served.socket)
        with pytest.raises(errors.Closed, match="the client is not connected"):
            await client.get("x")
        assert client.closed
        await client.connect()
        watch = client.watch()
        waits = [client.get("closed", timeout=LIMIT), watch.next(), client.watch("x").next()]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await until(lambda: len(client._watches) == 3)
        await client.close()
        await client.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [errors.Closed] * 3
        assert [event async for event in watch] == []
        for call in [client.get("x"), client.put("x", b""), client.keys()]:
            with pytest.raises(errors.Closed):
                await call
        assert client.closed

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_a_put_waits_for_free_memory() -> None:
    async def main(socket: str) -> None:
        async with AsyncClient(socket) as client:
            large = np.ones(20 << 20, np.uint8)
            await client.put("first", large)
            with pytest.raises(errors.OverQuota):
                await client.put("second", large)
            with pytest.raises(errors.OverQuota):
                await client.put("second", large, timeout=0.01)
            cancelled = asyncio.create_task(client.put("third", large, timeout=float("inf")))
            await turns()
            cancelled.cancel()
            # The request that is running when its task is cancelled may still be executed.
            await until(lambda: not client._requests)
            assert await client.keys() == ["first"]
            waiting = asyncio.create_task(client.put("second", large, timeout=LIMIT))
            await until(lambda: bool(client._requests))
            await client.delete("first")
            assert await waiting == 1 and await client.keys() == ["second"]

    with StoreServer("32MiB") as served:
        asyncio.run(asyncio.wait_for(main(served.socket), LIMIT))


def test_a_restarted_server_is_an_event_and_later_events_arrive() -> None:
    async def main(served: StoreServer) -> None:
        async with AsyncClient(served.socket) as client, client.watch("r") as watch:
            waiting = asyncio.create_task(client.get("r", timeout=LIMIT))
            await until(lambda: any(other._waiting for other in client._watches))
            for at_end in [False, True]:
                served.kill_server()
                await client.status()  # the next server answers
                # The first wait is cancelled while the watch is being registered, or when that ends, which must not lose the event.
                first = asyncio.create_task(watch.next())
                while watch._registration is None:
                    await asyncio.sleep(0)
                if at_end:
                    watch._registration.add_done_callback(lambda _: first.cancel())
                else:
                    first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
                event = await watch.next(LIMIT)
                assert (event.kind, event.name) == ("missed", "r")
            await client.put("r", b"bytes")
            assert (await watch.next(LIMIT)).kind == "published"
            assert (await waiting).nbytes == 5

    with StoreServer() as served:
        asyncio.run(asyncio.wait_for(main(served), LIMIT))


def test_the_end_of_the_store_ends_all_waits() -> None:
    async def main(served: StoreServer) -> None:
        async with AsyncClient(served.socket) as client:
            tasks = [asyncio.create_task(wait) for wait in (client.watch().next(), client.get("x", timeout=LIMIT))]
            await until(lambda: sum(watch._waiting is not None for watch in client._watches) == 2)
            served.kill()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in ended] == [errors.ServerLost] * 2

    asyncio.run(asyncio.wait_for(main(StoreServer()), LIMIT))


def test_connecting_without_a_store_fails_and_leaves_nothing() -> None:
    async def main() -> None:
        with pytest.raises(errors.ServerLost):
            async with AsyncClient("/nowhere/socket"):
                pass

    asyncio.run(main())


WAITING = """
import asyncio, sys
from wholemem.store.aio import AsyncClient

async def follow(client):
    async for event in client.watch():
        pass

async def tick():
    # A signal that arrives just before the event loop waits is handled after the wait.
    while True:
        await asyncio.sleep(0.01)

async def announce(client):
    while not all(watch._waiting for watch in client._watches) or len(client._watches) < 4:
        await asyncio.sleep(0.001)
    print("waiting", flush=True)

async def main():
    client = AsyncClient(sys.argv[1])
    {connect}
        tasks = [asyncio.create_task(follow(client)) for _ in range(3)]
        tasks.append(asyncio.create_task(client.get("never", timeout=1e9)))
        tasks.append(asyncio.create_task(tick()))
        tasks.append(asyncio.create_task(announce(client)))
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


@pytest.mark.parametrize("connect", ["async with client:", "if await client.connect():"])
def test_ctrl_c_ends_a_program_that_waits(served: StoreServer, connect: str) -> None:
    command = [*script(WAITING.replace("{connect}", connect)), served.socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout and program.stderr
        assert program.stdout.readline() == "waiting\n"
        os.kill(program.pid, signal.SIGINT)
        shown = program.stderr.read()
        assert program.wait() in (-signal.SIGINT, 130)
    assert shown.rstrip().endswith("KeyboardInterrupt"), shown
    assert "was destroyed" not in shown
    # Until Python 3.10, an interrupt ends the task that runs, and asyncio reports that task.
    assert "never retrieved" not in shown or sys.version_info < (3, 11)


def test_a_loop_that_ends_without_closing_leaves_no_message(served: StoreServer) -> None:
    text = """
        import asyncio, sys
        from wholemem.store.aio import AsyncClient

        async def main():
            client = await AsyncClient(sys.argv[1]).connect()
            waiting = asyncio.create_task(client.watch().next())
            while not client._watches:
                await asyncio.sleep(0)
            await client.put("x", b"")

        asyncio.run(main())
        print("ended")
    """
    ended = subprocess.run([*script(text), served.socket], capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


def test_importing_the_package_does_not_import_asyncio() -> None:
    ended = run("import sys, wholemem.store; print('asyncio' in sys.modules)")
    assert (ended.stdout, ended.stderr) == ("False\n", "")


@pytest.mark.usefixtures("store_of_examples")
def test_the_examples_of_the_module_run() -> None:
    outcome = doctest.testmod(aio)
    assert (outcome.failed, outcome.attempted > 0) == (0, True)
