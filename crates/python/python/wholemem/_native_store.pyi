"""Type stubs of the native classes that :mod:`wholemem.store` exports."""

import builtins
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Iterator, Mapping, Optional, Sequence, Union, final

from ._native import Array

@final
class Client:
    """A connection to an object store that ``wholemem serve`` runs. Threads may share a connection; a forked child process
    needs its own.

    A client is used like a dict of names: ``client[name]``, ``name in client``, ``del client[name]``, ``len(client)``, and iteration
    over the names. Calls that wait release the GIL, and Ctrl-C interrupts them. As a context manager, the connection is closed at the end;
    its arrays stay valid. After a call has detected that the store has ended, every later call raises
    :class:`wholemem.errors.ServerLost`.

    Args:
        socket: The path of the store's socket. ``None`` uses ``WHOLEMEM_SOCKET``, or else this user's default socket.

    Raises:
        wholemem.errors.NotAllowed: This user may not connect to the socket.
        wholemem.errors.ServerLost: No store is served at the socket.

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
    >>> with store.Client() as client:
    ...     client["answer"] = numpy.array(42)
    ...     print("answer" in client, int(client["answer"]), client.get("question", default=None))
    ...     del client["answer"]
    True 42 None
    """

    def __init__(self, socket: Optional[Union[str, PathLike[str]]] = None) -> None: ...
    @property
    def socket(self) -> Path:
        """The path of the Unix socket of the store."""
    @property
    def closed(self) -> bool:
        """True if the connection to the store was closed."""
    def get(self, name: str, timeout: Optional[float] = None, *, default: Any = ...) -> Any:
        """Returns the object that currently has a name in the store, without a copy.

        DLPack exports an array in host memory as a copy-on-write map, one for each export, because torch and other frameworks
        write to read-only memory: the writes of a tensor are visible only in that tensor. ``array.numpy()`` and the buffer
        protocol use the shared memory itself. For an object on a GPU, ``torch.from_dlpack(array)`` shares the memory: a kernel
        that writes to it fails and destroys the CUDA context of the process. ``torch.from_dlpack(array, copy=True)`` creates a
        writable copy.

        Getting an object again takes about a microsecond and no system call. ``client[name]`` is a get without a timeout.

        Args:
            name: The name of the object.
            timeout: Seconds to wait until the name exists. ``None`` does not wait.
            default: The result if the name does not exist, or did not appear in time. Without it, an exception is raised.

        Returns:
            A read-only :class:`Array`, or a :class:`Pack`.

        Raises:
            wholemem.errors.NotFound: The name does not exist.
            wholemem.errors.Timeout: The name did not appear in time.
        """
    def _get_mapped(self, name: str) -> Any:
        """Returns the object that currently has a name if its memory is already mapped in this process, and ``None``
        otherwise. Does not wait."""
    def put(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Copies an array into the store, or a mapping of names to arrays as a pack (one object with several arrays).

        Arrays in host memory and tensors of torch may have any strides; objects are contiguous. A parameter of a torch module is put
        without its gradient. An array on a GPU is copied on that GPU, after the work that is enqueued on it. An array of a pack also
        has its own name: ``name/array``. ``client[name] = value`` is a put without a timeout.

        Args:
            name: The name of the object. An object that has the name is replaced.
            value: An array, a buffer such as ``bytes``, or a mapping of names to arrays, such as the ``state_dict`` of a module.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
            wholemem.errors.OverQuota: The quota is exhausted.
            wholemem.errors.WrongStride: An array on a GPU is not contiguous, and not a tensor of torch.
        """
    def publish(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Publishes an array under a name, without a copy if the array is already an object of this store.

        An array that this client got, by its name or from a pack, gets a second name. It is copied if it was deleted or replaced
        meanwhile. Other values are copied, as by :meth:`put`.

        Args:
            name: The name. An object that has the name is replaced.
            value: An array, a buffer such as ``bytes``, or a mapping of names to arrays.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.OverQuota: The quota is exhausted.
            wholemem.errors.WrongStride: An array on a GPU is not contiguous, and not a tensor of torch.
        """
    def share(self, name: str, array: Any, *, timeout: Optional[float] = None) -> int:
        """Publishes an array on a GPU as an object of the store, without a copy. The object keeps the array's memory, so the
        array may be dropped.

        The memory must be shareable: allocated in :func:`wholemem.torch.pool.mem_pool`, a table or window of this package, or in
        torch's expandable segments if the array is inside one segment. The store holds the whole allocation, and all of it counts
        towards the quota. The memory is kept until the object is freed. Writing to the array is possible but changes the object.
        Only the user who serves the store may call it.

        Args:
            name: The name. An object that has the name is replaced.
            array: A contiguous array on a GPU.
            timeout: Seconds to wait for free quota. ``None`` does not wait.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.NotAllowed: Another user serves the store.
            wholemem.errors.OverQuota: The quota is exhausted.
            wholemem.errors.Unsupported: The memory was not allocated to be shared.
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
        """Creates a draft: an object of the store that is written in place and then sealed (made immutable and visible).

        Args:
            name: The name that the object will have.
            shape: The length of each dimension, or one int.
            dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
            device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The draft.

        Raises:
            wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
            wholemem.errors.OverQuota: The quota is exhausted.
        """
    def create_pack(
        self,
        name: str,
        arrays: Mapping[str, tuple[Union[int, Sequence[int]], Any]],
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> PackDraft:
        """Creates the draft of a pack (several arrays in one allocation), which is written in place and then sealed.

        Args:
            name: The name that the pack will have.
            arrays: A mapping of names to pairs of shape and element type.
            device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The draft of the pack.

        Raises:
            wholemem.errors.OutOfMemory: The store has no memory or no free index entry.
            wholemem.errors.OverQuota: The quota is exhausted.
        """
    def delete(self, name: Union[str, Entry]) -> None:
        """Deletes an object or a draft from the store. Processes that hold the object can still use it; its memory is freed
        when the last of them releases it.

        Args:
            name: The name of an object, or an :class:`Entry` of exactly the object or draft to delete.

        Raises:
            wholemem.errors.NotAllowed: Another user created the object, or it is a draft and another user runs the server.
            wholemem.errors.NotFound: The name or object does not exist.
        """
    def drafts(self, prefix: str = "") -> builtins.list[Entry]:
        """Lists the drafts (objects that are not sealed yet) of all clients of the store, sorted by name. A pack is one draft.

        Args:
            prefix: The beginning of the names.

        Returns:
            One entry for each draft.
        """
    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """Lists the objects of the store, sorted by name.

        Args:
            prefix: The beginning of the names.

        Returns:
            One entry for each object.
        """
    def keys(self, prefix: str = "") -> builtins.list[str]:
        """Returns the names of the objects of the store, sorted. Iterating over the client yields the same names, ``len(client)`` is their
        number, ``name in client`` tests whether one exists, and ``del client[name]`` deletes an object.

        Args:
            prefix: The beginning of the names.
        """
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, value: Any) -> None: ...
    def __delitem__(self, name: str) -> None: ...
    def stat(self, name: str) -> Entry:
        """Returns the description of the object that currently has a name in the store.

        Args:
            name: The name of the object.

        Raises:
            wholemem.errors.NotFound: The name does not exist.
        """
    def status(self) -> Status:
        """Returns the status of the store: the numbers of objects and clients, and the memory in use."""
    def watch(self, prefix: str = "", *, after: Optional[int] = None) -> Watch:
        """Subscribes to the events of objects whose names begin with a prefix.

        The events are: an object was published, replaced or deleted, and events were missed.

        Args:
            prefix: The beginning of the names.
            after: The :attr:`Event.revision` of the last event that the program has seen, to resume a watch. The watch first returns the
                events behind it. The server retains the latest events of all names, about 1 MiB of them, and a restarted server
                has none of its predecessor: if events are lost, the first event has the kind ``missed``. ``None`` starts with the
                next event.

        Returns:
            An iterator over the events.
        """
    def close(self) -> None:
        """Closes the connection to the store and the watches of the connection. Arrays from the store stay valid.

        Calls of other threads that are waiting raise :class:`wholemem.errors.Closed`; their requests may or may not have been
        executed.
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
    """A draft: an object of the store that is still being written. A ``with`` block seals the draft at its end, or abandons it
    if the block raises.

    Sealing unmaps host memory from this process. If an array of the draft still exists, or a child process that was forked
    after one was created, :class:`wholemem.errors.InUse` is raised and the draft stays open. On a GPU, arrays may remain, but
    must not be used to write.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.create("drafted", (2, 2), "float32") as draft:
    ...     draft.array.numpy()[:] = 7
    >>> client.get("drafted").numpy().tolist()
    [[7.0, 7.0], [7.0, 7.0]]
    """

    @property
    def name(self) -> str:
        """The name that the object of the draft will have in the store."""
    @property
    def array(self) -> Array:
        """The memory of the draft as a writable array, initially zero."""
    def seal(self, *, stream: Any = None) -> int:
        """Seals the draft (makes its object immutable) and publishes the object under its name.

        Args:
            stream: On a GPU, the CUDA stream whose earlier work is waited for. ``None`` is the default stream.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.Closed: The draft was sealed or abandoned.
            wholemem.errors.InUse: An array of the draft still exists.
        """
    def abandon(self) -> None:
        """Abandons the draft and frees its memory."""
    def __enter__(self) -> Draft: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class PackDraft:
    """The draft of a pack: a mapping of names to arrays that are still being written. A ``with`` block seals or abandons it
    like a :class:`Draft`.

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
        """The name that the pack will have in the store."""
    def seal(self, *, stream: Any = None) -> int:
        """Seals the pack (makes its arrays immutable) and publishes the pack under its name.

        Args:
            stream: On a GPU, the CUDA stream whose earlier work is waited for. ``None`` is the default stream.

        Returns:
            The version of the pack under its name.

        Raises:
            wholemem.errors.Closed: The draft was sealed or abandoned.
            wholemem.errors.InUse: An array of the draft still exists.
        """
    def abandon(self) -> None:
        """Abandons the draft of the pack and frees its memory."""
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
    """A pack: an object of the store that contains several arrays in one allocation, as a mapping of names to arrays. The
    order is that in which the arrays were put.

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
        """The name of the pack (an object with several arrays) in the store."""
    @property
    def nbytes(self) -> int:
        """The size of all arrays of the pack in bytes."""
    def get(self, name: str, default: Any = None) -> Any:
        """Returns the array with the given name from the pack, or a default value.

        Args:
            name: The name without the name of the pack.
            default: The result if there is no such array.
        """
    # These methods return lists where `Mapping` declares views, and accept only strings as names, hence the ignored type errors.
    def keys(self) -> list[str]:  # type: ignore[override]
        """Returns the names of the arrays of the pack."""
    def values(self) -> list[Array]:  # type: ignore[override]
        """Returns the arrays of the pack."""
    def items(self) -> list[tuple[str, Array]]:  # type: ignore[override]
        """Returns the names of the pack's arrays, each with its array."""
    def __len__(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...  # type: ignore[override]
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Array: ...

@final
class Watch:
    """A watch: an iterator over the events (published, replaced, deleted) of names with a prefix. The iterator waits for the next
    event; Ctrl-C interrupts the wait.

    If the server is restarted, or has not retained all events behind the revision at which the watch is resumed, the next event
    has the kind ``missed``: earlier events may be lost, and later events are delivered. List the objects again after it.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> with client.watch("seen/") as watch:
    ...     version = client.put("seen/this", b"bytes")
    ...     print(watch.next(timeout=60))
    Event(name='seen/this', kind='published', version=1)
    """

    def next(self, timeout: Optional[float] = None) -> Event:
        """Waits for the next event of the watched names and returns the event.

        Args:
            timeout: Seconds to wait. ``None`` waits without a limit.

        Returns:
            The event.

        Raises:
            wholemem.errors.Busy: Another thread is waiting.
            wholemem.errors.Closed: The watch or its client is closed.
            wholemem.errors.ServerLost: The store has ended.
            wholemem.errors.Timeout: No event arrived in time.
        """
    def try_next(self) -> Optional[Event]:
        """Returns the next event if it has already arrived, and ``None`` otherwise. It does not wait, so it is for event loops:
        :meth:`fileno` is readable when events have arrived. Call it once before waiting for that: the descriptor is not readable
        for the event ``missed`` of a resumed watch.

        It also returns ``None`` if :attr:`is_registered` is false; :meth:`next` then registers the watch.

        Raises:
            wholemem.errors.Busy: Another thread is waiting.
            wholemem.errors.Closed: The watch or its client is closed.
            wholemem.errors.ServerLost: The store has ended.
        """
    def fileno(self) -> int:
        """Returns the file descriptor of the watch, for event loops. It is readable if an event has arrived, if the server was
        restarted, or if the store has ended. It is closed with the watch.

        Raises:
            wholemem.errors.Closed: The watch or its client is closed.
        """
    @property
    def is_registered(self) -> bool:
        """False if the server was restarted and the watch is not registered with the new one yet: the next call of :meth:`next`
        registers it, and returns the event ``missed``.
        """
    def close(self) -> None:
        """Closes the watch, from any thread. Iterations over the watch end, and a thread that waits in :meth:`next` gets
        :class:`wholemem.errors.Closed`.
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
    """An event of a watch: an object of the store was published, replaced or deleted, or events were missed. The objects of a pack
    change in one event.

    >>> from wholemem import store
    >>> client = store.Client()
    >>> watch = client.watch("watched")
    >>> versions = client.put("watched", b"old"), client.put("watched", b"new")
    >>> watch.next()
    Event(name='watched', kind='published', version=1)
    >>> event = watch.next()
    >>> event.kind, (event.previous, event.version) == versions
    ('replaced', True)
    >>> client.watch("watched", after=event.revision).try_next() is None
    True
    """

    @property
    def name(self) -> str:
        """The name of the event's object, for a pack that of the pack; if the kind is ``missed``, the prefix of the watch."""
    @property
    def id(self) -> int:
        """The id of the event's object, for a pack that of the pack; 0 if the kind is ``missed``."""
    @property
    def kind(self) -> str:
        """The kind of the event. ``published``: the object has its name now, and no object had the name before. ``replaced``: the object
        has its name now, and the object that had the name before is deleted. ``deleted``: the object was deleted, and no object has
        its name now. ``missed``: events of names with the prefix may be lost, because the server was restarted or, if the watch was
        resumed, because the server has not retained them.
        """
    @property
    def version(self) -> Optional[int]:
        """The version of the event's object under its name; ``None`` if the kind is ``missed``."""
    @property
    def previous(self) -> Optional[int]:
        """The version of the object that had the name before; ``None`` unless the kind is ``replaced``."""
    @property
    def objects(self) -> int:
        """The number of objects that changed: 1, or for a pack one more than the arrays in it; 0 if the kind is ``missed``."""
    @property
    def revision(self) -> int:
        """The number of the event in its store, which is larger than that of every earlier event: ``client.watch(after=...)`` resumes a
        watch behind it. If the kind is ``missed``, the next event is behind this number.
        """
    @staticmethod
    def _restored(*values: Any) -> Event:
        """Creates an event of a watch from its pickled values."""
    def __hash__(self) -> int: ...

@final
class Mirror:
    """A mirror: a copy in host memory of a draft, or of an array that was got by its name. The mirror of a draft is written
    back to the draft.

    The mirror of a draft is written back by :meth:`write_back`, or at the end of a ``with`` block; if the block raises, it is
    abandoned. The draft cannot be sealed before. A mirror that is dropped outside of a ``with`` block is written back with its
    last array, even after an exception, so use a ``with`` block if the data may be incomplete.

    Args:
        source: A :class:`Draft`, or an array that was got by its name.
        copy_in: Whether to copy the content of the draft. If not, the initial bytes are undefined.

    Raises:
        wholemem.errors.Unsupported: The draft has less than 1 MiB in host memory; write to ``draft.array`` instead.
        wholemem.errors.WrongType: The source is neither a draft nor an array that was got by its name.

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
        """The mirror's copy in host memory as an array, which is writable if the mirror is that of a draft."""
    def write_back(self) -> None:
        """Writes the mirror back to its draft and closes the mirror. No array of the mirror may still exist.

        Raises:
            wholemem.errors.Closed: The mirror was written back or abandoned.
            wholemem.errors.InUse: An array of the mirror still exists.
        """
    def __enter__(self) -> Mirror: ...
    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

@final
class Entry:
    """The description of an object of the store. The description does not keep the object alive.

    >>> import numpy
    >>> from wholemem import store
    >>> client = store.Client()
    >>> version = client.put("known", numpy.zeros((4, 5), "float32"))
    >>> client.stat("known")
    Entry(name='known', version=1, shape=(4, 5), dtype=float32, device=cpu)
    """

    @property
    def name(self) -> str:
        """The name of the object in the store."""
    @property
    def id(self) -> int:
        """The id of the object, which is never reused."""
    @property
    def version(self) -> int:
        """The version of the object: one more than that of the previous object with the same name."""
    @property
    def nbytes(self) -> int:
        """The size of the object in bytes."""
    @property
    def shape(self) -> Optional[tuple[int, ...]]:
        """The shape of the object's array; ``None`` if the object is a pack (several arrays)."""
    @property
    def dtype(self) -> Optional[str]:
        """The element type of the object's array; ``None`` if the object is a pack (several arrays)."""
    @property
    def device(self) -> str:
        """The kind of device that holds the object's memory: ``cpu`` or ``cuda``."""
    @property
    def owner(self) -> int:
        """The Linux user id of the creator of the object."""
    @property
    def created(self) -> float:
        """The time at which the object was created, in seconds since the Unix epoch, as ``time.time`` returns."""
    @property
    def pack(self) -> Optional[int]:
        """The id of the pack (several arrays in one allocation), if the object is a pack or belongs to one; otherwise
        ``None``.
        """
    @property
    def is_pack(self) -> bool:
        """True if the object is a pack (several arrays in one allocation)."""
    @staticmethod
    def _restored(*values: Any) -> Entry:
        """Creates the description of an object from its pickled values."""
    def __hash__(self) -> int: ...

@final
class Status:
    """The status of a store: the numbers of objects and clients, and the memory in use.

    >>> from wholemem import store
    >>> status = store.Client().status()
    >>> 0 <= status.host_used <= status.host_quota
    True
    """

    @property
    def objects(self) -> int:
        """The number of sealed objects in the store."""
    @property
    def unsealed(self) -> int:
        """The number of drafts (objects that are not sealed yet) in the store."""
    @property
    def retired(self) -> int:
        """The number of deleted objects of the store that clients still hold."""
    @property
    def clients(self) -> int:
        """The number of client connections to the store."""
    @property
    def host_used(self) -> int:
        """The host memory that the store uses, in bytes."""
    @property
    def host_quota(self) -> int:
        """The quota of the store for host memory, in bytes."""
    @property
    def device_used(self) -> int:
        """The device memory that the store uses, in bytes."""
    @property
    def device_quota(self) -> int:
        """The quota of the store for device memory, in bytes."""
    @property
    def servers(self) -> int:
        """The number of server processes that were started for this store."""
    @staticmethod
    def _restored(*values: Any) -> Status:
        """Creates the status of a store from its pickled values."""
    def __hash__(self) -> int: ...
