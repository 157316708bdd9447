"""A store of named objects in shared memory. Objects outlive the processes that created them.

``wholemem serve`` serves a store. One process puts an array under a name; other processes get it without a copy, as an
:class:`~wholemem.Array` that numpy, torch, CuPy and JAX import. An object never changes. Putting another object under its name
creates a new version; processes that hold the old object keep it.

Serve a store, put a file into it, and use it::

    $ wholemem serve --size 16GiB &
    $ wholemem put model model.safetensors

    from wholemem import store

    client = store.Client()
    model = client.get("model", timeout=60)         # a Pack: arrays by name, mapped together
    weights = model["layers.0.weight"].numpy()      # a view, not a copy; it keeps the memory alive

    client["answer"] = numpy.arange(10)             # as `client.put`, which returns the version and waits for free memory
    assert "answer" in client
    with client.create("large", (1 << 20, 256), "float32") as draft:
        fill(draft.array.numpy())                   # written in place

    for event in client.watch("model"):             # Ctrl-C ends the loop
        print(event.kind, event.name, event.version)

Arrays on a GPU stay on it: :meth:`Client.put` copies them to memory of the store on the same GPU, and :meth:`Client.share`
publishes their memory without a copy. ``torch.from_dlpack`` imports an object on a GPU as a tensor.

The server may be killed and restarted: clients and arrays stay valid. An array keeps its object alive, also after its client is
closed or the store has ended. :mod:`wholemem.store.aio` is the client of asyncio programs. A forked child holds the arrays that it inherited until it exits; for anything else it needs its
own client.
"""

from __future__ import annotations

from collections.abc import Mapping

from .._native import Client, Draft, Entry, Event, Mirror, Pack, PackDraft, Status, Watch

__all__ = ["Client", "Draft", "Entry", "Event", "Mirror", "Pack", "PackDraft", "Status", "Watch"]

Mapping.register(Pack)
