"""A client of a store for programs with asyncio: calls are awaited, and a watch is an asynchronous iterator.

::

    import asyncio
    from wholemem.store.aio import AsyncClient

    async def main():
        async with AsyncClient() as client:
            model = await client.get("model", timeout=60)
            async for event in client.watch("model"):
                print(event.kind, event.name, event.version)

    asyncio.run(main())

Waits for names and events are waits of the event loop for a file descriptor, in any number and without a thread for each. Requests
that the server answers at once, and copies, run in up to four threads of the client. A cancelled wait has no effect and loses no
event. A cancelled request may still be executed by the server, and its answer is discarded. At the end of the ``async with`` block,
also after Ctrl-C, all waits and requests end, and so do the threads.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from types import TracebackType
from typing import Any, Callable, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar, Union
from weakref import WeakSet

from ..errors import Busy, Closed, NotFound, OverQuota, Timeout
from . import Client, Draft, Entry, Event, PackDraft, Status, Watch

__all__ = ["AsyncClient", "AsyncWatch"]

T = TypeVar("T")

_MISSING: Any = object()

# The number of threads in which the requests of a client run. Copies run at the speed of memory with few threads.
_THREADS = 4

# The first and the longest pause, in seconds, between two attempts to allocate memory in a store whose quota is exhausted.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class _Time:
    """The time until a deadline on the clock of the event loop.

    Args:
        seconds: The seconds until the deadline; ``None`` or infinity is no deadline.
    """

    def __init__(self, seconds: Optional[float]) -> None:
        self._end = None if seconds is None or seconds == math.inf else asyncio.get_running_loop().time() + seconds

    def left(self) -> Optional[float]:
        return None if self._end is None else max(0.0, self._end - asyncio.get_running_loop().time())

    def is_over(self) -> bool:
        return self.left() == 0.0


class AsyncClient:
    """A connection to an object store, whose calls are awaited. Arguments, results and exceptions are those of
    :class:`~wholemem.store.Client`.

    ``async with AsyncClient() as client`` connects it and closes it. It may be used by any number of tasks of one event loop.

    Args:
        socket: The path of the store's socket. ``None`` uses ``WHOLEMEM_SOCKET``, or else this user's default socket.

    >>> import asyncio, numpy
    >>> from wholemem.store.aio import AsyncClient
    >>> async def main():
    ...     async with AsyncClient() as client:
    ...         waiting = asyncio.create_task(client.get("later", timeout=60))
    ...         await client.put("later", numpy.arange(3))
    ...         return await waiting
    >>> asyncio.run(main()).tolist()
    [0, 1, 2]
    """

    def __init__(self, socket: Optional[Union[str, PathLike[str]]] = None) -> None:
        self._socket = socket
        self._client: Optional[Client] = None
        self._executor: Optional[ThreadPoolExecutor] = None
        self._requests: Set[Future[Any]] = set()
        self._watches: WeakSet[AsyncWatch] = WeakSet()

    async def connect(self) -> AsyncClient:
        """Connects to the store. ``async with`` does this.

        Returns:
            This client.

        Raises:
            wholemem.errors.NotAllowed: This user may not connect to the socket.
            wholemem.errors.ServerLost: No store is served at the socket.
        """
        if self._client is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="wholemem-store")
            try:
                self._client = await self._submit(Client, self._socket)
            except BaseException as error:
                # If the task was cancelled, the thread may still be connecting.
                self._executor.shutdown(wait=not isinstance(error, asyncio.CancelledError))
                self._executor = None
                raise
        return self

    @property
    def sync(self) -> Client:
        """The client for calls that block, such as those of drafts, on the same connection.

        Raises:
            wholemem.errors.Closed: The client is not connected.
        """
        if self._client is None:
            raise Closed(
                "the client is not connected", hint="use `async with AsyncClient() as client`, or `await client.connect()`"
            )
        return self._client

    @property
    def closed(self) -> bool:
        """True if the client is not connected, or was closed."""
        return self._client is None or self._client.closed

    def _submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> asyncio.Future[T]:
        """Runs a call in a thread of this client."""
        if self._executor is None:
            raise Closed("the client is closed", hint="create a new one: `AsyncClient(socket)`")
        request = self._executor.submit(call, *arguments, **options)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return asyncio.wrap_future(request)

    async def _allocate(self, timeout: Optional[float], call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Runs a call that allocates memory in the store, again and again while the quota is exhausted, for up to ``timeout``
        seconds."""
        time, pause = _Time(timeout), _FIRST_PAUSE
        while True:
            try:
                return await self._submit(call, *arguments, **options)
            except OverQuota:
                if timeout is None or time.is_over():
                    raise
                left = time.left()
                await asyncio.sleep(pause if left is None else min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def get(self, name: str, timeout: Optional[float] = None, *, default: Any = _MISSING) -> Any:
        """Returns the object that currently has a name in the store, without a copy. An object that this process has mapped is
        returned at once, without a thread.

        Args:
            name: The name of the object.
            timeout: Seconds to wait until the name exists. ``None`` does not wait.
            default: The result if the name does not exist, or did not appear in time. Without it, an exception is raised.

        Returns:
            A read-only :class:`~wholemem.Array`, or a :class:`~wholemem.store.Pack`.

        Raises:
            wholemem.errors.NotFound: The name does not exist.
            wholemem.errors.Timeout: The name did not appear in time.
        """
        found = self.sync._get_mapped(name)
        if found is not None:
            return found
        if timeout is not None and not timeout >= 0:
            self.sync.get(name, timeout)  # raises the error of an invalid timeout
        try:
            return await self._submit(self.sync.get, name)
        except NotFound:
            if timeout is None and default is _MISSING:
                raise
            if timeout is None:
                return default
        time = _Time(timeout)
        async with self.watch(name) as watch:
            while True:
                # The name may have been published before the watch was registered.
                try:
                    return await self._submit(self.sync.get, name)
                except NotFound:
                    pass
                if not await watch._is_affected(name, time):
                    break
        if default is not _MISSING:
            return default
        raise Timeout(
            f"the name `{name}` did not appear within {timeout:g} seconds",
            hint="`await client.list()` lists the objects",
            code="no-such-name",
        )

    async def put(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Copies an array into the store, or a mapping of names to arrays as a pack. The arrays must not change meanwhile.

        Args:
            name: The name of the object. An object that has the name is replaced.
            value: An array, a buffer such as ``bytes``, or a mapping of names to arrays.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.OverQuota: The quota is exhausted.
        """
        return await self._allocate(timeout, self.sync.put, name, value)

    async def publish(self, name: str, value: Any, *, timeout: Optional[float] = None) -> int:
        """Publishes an array under a name, without a copy if the array is already an object of this store.

        Args:
            name: The name. An object that has the name is replaced.
            value: An array, a buffer such as ``bytes``, or a mapping of names to arrays.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The version of the object under its name.

        Raises:
            wholemem.errors.OverQuota: The quota is exhausted.
        """
        return await self._allocate(timeout, self.sync.publish, name, value)

    async def create(
        self,
        name: str,
        shape: Union[int, Sequence[int]],
        dtype: Any,
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> Draft:
        """Creates a draft: an object of the store that is written in place and then sealed. The calls of the draft block.

        Args:
            name: The name that the object will have.
            shape: The length of each dimension, or one int.
            dtype: The element type: a name such as ``float32``, or a dtype of numpy or torch.
            device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The draft.

        Raises:
            wholemem.errors.OverQuota: The quota is exhausted.
        """
        return await self._allocate(timeout, self.sync.create, name, shape, dtype, device=device)

    async def create_pack(
        self,
        name: str,
        arrays: Mapping[str, Tuple[Union[int, Sequence[int]], Any]],
        *,
        device: Any = None,
        timeout: Optional[float] = None,
    ) -> PackDraft:
        """Creates the draft of a pack, which is written in place and then sealed. The calls of the draft block.

        Args:
            name: The name that the pack will have.
            arrays: A mapping of names to pairs of shape and element type.
            device: ``cuda`` or ``cuda:1`` for memory of a GPU. ``None`` is host memory.
            timeout: Seconds to wait for free memory if the quota is exhausted. ``None`` does not wait.

        Returns:
            The draft of the pack.

        Raises:
            wholemem.errors.OverQuota: The quota is exhausted.
        """
        return await self._allocate(timeout, self.sync.create_pack, name, arrays, device=device)

    async def delete(self, name: Union[str, Entry]) -> None:
        """Deletes an object or a draft from the store. Processes that hold the object can still use it.

        Args:
            name: The name of an object, or an :class:`~wholemem.store.Entry` of exactly the object or draft to delete.

        Raises:
            wholemem.errors.NotAllowed: Another user created the object.
            wholemem.errors.NotFound: The name or object does not exist.
        """
        await self._submit(self.sync.delete, name)

    async def keys(self, prefix: str = "") -> List[str]:
        """Returns the names of the objects of the store, sorted.

        Args:
            prefix: The beginning of the names.
        """
        return await self._submit(self.sync.keys, prefix)

    async def list(self, prefix: str = "") -> List[Entry]:
        """Lists the objects of the store, sorted by name.

        Args:
            prefix: The beginning of the names.
        """
        return await self._submit(self.sync.list, prefix)

    async def drafts(self, prefix: str = "") -> List[Entry]:
        """Lists the drafts of all clients of the store, sorted by name. A pack is one draft.

        Args:
            prefix: The beginning of the names.
        """
        return await self._submit(self.sync.drafts, prefix)

    async def stat(self, name: str) -> Entry:
        """Returns the description of the object that currently has a name in the store.

        Args:
            name: The name of the object.

        Raises:
            wholemem.errors.NotFound: The name does not exist.
        """
        return await self._submit(self.sync.stat, name)

    async def status(self) -> Status:
        """Returns the status of the store: the numbers of objects and clients, and the memory in use."""
        return await self._submit(self.sync.status)

    def watch(self, prefix: str = "", *, after: Optional[int] = None) -> AsyncWatch:
        """Subscribes to the events of names with a prefix: ``async for event in client.watch("model")``.

        The subscription begins with the iteration, or with an ``async with`` block.

        Args:
            prefix: The beginning of the names.
            after: The :attr:`Event.revision` of the last event that the program has seen, to resume a watch, as of
                :meth:`wholemem.store.Client.watch`. ``None`` starts with the next event.

        Returns:
            An asynchronous iterator over the events.
        """
        return AsyncWatch(self, prefix, after)

    async def close(self) -> None:
        """Closes the connection and its watches, and waits for the threads of the client. Arrays from the store stay valid.

        Tasks that are waiting get :class:`wholemem.errors.Closed`; their requests may or may not have been executed.
        """
        for watch in list(self._watches):
            watch.close()
        if self._client is not None:
            self._client.close()
        executor, self._executor = self._executor, None
        if executor is None:
            return
        try:
            requests = [asyncio.wrap_future(request) for request in list(self._requests)]
            await asyncio.gather(*requests, return_exceptions=True)
        except asyncio.CancelledError:
            executor.shutdown(wait=False)
            raise
        # All requests have ended, so the threads end at once.
        executor.shutdown()

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._client}" if self._client is not None else "AsyncClient(not connected)"


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class AsyncWatch:
    """An asynchronous iterator over the events (published, replaced, deleted) of names with a prefix, which
    :meth:`AsyncClient.watch` creates.

    Cancelling a task that waits for an event loses no event. If the server is restarted, the next event has the kind ``missed``.

    Args:
        client: The client.
        prefix: The beginning of the names.
        after: The revision behind which the watch is resumed, or ``None``.
    """

    def __init__(self, client: AsyncClient, prefix: str, after: Optional[int] = None) -> None:
        self._client = client
        self._prefix = prefix
        self._after = after
        self._watch: Optional[Watch] = None
        # The request to register the watch with a new server, whose result is the event `missed`. It is kept if its task is cancelled.
        self._registration: Optional[asyncio.Future[Event]] = None
        # The event loop, the descriptor and the future of the task that waits.
        self._waiting: Optional[Tuple[asyncio.AbstractEventLoop, int, asyncio.Future[None]]] = None
        self._is_busy = False
        self._is_closed = False

    async def open(self) -> AsyncWatch:
        """Subscribes to the events. The first :meth:`next` does this too, and so does ``async with``.

        Returns:
            This watch.

        Raises:
            wholemem.errors.Closed: The watch or its client is closed.
            wholemem.errors.ServerLost: The store has ended.
        """
        self._check_open()
        if self._watch is None:
            self._client._watches.add(self)
            try:
                watch = await self._client._submit(self._client.sync.watch, self._prefix, after=self._after)
            except BaseException:
                self._client._watches.discard(self)
                raise
            if self._is_closed:
                watch.close()
            self._check_open()
            self._watch = watch
        return self

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the watch is closed", hint="create another one: `client.watch(prefix)`")

    async def next(self, timeout: Optional[float] = None) -> Event:
        """Waits for the next event of the watched names and returns the event.

        Args:
            timeout: Seconds to wait. ``None`` waits without a limit.

        Returns:
            The event.

        Raises:
            wholemem.errors.Busy: Another task is waiting.
            wholemem.errors.Closed: The watch or its client is closed.
            wholemem.errors.ServerLost: The store has ended.
            wholemem.errors.Timeout: No event arrived in time.
        """
        event = await self._next(_Time(timeout))
        if event is None:
            raise Timeout("no event arrived in time", code="timed-out")
        return event

    async def _next(self, time: _Time) -> Optional[Event]:
        """Returns the next event, or ``None`` if none arrived in time."""
        if self._is_busy:
            raise Busy("another task is waiting for the next event of this watch", hint="each task needs its own watch")
        self._is_busy = True
        try:
            await self.open()
            while True:
                watch = self._watch
                self._check_open()
                assert watch is not None
                if self._registration is None:
                    event = watch.try_next()
                    if event is not None:
                        return event
                    if not watch.is_registered:
                        self._registration = self._client._submit(watch.next)
                if self._registration is not None:
                    try:
                        event = await asyncio.shield(self._registration)
                    except asyncio.CancelledError:
                        # The registration may have ended in the same turn of the event loop: its result is for the next call.
                        raise
                    except BaseException:
                        self._registration = None
                        raise
                    self._registration = None
                    return event
                if time.is_over():
                    return None
                await self._wait(watch.fileno(), time.left())
        finally:
            self._is_busy = False

    async def _is_affected(self, name: str, time: _Time) -> bool:
        """Waits for an event after which a name may exist, and returns false if none arrived in time."""
        while True:
            event = await self._next(time)
            # The event of a pack has the name of the pack, and the name may be that of an array in it.
            if event is None or event.kind == "missed" or (event.kind != "deleted" and (event.name == name or event.objects > 1)):
                return event is not None

    async def _wait(self, descriptor: int, seconds: Optional[float]) -> None:
        """Waits until the descriptor is readable, the time is over, or the watch is closed."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting = (loop, descriptor, waiter)
        loop.add_reader(descriptor, _wake, waiter)
        timer = None if seconds is None else loop.call_later(seconds, _wake, waiter)
        try:
            await waiter
        finally:
            self._stop_waiting()
            if timer is not None:
                timer.cancel()

    def _stop_waiting(self) -> None:
        """Removes the descriptor from the event loop. It must not be removed later: when the watch is closed, another file may get
        the same number."""
        if self._waiting is not None:
            loop, descriptor, waiter = self._waiting
            self._waiting = None
            loop.remove_reader(descriptor)
            _wake(waiter)

    def close(self) -> None:
        """Closes the watch. Iterations over it end, and a task that waits in :meth:`next` gets :class:`wholemem.errors.Closed`."""
        self._is_closed = True
        self._stop_waiting()
        self._client._watches.discard(self)
        if self._watch is not None:
            self._watch.close()

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> Event:
        try:
            return await self.next()
        except Closed:
            if self._client.closed or self._is_closed:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> AsyncWatch:
        return await self.open()

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()
