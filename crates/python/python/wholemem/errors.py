"""The exceptions that wholemem raises.

Every exception is an :class:`Error` and also a matching builtin exception, so that code that does not know wholemem can catch
``TimeoutError`` or ``MemoryError``. ``hint`` is what the user can do about the error.

>>> try:
...     raise Timeout("rank 3 did not call within 2s", missing=(3,), hint="start rank 3")
... except TimeoutError as error:
...     print(error.missing, error)
(3,) rank 3 did not call within 2s
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
    """The base class of all exceptions of wholemem.

    Args:
        message: The message.
        hint: What the user can do about the error.
        code: A stable identifier of the error.
    """

    hint: Optional[str]
    """What the user can do about the error, if known."""

    code: Optional[str]
    """A stable identifier of the error for programs. It is the same in all versions and in Rust."""

    def __init__(self, message: str, *, hint: Optional[str] = None, code: Optional[str] = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        return f"{message}\nhint: {self.hint}" if self.hint else message

    def __reduce__(self) -> tuple[object, ...]:
        # An exception must be picklable, because it is sent between processes, for example by a process pool.
        return (_restored, (type(self), self.args, self.__dict__))


def _restored(kind: type[Error], args: tuple[object, ...], attributes: dict[str, object]) -> Error:
    # For a subclass of `MemoryError`, `kind.__new__` raises a `TypeError`, so `Error.__new__` creates the exception.
    new = Error.__new__ if issubclass(kind, MemoryError) else kind.__new__
    error = new(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class _RankError(Error):
    """Base class of errors that concern one rank.

    Args:
        message: The message.
        rank: The rank.
        hint: What the user can do about the error.
        code: A stable identifier of the error.
    """

    rank: Optional[int]
    """The rank, if known. It is lost if an exception is recreated from its message alone, as torch's data loader does."""

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


class PeerLost(_RankError, ConnectionError):
    """Rank ``rank`` exited or left the group. The communicator cannot be used any more."""


class Aborted(_RankError, ConnectionError):
    """Rank ``rank`` called ``abort`` or was interrupted during a call. The communicator cannot be used any more, unless the call
    was a save or load, which may fail on all ranks without ending the communicator."""


class RankFailed(_RankError, RuntimeError):
    """A collective call failed on rank ``rank``. The call has no effect, and the communicator stays usable."""


class Timeout(Error, TimeoutError):
    """A timeout expired. ``missing`` lists the ranks that did not call in time, as far as they are known.

    Args:
        message: The message.
        missing: The missing ranks.
        hint: What the user can do about the error.
        code: A stable identifier of the error.
    """

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
    """Ranks made different calls, or the same call with different arguments.

    The message names both calls of a collective. On a GPU, the next call or ``check`` raises it. Also raised if ranks load
    different versions of a file that was replaced meanwhile.
    """


class Busy(Error, RuntimeError):
    """Another thread is using the same communicator or watch, or is sealing the same draft."""


class Closed(Error, ValueError):
    """An object such as a communicator, a client or a draft was used after it was closed."""


class Forked(Error, RuntimeError):
    """A forked child used an object that it inherited from its parent."""


class OutOfMemory(Error, MemoryError):
    """Memory, or address space for it, cannot be allocated."""


class OverQuota(OutOfMemory):
    """The memory quota of the store is exhausted."""


class Unsupported(Error, NotImplementedError):
    """This machine, device or memory does not support the operation."""


class WrongValue(Error, ValueError):
    """An argument has an invalid value, for example a shape, a length or a range."""


class WrongStride(WrongValue):
    """An array does not have the strides that the called function requires; most functions require a contiguous array."""


class WrongDevice(WrongValue):
    """An array is on another device than the called function requires, or a device does not exist."""


class ReadOnly(WrongValue):
    """The called function would write to a read-only array."""


class CannotExport(Error, BufferError):
    """An array cannot be exported to another framework as requested."""


class WrongType(Error, TypeError):
    """An object is not an array, has the wrong element type, or cannot be pickled."""


class BadIndex(Error, IndexError):
    """An index is outside the table or array. ``position`` is the position of the first bad index among the indices.

    Args:
        message: The message.
        position: The first position of a bad index.
        index: The bad index.
        rows: The number of rows.
        hint: What the user can do about the error.
        code: A stable identifier of the error.
    """

    position: Optional[int]
    """The position in the indices, if known."""

    index: Optional[int]
    """The bad index. ``None`` for work on a GPU, which records only the position."""

    rows: Optional[int]
    """The number of rows; valid indices are ``range(rows)``. ``None`` if it is not known."""

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
    """An environment variable is missing or invalid, the directory for sockets cannot be used, or ranks on several nodes lack a
    secret or an address."""


class BadFile(Error, OSError):
    """A file cannot be read or written, or its content is invalid."""


class NotFound(Error, KeyError):
    """A name or an object does not exist in the store."""


class NotAllowed(Error, PermissionError):
    """This user may not perform the operation; another user may, for example the one who serves the store."""


class InUse(Error, BufferError):
    """The called function requires that no array of a draft or mirror exists, but such an array still exists."""


class ServerLost(Error, ConnectionError):
    """No store is served at the socket, or the store of this client has ended."""
