"""Tensors that are published to a store where they lie, without a copy.

A ``torch.cuda.MemPool`` of :func:`mem_pool` has memory that other processes can map. What is made in it is an ordinary
tensor; :func:`publish` makes it an object of a store, which others get at once, and which outlives this process::

    from wholemem import store
    from wholemem.torch import pool

    client, memory = store.Client(), pool.mem_pool()
    with torch.cuda.use_mem_pool(memory):
        weights = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    fill(weights)
    pool.publish(client, "weights", weights)

    # in another process
    weights = torch.from_dlpack(store.Client().get("weights", timeout=60))

The tensor may be dropped: its memory is used for nothing else before the object has gone, and whoever had it has let it go.
It must not be written meanwhile: on a GPU nobody can be kept from that.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Optional

from wholemem import _native

__all__ = ["collect", "mem_pool", "publish"]

_allocator: Any = None


def mem_pool() -> Any:
    """A ``torch.cuda.MemPool``, for ``torch.cuda.use_mem_pool``, whose tensors can be published."""
    global _allocator
    if _allocator is None:
        # torch calls it for as long as there is a tensor: it stays.
        memory: Any = import_module("torch.cuda.memory")
        _allocator = memory.CUDAPluggableAllocator(
            _native.__file__, "wholemem_torch_alloc", "wholemem_torch_free"
        )
    cuda: Any = import_module("torch.cuda")
    return cuda.MemPool(_allocator.allocator())


def publish(client: _native.Client, name: str, tensor: Any, *, timeout: Optional[float] = None) -> int:
    """Makes a name mean a tensor of a pool where it lies, and returns the version: see :meth:`Client.share`.

    What is enqueued on the current stream is waited for. Tensors of one pool that torch has put into one piece of memory
    are counted once.
    """
    return client.share(name, tensor.detach(), timeout=timeout)


def collect() -> int:
    """Gives memory back to the pool whose objects nobody has any more; how many published tensors are still kept.

    Publishing and deleting do the same.
    """
    return _native.collect_shared()
