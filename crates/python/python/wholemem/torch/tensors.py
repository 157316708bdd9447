"""Reads and checks torch tensors: opens the exchange API for native code, lists the supported dtypes, and checks arguments.

The native half checks shapes, strides, devices and memory in every call.
"""

from __future__ import annotations

from typing import Any

import torch

from .._native import Exchange, WholeTensor, Window, element_types
from ..chunked import ChunkedTensor
from ..errors import Unsupported, WrongDevice, WrongType, WrongValue

__all__ = ["as_tensor"]


def _exchange() -> Exchange:
    """Opens torch's DLPack C exchange API, by which native code reads tensors."""
    exchange = Exchange.of(torch.Tensor, torch.nn.Parameter)
    if exchange is None:
        raise Unsupported(
            f"torch {torch.__version__} does not publish a supported version of DLPack's C exchange API",
            hint="use torch 2.11 or newer",
        )
    return exchange


EXCHANGE = _exchange()
"""Runs native calls on tensors, on torch's current stream."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name, _, _ in element_types() if hasattr(torch, name)
}
"""The dtypes that tables support, by name."""

NUMBERS = frozenset(DTYPES[name] for name, is_number, _ in element_types() if is_number)
"""The dtypes that can be reduced and converted."""


def as_tensor(array: Any) -> torch.Tensor:
    """Imports an array of wholemem as a torch tensor, without a copy: rows of a table, a part of a window, an object of a store.

    The tensor keeps the memory alive. torch has no read-only tensors, so a read-only array is not protected by the tensor.

    Args:
        array: The array.

    Returns:
        The tensor.

    Raises:
        wholemem.errors.WrongType: The object is not an array.

    >>> import wholemem
    >>> array = wholemem.zeros((2, 3), "float32")
    >>> tensor = as_tensor(array)
    >>> tensor += 1
    >>> array.numpy().sum(), tensor.data_ptr() == array.data_ptr()
    (np.float32(6.0), True)
    """
    if not hasattr(array, "__dlpack__") and type(array).__name__ != "PyCapsule":
        has_parts = isinstance(array, (WholeTensor, Window, ChunkedTensor))
        hint = "pass this rank's part of it: `local()`" if has_parts else "pass an array of wholemem"
        raise WrongType(f"a `{type(array).__name__}` is not an array", hint=hint)
    return torch.from_dlpack(array)


def contiguous(argument: str, tensor: torch.Tensor, dims: int = 0) -> torch.Tensor:
    """Returns a tensor if it is contiguous, or else a contiguous copy. If ``dims`` is 1, contiguous rows with gaps between them
    are not copied.

    Args:
        argument: The name of the tensor in errors.
        tensor: The tensor.
        dims: The number of dimensions before a row.

    Raises:
        WrongValue: The storage of the tensor was freed.
    """
    if tensor.is_contiguous():
        return tensor
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0:
        # Copying a tensor whose storage was freed would read freed memory.
        raise WrongValue(f"{argument} has no memory", hint="pass a tensor whose storage was not freed")
    has_plain_rows = (
        dims == 1 and tensor.numel() > 0 and tensor[0].is_contiguous() and tensor.stride(0) >= tensor[0].numel()
    )
    return tensor if has_plain_rows else tensor.contiguous()


def raw_stream(device: int) -> int:
    """Returns the handle of torch's current stream on a GPU.

    Args:
        device: The number of the GPU; negative for the CPU.

    Returns:
        The handle; 0 for the CPU.
    """
    return 0 if device < 0 else int(torch._C._cuda_getCurrentRawStream(device))


def dtype_of(table: WholeTensor) -> torch.dtype:
    """Returns the torch dtype of a table's elements.

    Args:
        table: The table.

    Raises:
        WrongType: This version of torch does not have the dtype.
    """
    try:
        return DTYPES[table.dtype]
    except KeyError:
        raise WrongType(f"torch {torch.__version__} has no type {table.dtype}") from None


def as_torch_dtype(dtype: Any) -> torch.dtype:
    """Converts a dtype argument, which is a torch dtype or the name of one, to a torch dtype.

    Args:
        dtype: The argument.

    Raises:
        WrongType: torch does not have the dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise WrongType(f"torch has no type `{dtype}`", hint="pass a name such as `float32`, or a `torch.dtype`")


def check_kind(argument: str, value: Any, kind: type) -> None:
    """Raises ``WrongType`` unless an argument is an instance of a class."""
    if not isinstance(value, kind):
        raise WrongType(f"{argument} is a `{type(value).__name__}`", hint=f"pass a `wholemem.{kind.__name__}`")


def check_tensor(argument: str, value: Any) -> None:
    """Raises ``WrongType`` unless an argument is a tensor or an object with ``__torch_function__``."""
    if not isinstance(value, torch.Tensor) and not hasattr(value, "__torch_function__"):
        raise WrongType(f"{argument} is a `{type(value).__name__}`", hint="pass a tensor: `torch.as_tensor(...)`")


def check_op(op: Any) -> None:
    """Raises ``WrongType`` unless the reduction operation is given as a ``str``, such as ``sum``."""
    if not isinstance(op, str):
        hint = "pass its name, such as `sum`, `avg`, `min` or `max`"
        raise WrongType(f"the operation is a `{type(op).__name__}`, not a str", hint=hint)


def check_number(dtype: torch.dtype) -> None:
    """Raises ``WrongType`` unless collectives can reduce elements of a dtype."""
    if dtype not in NUMBERS:
        raise WrongType(f"cannot compute with {dtype}", hint="convert the tensor to another type first")


def check_requested_dtype(argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ``WrongValue`` unless an output tensor has the requested dtype."""
    if dtype is not tensor.dtype:
        raise WrongValue(f"{argument} has the type {tensor.dtype}, but `dtype` is {dtype}", hint="omit `dtype`")


def check_no_gradient(argument: str, tensor: torch.Tensor) -> None:
    """Raises ``Unsupported`` if autograd records writes to an output tensor."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"{argument} requires a gradient", hint="pass `tensor.detach()`, or use `torch.no_grad()`")


def check_resolved(argument: str, tensor: torch.Tensor) -> None:
    """Raises ``WrongValue`` if a tensor is a lazily negated or conjugated view of its memory."""
    if tensor.is_neg() or tensor.is_conj():
        view = "negated" if tensor.is_neg() else "conjugated"
        raise WrongValue(f"{argument} is a lazily {view} view of its memory", hint="pass a tensor that is not such a view")


def check_like(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Raises an error unless a tensor has the dtype, shape and device of another tensor."""
    if tensor.dtype is not other.dtype:
        raise WrongType(f"{argument} has the type {tensor.dtype}, but the tensor has {other.dtype}", hint="use the same type")
    if tensor.shape != other.shape:
        raise WrongValue(f"{argument} must have the shape {list(other.shape)}, but has {list(tensor.shape)}")
    check_same_device(argument, tensor, other)


def check_same_device(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Raises ``WrongDevice`` unless two tensors are on the same device."""
    if tensor.device != other.device:
        raise WrongDevice(
            f"{argument} is on {tensor.device}, but the other tensor is on {other.device}",
            hint="move one of them to the device of the other",
        )


def check_indices(indices: torch.Tensor) -> None:
    """Raises ``WrongType`` unless a tensor of indices has the dtype int32 or int64."""
    if indices.dtype is not torch.int64 and indices.dtype is not torch.int32:
        raise WrongType(f"indices must be int32 or int64, but are {indices.dtype}", hint="convert them with `long()`")
