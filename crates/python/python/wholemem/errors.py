"""What can go wrong, as exceptions.

Every exception of this package is an :class:`Error`, and also the builtin exception that fits, so that code which knows
nothing of wholemem can still catch a ``TimeoutError`` or a ``MemoryError``. Where something can be done about it, ``hint``
says what.

>>> try:
...     raise Timeout("no answer from rank 3 within 2s", missing=(3,), hint="start rank 3")
... except TimeoutError as error:
...     print(error.missing, error)
(3,) no answer from rank 3 within 2s
hint: start rank 3
"""

from __future__ import annotations

from typing import Iterable, Optional

__all__ = [
    "Aborted",
    "BadEnvironment",
    "BadFile",
    "BadIndex",
    "Busy",
    "CannotExport",
    "Closed",
    "Error",
    "Forked",
    "InUse",
    "NotAllowed",
    "NotFound",
    "OutOfMemory",
    "OverQuota",
    "PeerLost",
    "RankFailed",
    "RanksDisagree",
    "ReadOnly",
    "ServerLost",
    "Timeout",
    "Unsupported",
    "WrongDevice",
    "WrongStride",
    "WrongType",
    "WrongValue",
]


class Error(Exception):
    """Something that wholemem could not do."""

    hint: Optional[str]
    """What can be done about it, where something can."""

    code: Optional[str]
    """What programs tell it by: it stays the same between versions, and is the same in Rust."""

    def __init__(self, message: str, *, hint: Optional[str] = None, code: Optional[str] = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        return f"{message}\nhint: {self.hint}" if self.hint else message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel between processes: through a pool, for one.
        return (_restored, (type(self), self.args, self.__dict__))


def _restored(kind: type[Error], args: tuple[object, ...], says: dict[str, object]) -> Error:
    # That of `MemoryError` makes nothing but its own.
    new = Error.__new__ if issubclass(kind, MemoryError) else kind.__new__
    error = new(kind, *args)
    error.args = args
    error.__dict__.update(says)
    return error


class _OfRank(Error):
    """An error to which one rank belongs."""

    rank: Optional[int]
    """Which, where it is known: who makes an exception anew of its words alone, as a loader of torch does, loses it."""

    def __init__(
        self,
        message: str,
        *,
        rank: Optional[int] = None,
        hint: Optional[str] = None,
        code: Optional[str] = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.rank = rank


class PeerLost(_OfRank, ConnectionError):
    """Rank ``rank`` has died or left. The communicator is of no more use."""


class Aborted(_OfRank, ConnectionError):
    """Rank ``rank`` has ended the communicator for all, by ``abort`` or because it was interrupted."""


class RankFailed(_OfRank, RuntimeError):
    """A call that all ranks make failed because of rank ``rank``; nothing is left of it, and the communicator stands."""


class Timeout(Error, TimeoutError):
    """Others did not come in time: at least the ranks in ``missing``."""

    missing: tuple[int, ...]

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[int] = (),
        hint: Optional[str] = None,
        code: Optional[str] = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.missing = tuple(missing)


class RanksDisagree(Error, RuntimeError):
    """Ranks make different calls, or the same with different arguments or of different tensors, where that is noticed: when they
    make memory, load, save, register, or put rows in a fixed order. Collectives on data are too short for it. Also raised
    if ranks load different saves because the file was replaced meanwhile."""


class Busy(Error, RuntimeError):
    """Another thread is in a call of the same communicator."""


class Closed(Error, ValueError):
    """Something that was closed is used."""


class Forked(Error, RuntimeError):
    """A forked child uses what it has inherited, and what is its parent's."""


class OutOfMemory(Error, MemoryError):
    """Memory, or addresses for it, are not to be had."""


class OverQuota(OutOfMemory):
    """More than the store may take."""


class Unsupported(Error, NotImplementedError):
    """Something that this machine, or this memory, cannot do."""


class WrongValue(Error, ValueError):
    """An argument that makes no sense: a shape, a length, a range."""


class WrongStride(WrongValue):
    """An array whose elements do not lie as the call needs them."""


class WrongDevice(WrongValue):
    """An array, or a number, of another device than the one that is meant."""


class ReadOnly(WrongValue):
    """An array that cannot be written, where something would be."""


class CannotExport(Error, BufferError):
    """An array that cannot be given to another framework as was asked."""


class WrongType(Error, TypeError):
    """Elements of another type, an object that is no array, or one that cannot be pickled."""


class BadIndex(Error, IndexError):
    """An index that names no row; ``position`` is the first place where one stands."""

    position: Optional[int]
    """The place, where it is known."""

    index: Optional[int]
    """The index there. ``None`` if a GPU met it: its work has run after the call returned, and records the position alone."""

    rows: Optional[int]
    """How many rows there are: valid indices are ``range(rows)``. ``None`` if it is not known."""

    def __init__(
        self,
        message: str,
        *,
        position: Optional[int] = None,
        index: Optional[int] = None,
        rows: Optional[int] = None,
        hint: Optional[str] = None,
        code: Optional[str] = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.position = position
        self.index = index
        self.rows = rows


class BadEnvironment(Error, RuntimeError):
    """A variable of the environment is missing, or makes no sense."""


class BadFile(Error, OSError):
    """A file that cannot be read or written, or is not what it says."""


class NotFound(Error, KeyError):
    """Nothing has that name."""


class NotAllowed(Error, PermissionError):
    """Something that only another user may do."""


class InUse(Error, BufferError):
    """Memory of which arrays are still there, where nobody may have any."""


class ServerLost(Error, ConnectionError):
    """No store is served there, or its server has gone."""
