"""Operators whose order a compiler keeps."""

from __future__ import annotations

import torch

from ..errors import Unsupported

__all__ = ["ordered"]


def ordered(name: str) -> None:
    """Declares that an operator does something that torch does not see: it stays, and stays where it is.

    torch has this under a name with an underscore; there is no other way to say it of memory that is no tensor.
    A schema that claims to write some tensor instead would not do: the compiler copies the tensor, and moves a gather
    behind the scatter that it came before.
    """
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        raise Unsupported(
            f"torch {torch.__version__} cannot be told of effects that it does not see",
            hint="use torch 2.11 or newer",
        )
    from torch._library.effects import EffectType

    register(name, EffectType.ORDERED)
