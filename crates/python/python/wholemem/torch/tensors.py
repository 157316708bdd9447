"""Tensors of torch as the native half takes them: as numbers, once they have been looked at."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._native import WholeTensor, Window, dtype_code, element_types
from ..chunked import ChunkedTensor
from ..errors import Unsupported, WrongDevice, WrongStride, WrongType, WrongValue

__all__ = ["as_tensor"]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name, _, _ in element_types() if hasattr(torch, name)
}
"""The types that tables hold, by the names they have there."""

CODES: dict[torch.dtype, int] = {
    DTYPES[name]: dtype_code(name) for name, is_number, _ in element_types() if is_number
}
"""The types that can be reduced and converted, and what the native half calls them."""

INSTEAD = "give one without gaps, and copy from it"
"""What can be done about an output with gaps: what is made contiguous is a copy, and not what was meant."""


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


def address_of(what: str, tensor: torch.Tensor) -> int:
    """Where a tensor's elements are."""
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        raise WrongValue(f"{what} has no memory", hint="give one whose storage was not freed")
    return int(tensor.data_ptr())


def gapless(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or a copy of it whose elements follow each other without a gap."""
    # Of a storage that was freed, nothing is copied.
    address_of(what, tensor)
    return tensor.contiguous()


def raw_stream(device: int) -> int:
    """The number of torch's current stream on a GPU; on the processor, where there are none, 0."""
    return 0 if device < 0 else int(torch._C._cuda_getCurrentRawStream(device))


def dtype_of(table: WholeTensor) -> torch.dtype:
    """What torch calls the elements of a table."""
    try:
        return DTYPES[table.dtype]
    except KeyError:
        raise WrongType(f"torch {torch.__version__} has no type like {table.dtype}") from None


def called(dtype: Any) -> torch.dtype:
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
    if dtype not in CODES:
        raise WrongType(f"cannot compute with {dtype}", hint="convert the tensor to another type first")


def check_contiguous(what: str, tensor: torch.Tensor, hint: str = "make it so by `contiguous()`") -> None:
    """Raises unless the elements follow each other without a gap."""
    if not tensor.is_contiguous():
        raise WrongStride(
            f"{what} is not contiguous: strides {list(tensor.stride())} of shape {list(tensor.shape)}", hint=hint
        )


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


def check_rows(what: str, rows: torch.Tensor, indices: torch.Tensor, table: WholeTensor) -> None:
    """Raises unless a tensor has a row of the table for every index."""
    shape = (*indices.shape, *table.shape[1:])
    if rows.shape != shape:
        raise WrongValue(f"{what} must have the shape {list(shape)}, and has {list(rows.shape)}")
    check_together(what, rows, indices)


def stride_of(rows: torch.Tensor, dims: int) -> Optional[int]:
    """The bytes from one row to the next, where rows are at the end of so many dimensions; 0 if nothing lies between, and
    ``None`` if something lies within."""
    if rows.is_contiguous():
        return 0
    if dims == 1 and rows.numel() > 0 and rows[0].is_contiguous() and rows.stride(0) >= rows[0].numel():
        return int(rows.stride(0)) * rows.itemsize
    return None


def check_stride(what: str, rows: torch.Tensor, dims: int) -> int:
    """The same, or raises."""
    stride = stride_of(rows, dims)
    if stride is None:
        raise WrongStride(
            f"the rows of {what} have gaps: strides {list(rows.stride())} of shape {list(rows.shape)}",
            hint=INSTEAD,
        )
    return stride


def conversion(what: str, dtype: torch.dtype, own: torch.dtype) -> Optional[int]:
    """The code of the type that a table's elements are converted to; none, if it is their own."""
    if dtype is own:
        return None
    if dtype not in CODES or own not in CODES or dtype.is_floating_point != own.is_floating_point:
        raise WrongType(
            f"{what} cannot be {dtype}: the table holds {own}",
            hint="floats are converted to floats, and integers to integers",
        )
    return CODES[dtype]

