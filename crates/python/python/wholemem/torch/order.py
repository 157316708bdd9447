"""Checks the order of scatters, which says if rows for the same index are written or added in a fixed order."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .._native import WholeTensor
from ..errors import Unsupported, WrongValue
from .tensors import NUMBERS, dtype_of

__all__ = ["check_deterministic", "check_order"]


def check_order(order: Any) -> None:
    """Raises ``WrongValue`` unless an argument is the name of a scatter order: ``any`` or ``fixed``."""
    if order not in ("any", "fixed"):
        hint = "use `any`, or `fixed`: the same result in every run, by a collective call"
        raise WrongValue(f"the order `{order}` does not exist", hint=hint)


def check_deterministic(table: WholeTensor, add: bool) -> None:
    """Raises ``Unsupported``, or warns, if torch requires deterministic algorithms and a scatter with the order ``any`` is not
    deterministic.

    Args:
        table: The table.
        add: Whether the scatter adds.
    """
    if not torch.are_deterministic_algorithms_enabled() or (add and _is_deterministic_in_any_order(table)):
        return
    operation = f"a scatter-add of {table.dtype}" if add else "a scatter"
    error = Unsupported(
        f"{operation} in any order is not deterministic, which `torch.use_deterministic_algorithms` requires",
        hint='pass order="fixed", which is a collective call',
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise error
    warnings.warn(str(error), UserWarning, stacklevel=2)


def _is_deterministic_in_any_order(table: WholeTensor) -> bool:
    """Returns true if a scatter-add with the order ``any`` gives the same sums in every run: for integers, whose sums do not
    depend on the order, and in host memory, where rows are always added in a fixed order.

    Types that cannot be added are reported by the call itself.
    """
    dtype = dtype_of(table)
    return not dtype.is_floating_point or dtype not in NUMBERS or table.location == "host"
