"""Tests the errors of the store: their classes, messages and hints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from wholemem import errors, store

LARGE = 3 << 20


class Twice(Mapping[str, Any]):
    """A mapping whose iteration gives one name twice, which a dict cannot do."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, name: str) -> Any:
        return self.value

    def __iter__(self) -> Iterator[str]:
        return iter(["y", "y"])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda client: client.get("nothing"), errors.NotFound, "there is no object named `nothing`"),
        (lambda client: client.stat("nothing"), errors.NotFound, "there is no object named `nothing`"),
        (lambda client: client.delete("nothing"), errors.NotFound, "there is no object named `nothing`"),
        (lambda client: client.put("x", [1, 2]), errors.WrongType, "`list` is not an array"),
        (lambda client: client.put("x", np.array(["text"])), errors.WrongType, "not supported"),
        (lambda client: client.put("x", {"y": b"", "z": [1]}), errors.WrongType, "^`z`: `list` is not an array"),
        (lambda client: client.put("x", {"z": np.array(["text"])}), errors.WrongType, "^`z`: .* not supported"),
        (lambda client: client.put("x", {"z": np.ones(2, "datetime64[s]")}), errors.WrongValue, "^`z`: .* cannot be imported"),
        (lambda client: client.put("x", {7: b""}), errors.WrongType, "7 is not a name of an array"),
        (lambda client: client.create_pack("x", {7: (1, "int8")}), errors.WrongType, "7 is not a name of an array"),
        (lambda client: client.create_pack("x", {"z": (-1, "int8")}), errors.WrongValue, "^`z`: -1 is out of range"),
        (lambda client: client.create_pack("x", {"z": (1, "float1")}), errors.WrongType, "^`z`: the element type `float1`"),
        (lambda client: client.create("x", (-1,), "int8"), errors.WrongValue, "-1 is out of range"),
        (lambda client: client.create("x", (1,), "float1"), errors.WrongType, "the element type `float1`"),
        (lambda client: client.put("x" * 201, b""), errors.WrongValue, "an object name of 201 bytes is too long"),
        (lambda client: client.get("x", timeout=-1), errors.WrongValue, "a timeout of -1 seconds is not valid"),
        (lambda client: client.put("x", b"", timeout=float("nan")), errors.WrongValue, "a timeout of NaN"),
        (lambda client: client.create("x", (1 << 40,), "int8"), errors.OverQuota, "cannot allocate 1 TiB"),
        (lambda client: store.Client("/nowhere/socket"), errors.ServerLost, "no store is served at the socket `/nowhere/socket`"),
    ],
)
def test_mistakes_raise_the_expected_errors(client: store.Client, call: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call(client)
    assert isinstance(caught.value, errors.Error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_foreign_exception_gets_a_note_with_the_member_name(client: store.Client) -> None:
    class Broken:
        def __dlpack__(self) -> None:
            raise LookupError("nothing is here")

        def __dlpack_device__(self) -> None:
            self.__dlpack__()

    with pytest.raises(LookupError, match="nothing is here") as caught:
        client.put("x", {"y": b"", "z": Broken()})
    assert getattr(caught.value, "__notes__") == ["this concerns `z`"]


def test_a_shape_with_too_many_dimensions_is_rejected(client: store.Client) -> None:
    with pytest.raises(errors.WrongValue, match="metadata of .* bytes is too long"):
        client.create("dimensions", (1,) * 200, "int8")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.put("", np.ones(LARGE)),
        lambda client: client.put("", {"x": b""}),
        lambda client: client.publish("", b""),
        lambda client: client.publish("", client.get("named")),
        lambda client: client.share("", b""),
        lambda client: client.create("", (LARGE,), "int8"),
        lambda client: client.create_pack("", {"x": ((LARGE,), "int8")}),
    ],
)
def test_an_empty_name_is_rejected_before_memory_is_allocated(client: store.Client, call: Any) -> None:
    client.put("named", b"")
    before = client.status()
    with pytest.raises(errors.WrongValue, match="the name of an object must not be empty") as caught:
        call(client)
    assert caught.value.hint and caught.value.code == "empty-name"
    after = client.status()
    assert (after.objects, after.unsealed, after.host_used) == (before.objects, before.unsealed, before.host_used)


def test_calls_without_a_timeout_do_not_suggest_one(client: store.Client) -> None:
    for call in [client.stat, client.delete]:
        with pytest.raises(errors.NotFound) as caught:
            call("nothing")
        assert caught.value.hint == "`client.list()` lists the objects"
    with pytest.raises(errors.NotFound) as caught:
        client.get("nothing")
    assert "timeout=10" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda client: client.create_pack("x", {"z": (1,)}), errors.WrongType, r"^`z`: \(1,\) is not a pair of shape and type"),
        (lambda client: client.create_pack("x", [("z", 1)]), errors.WrongType, "`list` is not a mapping"),
        (lambda client: client.create_pack("x", {"z": ((1.5, 2), "int8")}), errors.WrongType, r"^`z`: \(1.5, 2\) is no"),
        (lambda client: client.create_pack("x", {"z": (None, "int8")}), errors.WrongType, "^`z`: None is not a shape"),
        (lambda client: client.create("x", (1.5, 2), "int8"), errors.WrongType, r"^\(1.5, 2\) is not a shape"),
        (lambda client: client.create("x", None, "int8"), errors.WrongType, "^None is not a shape"),
        (lambda client: client.create("x", "abc", "int8"), errors.WrongType, "^'abc' is not a shape"),
        (lambda client: client.create("x", b"abc", "int8"), errors.WrongType, "^b'abc' is not a shape"),
        (lambda client: client.put("x", Twice(b"")), errors.WrongValue, "^two arrays are named `y`"),
        (lambda client: client.create_pack("x", Twice((2, "int8"))), errors.WrongValue, "^two arrays are named `y`"),
        (lambda client: store.Client("x" * 300), errors.WrongValue, "^cannot use the store's socket `x*`: `bind` failed: File name too long"),
        (lambda client: store.Client("a\0b"), errors.WrongValue, "^cannot use the store's socket `a\0b`: `bind` failed: Invalid"),
    ],
)
def test_malformed_arguments_raise_with_a_hint(client: store.Client, call: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        call(client)
    assert isinstance(caught.value, errors.Error) and caught.value.hint
