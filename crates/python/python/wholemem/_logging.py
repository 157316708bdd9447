"""Passes log events of the native module to :mod:`logging`. It is imported only if the environment selects log events.

The logger of the native module ``wholemem::collective`` is ``wholemem.collective``. If the program has configured no handler for
a record, the record is written to stderr, as :mod:`logging` does with warnings.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Optional, Sequence

from . import _native

__all__ = ["configure", "deliver"]

LEVELS = {
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG - 5,
}

_root = logging.getLogger("wholemem")


class _Fallback(logging.Handler):
    """Writes those log records to stderr that no handler of the program receives."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: Optional[logging.Logger] = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        if sys.stderr is not None:
            sys.stderr.write(self.format(record) + "\n")


def configure(level: str) -> None:
    """Sets the level of the logger ``wholemem``, if the program has not set it, and delivers all log records when the interpreter
    exits."""
    if _root.level == logging.NOTSET:
        _root.setLevel(LEVELS.get(level.upper(), logging.CRITICAL))
    fallback = _Fallback()
    fallback.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    _root.addHandler(fallback)
    atexit.register(_native.stop_logging)


def deliver(records: Sequence[tuple[str, str, str]], dropped: int) -> None:
    """Passes log records to Python's loggers. Each record has the name of its logger, its level and its message."""
    for name, level, message in records:
        logger = logging.getLogger(name)
        if logger.isEnabledFor(LEVELS[level]):
            # The message is complete: without arguments, `logging` does not format it.
            logger.handle(logger.makeRecord(name, LEVELS[level], "wholemem", 0, message, (), None))
    if dropped:
        _root.warning("%d records were dropped, because no thread of Python could run", dropped)
