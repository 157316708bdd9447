"""Declares that torch operators have an ordered effect, so that a compiler neither eliminates nor reorders them."""

from __future__ import annotations

import torch

from ..errors import Unsupported

__all__ = ["register_ordered"]


def register_ordered(name: str) -> None:
    """Declares that a torch operator has an effect that torch does not see, so that a compiler neither eliminates nor reorders
    the operator.

    torch's function for this is private; there is no public way to declare an effect on memory that is not a tensor. A schema
    that declares a write to a tensor does not work: the compiler copies the tensor, and moves a gather after a later scatter.

    Args:
        name: The qualified name of the operator.

    Raises:
        Unsupported: This version of torch does not have the function.
    """
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        raise Unsupported(
            f"torch {torch.__version__} does not support operators with ordered effects",
            hint="use torch 2.11 or newer",
        )
    from torch._library.effects import EffectType

    register(name, EffectType.ORDERED)
