"""Named objects in shared memory that outlive whoever made them, and the daemon that serves them.

``wholemem serve`` serves a store. One process puts arrays under a name; any other has them at once, without a copy, as
:class:`~wholemem.Array` that numpy, torch, CuPy and JAX take. An object never changes. Putting another under its name gives
the name a new version, and whoever holds the old one keeps it.

A program that serves, and one that uses what is served::

    $ wholemem serve --size 16GiB &
    $ wholemem put model model.safetensors

    from wholemem import store

    client = store.Client()
    model = client.get("model", timeout=60)         # a Pack: arrays by name, all of them mapped at once
    weights = model["layers.0.weight"].numpy()      # a view, not a copy; it keeps the memory

    client.put("answer", numpy.arange(10))
    with client.create("large", (1 << 20, 256), "float32") as draft:
        fill(draft.array.numpy())                   # written where it stays

    for event in client.watch("model"):             # Ctrl-C ends it
        print(event.kind, event.name, event.version)

Arrays of a GPU stay there: :meth:`Client.put` copies them into memory of the store on their GPU, and :meth:`Client.share`
makes them objects where they lie. What is got from a GPU is a tensor by ``torch.from_dlpack``.

The server may be killed and started again: clients go on, and arrays notice nothing. An array of an object keeps it as long
as anything that was made of it lives, also when its client is closed and the store has ended. A forked child holds the arrays
that it has inherited until it exits, and makes its own client for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._native import Client, Draft, Entry, Event, Mirror, Pack, PackDraft, Status, Watch

__all__ = ["Client", "Draft", "Entry", "Event", "Mirror", "Pack", "PackDraft", "Status", "Watch"]

Mapping.register(Pack)
