"""Exports arrays through Python's buffer protocol.

One binary supports every Python from 3.9 on. Before 3.11, such a binary cannot implement the buffer protocol, so ``ctypes`` does.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, cast

from ._native import element_types

if TYPE_CHECKING:
    from ._native import Array

# The buffer formats that `memoryview.cast` supports in every Python from 3.9 on, by element type. No version supports complex
# formats.
_FORMATS = {name: letter for name, _, letter in element_types() if letter is not None and letter in "?bBhHiIqQfd"}


def memoryview_of(array: Array) -> memoryview:
    """Returns a ``memoryview`` of an array's memory.

    Args:
        array: A contiguous array in host memory.

    Returns:
        A view with the array's element type if ``memoryview`` supports it, else of bytes; read-only if the array is.


    >>> from wholemem import zeros
    >>> view = memoryview_of(zeros((2, 3), "int32"))
    >>> view.shape, view.format, view.readonly
    ((2, 3), 'i', False)
    """
    # An empty array is exported as an empty slice of a `ctypes` array of one byte.
    memory: Any = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.data_ptr())
    # The `memoryview` keeps `memory` alive, and `memory` keeps the array alive.
    memory.owner = array
    view: Any = memoryview(memory).cast("B")[: array.nbytes]
    if array.nbytes and array.dtype in _FORMATS:
        view = view.cast(_FORMATS[array.dtype], array.shape)
    if array.readonly:
        view = view.toreadonly()
    return cast("memoryview", view)
