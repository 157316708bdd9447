"""Tensors of torch: how the native half looks at them, their types, and what is checked of them in Python.

Shapes, strides, devices and memory are checked in the native half, by every call.
"""

from __future__ import annotations

from typing import Any

import torch

from .._native import Exchange, WholeTensor, Window, element_types
from ..chunked import ChunkedTensor
from ..errors import Unsupported, WrongDevice, WrongType, WrongValue

__all__ = ["as_tensor"]


def _exchange() -> Exchange:
    """The functions by which torch describes its tensors."""
    found = Exchange.of(torch.Tensor, torch.nn.Parameter)
    if found is None:
        raise Unsupported(
            f"torch {torch.__version__} has no exchange API of DLPack that is understood here",
            hint="use torch 2.11 or newer",
        )
    return found


EXCHANGE = _exchange()
"""Calls the native half with tensors, on torch's current stream."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name, _, _ in element_types() if hasattr(torch, name)
}
"""The types that tables hold, by the names they have there."""

NUMBERS = frozenset(DTYPES[name] for name, is_number, _ in element_types() if is_number)
"""The types that can be reduced and converted."""


def as_tensor(array: Any) -> torch.Tensor:
    """An array of wholemem as a tensor of torch, without a copy: rows of a table, a part of a window, an object of a store.

    The tensor keeps the memory. What must not be written is not told by torch, which knows no such tensors.

    >>> import wholemem
    >>> array = wholemem.zeros((2, 3), "float32")
    >>> tensor = as_tensor(array)
    >>> tensor += 1
    >>> array.numpy().sum(), tensor.data_ptr() == array.data_ptr()
    (np.float32(6.0), True)
    """
    if not hasattr(array, "__dlpack__") and type(array).__name__ != "PyCapsule":
        is_of_ranks = isinstance(array, (WholeTensor, Window, ChunkedTensor))
        hint = "give this rank's part of it: `local()`" if is_of_ranks else "give an array of wholemem"
        raise WrongType(f"there is no array of a `{type(array).__name__}`", hint=hint)
    return torch.from_dlpack(array)


def contiguous(what: str, tensor: torch.Tensor, dims: int = 0) -> torch.Tensor:
    """A tensor that is read, or a contiguous copy of it. Behind one dimension, rows may lie apart."""
    if tensor.is_contiguous():
        return tensor
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        # Copying it would read memory that is gone.
        raise WrongValue(f"{what} has no memory", hint="give one whose storage was not freed")
    is_of_rows = dims == 1 and tensor.numel() > 0 and tensor[0].is_contiguous() and tensor.stride(0) >= tensor[0].numel()
    return tensor if is_of_rows else tensor.contiguous()


def raw_stream(device: int) -> int:
    """The number of torch's current stream on a GPU; on the processor, where there are none, 0."""
    return 0 if device < 0 else int(torch._C._cuda_getCurrentRawStream(device))


def dtype_of(table: WholeTensor) -> torch.dtype:
    """What torch calls the elements of a table."""
    try:
        return DTYPES[table.dtype]
    except KeyError:
        raise WrongType(f"torch {torch.__version__} has no type like {table.dtype}") from None


def as_torch_dtype(dtype: Any) -> torch.dtype:
    """A type of torch, given as it is or by its name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise WrongType(f"torch has no type called `{dtype}`", hint="give a name such as `float32`, or a `torch.dtype`")


def check_kind(what: str, given: Any, kind: type) -> None:
    """Raises unless something is what it is called."""
    if not isinstance(given, kind):
        raise WrongType(f"{what} is a `{type(given).__name__}`", hint=f"give a `wholemem.{kind.__name__}`")


def check_tensor(what: str, given: Any) -> None:
    """Raises unless torch takes something for a tensor."""
    if not isinstance(given, torch.Tensor) and not hasattr(given, "__torch_function__"):
        raise WrongType(f"{what} is a `{type(given).__name__}`", hint="give a tensor: `torch.as_tensor(...)`")


def check_op(op: Any) -> None:
    """Raises unless a reduction is given by its name."""
    if not isinstance(op, str):
        raise WrongType(f"the operation is a `{type(op).__name__}`", hint="give its name: `sum`, `avg`, `min`, `max` and so on")


def check_number(dtype: torch.dtype) -> None:
    """Raises unless elements of a type can be reduced."""
    if dtype not in NUMBERS:
        raise WrongType(f"cannot compute with {dtype}", hint="convert the tensor to another type first")


def check_asked(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises unless a tensor holds what was asked for."""
    if dtype is not tensor.dtype:
        raise WrongValue(f"{what} holds {tensor.dtype}, and {dtype} was asked for", hint="leave out `dtype`")


def check_no_gradient(what: str, tensor: torch.Tensor) -> None:
    """Raises if a backward pass would come to a tensor that is to be written."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"{what} requires a gradient", hint="give it by `detach()`, or under `torch.no_grad()`")


def check_own(what: str, tensor: torch.Tensor) -> None:
    """Raises if the elements are not those in memory, but their negatives or conjugates."""
    if tensor.is_neg() or tensor.is_conj():
        other = "negative" if tensor.is_neg() else "conjugate"
        raise WrongValue(f"{what} is the {other} of what is in its memory", hint="give one that is no such view")


def check_like(what: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Raises unless a tensor has the type, the shape and the device of another."""
    if tensor.dtype is not other.dtype:
        raise WrongType(f"{what} holds {tensor.dtype}, and the tensor {other.dtype}", hint="give one of the same type")
    if tensor.shape != other.shape:
        raise WrongValue(f"{what} must have the shape {list(other.shape)}, and has {list(tensor.shape)}")
    check_together(what, tensor, other)


def check_together(what: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Raises unless two tensors are on one device."""
    if tensor.device != other.device:
        raise WrongDevice(
            f"{what} is on {tensor.device}, and the other tensor on {other.device}", hint="move one to the other"
        )


def check_indices(indices: torch.Tensor) -> None:
    """Raises unless these can name rows."""
    if indices.dtype is not torch.int64 and indices.dtype is not torch.int32:
        raise WrongType(f"indices are int32 or int64, and not {indices.dtype}", hint="convert them by `long()`")
