"""The process of a rank that :func:`wholemem.run` started: runs the function and sends its result."""

from __future__ import annotations

import builtins
import os
import pickle
import struct
import sys
import traceback
from io import RawIOBase
from types import ModuleType
from typing import Any, Dict, Optional, Tuple

from . import _by_value, errors
from ._native import Communicator, die_with_parent

# The first byte that a rank writes: from then on, it can be interrupted.
READY = b"\1"

# The length of a report, which precedes it.
LENGTH = struct.Struct("<Q")

# What a rank reports: its pickled result; or its pickled exception if possible, its last line, and its traceback.
Report = Tuple[Optional[bytes], Optional[bytes], str, str]


def read_all(descriptor: int) -> bytes:
    """Reads a memory file from its start, which other processes may read too.

    Args:
        descriptor: The descriptor of the file.
    """
    length = os.fstat(descriptor).st_size
    parts, offset = [], 0
    while offset < length:
        parts.append(os.pread(descriptor, min(length - offset, 1 << 30), offset))
        offset += len(parts[-1])
    return b"".join(parts)


def main(arguments: str, report: str, release: str, parent: str) -> None:
    """Runs the function of :func:`wholemem.run` as one rank, and ends when the parent releases it.

    Args:
        arguments: The descriptor of the memory file with the function and its arguments.
        report: The descriptor to which the result is written.
        release: The descriptor of a pipe that the parent closes when all ranks have returned.
        parent: The process id of the parent.
    """
    try:
        for descriptor in (report, release):
            os.set_inheritable(int(descriptor), False)
        with open(int(report), "wb", buffering=0) as pipe:
            # From here on, an interrupt ends the process without a traceback.
            pipe.write(READY)
            die_with_parent(int(parent))
            _run(int(arguments), pipe, int(release))
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)


def _run(arguments: int, pipe: RawIOBase, release: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    comm = None
    try:
        settings, data = pickle.loads(read_all(arguments))
        os.close(arguments)
        _become_main(settings)
        function, values = _receive(data)
        comm = Communicator.from_env(device=settings["device"], timeout=settings["timeout"])
        report = _succeeded(function(comm, *values), comm.rank)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report = _failed(error)
    sys.stdout.flush()
    message = memoryview(pickle.dumps(report))
    pipe.write(LENGTH.pack(len(message)))
    while message:
        message = message[pipe.write(message) :]
    if report[0] is None:
        sys.exit(1)
    # The group and its memory stay usable for the other ranks until all have returned.
    os.read(release, 1)
    if comm is not None:
        comm.close()


def _become_main(settings: Dict[str, Any]) -> None:
    """Replaces ``__main__`` by an empty module that stands for ``__main__`` of the parent."""
    main = ModuleType("__main__")
    vars(main).update(settings["main"], __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = settings["argv"]


def _receive(data: bytes) -> Tuple[Any, Any]:
    try:
        received: Tuple[Any, Any] = _by_value.loads(data)
        return received
    except Exception as error:
        hint = "define it in a module without side effects, or pass `threads=True`"
        raise errors.WrongType(f"the function cannot be received in the process of the rank: {error!r}", hint=hint) from error


def _succeeded(result: Any, rank: int) -> Report:
    try:
        return pickle.dumps(result), None, "", ""
    except Exception as error:
        hint = "return plain values or numpy arrays, or pass `threads=True`"
        raise errors.WrongType(f"the result of rank {rank} cannot be sent to this process: {error}", hint=hint) from error


def _failed(error: BaseException) -> Report:
    # The first frame is that of `main`.
    first = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, first))
    last = "".join(traceback.format_exception_only(type(error), error)).strip()
    pickled = None
    try:
        if not isinstance(error, SystemExit):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
    except Exception:
        pickled = None
    return None, pickled, last, text
