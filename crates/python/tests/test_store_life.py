"""Tests lifetimes: arrays outlive clients and stores, memory is freed with its last user, in any order and at exit."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, Callable

import numpy as np
import pytest

from store_server import StoreServer, map_of
from wholemem import errors, store
from launcher import descriptors, resident, run

LARGE = 3 << 20


def mapped() -> int:
    """Returns the number of objects and arenas of a store that this process has mapped."""
    with open("/proc/self/maps") as file:
        return sum("wholemem-object" in line for line in file)


@pytest.mark.parametrize("count", [10, LARGE])
def test_an_array_outlives_its_name_its_client_and_the_store(count: int) -> None:
    served = StoreServer()
    client = served.client()
    client.put("held", np.arange(count, dtype=np.uint8))
    client.put("pack", {"a": np.full(count, 3, np.uint8)})
    view = client.get("held").numpy()
    by_dlpack = np.from_dlpack(client.get("held"))
    member = client.get("pack")["a"].memoryview()
    expected = np.arange(count, dtype=np.uint8)

    def holds() -> None:
        np.testing.assert_array_equal(view, expected)
        np.testing.assert_array_equal(by_dlpack, expected)
        assert member[count - 1] == 3

    client.delete("held")
    client.delete("pack")
    assert client.status().retired >= 2
    # New objects do not reuse the memory of deleted objects that the client still holds.
    for _ in range(20):
        client.put("other", np.zeros(count, dtype=np.uint8))
        client.put("another", np.zeros(count, dtype=np.uint8))
    holds()
    client.close()
    del client
    gc.collect()
    holds()
    served.kill()
    holds()
    del view, by_dlpack
    assert member[0] == 3


def test_memory_is_freed_with_its_last_holder(served: StoreServer, client: store.Client) -> None:
    before = client.status()
    client.put("going", np.zeros(LARGE, np.uint8))
    array = client.get("going")
    views = [array.numpy(), np.from_dlpack(array), array.memoryview(), array.__dlpack__(max_version=(1, 0)), array]
    del array
    client.delete("going")
    while views:
        assert client.status().retired == before.retired + 1
        views.pop()
        gc.collect()
    after = client.status()
    assert (after.retired, after.objects) == (before.retired, before.objects)
    assert not any(entry.name == "going" for entry in client.list())


def test_clients_survive_a_killed_server() -> None:
    with StoreServer() as served:
        client = served.client()
        client.put("stays", np.arange(LARGE, dtype=np.uint8))
        held = client.get("stays")
        draft = client.create("drafted", (LARGE,), "uint8")
        reported: list[store.Event] = []
        watch = client.watch("seen")

        def listen() -> None:
            while not reported or reported[-1].kind == "missed":
                reported.append(next(watch))

        watcher = threading.Thread(target=listen)
        watcher.start()
        for _ in range(3):
            before = client.status().servers
            served.kill_server()
            # `get` of an object that the client has mapped works with or without a server.
            for _ in range(1000):
                assert client.get("stays").data_ptr() == held.data_ptr()
            # The first call that needs a server is answered by the restarted server.
            client.put("later", np.array([before]))
            assert client.get("later").numpy()[0] == before
            assert client.status().servers == before + 1
            assert held.numpy()[251] == 251
        draft.array.numpy()[:] = 1
        draft.seal()
        assert client.get("drafted").numpy().all()
        # A watch continues after a restart of the server, and reports that it may have missed events.
        while watcher.is_alive():
            client.put("seen", b"")
        watcher.join()
        assert {(event.name, event.kind, event.id, event.version) for event in reported[:-1]} == {("seen", "missed", 0, None)}
        assert reported[-1].kind == "published"


def test_a_dead_store_raises_server_lost() -> None:
    served = StoreServer()
    client = served.client()
    client.put("cached", np.arange(3))
    client.put("not cached", np.arange(LARGE, dtype=np.uint8))
    cached = client.get("cached")
    watch = client.watch()
    served.kill()
    for call in [client.status, lambda: client.get("not cached"), lambda: client.put("x", b""), watch.next]:
        with pytest.raises(errors.ServerLost) as caught:
            call()
        assert caught.value.hint and isinstance(caught.value, ConnectionError)
    with pytest.raises(errors.ServerLost, match="no store is served"):
        served.client()
    # After the store has ended, all calls fail, also `get` and `stat` of an object that the client has mapped: no process updates
    # the index any more, so its names may be out of date.
    calls: list[Callable[[], Any]] = [
        lambda: client.get("cached"),
        lambda: client.get("cached", timeout=1),
        lambda: client.stat("cached"),
        client.list,
        client.watch,
        lambda: client.create("new", (3,), "int8"),
        lambda: client.delete("cached"),
    ]
    for call in calls:
        with pytest.raises(errors.ServerLost):
            call()
    # Arrays that were got before the store ended are still valid.
    assert cached.numpy().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "look",
    [
        lambda client: client.get("cached"),
        lambda client: client.stat("cached"),
        lambda client: client.list(),
        lambda client: client.create("new", (3,), "int8"),
    ],
)
def test_a_cached_get_detects_a_dead_store(look: Any) -> None:
    served = StoreServer()
    client = served.client()
    client.put("cached", np.arange(3))
    client.get("cached")
    served.kill()
    with pytest.raises(errors.ServerLost):
        while True:
            look(client)


def test_ten_thousand_cycles_leak_nothing() -> None:
    with StoreServer() as served:
        client = served.client()
        small, large = np.arange(100), np.zeros(2 << 20, np.uint8)

        def cycle(times: int) -> None:
            for number in range(times):
                client.put("small", small)
                array = client.get("small")
                view = np.from_dlpack(array)
                assert view[99] == 99
                if number % 20 == 0:
                    client.put("large", large)
                    client.get("large").numpy()
                    client.put("pack", {"a": small, "b": small})
                    pack = client.get("pack")
                    assert pack["b"].numpy()[99] == 99
                    client.create("abandoned", (4,), "uint8")
                    client.create("abandoned", (LARGE,), "uint8")
                    del pack
                del array, view
            for name in ("small", "large", "pack"):
                client.delete(name)
            client.status()

        cycle(500)
        gc.collect()
        before = (descriptors(), mapped(), client.status())
        memory = resident()
        cycle(10_000)
        gc.collect()
        after = (descriptors(), mapped(), client.status())
        assert before[:2] == after[:2]
        for what in ["objects", "unsealed", "retired", "clients", "host_used"]:
            assert getattr(before[2], what) == getattr(after[2], what), what
        # If 10,000 objects leaked, they would occupy 8 MB, and the large ones a gigabyte.
        assert resident() - memory < 4 << 20


def test_dropped_clients_leak_nothing(served: StoreServer, client: store.Client) -> None:
    client.put("got", np.arange(3))

    def cycle(times: int) -> None:
        for _ in range(times):
            with served.client() as other:
                array = other.get("got")
                watch = other.watch()
                other.create("draft", (LARGE,), "uint8")
            del other
            assert array.numpy()[2] == 2
            del array, watch

    cycle(10)
    before = (descriptors(), mapped())
    cycle(200)
    assert (descriptors(), mapped()) == before
    while client.status().clients > 1:
        pass
    assert client.status().unsealed == 0


@pytest.mark.parametrize("order", range(6))
def test_objects_can_be_dropped_in_any_order(served: StoreServer, order: int) -> None:
    client: Any = served.client()
    client.put("any order", {"a": np.arange(LARGE, dtype=np.uint8)})
    pack = client.get("any order")
    array = pack["a"]
    alone = client.get("any order/a")
    view = alone.numpy()
    draft = client.create("any draft", (LARGE,), "uint8")
    written = draft.array.numpy()
    mirror = store.Mirror(draft)
    watch = client.watch()
    things = [client, pack, array, alone, view, draft, written, mirror, watch]
    del client, pack, array, alone, view, draft, written, mirror, watch
    if order == 1:
        things.reverse()
    things = things[order:] + things[:order]
    while things:
        thing = things.pop(0)
        if isinstance(thing, np.ndarray):
            thing.sum()
        del thing
        gc.collect()
    with served.client() as other:
        while other.status().clients > 1:
            pass
        assert (other.status().unsealed, other.status().retired) == (0, 0)


def test_cycles_are_collected(served: StoreServer, client: store.Client) -> None:
    client.put("cyclic", np.zeros(LARGE, np.uint8))

    class Node:
        def __init__(self) -> None:
            self.array = client.get("cyclic")
            self.view = self.array.numpy()
            self.draft = client.create("cyclic draft", (LARGE,), "uint8")
            self.me = self

    nodes = [Node() for _ in range(5)]
    died = [weakref.ref(node) for node in nodes]
    client.delete("cyclic")
    assert (client.status().retired, client.status().unsealed) == (1, 5)
    del nodes
    gc.collect()
    assert [ref() for ref in died] == [None] * 5
    assert (client.status().retired, client.status().unsealed) == (0, 0)


def test_objects_alive_at_interpreter_exit_do_not_crash(served: StoreServer, client: store.Client) -> None:
    script = f"""
        import sys, threading, numpy as np
        from wholemem import store
        client = store.Client({served.socket!r})
        client.put("at exit", {{"a": np.zeros({LARGE}, np.uint8)}})
        pack = client.get("at exit")
        draft = client.create("draft at exit", ({LARGE},), "uint8")
        class Keeps:
            pass
        keeps = Keeps()
        keeps.all = [client, pack, pack["a"], pack["a"].numpy(), np.from_dlpack(pack["a"]), draft, draft.array, keeps]
        keeps.mirror = store.Mirror(draft)
        keeps.watch = client.watch()
        threading.Thread(target=lambda: client.get("never", timeout=float("inf")), daemon=True).start()
        sys.keeps = keeps
        """
    ended = run(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    while client.status().clients > 1:
        pass
    assert client.status().unsealed == 0


def test_a_cached_get_makes_no_system_call(served: StoreServer, client: store.Client) -> None:
    client.put("cached", np.arange(3))
    text = f"""
        import ctypes, gc, os
        from wholemem import store
        client = store.Client({served.socket!r})
        call = ctypes.CDLL(None).prctl
        def get(times):
            for _ in range(times):
                client.get("cached")
        get(1000)
        gc.disable()
        # After this call of `prctl` (seccomp), the kernel kills the process at almost any system call but read and write.
        assert call(22, 1, 0, 0, 0) == 0
        get(1000)
        os.write(1, b"done")
        os.getpid()
        client.status()
        os.write(1, b"never")
        """
    # Every 100 ms, `get` checks the connection by a system call, which kills the process, so the program is run up to ten times.
    outcomes = ((ended.stdout, ended.returncode) for ended in (run(text) for _ in range(10)))
    assert ("done", -9) in outcomes


def test_memory_of_the_store_cannot_be_written(client: store.Client) -> None:
    client.put("sealed", np.zeros(LARGE, np.uint8))
    array = client.get("sealed")
    assert map_of(array.data_ptr())[0] == "r--s"
    with pytest.raises(ValueError):
        array.numpy().flags.writeable = True
