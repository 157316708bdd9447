"""Publishes torch tensors to a store without a copy.

A ``torch.cuda.MemPool`` of :func:`mem_pool` has memory that other processes can map. Tensors in it are ordinary tensors;
:func:`publish` makes one an object of a store, which other processes get and which outlives this process::

    from wholemem import store
    from wholemem.torch import pool

    client, memory = store.Client(), pool.mem_pool()
    with torch.cuda.use_mem_pool(memory):
        weights = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    fill(weights)
    pool.publish(client, "weights", weights)

    # Another process gets the tensor:
    weights = torch.from_dlpack(store.Client().get("weights", timeout=60))

The tensor may be dropped: its memory is not reused before the object is deleted and all clients have released it. It must not
be written meanwhile; on a GPU, writes cannot be prevented.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Optional

from wholemem import _native

__all__ = ["collect", "mem_pool", "publish"]

_allocator: Any = None


def mem_pool() -> Any:
    """Creates a CUDA memory pool whose tensors can be published to a store without a copy.

    Returns:
        A ``torch.cuda.MemPool`` for ``torch.cuda.use_mem_pool``.
    """
    global _allocator
    if _allocator is None:
        # The allocator is never dropped: torch may call it as long as a tensor exists that it allocated.
        memory: Any = import_module("torch.cuda.memory")
        _allocator = memory.CUDAPluggableAllocator(
            _native.__file__, "wholemem_torch_alloc", "wholemem_torch_free"
        )
    cuda: Any = import_module("torch.cuda")
    return cuda.MemPool(_allocator.allocator())


def publish(client: _native.Client, name: str, tensor: Any, *, timeout: Optional[float] = None) -> int:
    """Publishes a tensor of a CUDA memory pool as an object of the store, without a copy: see :meth:`Client.share`.

    The call waits for the work on the current stream. The quota counts a segment of torch's allocator once, even if several of
    its tensors are published.

    Args:
        client: The connection to the store.
        name: The name of the object.
        tensor: A contiguous tensor that was created in a pool of :func:`mem_pool`.
        timeout: Seconds to wait for free quota. ``None`` does not wait.

    Returns:
        The version of the object under its name.

    Raises:
        wholemem.errors.NotAllowed: Another user serves the store.
        wholemem.errors.OverQuota: The quota is exhausted.
        wholemem.errors.Unsupported: The tensor was not created in a pool.
    """
    return client.share(name, tensor.detach(), timeout=timeout)


def collect() -> int:
    """Releases published tensors whose objects the store has freed. Publishing and deleting objects also releases them.

    Returns:
        The number of published tensors that are still held.
    """
    return _native.collect_shared()
