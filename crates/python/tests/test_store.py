"""Tests the Python interface of the store: arrays are put, got, created as drafts, published, watched and deleted, and are
exchanged with the command line program `wholemem`."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import subprocess
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wholemem
from store_server import StoreServer, address, map_of
from wholemem import errors, store
from launcher import run

LARGE = 3 << 20

NUMPY_TYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_an_array_survives_put_and_get(client: store.Client, dtype: str) -> None:
    there = np.arange(24).reshape(2, 3, 4).astype(dtype)
    client.put("typed", there)
    here = client.get("typed")
    assert (here.shape, here.dtype, here.device, here.readonly) == ((2, 3, 4), dtype, "cpu", True)
    for back in [here.numpy(), np.from_dlpack(here), np.asarray(here)]:
        np.testing.assert_array_equal(back, there)
        assert back.dtype == there.dtype and not back.flags.writeable
    assert address(here.numpy()) == address(np.asarray(here)) == here.data_ptr()
    assert here.memoryview().readonly and here.memoryview().tobytes() == there.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_element_types_that_numpy_lacks_are_preserved(client: store.Client, dtype: str) -> None:
    there = wholemem.zeros((3, 2), dtype)
    there.memoryview().cast("B")[1] = 7
    client.put("small floats", there)
    here = client.get("small floats")
    assert (here.dtype, here.shape) == (dtype, (3, 2))
    assert here.memoryview().tobytes() == there.memoryview().tobytes()


@pytest.mark.parametrize("there", [np.array(7.5), np.zeros((0, 5)), np.zeros((3, 0, 2), "int8")], ids=str)
def test_arrays_of_one_or_no_element_are_supported(client: store.Client, there: np.ndarray) -> None:
    client.put("few", there)
    here = client.get("few").numpy()
    assert (here.shape, here.dtype) == (there.shape, there.dtype)
    np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("there", [b"hello", bytearray(b"hello"), memoryview(b"hello")])
def test_bytes_are_an_array(client: store.Client, there: Any) -> None:
    client.put("bytes", there)
    assert client.get("bytes").memoryview().tobytes() == b"hello"


def test_objects_are_exported_as_read_only(client: store.Client) -> None:
    client.put("sealed", np.arange(3))
    here = client.get("sealed")
    assert '"dltensor_versioned"' in repr(here.__dlpack__(max_version=(1, 0)))
    # A consumer of an unversioned capsule sees no read-only flag and may write; `test_store_writes.py` tests that the writes are
    # private.
    assert '"dltensor"' in repr(here.__dlpack__())
    with pytest.raises(ValueError, match="read-only"):
        here.numpy()[0] = 1


@pytest.mark.parametrize("count", [10, LARGE])
def test_get_copies_nothing(served: StoreServer, client: store.Client, count: int) -> None:
    client.put("once", np.arange(count, dtype=np.uint8))
    first, second = client.get("once"), client.get("once")
    assert first.data_ptr() == second.data_ptr() == address(first.numpy()) == address(second.numpy())
    access, inode = map_of(first.data_ptr())
    assert access == "r--s"
    assert map_of(address(np.from_dlpack(second))) == ("rw-p", inode)
    # Another process maps the memory of the object that this process has mapped.
    ended = run(
        f"""
        from wholemem import store
        from store_server import map_of
        array = store.Client({served.socket!r}).get("once")
        print(map_of(array.data_ptr())[1], array.numpy()[9])
        """,
        cwd=Path(__file__).parent,
    )
    assert (ended.stdout.split(), ended.stderr) == ([inode, "9"], "")


def test_put_creates_a_new_version_and_readers_keep_the_old_one(client: store.Client) -> None:
    before = client.put("versions", np.array([1]))
    old = client.get("versions").numpy()
    assert client.put("versions", np.array([2])) == before + 1 == client.stat("versions").version
    assert client.publish("versions", np.array([3])) == before + 2
    assert (old[0], client.get("versions").numpy()[0]) == (1, 3)


def test_publishing_an_object_copies_nothing(served: StoreServer, client: store.Client) -> None:
    client.put("original", np.arange(LARGE, dtype=np.uint8))
    original = client.get("original")
    client.publish("alias", original)
    client.delete("original")
    alias = client.get("alias")
    assert (alias.data_ptr(), alias.shape, alias.dtype) == (original.data_ptr(), (LARGE,), "uint8")
    client.put("pack", {"none": np.zeros(0), "first": np.arange(4), "second": np.arange(5)})
    pack = client.get("pack")
    for name, array in pack.items():
        client.publish("alias of " + name, array)
        there = client.get("alias of " + name)
        assert (there.shape, there.dtype, there.numpy().tolist()) == (array.shape, array.dtype, array.numpy().tolist())
        assert (there.data_ptr() == array.data_ptr()) == (array.nbytes > 0)
    # Publishing copies an array that another connection got, and an array that is a part of an object.
    client.publish("copy", served.client().get("alias"))
    client.publish("part", np.asarray(alias)[5:8])
    assert map_of(client.get("copy").data_ptr()) != map_of(alias.data_ptr())
    assert client.get("part").numpy().tolist() == [5, 6, 7]


@pytest.mark.parametrize("in_pack", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_publishing_a_deleted_object_copies_it(
    client: store.Client, in_pack: bool, is_replaced: bool
) -> None:
    value: Any = {"array": np.arange(4)} if in_pack else np.arange(4)
    client.put("old", value)
    old = client.get("old")["array"] if in_pack else client.get("old")
    if is_replaced:
        client.put("old", np.zeros(2))
    else:
        client.delete("old")
    client.publish("old", old)
    assert client.get("old").numpy().tolist() == [0, 1, 2, 3] and client.get("old").data_ptr() != old.data_ptr()


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_draft_can_be_written_and_sealed(client: store.Client, count: int) -> None:
    draft = client.create("drafted", (count,), np.uint8)
    assert not draft.array.readonly and not draft.array.numpy().any()
    kept = draft.array.numpy()
    kept[:] = 5
    with pytest.raises(errors.NotFound):
        client.get("drafted")
    with pytest.raises(errors.InUse, match="cannot seal the draft of `drafted`: arrays of it still exist") as caught:
        draft.seal()
    assert caught.value.hint and caught.value.code == "still-mapped"
    del kept
    assert draft.seal() == 1
    assert client.get("drafted").numpy().sum() == 5 * count
    for use in [draft.seal, lambda: draft.array]:
        with pytest.raises(errors.Closed):
            use()
    client.delete("drafted")


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_draft_is_a_context_manager(client: store.Client, count: int) -> None:
    with client.create("context", (count,), "uint8") as draft:
        draft.array.numpy()[:] = 1
    assert client.get("context").numpy().all()
    with pytest.raises(ZeroDivisionError):
        with client.create("failed", (count,), "uint8"):
            raise ZeroDivisionError
    with client.create("abandoned", (count,), "uint8") as draft:
        draft.abandon()
    with client.create("sealed within", (count,), "uint8") as draft:
        draft.seal()
    assert {entry.name for entry in client.list()}.isdisjoint({"failed", "abandoned"})
    assert client.status().unsealed == 0


def test_a_mirror_is_written_back(client: store.Client) -> None:
    draft = client.create("mirrored", (LARGE,), "uint8")
    draft.array.numpy()[:] = 1
    mirror = store.Mirror(draft)
    with pytest.raises(errors.InUse):
        draft.seal()
    shown = mirror.array.numpy()
    assert shown.all() and address(shown) != draft.array.data_ptr()
    shown[:] = 2
    with pytest.raises(errors.InUse):
        mirror.write_back()
    del shown
    mirror.write_back()
    with pytest.raises(errors.Closed):
        mirror.array
    draft.seal()
    sealed = client.get("mirrored")
    assert sealed.numpy().sum() == 2 * LARGE
    with store.Mirror(sealed) as mirror:
        assert mirror.array.readonly and mirror.array.numpy().sum() == 2 * LARGE
        assert mirror.array.data_ptr() != sealed.data_ptr()


def test_a_block_does_not_write_a_mirror_back_twice(client: store.Client) -> None:
    with client.create("written", (LARGE,), "uint8") as draft:
        with store.Mirror(draft, copy_in=False) as mirror:
            mirror.array.numpy()[:] = 3
            mirror.write_back()
    assert (client.get("written").numpy() == 3).all()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_mirror_is_abandoned_if_its_block_raises(client: store.Client, is_held: bool) -> None:
    draft = client.create("half", (LARGE,), "uint8")
    draft.array.numpy()[:] = 1
    with pytest.raises(ZeroDivisionError):
        with store.Mirror(draft, copy_in=False) as mirror:
            shown = mirror.array.numpy()
            shown[:] = 2
            if not is_held:
                del shown
            raise ZeroDivisionError
    with pytest.raises(errors.Closed, match="written back or abandoned"):
        mirror.write_back()
    draft.seal()
    assert (client.get("half").numpy() == 1).all()
    if is_held:
        shown[:] = 3
        assert shown.sum() == 3 * LARGE


def test_arrays_of_a_read_only_mirror_may_remain(client: store.Client) -> None:
    client.put("read", np.arange(5))
    with store.Mirror(client.get("read")) as mirror:
        shown = mirror.array.numpy()
    mirror = store.Mirror(client.get("read"))
    again = mirror.array.numpy()
    mirror.write_back()
    assert shown.tolist() == again.tolist() == [0, 1, 2, 3, 4]


def test_unsupported_mirror_sources_are_rejected(client: store.Client) -> None:
    with pytest.raises(errors.Unsupported, match="needs no mirror"):
        store.Mirror(client.create("small", (3,), "uint8"))
    with pytest.raises(errors.WrongType, match="only a draft, or an array that was got"):
        store.Mirror(wholemem.zeros((3,), "uint8"))


def test_entries_describe_objects(client: store.Client) -> None:
    client.put("entries/b", np.zeros((4, 5), "float32"))
    client.put("entries/a", {"x": np.zeros(3)})
    pack, member, array = client.list("entries/")
    assert [entry.name for entry in (pack, member, array)] == ["entries/a", "entries/a/x", "entries/b"]
    assert (array.shape, array.dtype, array.nbytes, array.device) == ((4, 5), "float32", 80, "cpu")
    assert (pack.is_pack, pack.shape, pack.dtype, pack.pack) == (True, None, None, pack.id)
    assert (member.is_pack, member.pack, member.shape) == (False, pack.id, (3,))
    stat = client.stat("entries/b")
    assert (stat.id, stat.version, stat.owner, stat.created) == (array.id, 1, array.owner, array.created)
    assert stat.created > 1e9
    status = client.status()
    assert status.objects >= 3 and 0 < status.host_used < status.host_quota and status.servers >= 1
    client.delete("entries/a")
    assert [entry.name for entry in client.list("entries/")] == ["entries/b"]


def test_entries_events_and_status_can_be_pickled(client: store.Client) -> None:
    watch = client.watch("travels")
    client.put("travels/a", np.zeros((4, 5), "float32"))
    client.put("travels/b", {})
    client.put("travels/b", {})
    client.delete("travels/a")
    client.put("travels/c", {"x": b"abc"})
    reported = [watch.next() for _ in range(5)]
    reported.append(client.watch("travels", after=0).next())
    assert [event.kind for event in reported] == ["published", "published", "replaced", "deleted", "published", "missed"]
    there = [*reported, *client.list("travels"), client.status()]
    for value in there:
        for travel in (pickle.dumps, lambda it: pickle.dumps(it, 0), ForkingPickler.dumps):
            again = pickle.loads(travel(value))
            assert again == value and hash(again) == hash(value) and repr(again) == repr(value)
            fields = [name for name in dir(value) if not name.startswith("_")]
            assert [getattr(again, name) for name in fields] == [getattr(value, name) for name in fields]
        assert copy.copy(value) == copy.deepcopy(value) == value
    assert len(set(there)) == len(there) and there[0] != reported[0].name


def test_a_watch_returns_events(served: StoreServer, client: store.Client) -> None:
    with client.watch("watched") as watch:
        other = served.client()
        other.put("elsewhere", b"1")
        other.put("watched", b"1")
        other.put("watched", b"2")
        other.delete("watched")
        events = [watch.next(timeout=60) for _ in range(3)]
        seen = [(event.name, event.kind, event.version, event.previous, event.objects) for event in events]
        assert seen == [
            ("watched", "published", 1, None, 1),
            ("watched", "replaced", 2, 1, 1),
            ("watched", "deleted", 2, None, 1),
        ]
        assert [repr(event) for event in events] == [
            "Event(name='watched', kind='published', version=1)",
            "Event(name='watched', kind='replaced', version=2, previous=1)",
            "Event(name='watched', kind='deleted', version=2)",
        ]
        assert events[0].id != events[1].id == events[2].id
        first = events[0].revision
        assert [event.revision for event in events] == [first, first + 1, first + 2]
        with pytest.raises(errors.Timeout):
            watch.next(timeout=0.05)
    assert list(watch) == []
    with pytest.raises(errors.Closed):
        watch.next()


def test_a_pack_is_one_event(client: store.Client) -> None:
    # The second watch is of an array that is only in the second pack.
    with client.watch("packed") as watch, client.watch("packed/c") as other:
        client.put("packed", {"a": b"1", "b": b"2"})
        client.put("packed", {"c": b"3"})
        id = client.stat("packed").id
        client.delete("packed")
        events = [watch.next(timeout=60) for _ in range(3)]
        assert [repr(event) for event in events] == [
            "Event(name='packed', kind='published', version=1, objects=3)",
            "Event(name='packed', kind='replaced', version=2, previous=1, objects=2)",
            "Event(name='packed', kind='deleted', version=2, objects=2)",
        ]
        assert [event.id == id for event in events] == [False, True, True]
        assert [other.next(timeout=60) for _ in range(2)] == events[1:]
        assert (watch.try_next(), other.try_next()) == (None, None)


def test_a_watch_is_resumed_behind_a_revision(served: StoreServer, client: store.Client) -> None:
    with client.watch("resumed/") as watch:
        client.put("resumed/1", b"")
        last = watch.next(timeout=60)
    client.put("resumed/2", b"")
    client.put("other", b"")
    client.put("resumed/3", b"")
    with served.client().watch("resumed/", after=last.revision) as watch:
        events = [watch.next(timeout=60) for _ in range(2)]
        assert [event.name for event in events] == ["resumed/2", "resumed/3"]
        assert [event.revision for event in events] == [last.revision + 1, last.revision + 3]
    for revision in [0, 2**64 - 1]:
        for call in [lambda watch: watch.next(timeout=60), lambda watch: watch.try_next()]:
            with client.watch("resumed/", after=revision) as watch:
                missed = call(watch)
                assert repr(missed) == "Event(name='resumed/', kind='missed')"
                assert (missed.id, missed.version, missed.previous, missed.objects) == (0, None, None, 0)
                client.put("resumed/4", b"")
                event = watch.next(timeout=60)
                assert (event.name, event.revision) == ("resumed/4", missed.revision + 1)
    for revision, hint in [(-1, "pass a number that is not negative"), (2**64, "pass a number of at most 64 bits")]:
        with pytest.raises(errors.WrongValue, match=f"{revision} is out of range") as caught:
            client.watch("resumed/", after=revision)
        assert caught.value.hint == hint


def wait_for_clients(client: store.Client, count: int) -> None:
    """Waits until the store has ``count`` connections; a waiting call has its own connection."""
    while client.status().clients != count:
        pass


def test_get_waits_for_a_name() -> None:
    with StoreServer() as served:
        client = served.client()
        with pytest.raises(errors.Timeout, match="the name `late` did not appear within 0.05 seconds"):
            client.get("late", 0.05)
        wait_for_clients(client, 1)
        got: list[Any] = []
        wait = lambda: got.append(client.get("late", timeout=float("inf")))
        waits = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waits:
            thread.start()
        wait_for_clients(client, 4)
        client.put("late", np.array([9]))
        for thread in waits:
            thread.join()
        assert [int(array.numpy()[0]) for array in got] == [9, 9, 9]


def test_put_waits_for_quota() -> None:
    with StoreServer("64MiB") as served:
        client = served.client()
        client.put("first", np.zeros(40 << 20, np.uint8))
        with pytest.raises(errors.OverQuota, match="cannot allocate 40 MiB") as caught:
            client.put("second", np.zeros(40 << 20, np.uint8))
        assert "timeout=10" in str(caught.value) and caught.value.code == "over-quota"
        with pytest.raises(errors.OverQuota) as caught:
            client.put("all", np.zeros(65 << 20, np.uint8), timeout=600)
        assert "hint: it is larger than the whole store, so waiting does not help" in str(caught.value)
        with pytest.raises(errors.OverQuota):
            client.create("second", (40 << 20,), "uint8", timeout=0.05)
        wait_for_clients(client, 1)
        forever = float("inf")
        for call in [client.put, client.publish]:
            call("at once", b"", timeout=forever)
        client.create("at once", (1,), "int8", timeout=forever).seal()
        client.create_pack("at once", {}, timeout=forever).seal()
        second = threading.Thread(target=lambda: client.put("second", np.zeros(40 << 20, np.uint8), timeout=forever))
        second.start()
        wait_for_clients(client, 2)
        client.delete("first")
        second.join()
        assert client.stat("second").nbytes == 40 << 20


def test_drafts_and_mirrors_have_a_repr(client: store.Client) -> None:
    draft = client.create("shown", (2, 1 << 20), "uint8")
    mirror = store.Mirror(draft)
    zeros = "[0, 0, 0, ..., 0, 0, 0]"
    assert repr(mirror) == f"Mirror(Array([{zeros},\n       {zeros}], shape=(2, 1048576), dtype=uint8, device=cpu))"
    mirror.write_back()
    pack = client.create_pack("packed", {"x": ((2,), "int8")})
    assert (repr(draft), repr(pack)) == ("Draft(name='shown')", "PackDraft(name='packed')")
    draft.abandon()
    pack.seal()
    assert (repr(draft), repr(pack)) == ("Draft(name='shown', closed)", "PackDraft(name='packed', closed)")
    assert repr(mirror) == "Mirror(closed)"


def test_a_closed_client_raises_closed(served: StoreServer) -> None:
    with served.client() as client:
        client.put("stays", np.arange(4))
        array = client.get("stays")
        assert not client.closed and repr(client) == f"Client('{served.socket}')"
        assert str(client.socket) == served.socket
    assert client.closed and repr(client).endswith(", closed)")
    for call in [client.list, client.status, lambda: client.get("stays"), lambda: client.put("x", b"")]:
        with pytest.raises(errors.Closed, match="the client is closed") as caught:
            call()
        assert caught.value.hint
    client.close()
    assert array.numpy().tolist() == [0, 1, 2, 3]


def test_too_many_pins_raise_an_error(served: StoreServer) -> None:
    client = served.client()
    client.put("held", b"1")
    held = [client.get("held") for _ in range(8190)]
    with pytest.raises(errors.OutOfMemory, match="holds 8190 objects, which is the limit") as caught:
        client.get("held")
    assert caught.value.hint
    held.pop()
    client.get("held")


def safetensors(path: Path, arrays: dict[str, np.ndarray], types: dict[str, str]) -> None:
    """Writes a `.safetensors` file as other programs do."""
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": types[name], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))


def test_files_put_by_the_program_are_arrays(served: StoreServer, client: store.Client, tmp_path: Path) -> None:
    there = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "half": np.arange(4, dtype=np.uint16)}
    safetensors(tmp_path / "model.safetensors", there, {"w": "F32", "half": "BF16"})
    served.run("put", "file", str(tmp_path / "model.safetensors"))
    model = client.get("file")
    np.testing.assert_array_equal(model["w"].numpy(), there["w"])
    assert (model["half"].dtype, model["half"].shape) == ("bfloat16", (4,))
    for array in [np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([True])]:
        np.save(tmp_path / "array.npy", array)
        served.run("put", "array", str(tmp_path / "array.npy"))
        here = client.get("array").numpy()
        np.testing.assert_array_equal(here, array)
        assert (here.dtype, here.strides) == (array.dtype, array.strides)
    (tmp_path / "plain").write_bytes(b"hello")
    served.run("put", "plain", str(tmp_path / "plain"))
    assert client.get("plain").memoryview().tobytes() == b"hello"


def test_a_fortran_order_array_is_mirrored_and_published(
    served: StoreServer, client: store.Client, tmp_path: Path
) -> None:
    there = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.save(tmp_path / "columns.npy", there)
    served.run("put", "columns", str(tmp_path / "columns.npy"))
    columns = client.get("columns")
    client.publish("columns again", columns)
    again = client.get("columns again")
    assert again.data_ptr() == columns.data_ptr()
    for array in [store.Mirror(columns).array, again]:
        np.testing.assert_array_equal(array.numpy(), there)
        assert array.stride == columns.stride == (1, 2)
    served.run("get", "columns again", str(tmp_path / "again.npy"))
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "columns.npy").read_bytes()


def test_a_truncated_file_is_rejected(served: StoreServer, client: store.Client, tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", np.arange(10.0))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-8])
    with pytest.raises(subprocess.CalledProcessError):
        served.run("put", "cut", str(tmp_path / "cut.npy"))
    with pytest.raises(errors.NotFound):
        client.get("cut")


def test_the_program_gets_arrays_as_files(served: StoreServer, client: store.Client, tmp_path: Path) -> None:
    there = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([True, False])}
    client.put("out", there)
    served.run("get", "out", str(tmp_path / "out.safetensors"))
    safetensors(tmp_path / "expected.safetensors", there, {"w": "F32", "b": "BOOL"})
    served.run("put", "in", str(tmp_path / "out.safetensors"))
    for name, array in client.get("in").items():
        np.testing.assert_array_equal(array.numpy(), there[name])
    for array in [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1 + 2j], "complex64"), np.array(True)]:
        client.put("single", array)
        served.run("get", "single", str(tmp_path / "single.npy"))
        back = np.load(tmp_path / "single.npy")
        np.testing.assert_array_equal(back, array)
        assert (back.dtype, back.shape) == (array.dtype, array.shape)


def test_drafts_can_be_listed_and_deleted_by_entry(client: store.Client) -> None:
    draft = client.create("weights", (1 << 20,), "float32")
    assert client.list("weights") == []
    (entry,) = client.drafts("wei")
    assert (entry.name, entry.nbytes, client.drafts("other")) == ("weights", 4 << 20, [])
    client.delete(entry)
    assert client.drafts() == []
    with pytest.raises(errors.Error) as caught:
        draft.seal()
    assert caught.value.code == "nothing-to-seal"
    version = client.put("weights", np.zeros(3))
    client.delete(client.stat("weights"))
    assert version and client.list("weights") == []


def test_the_program_describes_arrays_of_python(served: StoreServer, client: store.Client) -> None:
    client.put("described", np.zeros((2, 3), "float16"))
    reported = json.loads(served.run("stat", "described", "--json").stdout)
    assert json.loads(reported["description"]) == {"dtype": "F16", "shape": [2, 3]}


def test_the_default_socket_is_that_of_the_program(served: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLEMEM_SOCKET", served.socket)
    assert str(store.Client().socket) == served.socket
    monkeypatch.delenv("WHOLEMEM_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    with pytest.raises(errors.BadEnvironment, match="`/nowhere`, does not exist; set `WHOLEMEM_SOCKET`") as caught:
        store.Client()
    assert caught.value.hint
    monkeypatch.setenv("XDG_RUNTIME_DIR", served.folder.name)
    with pytest.raises(errors.ServerLost, match=f"{served.folder.name}/wholemem.sock"):
        store.Client()


def test_the_program_fails_without_a_store() -> None:
    # The other tests rely on an exception when the program fails.
    with pytest.raises(subprocess.CalledProcessError):
        with StoreServer() as served:
            served.run("stat", "nothing")
