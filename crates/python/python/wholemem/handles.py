"""Numbers for objects, for places where only numbers go: the graphs of a compiler, for one.

A number keeps nothing. What it stands for is found as long as somebody else keeps it.

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
    """A number that nothing else has."""
    number = next(_numbers)
    _objects[number] = object
    return number


def find(handle: int, kind: type[T]) -> T:
    """What a number stands for."""
    found = _objects.get(handle)
    if found is None:
        raise Closed(
            f"the {kind.__name__} of handle {handle} is gone",
            hint="keep it as long as what was compiled with it runs",
        )
    if not isinstance(found, kind):
        raise WrongType(f"handle {handle} is of a {type(found).__name__}, and not of a {kind.__name__}")
    return found
