"""Tests torch tensors that are published to a store without a copy: tensors of the memory pool, and of expandable segments."""

from __future__ import annotations

import gc
import os
from typing import Any, Iterator

import pytest

from gpu import any_bits, bits, free_bytes, release_unused, torch
from store_server import StoreServer
from wholemem import errors, store
from wholemem.torch import pool
from launcher import run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def served() -> Iterator[StoreServer]:
    with StoreServer(device_size="2GiB") as served:
        yield served


@pytest.fixture(scope="module")
def memory() -> Any:
    return pool.mem_pool()


def elsewhere(served: StoreServer, text: str, **environment: str) -> str:
    """Runs code in another process that imports torch and connects to the store, and returns its output."""
    beginning = "import torch, wholemem\nfrom wholemem import errors, store\nclient = store.Client()\n"
    environment = {**os.environ, "WHOLEMEM_SOCKET": served.socket, **environment}
    ended = run(beginning + text, env=environment, timeout=50)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_tensor_of_the_pool_is_published_without_a_copy(
    served: StoreServer, client: store.Client, memory: Any
) -> None:
    with torch.cuda.use_mem_pool(memory):
        there = torch.empty((3000, 1000), dtype=torch.bfloat16, device="cuda")
    there.copy_(any_bits((3000, 1000), "bfloat16"))
    release_unused()
    before = torch.cuda.mem_get_info()[0]
    assert pool.publish(client, "weights", there) == 1
    # Publishing allocates no GPU memory: a copy of the tensor would take 6 MB.
    assert before - torch.cuda.mem_get_info()[0] < 4 << 20
    array = client.get("weights")
    assert (array.shape, array.dtype, array.readonly) == ((3000, 1000), "bfloat16", True)
    assert (bits(torch.from_dlpack(array)) == bits(there)).all()
    output = elsewhere(
        served,
        """
x = torch.from_dlpack(client.get("weights"))
print(int(x.view(torch.uint8).long().sum()))
""",
    )
    assert output == f"{int(there.view(torch.uint8).long().sum())}\n"


def test_a_published_tensor_shares_memory_with_the_object(client: store.Client, memory: Any) -> None:
    with torch.cuda.use_mem_pool(memory):
        there = torch.zeros(1 << 20, device="cuda")
    pool.publish(client, "same", there)
    seen = torch.from_dlpack(client.get("same"))
    # Writing to a published tensor is not allowed, but shows that the memory is shared.
    there.fill_(3)
    assert int(seen.sum()) == 3 << 20


def test_publishing_waits_for_enqueued_work(client: store.Client, memory: Any) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.use_mem_pool(memory), torch.cuda.stream(stream):
        there = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        torch.cuda._sleep(400_000_000)
        there.fill_(7)
        pool.publish(client, "late", there)
    assert int(torch.from_dlpack(client.get("late")).sum()) == 7 << 20


def test_the_memory_of_a_dropped_published_tensor_is_not_reused(served: StoreServer, client: store.Client) -> None:
    own = pool.mem_pool()
    with torch.cuda.use_mem_pool(own):
        there = torch.full((3 << 20,), 5, dtype=torch.int32, device="cuda")
        pool.publish(client, "dropped", there)
        address = there.data_ptr()
        del there
        gc.collect()
        # Without the published object, torch would reuse the memory of the dropped tensor immediately.
        others = [torch.full((3 << 20,), 9, dtype=torch.int32, device="cuda") for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
    assert int(torch.from_dlpack(client.get("dropped")).sum()) == 5 * (3 << 20)
    del others
    client.delete("dropped")
    gc.collect()
    with torch.cuda.use_mem_pool(own):
        again = [torch.full((3 << 20,), 9, dtype=torch.int32, device="cuda") for _ in range(4)]
    assert address in [other.data_ptr() for other in again]


def test_tensors_of_one_segment_are_counted_once(client: store.Client) -> None:
    own = pool.mem_pool()
    before = client.status().device_used
    with torch.cuda.use_mem_pool(own):
        tensors = [torch.full((1000,), i, dtype=torch.int32, device="cuda") for i in range(40)]
    for i, tensor in enumerate(tensors):
        pool.publish(client, f"small/{i}", tensor)
    assert client.status().device_used - before == 2 << 20
    for i in range(40):
        assert int(torch.from_dlpack(client.get(f"small/{i}")).sum()) == 1000 * i
        client.delete(f"small/{i}")
    assert client.status().device_used == before


def test_memory_is_returned_to_the_pool(served: StoreServer) -> None:
    before = free_bytes()
    with served.client() as client:
        own = pool.mem_pool()
        with torch.cuda.use_mem_pool(own):
            there = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
        pool.publish(client, "back", there)
        assert before - free_bytes() >= 64 << 20
        seen = torch.from_dlpack(client.get("back"))
        del there, own
        release_unused()
        # The creator drops the tensor and deletes the name; the client still holds the object.
        client.delete("back")
        assert int(seen.sum(dtype=torch.int64)) == 64 << 20
        del seen
        gc.collect()
        pool.collect()
    assert before - free_bytes() < 16 << 20


def test_a_published_tensor_outlives_its_process(served: StoreServer, client: store.Client) -> None:
    elsewhere(
        served,
        """
from wholemem.torch import pool
with torch.cuda.use_mem_pool(pool.mem_pool()):
    x = torch.arange(1 << 20, device="cuda")
pool.publish(client, "left", x)
""",
    )
    assert torch.equal(torch.from_dlpack(client.get("left")), torch.arange(1 << 20, device="cuda"))


def test_tensors_outside_of_a_pool_are_rejected(client: store.Client) -> None:
    with pytest.raises(errors.Unsupported, match="not allocated to be shared") as caught:
        pool.publish(client, "x", torch.zeros(1 << 20, device="cuda"))
    assert "mem_pool()" in str(caught.value)
    with pytest.raises(errors.Unsupported, match="on cpu"):
        pool.publish(client, "x", torch.zeros(4))


EXPANDABLE = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


def test_tensors_of_expandable_segments_can_be_put_and_shared(served: StoreServer, client: store.Client) -> None:
    output = elsewhere(
        served,
        """
small, large = torch.arange(1000, device="cuda"), torch.arange(32 << 20, device="cuda")
client.put("put", large)
client.share("small", small)
print(torch.equal(torch.from_dlpack(client.get("small")), small))
print(torch.equal(torch.from_dlpack(client.get("put")), large))
try:
    client.share("large", large)
    print(torch.equal(torch.from_dlpack(client.get("large")), large))
except errors.Unsupported as error:
    print("allocations instead of one" in str(error), error.hint)
client.delete("put")
""",
        **EXPANDABLE,
    )
    assert output.splitlines()[:2] == ["True", "True"]
    assert output.splitlines()[2].startswith("True")
    # The object outlives the process whose torch allocated it.
    assert torch.equal(torch.from_dlpack(client.get("small")), torch.arange(1000, device="cuda"))


def test_the_pool_works_with_expandable_segments(served: StoreServer) -> None:
    output = elsewhere(
        served,
        """
from wholemem.torch import pool
with torch.cuda.use_mem_pool(pool.mem_pool()):
    x = torch.arange(32 << 20, device="cuda")
pool.publish(client, "whole", x)
print(torch.equal(torch.from_dlpack(client.get("whole")), x))
client.delete("whole")
""",
        **EXPANDABLE,
    )
    assert output == "True\n"


def test_a_thousand_rounds_leak_nothing(client: store.Client) -> None:
    own = pool.mem_pool()

    def rounds(count: int) -> None:
        for _ in range(count):
            with torch.cuda.use_mem_pool(own):
                there = torch.zeros(1 << 20, device="cuda")
            pool.publish(client, "round", there)
            torch.from_dlpack(client.get("round"))

    rounds(50)
    before = (free_bytes(), len(os.listdir("/proc/self/fd")), client.status().device_used)
    rounds(1000)
    after = (free_bytes(), len(os.listdir("/proc/self/fd")), client.status().device_used)
    assert before[0] - after[0] <= 64 << 20
    assert after[1] - before[1] <= 4
    assert after[2] == before[2]
    client.delete("round")
