"""Tensors of a GPU for tests, and what is left of one when they are gone."""

from __future__ import annotations

import gc
from typing import Any, Sequence

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

# What both numpy and torch have, and what only torch has.
NUMPY_TYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64",
]  # fmt: skip
TORCH_TYPES = [*NUMPY_TYPES, "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2"]

# Those that numbers can be added in.
NUMBERS = ["int32", "int64", "float16", "bfloat16", "float32", "float64"]


def any_bits(shape: Sequence[int], dtype: str, seed: int = 7, device: str = "cuda") -> Any:
    """A tensor of any elements that there are of a type."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch.empty((), dtype=kind).element_size()
    made = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count, dtype=np.uint8)
    return torch.from_numpy(made).to(device).view(kind).reshape(tuple(shape))


def bits(tensor: Any) -> np.ndarray:
    """The bytes of a tensor, by which also elements are compared that are no numbers."""
    return torch.as_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def settle() -> None:
    """Lets go what nobody uses any more."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """How much of the GPU's memory nobody has."""
    settle()
    return int(torch.cuda.mem_get_info()[0])
