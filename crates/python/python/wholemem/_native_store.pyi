"""The store's part of the native half: see :mod:`wholemem.store`."""

import builtins
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Iterator, Mapping, Optional, Sequence, Union, final

from ._native import Array

@final
class Client:
    """A connection to a store, which ``wholemem serve`` serves. Threads may share it; a forked child makes its own.

    The socket is the one that is given, or that ``WHOLEMEM_SOCKET`` names, or this user's own. Calls that wait give up the
    interpreter's lock, and Ctrl-C ends them. Used as a context, it is closed at the end; its arrays stay. Once a call has
    found that the store has ended, every later one raises :class:`wholemem.errors.ServerLost`.

    >>> import numpy
    >>> from wholemem import store
    >>> with store.Client() as client:
    ...     client.put("numbers", numpy.arange(6).reshape(2, 3))
    ...     numbers = client.get("numbers")
    1
    >>> numbers
    Array([[0, 1, 2],
           [3, 4, 5]], shape=(2, 3), dtype=int64, device=cpu, readonly)
    >>> numbers.numpy().sum()
    np.int64(15)
    """

    def __init__(self, socket: Optional[Union[str, PathLike[str]]] = None) -> None: ...
    @property
    def socket(self) -> Path:
        """The socket of the store."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    def get(self, name: str, timeout: Optional[float] = None) -> Any:
        """What has a name now: an :class:`Array`, read-only, or a :class:`Pack` of them. Nothing is copied.

        Frameworks that take an array of host memory by DLPack get a copy-on-write map of it, one for each export, since
        torch and others write to memory that is read-only: what a tensor writes stays in that tensor. ``array.numpy()`` and
        the buffer protocol are the shared memory itself. Of an object on a GPU, ``torch.from_dlpack(array)`` is a tensor of
        the same memory: work that writes it fails, and takes the process's GPU context along; ``copy=True`` makes one to
        be written. With a ``timeout`` it is waited for, so many seconds. What was got before is got again in a
        microsecond, without a system call.
        """
    def put(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Copies an array into the store, or a mapping of names to arrays as a pack, and returns its version.

        What is on a GPU is copied there, behind what its maker has enqueued. Where there is no room, ``timeout`` is for
        how many seconds it is waited for. An array of a pack has a name of its own too: ``name/array``.
        """
    def publish(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Makes a name mean an array from now on, and returns the version.

        An array that this client got, by its name or of a pack, gets one more name, and is not copied; it is if it was
        deleted meanwhile, or replaced. Anything else is copied, as by :meth:`put`.
        """
    def share(self, name: str, array: Any, *, timeout: Optional[float] = None) -> int:
        """Makes a name mean an array of a GPU where it lies, without a copy, and returns the version.

        The memory must have been made to be shared: by :func:`wholemem.torch.pool.mem_pool`, as a tensor or window of
        this package, or under torch's expandable segments, where the array lies in one piece of it. The store holds
        that piece from now on, and all of it counts. The array may be dropped: it is kept until the object has gone.
        Nobody is kept from writing it, and nobody should. Only the user who serves the store may share with it.
        """
    def create(
        self,
        name: str,
        shape: Union[int, Sequence[int]],
        dtype: Any,
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> Draft:
        """Begins an object, to be written in place and sealed: in host memory, or on the GPU that ``device`` names."""
    def create_pack(
        self,
        name: str,
        arrays: Mapping[str, tuple[Union[int, Sequence[int]], Any]],
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> PackDraft:
        """Begins a pack of arrays whose shapes and types are given, to be written in place and sealed together."""
    def delete(self, name: Union[str, Entry]) -> None:
        """Deletes what has a name, or the object or draft of an entry. Processes that hold it keep it; its memory is freed when
        the last of them lets it go. Only the user who runs the server can delete a draft.
        """
    def drafts(self, prefix: str = "") -> builtins.list[Entry]:
        """The drafts whose names begin so, by name: what was created by any client and is not sealed yet. A pack is one
        draft.
        """
    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """The objects whose names begin so, by name."""
    def stat(self, name: str) -> Entry:
        """What there is to know of the object that has a name."""
    def status(self) -> Status:
        """How full the store is."""
    def watch(self, prefix: str = "") -> Watch:
        """Begins to be told of what happens to names that begin so."""
    def close(self) -> None:
        """Closes the connection, and its watches. Arrays stay; calls of other threads that still wait raise
        :class:`wholemem.errors.Closed`, and what they asked for may have been done or not.
        """
    def __enter__(self) -> Client: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Draft:
    """An object that is being written. As a context it is sealed at the end, and given up if something was raised.

    Sealing takes host memory away from who wrote it, so that no array of it may be left, nor a child that was forked
    after one was made: then :class:`wholemem.errors.InUse` is raised, and the draft stays as it is. On a GPU whoever has
    an array left is trusted not to write it.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.create("drafted", (2, 2), "float32") as draft:
    ...     draft.array.numpy()[:] = 7
    >>> client.get("drafted").numpy().tolist()
    [[7.0, 7.0], [7.0, 7.0]]
    """

    @property
    def name(self) -> str:
        """The name it will have."""
    @property
    def array(self) -> Array:
        """The memory, zero at first, to be written."""
    def seal(self, *, stream: Any = None) -> int:
        """Makes it everybody's, and returns its version; on a GPU, when that stream, or the default one, has come so far."""
    def abandon(self) -> None:
        """Gives it up."""
    def __enter__(self) -> Draft: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class PackDraft:
    """A pack that is being written: its arrays by name. As a context it is sealed at the end, as a :class:`Draft`.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.create_pack("layer", {"weight": ((2, 3), "float32"), "bias": ((3,), "float32")}) as draft:
    ...     for name in draft:
    ...         draft[name].numpy()[:] = 1
    >>> client.get("layer")
    Pack(name='layer', arrays=2, nbytes=36)
    """

    @property
    def name(self) -> str:
        """The name it will have."""
    def seal(self, *, stream: Any = None) -> int:
        """Makes it everybody's, and returns its version; on a GPU, when that stream, or the default one, has come so far."""
    def abandon(self) -> None:
        """Gives it up."""
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Array: ...
    def __enter__(self) -> PackDraft: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Pack(Mapping[str, Array]):
    """Arrays by name, in one piece of memory, held as one: a mapping, in the order in which they were put.

    >>> import numpy
    >>> from wholemem import store
    >>> client = store.Client()
    >>> version = client.put("model", {"weight": numpy.ones((2, 3)), "bias": numpy.zeros(3)})
    >>> model = client.get("model")
    >>> list(model), model["weight"].shape
    (['weight', 'bias'], (2, 3))
    >>> model["bias"].data_ptr() == client.get("model/bias").data_ptr()
    True
    """

    @property
    def name(self) -> str:
        """Its name."""
    @property
    def nbytes(self) -> int:
        """How many bytes its arrays take."""
    def get(self, name: str, default: Any = None) -> Any:
        """One of its arrays, or ``default``."""
    # Lists, where other mappings have views; and no name is anything but a string.
    def keys(self) -> list[str]:  # type: ignore[override]
        """The names of its arrays."""
    def values(self) -> list[Array]:  # type: ignore[override]
        """Its arrays."""
    def items(self) -> list[tuple[str, Array]]:  # type: ignore[override]
        """Names and arrays."""
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...  # type: ignore[override]
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Array: ...

@final
class Watch:
    """What happens to names, one event after the other: an iterator that waits for the next, and that Ctrl-C ends.

    When a server is replaced by another, the next event is of the kind ``missed``: what happened until then was told by
    nobody, and what happens from then on is. Look at what there is when you meet it.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.watch("seen/") as watch:
    ...     version = client.put("seen/this", b"bytes")
    ...     print(watch.next(timeout=60))
    Event(name='seen/this', kind='published', version=1)
    """

    def next(self, timeout: Optional[float] = None) -> Event:
        """The next event, within so many seconds."""
    def close(self) -> None:
        """Ends it, from any thread: the iteration is over, and a thread in :meth:`next` has
        :class:`wholemem.errors.Closed` raised.
        """
    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...
    def __enter__(self) -> Watch: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Event:
    """What happened to an object with a name.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> watch = client.watch("told")
    >>> version = client.put("told", b"bytes")
    >>> event = watch.next()
    >>> event.name, event.kind, event.version == version
    ('told', 'published', True)
    """

    @property
    def name(self) -> str:
        """The name; where events were missed, what was watched for."""
    @property
    def id(self) -> int:
        """The object; zero where events were missed."""
    @property
    def kind(self) -> str:
        """``published``: it is what its name means now; ``deleted``, also because another has taken its name; or
        ``missed``: the server was replaced, and anything may have happened to names that begin so.
        """
    @property
    def version(self) -> Optional[int]:
        """Which object of that name it is, if it was published."""
    @staticmethod
    def _restored(*values: Any) -> Event:
        """One that was pickled."""
    def __hash__(self) -> int: ...

@final
class Mirror:
    """A copy in host memory of a draft, or of an array that was got by its name, wherever that is.

    That of a draft is written back by :meth:`write_back`, or at the end of the context, and given up there if something
    was raised; until then the draft is not sealed. One that is simply dropped is written back as well, with the last of
    its arrays, also where something was raised: what may be half written is mirrored in a context. Without ``copy_in``,
    it begins with any bytes. A draft of less than 1 MiB in host memory is written by ``draft.array`` anyway, and has no
    mirror: :class:`wholemem.errors.Unsupported`.

    >>> import numpy
    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.create("mirrored", (1 << 20,), "float32") as draft:
    ...     with store.Mirror(draft, copy_in=False) as mirror:
    ...         mirror.array.numpy()[:] = 3
    >>> store.Mirror(client.get("mirrored")).array.numpy().max()
    np.float32(3.0)
    """

    def __init__(self, source: Union[Draft, Array], copy_in: bool = True) -> None: ...
    @property
    def array(self) -> Array:
        """The copy, to be read, and that of a draft to be written."""
    def write_back(self) -> None:
        """Writes a draft's mirror back, of which no array may be left, and ends it."""
    def __enter__(self) -> Mirror: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Entry:
    """What there is to know of an object without holding it.

    >>> import numpy
    >>> from wholemem import store
    >>> client = store.Client()
    >>> version = client.put("known", numpy.zeros((4, 5), "float32"))
    >>> client.stat("known")
    Entry(name='known', version=1, shape=(4, 5), dtype=float32, device=cpu)
    """

    @property
    def name(self) -> str:
        """Its name."""
    @property
    def id(self) -> int:
        """Its number, which no other object ever has."""
    @property
    def version(self) -> int:
        """Which object of its name it is."""
    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
    @property
    def shape(self) -> Optional[tuple[int, ...]]:
        """The shape of the array; of a pack there is none."""
    @property
    def dtype(self) -> Optional[str]:
        """The type of its elements; of a pack there is none."""
    @property
    def device(self) -> str:
        """Where it is: ``cpu`` or ``cuda``."""
    @property
    def owner(self) -> int:
        """The number of the user who made it."""
    @property
    def created(self) -> float:
        """When it was made, as ``time.time`` counts."""
    @property
    def pack(self) -> Optional[int]:
        """The number of the pack that it belongs to, or is."""
    @property
    def is_pack(self) -> bool:
        """Whether it is a pack."""
    @staticmethod
    def _restored(*values: Any) -> Entry:
        """One that was pickled."""
    def __hash__(self) -> int: ...

@final
class Status:
    """How full a store is.

    >>> from wholemem import store
    >>> status = store.Client().status()
    >>> 0 <= status.host_used <= status.host_quota
    True
    """

    @property
    def objects(self) -> int:
        """How many objects are sealed."""
    @property
    def unsealed(self) -> int:
        """How many are being written."""
    @property
    def retired(self) -> int:
        """How many are deleted, and still held by somebody."""
    @property
    def clients(self) -> int:
        """How many connections there are."""
    @property
    def host_used(self) -> int:
        """How many bytes of host memory are taken."""
    @property
    def host_quota(self) -> int:
        """How many may be."""
    @property
    def device_used(self) -> int:
        """How many bytes of device memory are taken."""
    @property
    def device_quota(self) -> int:
        """How many may be."""
    @property
    def servers(self) -> int:
        """How often a server has been started for this store."""
    @staticmethod
    def _restored(*values: Any) -> Status:
        """One that was pickled."""
    def __hash__(self) -> int: ...
