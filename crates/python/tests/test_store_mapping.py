"""Tests that a client is used like a dict, and that arrays of any strides and parameters are put."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from store_server import StoreServer
from wholemem import errors, store


def test_a_client_is_used_like_a_dict() -> None:
    with StoreServer() as served, served.client() as client:
        assert len(client) == 0 and list(client) == [] and bool(client)
        client["b"] = np.arange(3)
        client["a"] = {"x": np.ones(2), "y": b"bytes"}
        assert list(client) == client.keys() == ["a", "a/x", "a/y", "b"] and len(client) == 4
        assert client.keys("a/") == ["a/x", "a/y"]
        assert "a" in client and "a/x" in client and "c" not in client
        assert client["b"].tolist() == [0, 1, 2] and set(client["a"]) == {"x", "y"}
        assert {name: client.stat(name).nbytes for name in client.keys("a/")} == {"a/x": 16, "a/y": 5}
        assert set(dict(client)) == set(client) and dict(client)["b"].tolist() == [0, 1, 2]
        client["b"] = b"new"
        assert client.stat("b").version == 2 and client["b"].memoryview() == b"new"
        del client["b"]
        assert "b" not in client and client.keys() == ["a", "a/x", "a/y"]


def test_missing_names_raise_key_errors(client: store.Client) -> None:
    with pytest.raises(KeyError, match="there is no object named `nothing`") as caught:
        client["nothing"]
    assert isinstance(caught.value, errors.NotFound) and caught.value.code == "no-such-name"
    with pytest.raises(errors.NotFound):
        del client["nothing"]
    with pytest.raises(TypeError):
        client[7]  # type: ignore[index]
    assert 7 not in client and None not in client and "" not in client and "x" * 300 not in client


def test_get_returns_the_default_for_a_missing_name(client: store.Client) -> None:
    client.put("there", b"bytes")
    assert client.get("missing", default=None) is None
    assert client.get("missing", 0.01, default=7) == 7
    assert client.get("there", default=None).memoryview() == b"bytes"
    with pytest.raises(errors.Timeout, match="did not appear within 0.01 seconds"):
        client.get("missing", 0.01)
    with pytest.raises(errors.WrongValue, match="a timeout of -1 seconds"):
        client.get("missing", -1, default=None)


def test_a_closed_client_is_not_usable_as_a_dict(served: StoreServer) -> None:
    client = served.client()
    client.close()
    for call in [len, list, lambda client: "x" in client, lambda client: client["x"], lambda client: client.keys()]:
        with pytest.raises(errors.Closed):
            call(client)


def strided(rng: random.Random, dtype: str) -> Any:
    """Returns a random view of an array: permuted, reversed, sliced, broadcast or unaligned."""
    shape = tuple(rng.choice([1, 2, 3, 5, 8, 70]) for _ in range(rng.randint(1, 4)))
    count = int(np.prod(shape))
    memory = np.random.default_rng(rng.randint(0, 1 << 30)).integers(0, 256, count * np.dtype(dtype).itemsize + 1, np.uint8)
    start = rng.randint(0, 1)
    array = memory[start : len(memory) - 1 + start].view(dtype).reshape(shape)
    array = array.transpose(rng.sample(range(array.ndim), array.ndim))
    slices = [slice(None, None, rng.choice([1, 1, 2, 3, -1, -2])) for _ in range(array.ndim)]
    array = array[tuple(slices)]
    if rng.random() < 0.2:
        array = np.broadcast_to(array, (3, *array.shape))
    return array


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "complex128", "bool"])
def test_arrays_of_any_strides_are_put_in_order(client: store.Client, dtype: str) -> None:
    for seed in range(60):
        array = strided(random.Random(seed), "uint8" if dtype == "bool" else dtype)
        if dtype == "bool":
            array = array > 127
            array = array[::-1]
        client.put("strided", {"one": array, "two": b"end"})
        found = client["strided"]["one"].numpy()
        assert found.shape == array.shape and found.flags.c_contiguous
        assert found.tobytes() == array.tobytes(), (seed, array.shape, array.strides)


def test_large_strided_arrays_are_put(client: store.Client) -> None:
    table = np.random.default_rng(0).integers(0, 1 << 30, (1500, 1100), np.int32)
    for array in [table.T, table[::2], table[:, 100:900], table[:, ::-1], np.asfortranarray(table), table[3:3]]:
        client["large"] = array
        np.testing.assert_array_equal(client["large"].numpy(), array)
        client.publish("published", array)
        np.testing.assert_array_equal(client["published"].numpy(), array)


def test_slices_of_stored_arrays_are_put(client: store.Client) -> None:
    client["rows"] = np.arange(24).reshape(4, 6)
    client["columns"] = client["rows"][:, 1::2]
    assert client["columns"].tolist() == np.arange(24).reshape(4, 6)[:, 1::2].tolist()


def test_tensors_and_parameters_are_put_without_their_gradients(client: store.Client) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    client["parameter"] = module[0].weight
    client["parameters"] = dict(module.named_parameters())
    client["state"] = module.state_dict()
    assert torch.equal(torch.from_dlpack(client["parameter"]), module[0].weight.detach())
    for name, tensor in module.state_dict().items():
        assert torch.equal(torch.from_dlpack(client["state"][name]), tensor), name
    assert set(client["parameters"]) == {name for name, _ in module.named_parameters()}
    assert module[0].weight.requires_grad

    weight = torch.randn(6, 4, dtype=torch.complex64, requires_grad=True)
    for tensor in [weight.T, weight.conj(), weight.conj().imag, weight[::2, 1:], weight.real.expand(2, 6, 4)]:
        client["view"] = tensor
        assert torch.equal(torch.from_dlpack(client["view"]), tensor.detach().clone())
    client["half"] = torch.arange(12).reshape(3, 4).T.to(torch.bfloat16)[1:]
    assert torch.from_dlpack(client["half"]).tolist() == torch.arange(12.0).reshape(3, 4).T[1:].tolist()


def test_values_that_are_no_arrays_are_still_refused(client: store.Client) -> None:
    class Fake:
        requires_grad = True

        def detach(self) -> list[int]:
            return [1]

    with pytest.raises(errors.WrongType, match="`list` is not an array"):
        client["fake"] = Fake()
    with pytest.raises(errors.WrongType, match="^`x`: `list` is not an array"):
        client["fake"] = {"x": Fake()}
