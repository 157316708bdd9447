"""Tests that model files are loaded once into a store, and mapped by all processes."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

import wholemem
from store_server import StoreServer, map_of
from wholemem import Communicator, errors, safetensors, store

LIMIT = 60

# The bytes of two elements of every type.
DTYPES = {dtype: 2 * size for dtype, (_, size) in safetensors._DTYPES.items()}


def write(path: Path, tensors: Dict[str, tuple[str, list[int], bytes]]) -> Path:
    """Writes a `.safetensors` file of element types, shapes and bytes."""
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_sharded(folder: Path, size: int) -> Dict[str, np.ndarray]:
    """Writes a model of three files with an index, and returns its tensors."""
    arrays = {f"layer.{number}.weight": np.full((size,), number, np.float32) for number in range(6)}
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        part = {name: array for number, (name, array) in enumerate(arrays.items()) if number % 3 == shard}
        write(folder / file, {name: ("F32", [size], array.tobytes()) for name, array in part.items()})
        weight_map.update({name: file for name in part})
    (folder / safetensors.INDEX).write_text(json.dumps({"metadata": {"total_size": 24 * size}, "weight_map": weight_map}))
    return arrays


def test_tensors_of_every_type_are_loaded(client: store.Client, tmp_path: Path) -> None:
    tensors = {dtype: (dtype, [2], bytes(range(1, length + 1))) for dtype, length in DTYPES.items()}
    tensors["BOOL"] = ("BOOL", [2], b"\0\1")
    tensors.update(scalar=("F32", [], np.float32(1.5).tobytes()), empty=("BF16", [0, 4], b""), matrix=("I64", [2, 3], bytes(48)))
    path = write(tmp_path / "model.safetensors", tensors)
    arrays = safetensors.load_arrays(path, client=client)
    assert list(arrays) == list(tensors)
    for name, (dtype, shape, data) in tensors.items():
        array = arrays[name]
        assert (array.dtype, array.shape, array.readonly) == (safetensors._DTYPES[dtype][0], tuple(shape), True)
        assert bytes(array.memoryview()) == data
    (pack,) = safetensors.names_of(path)
    assert pack in client and safetensors.load_arrays(str(tmp_path), client=client)["matrix"].data_ptr() == arrays["matrix"].data_ptr()


def test_a_changed_file_is_loaded_again_and_a_given_name_is_not(client: store.Client, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": ("U8", [1], b"a")})
    assert safetensors.load_arrays(path, client=client)["x"].tolist() == [97]
    assert safetensors.load_arrays(path, client=client, name="model")["x"].tolist() == [97]
    write(path, {"x": ("U8", [2], b"bc")})
    assert safetensors.load_arrays(path, client=client)["x"].tolist() == [98, 99]
    assert safetensors.load_arrays(path, client=client, name="model")["x"].tolist() == [97]
    assert safetensors.names_of(path, name="model") == ["model"]
    client["other"] = b"bytes"
    with pytest.raises(errors.BadFile, match="the object `other` of the store is not a pack"):
        safetensors.load_arrays(path, client=client, name="other")


def test_a_model_of_several_files_is_loaded_by_its_index_or_folder(client: store.Client, tmp_path: Path) -> None:
    expected = write_sharded(tmp_path, 1000)
    for path in [tmp_path, tmp_path / safetensors.INDEX]:
        arrays = safetensors.load_arrays(path, client=client)
        assert list(arrays) == sorted(expected, key=list(arrays).index) and set(arrays) == set(expected)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array.numpy(), expected[name])
    names = safetensors.names_of(tmp_path)
    assert len(set(names)) == 3 and all(name in client for name in names)
    assert safetensors.names_of(tmp_path, name="m") == ["m.0", "m.1", "m.2"]
    index = json.loads((tmp_path / safetensors.INDEX).read_text())
    index["weight_map"]["layer.9.weight"] = "model-00002-of-00003.safetensors"
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(errors.BadFile, match="has no tensor `layer.9.weight`, which the index of the model lists"):
        safetensors.load_arrays(tmp_path, client=client)


def test_processes_load_each_file_once_and_map_the_same_memory(served: StoreServer, tmp_path: Path) -> None:
    expected = write_sharded(tmp_path, 1 << 18)
    socket, folder = served.socket, tmp_path

    def work(comm: Communicator) -> Dict[str, tuple[str, str, float]]:
        with store.Client(socket) as client:
            comm.barrier()
            arrays = safetensors.load_arrays(folder, client=client)
        return {name: (*map_of(array.data_ptr()), float(array.numpy().mean())) for name, array in arrays.items()}

    results = wholemem.run(work, ranks=4, device="cpu", time_limit=LIMIT)
    assert all(result == results[0] for result in results[1:]), "the processes use different memory"
    assert {name: mean for name, (_, _, mean) in results[0].items()} == {name: array.mean() for name, array in expected.items()}
    assert {access for access, _, _ in results[0].values()} == {"r--s"}
    with served.client() as client:
        assert [client.stat(name).version for name in safetensors.names_of(tmp_path)] == [1, 1, 1], "a file was loaded twice"


def test_a_file_that_another_process_loads_is_awaited(client: store.Client, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"x": ("U8", [1], b"a")})
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(errors.Timeout, match="another process did not finish loading .* within 0.05 seconds"):
            safetensors.load_arrays(path, client=client, timeout=0.05)
    assert safetensors.load_arrays(path, client=client, timeout=0)["x"].tolist() == [97]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (struct.pack("<Q", 100) + b"{}", "the length of its header is 100"),
        (struct.pack("<Q", 2) + b"[]", "its header is not an object"),
        (struct.pack("<Q", 2) + b"{x", "Expecting property name"),
    ],
)
def test_invalid_files_are_refused(client: store.Client, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    before = client.keys()
    with pytest.raises(errors.BadFile, match=f"is not a valid .safetensors file: {message}"):
        safetensors.load_arrays(path, client=client)
    assert client.keys() == before


@pytest.mark.parametrize(
    "tensor", [("F32", [2], b"1234567"), ("F32", [-1], b""), ("F32", [True], b"1234"), ("F32", ["1"], b"1234")]
)
def test_invalid_tensors_are_refused(client: store.Client, tmp_path: Path, tensor: Any) -> None:
    path = write(tmp_path / "model.safetensors", {"x": tensor})
    with pytest.raises(errors.BadFile, match="the description of `x` is invalid"):
        safetensors.load_arrays(path, client=client)
    whole = write(tmp_path / "cut.safetensors", {"x": ("U8", [9], b"123456789")})
    os.truncate(whole, whole.stat().st_size - 1)
    with pytest.raises(errors.BadFile, match="the description of `x` is invalid"):
        safetensors.load_arrays(whole, client=client)


def test_missing_files_and_unknown_types_are_refused(client: store.Client, tmp_path: Path) -> None:
    with pytest.raises(errors.BadFile, match="cannot open .*model.safetensors: No such file"):
        safetensors.load_arrays(tmp_path, client=client)
    path = write(tmp_path / "model.safetensors", {"x": ("F4", [2], b"1")})
    with pytest.raises(errors.Unsupported, match="has the element type F4"):
        safetensors.load_arrays(path, client=client)
    (tmp_path / safetensors.INDEX).write_text("{}")
    with pytest.raises(errors.BadFile, match="cannot read the index .*: KeyError"):
        safetensors.load_arrays(tmp_path, client=client)
    large = write(tmp_path / "large.safetensors", {"x": ("U8", [300 << 20], b"")})
    text = large.read_bytes().replace(b"[0, 0]", b"[0, 314572800]")
    large.write_bytes(struct.pack("<Q", len(text) - 8) + text[8:])
    os.truncate(large, len(text) + (300 << 20))
    with pytest.raises(errors.OverQuota) as caught:
        safetensors.load_arrays(large, client=client)
    assert "wholemem serve --size" in str(caught.value)


@pytest.mark.usefixtures("store_of_examples")
def test_the_default_store_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"x": ("U8", [1], b"a")})
    assert safetensors.load_arrays(path)["x"].tolist() == [97]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_module_without_memory_gets_its_parameters_from_the_store(client: store.Client, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16).eval()
    names = {torch.bfloat16: "BF16", torch.int64: "I64"}
    state = {
        name: (names[tensor.dtype], list(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in source.state_dict().items()
    }
    path = write(tmp_path / "model.safetensors", state)
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).eval()
    assert safetensors.load_model(module, path, client=client) == ([], [])
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    assert torch.equal(module(x), source(x))
    loaded = safetensors.load_file(path, "cpu", client=client)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {name: t.dtype for name, t in source.state_dict().items()}
    with torch.no_grad():
        loaded["0.weight"].zero_()  # changes this tensor only
    assert torch.equal(module[0].weight, source[0].weight)
    extra = torch.nn.Sequential(torch.nn.Linear(4, 3))
    assert safetensors.load_model(extra, path, strict=False, client=client)[0] == []
    with pytest.raises(RuntimeError, match="Unexpected key"):
        safetensors.load_model(extra, path, client=client)
