"""Tests the store on a GPU: torch, CuPy and JAX put and get the same memory, and nothing leaks."""

from __future__ import annotations

import os
from typing import Iterator

import numpy as np
import pytest

from gpu import TORCH_TYPES, any_bits, bits, free_bytes, release_unused, torch
from store_server import StoreServer
from wholemem import errors, store
from launcher import descriptors, resident, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def served() -> Iterator[StoreServer]:
    with StoreServer(device_size="2GiB") as served:
        yield served


def elsewhere(served: StoreServer, text: str) -> str:
    """Runs code in another process that imports torch and connects to the store, and returns its output."""
    beginning = "import torch, wholemem\nfrom wholemem import store\nclient = store.Client()\n"
    ended = run(beginning + text, env={**os.environ, "WHOLEMEM_SOCKET": served.socket}, timeout=50)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_a_tensor_can_be_put_and_got(client: store.Client, dtype: str) -> None:
    there = any_bits((33, 5), dtype)
    client.put("x", there)
    array = client.get("x")
    assert (array.dtype, array.shape, array.device, array.readonly) == (dtype, (33, 5), "cuda:0", True)
    back = torch.from_dlpack(array)
    assert (back.dtype, back.data_ptr(), back.device) == (there.dtype, array.data_ptr(), there.device)
    assert (bits(back) == bits(there)).all()
    # A second `get` of the object returns an array of the same memory.
    assert client.get("x").data_ptr() == array.data_ptr()


def test_another_process_gets_the_same_bytes(served: StoreServer, client: store.Client) -> None:
    there = any_bits((1 << 20, 3), "bfloat16")
    client.put("shared", there)
    output = elsewhere(
        served,
        """
x = torch.from_dlpack(client.get("shared"))
print(x.dtype, tuple(x.shape), int(x.view(torch.uint8).long().sum()))
client.put("answer", x.view(torch.int16) + 1)
""",
    )
    assert output == f"torch.bfloat16 (1048576, 3) {int(there.view(torch.uint8).long().sum())}\n"
    # The process that created the object has exited, and the object still exists.
    answer = torch.from_dlpack(client.get("answer"))
    assert torch.equal(answer, there.view(torch.int16) + 1)


def test_put_waits_for_enqueued_work(client: store.Client) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        torch.cuda._sleep(400_000_000)
        there.fill_(7)
        client.put("late", there)
    assert int(torch.from_dlpack(client.get("late")).sum()) == 7 << 20


def test_cupy_and_jax_arrays_can_be_put_and_got(client: store.Client) -> None:
    tried = 0
    try:
        import cupy

        client.put("cupy", cupy.arange(1000, dtype="float16"))
        array = client.get("cupy")
        back = cupy.asarray(array)
        assert back.data.ptr == array.data_ptr() and float(back.sum(dtype="float64")) == 499500
        tried += 1
    except ImportError:
        pass
    try:
        import jax

        client.put("jax", jax.numpy.arange(1000).astype("bfloat16"))
        array = client.get("jax")
        # JAX rejects read-only arrays, but never writes to an array, so a writable export is safe.
        back = jax.dlpack.from_dlpack(array.lent())
        assert back.unsafe_buffer_pointer() == array.data_ptr()
        assert float(back.astype("float32")[999]) == 1000.0
        tried += 1
    except ImportError:
        pass
    if not tried:
        pytest.skip("there is neither CuPy nor JAX")


def test_a_state_dict_can_be_put_as_a_pack(served: StoreServer, client: store.Client) -> None:
    model = {f"layers.{i}.weight": torch.full((64, i + 1), i, dtype=torch.bfloat16, device="cuda") for i in range(50)}
    client.put("model", model)
    output = elsewhere(
        served,
        """
model = client.get("model")
state = {name: torch.from_dlpack(array) for name, array in model.items()}
print(len(state), sum(int((tensor == i).all()) for i, tensor in enumerate(state.values())))
layer = torch.nn.Linear(50, 64, bias=False, device="meta", dtype=torch.bfloat16)
layer.load_state_dict({"weight": state["layers.49.weight"]}, assign=True)
print(layer.weight.data_ptr() == model["layers.49.weight"].data_ptr())
print(float(layer(torch.ones(50, dtype=torch.bfloat16, device="cuda"))[0]))
""",
    )
    assert output == "50 50\nTrue\n2448.0\n"


def test_an_object_outlives_its_client_and_its_name(served: StoreServer) -> None:
    client = served.client()
    client.put("gone", torch.full((1 << 20,), 3, device="cuda"))
    there = torch.from_dlpack(client.get("gone"))
    client.delete("gone")
    client.close()
    assert int(there.sum()) == 3 << 20


def test_drafts_and_mirrors_work_on_a_gpu(client: store.Client) -> None:
    draft = client.create("draft", (1000, 4), "float32", device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = torch.from_dlpack(draft.array)
        torch.cuda._sleep(100_000_000)
        there.fill_(5)
        del there
    draft.seal(stream=stream)
    with store.Mirror(client.get("draft")) as mirror:
        assert (mirror.array.numpy() == 5).all()


def test_mistakes_raise_the_expected_errors(client: store.Client) -> None:
    with pytest.raises(errors.WrongStride, match="not contiguous"):
        client.put("x", torch.zeros((4, 4), device="cuda").T[1:])
    with pytest.raises(errors.WrongDevice, match="is on cuda:0, but `b` is on cpu"):
        client.put("x", {"a": torch.zeros(4, device="cuda"), "b": np.zeros(4)})
    with pytest.raises(errors.OverQuota):
        client.put("x", torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))
    release_unused()


def test_ten_thousand_rounds_leak_nothing(client: store.Client) -> None:
    there = torch.zeros(1 << 18, device="cuda")

    def rounds(count: int) -> None:
        for _ in range(count):
            client.put("round", there)
            torch.from_dlpack(client.get("round"))

    rounds(100)
    before = (free_bytes(), resident(), descriptors(), client.status().device_used)
    rounds(2_500)
    small = torch.zeros(1000, device="cuda")
    for _ in range(7_500):
        client.put("small", small)
        torch.from_dlpack(client.get("small"))
    client.delete("small")
    after = (free_bytes(), resident(), descriptors(), client.status().device_used)
    # One arena (memory that small objects share) may remain allocated.
    assert before[0] - after[0] <= 64 << 20
    assert after[1] - before[1] < 8 << 20
    assert after[2] - before[2] <= 1
    assert after[3] - before[3] <= 32 << 20
