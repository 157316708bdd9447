"""The order in which rows come to one place, for those who want the same bits in every run."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .._native import WholeTensor
from ..errors import Unsupported, WrongValue
from .tensors import NUMBERS, dtype_of

__all__ = ["check_determined", "check_order"]


def check_order(order: Any) -> None:
    """Raises unless an order has this name."""
    if order not in ("any", "fixed"):
        hint = "it is `any`, or `fixed`: the same in every run, and a call of all ranks"
        raise WrongValue(f"no order is called `{order}`", hint=hint)


def check_determined(table: WholeTensor, add: bool) -> None:
    """Raises, or warns, if torch was told to do only what comes out the same in every run, and rows in any order do not."""
    if not torch.are_deterministic_algorithms_enabled() or (add and _is_same_in_any_order(table)):
        return
    what = f"additions of {table.dtype}" if add else "rows that are written to one place"
    error = Unsupported(
        f"{what} have no fixed order, which `torch.use_deterministic_algorithms` asks for",
        hint='give order="fixed", which is a call of all ranks',
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise error
    warnings.warn(str(error), UserWarning, stacklevel=2)


def _is_same_in_any_order(table: WholeTensor) -> bool:
    """Whether additions to a table are the same whichever comes first: of integers, and where they go the way of the fixed order.

    What cannot be added at all is told by those who try."""
    dtype = dtype_of(table)
    return not dtype.is_floating_point or dtype not in NUMBERS or table.location == "host"
