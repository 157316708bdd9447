"""Assigns integer handles to objects, because torch operators accept only tensors and plain values as arguments.

Handles are weak references: a handle resolves to its object while the object is alive.

>>> class Table: pass
>>> table = Table()
>>> number = register(table)
>>> find(number, Table) is table
True
>>> del table
>>> find(number, Table)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
wholemem.errors.Closed: the Table of handle ... was dropped
hint: keep it alive while code that was compiled with it runs
"""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from .errors import Closed, WrongType

__all__ = ["find", "register"]

T = TypeVar("T")

_numbers = count(1)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(object: Any) -> int:
    """Assigns an integer handle to an object. Handles are never reused.

    Args:
        object: The object, of a class that supports weak references.

    Returns:
        The handle.
    """
    number = next(_numbers)
    _objects[number] = object
    return number


def find(handle: int, kind: type[T]) -> T:
    """Returns the object to which an integer handle was assigned.

    Args:
        handle: The handle.
        kind: The class of the object.

    Raises:
        Closed: The object was dropped.
        WrongType: The object is not an instance of ``kind``.
    """
    object = _objects.get(handle)
    if object is None:
        raise Closed(
            f"the {kind.__name__} of handle {handle} was dropped",
            hint="keep it alive while code that was compiled with it runs",
        )
    if not isinstance(object, kind):
        raise WrongType(f"handle {handle} belongs to a {type(object).__name__}, not a {kind.__name__}")
    return object
