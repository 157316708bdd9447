"""Numbers for objects: torch's operators take numbers and tensors, and no other objects.

Handles are weak references: an object is found by its number as long as something else keeps it.

>>> class Table: pass
>>> table = Table()
>>> number = give(table)
>>> find(number, Table) is table
True
>>> del table
>>> find(number, Table)  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
wholemem.errors.Closed: the Table of handle ... is gone
hint: keep it as long as what was compiled with it runs
"""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from .errors import Closed, WrongType

__all__ = ["find", "give"]

T = TypeVar("T")

_numbers = count(1)
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


def give(object: Any) -> int:
    """Gives an object a number that no other object has."""
    number = next(_numbers)
    _objects[number] = object
    return number


def find(handle: int, kind: type[T]) -> T:
    """The object of a number."""
    found = _objects.get(handle)
    if found is None:
        raise Closed(
            f"the {kind.__name__} of handle {handle} is gone",
            hint="keep it as long as what was compiled with it runs",
        )
    if not isinstance(found, kind):
        raise WrongType(f"handle {handle} is of a {type(found).__name__}, and not of a {kind.__name__}")
    return found
