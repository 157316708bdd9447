"""One memory over many GPUs, processes and threads.

Importing this touches no driver and starts nothing.

>>> import wholemem
>>> wholemem.zeros((2, 3), "float32")
Array(shape=(2, 3), dtype=float32, device=cpu)
"""

from __future__ import annotations

from . import errors
from ._native import VERSION as __version__
from ._native import Array, Communicator, asarray, unique_id, zeros
from .errors import Error

__all__ = [
    "Array",
    "Communicator",
    "Error",
    "__version__",
    "asarray",
    "errors",
    "unique_id",
    "zeros",
]
