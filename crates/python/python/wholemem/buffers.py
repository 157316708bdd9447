"""Arrays as buffers of Python.

One binary serves every Python from 3.9 on, and before 3.11 such a binary cannot have buffers of its own: ``ctypes`` has.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, cast

from ._native import element_types

if TYPE_CHECKING:
    from ._native import Array

# Every Python from 3.9 on casts views to these formats: to halves only newer ones, to complex numbers none.
_FORMATS = {name: letter for name, _, letter in element_types() if letter is not None and letter in "?bBhHiIqQfd"}


def memoryview_of(array: Array) -> memoryview:
    """The array's memory, read-only where the array is; bytes where a buffer has no type like the array's.

    >>> from wholemem import zeros
    >>> view = memoryview_of(zeros((2, 3), "int32"))
    >>> view.shape, view.format, view.readonly
    ((2, 3), 'i', False)
    """
    # Of at least one byte: there is no address of none.
    memory: Any = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.data_ptr())
    # The view keeps this, and this the array.
    memory.owner = array
    view: Any = memoryview(memory).cast("B")[: array.nbytes]
    if array.nbytes and array.dtype in _FORMATS:
        view = view.cast(_FORMATS[array.dtype], array.shape)
    if array.readonly:
        view = view.toreadonly()
    return cast("memoryview", view)
