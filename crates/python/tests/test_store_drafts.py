"""Tests drafts that cannot be sealed at first, and their mirrors: a failed call changes neither."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from store_server import StoreServer
from wholemem import errors, store

LARGE = 3 << 20

DRAFTS: list[Any] = [
    lambda client: client.create("draft", (LARGE,), "uint8"),
    lambda client: client.create_pack("draft", {"array": ((LARGE,), "uint8"), "last": ((2,), "uint8")}),
]


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Forks a child process that inherits the Python objects of this process and only waits. The ``with`` block runs in the
    parent; the child exits at the end of the block."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0


def array_of(value: Any) -> Any:
    """Returns the array of a draft or object, or the first array of a pack."""
    if isinstance(value, (store.PackDraft, store.Pack)):
        return value["array"].numpy()
    return value.array.numpy() if isinstance(value, store.Draft) else value.numpy()


@pytest.mark.parametrize("create", DRAFTS)
def test_a_draft_mapped_by_a_forked_child_is_sealed_after_its_exit(client: store.Client, create: Any) -> None:
    draft = create(client)
    array_of(draft)[:] = 7
    with forked():
        for _ in range(2):
            with pytest.raises(errors.InUse, match="still mapped for writing") as caught:
                draft.seal()
            assert "end child processes" in (caught.value.hint or "") and caught.value.code == "still-mapped"
        array_of(draft)[0] = 8
    version = draft.seal()
    sealed = client.get("draft")
    assert client.stat("draft").version == version and array_of(sealed)[:3].tolist() == [8, 7, 7]
    assert client.status().unsealed == 0


@pytest.mark.parametrize("create", DRAFTS)
def test_a_failed_seal_at_block_exit_keeps_the_draft_open(client: store.Client, create: Any) -> None:
    with pytest.raises(errors.InUse, match="still mapped for writing"):
        with contextlib.ExitStack() as child, create(client) as draft:
            array_of(draft)[:] = 7
            child.enter_context(forked())
    with draft:
        array_of(draft)[0] = 8
    assert array_of(client.get("draft"))[:3].tolist() == [8, 7, 7]
    with pytest.raises(errors.InUse, match="cannot seal the draft of `draft`: arrays of it still exist"):
        with create(client) as draft:
            kept = array_of(draft)
    del kept
    draft.seal()


def test_a_small_draft_over_quota_can_be_sealed_later() -> None:
    with StoreServer("32MiB") as served, served.client() as client:
        draft = client.create("small", (3,), "uint8")
        draft.array.numpy()[:] = 7
        client.create("large", (32 << 20,), "uint8").seal()
        with pytest.raises(errors.OverQuota):
            draft.seal()
        client.delete("large")
        draft.seal()
        assert client.get("small").numpy().tolist() == [7, 7, 7]


def test_a_draft_abandoned_during_a_failing_seal_is_closed(client: store.Client) -> None:
    draft = client.create("abandoned", (LARGE,), "uint8")
    with forked():
        with pytest.raises(errors.InUse):
            draft.seal()
        draft.abandon()
        with pytest.raises(errors.Closed):
            draft.seal()
    assert client.status().unsealed == 0


def test_an_array_of_a_dropped_mirror_prevents_sealing(client: store.Client) -> None:
    draft = client.create("mirrored", (LARGE,), "uint8")
    shown = store.Mirror(draft).array
    shown.numpy()[:] = 7
    with pytest.raises(errors.InUse, match="cannot seal the draft of `mirrored`: arrays of it still exist") as caught:
        draft.seal()
    assert "mirrors" in (caught.value.hint or "")
    del shown
    draft.seal()
    assert (client.get("mirrored").numpy() == 7).all()


@pytest.mark.parametrize("is_made", [True, False])
def test_creating_or_dropping_a_mirror_releases_the_gil(client: store.Client, is_made: bool) -> None:
    draft = client.create("looked at", (128 << 20,), "uint8")

    def longest() -> float:
        """Returns the longest time for which a call on the draft waits, as a fraction of the time that creating or dropping the
        mirror takes.
        """
        took: list[float] = []
        over = threading.Event()

        def work() -> None:
            mirrors = [] if is_made else [store.Mirror(draft)]
            start = time.monotonic()
            if is_made:
                mirrors.append(store.Mirror(draft))
            else:
                mirrors.clear()
            took.append(time.monotonic() - start)
            over.set()

        thread, gaps, last = threading.Thread(target=work), [0.0], time.monotonic()
        thread.start()
        while not over.wait(1e-4):
            repr(draft)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        thread.join()
        return max(gaps) / took[0]

    # On a busy machine, any thread may wait for a CPU, so the best of five measurements counts.
    assert min(longest() for _ in range(5)) < 0.5


def test_a_dropped_mirror_is_written_back_even_after_an_exception(client: store.Client) -> None:
    draft = client.create("dropped", (LARGE,), "uint8")

    def half() -> None:
        mirror = store.Mirror(draft)
        mirror.array.numpy()[:10] = 7
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    draft.seal()
    assert client.get("dropped").numpy().sum() == 70
