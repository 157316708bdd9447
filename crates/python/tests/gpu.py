"""Helpers of GPU tests: random tensors, and the free memory of the GPU."""

from __future__ import annotations

import gc
from typing import Any, Sequence

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

# The element types that both numpy and torch have, and all element types of torch.
NUMPY_TYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "complex64",
]  # fmt: skip
TORCH_TYPES = [*NUMPY_TYPES, "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2"]

# The element types that support addition.
NUMBERS = ["int32", "int64", "float16", "bfloat16", "float32", "float64"]


def any_bits(shape: Sequence[int], dtype: str, seed: int = 7, device: str = "cuda") -> Any:
    """Returns a tensor of random bits."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * torch.empty((), dtype=kind).element_size()
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count, dtype=np.uint8)
    return torch.from_numpy(data).to(device).view(kind).reshape(tuple(shape))


def bits(tensor: Any) -> np.ndarray:
    """Returns the bytes of a tensor, so that NaNs can be compared."""
    return torch.as_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def release_unused() -> None:
    """Frees unreferenced objects and torch's cached memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free_bytes() -> int:
    """Frees unreferenced objects and torch's cached memory, and returns the free memory of the GPU in bytes."""
    release_unused()
    return int(torch.cuda.mem_get_info()[0])
