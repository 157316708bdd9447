"""Tests packs: several arrays in one allocation, put, written in place and got together."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from store_server import StoreServer, map_of
from wholemem import errors, store

LARGE = 3 << 20


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_pack_is_a_mapping_over_one_memory(client: store.Client, count: int) -> None:
    there = {"z": np.arange(count, dtype=np.uint8), "a.b": np.ones((2, 3), "float32"), "n": np.array(5)}
    assert client.put("pack", there) >= 1
    pack = client.get("pack")
    assert isinstance(pack, Mapping) and isinstance(pack, store.Pack)
    assert (len(pack), list(pack), pack.keys(), pack.name) == (3, ["z", "a.b", "n"], ["z", "a.b", "n"], "pack")
    assert pack.nbytes == sum(array.nbytes for array in there.values())
    for name, array in pack.items():
        np.testing.assert_array_equal(array.numpy(), there[name])
        assert array.dtype == there[name].dtype.name and array.readonly
        assert array.data_ptr() == pack[name].data_ptr() == client.get(f"pack/{name}").data_ptr()
    assert len({map_of(array.data_ptr()) for array in pack.values()}) == 1
    assert ("z" in pack, "y" in pack, pack.get("y"), pack.get("y", 7)) == (True, False, None, 7)
    with pytest.raises(KeyError, match="the pack `pack` has no array `y`"):
        pack["y"]
    # A pack that was got from the store can be put again like any other mapping.
    client.put("again", pack)
    assert client.get("again")["n"].numpy() == 5


def test_an_empty_pack_is_a_pack(served: StoreServer, client: store.Client, tmp_path: Path) -> None:
    client.put("none", {})
    client.create_pack("none drafted", {}).seal()
    text = b'{"__metadata__":{"made":"by hand"}}'
    (tmp_path / "none.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    served.run("put", "none of a file", str(tmp_path / "none.safetensors"))
    for name in ["none", "none drafted", "none of a file"]:
        pack, entry = client.get(name), client.stat(name)
        assert isinstance(pack, store.Pack) and (dict(pack), pack.name, pack.nbytes) == ({}, name, 0)
        assert (entry.is_pack, entry.pack, entry.shape, entry.dtype) == (True, entry.id, None, None)
    # An object of zero bytes is not a pack.
    client.put("no bytes", b"")
    assert client.get("no bytes").shape == (0,) and not client.stat("no bytes").is_pack


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_pack_preserves_the_order_of_empty_arrays(client: store.Client, count: int) -> None:
    names = ["z", "y", "last", "b", "first", "x", "a"]
    # Objects are deleted in random order, so that the arrays of the pack get index slots that are not in ascending order.
    for number in range(100):
        client.put(f"before {number}", b"")
    for number in random.Random(1).sample(range(100), 100):
        client.delete(f"before {number}")
    for _ in range(20):
        client.put("ordered", {name: np.zeros(count if name in ("last", "first") else 0) for name in names})
        assert list(client.get("ordered")) == names


def test_a_pack_can_have_thousands_of_arrays(client: store.Client) -> None:
    client.put("many", {f"layer.{number}": np.full(3, number) for number in range(3000)})
    many = client.get("many")
    assert [int(array.numpy()[2]) for array in many.values()] == list(range(3000))
    client.delete("many")
    assert many["layer.2999"].numpy()[0] == 2999


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_pack_is_written_in_place(client: store.Client, count: int) -> None:
    with client.create_pack("in place", {"a": ((count,), "uint8"), "b": ([2, 2], np.float32)}) as draft:
        assert (len(draft), list(draft)) == (2, ["a", "b"])
        draft["a"].numpy()[:] = 3
        draft["b"].numpy()[:] = 4
        with pytest.raises(errors.NotFound, match="has no array `c`"):
            draft["c"]
        kept = draft["a"]
        with pytest.raises(errors.InUse):
            draft.seal()
        del kept
    pack = client.get("in place")
    assert (pack["a"].numpy().sum(), pack["b"].numpy().tolist()) == (3 * count, [[4, 4], [4, 4]])
