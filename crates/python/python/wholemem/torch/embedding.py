"""An embedding whose rows and gradients are divided among ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, Optional

import torch

from .. import _handles
from .._handles import find
from .._native import WholeTensor
from ..errors import RanksDisagree, WrongType, WrongValue
from .effects import register_ordered
from .ops import LIBRARY, _gather, _gather_fake, gather, scatter_rows
from .order import check_order
from .tensors import NUMBERS, as_tensor, check_indices, check_kind, check_tensor, dtype_of, raw_stream

if TYPE_CHECKING:
    from .._native import Order

__all__ = ["Embedding"]

LIBRARY.define("embedding(int table, int gradients, Tensor anchor, Tensor indices) -> Tensor")
LIBRARY.define("embedding_backward(int gradients, Tensor values, Tensor indices) -> Tensor")

OPS = torch.ops.wholemem

GRADIENTS_HINT = (
    "run the first backward pass on all ranks, with the embeddings in the same order, or pass `grad=table.like()`"
)
"""The hint if ranks create the gradients of different tables."""


class Gradients:
    """The gradients of an embedding: their table, which is created on first use, and the order in which gradients are
    added, ``any`` or ``fixed``.

    Args:
        table: The table.
        grad: The table of gradients, or ``None``.
        order: ``any`` or ``fixed``.
    """

    def __init__(self, table: WholeTensor, grad: Optional[WholeTensor], order: str) -> None:
        self.like = table
        self.created = grad
        self.order = order
        self.handle = _handles.register(self)
        self.pid, self.lock = os.getpid(), RLock()

    @property
    def table(self) -> WholeTensor:
        """The table of the embedding's gradients. The first use creates the table, which is a collective call."""
        if self.created is None:
            # The lock makes threads create only one table. A forked child cannot create a table, and must not wait for a lock of
            # its parent.
            with self.lock if os.getpid() == self.pid else nullcontext():
                if self.created is None:
                    self.created = self._create()
        return self.created

    def _create(self) -> WholeTensor:
        try:
            return self.like.like()
        except RanksDisagree as error:
            # Ranks disagree here if they took different paths through the model, so the error gets a hint.
            error.hint = error.hint or GRADIENTS_HINT
            raise


class Embedding(torch.nn.Module):
    """An embedding like ``torch.nn.Embedding`` whose rows are a table that is divided among all ranks.

    The backward pass adds the gradients of rows directly to the table ``grad``, on the ranks that store them: nothing of the size
    of the table is allocated, sent or reduced. If no ``grad`` is passed, the first backward pass creates it. All ranks must run
    that pass with their embeddings in the same order; otherwise it raises :class:`~wholemem.errors.RanksDisagree`.
    :meth:`step` is gradient descent. For another optimizer, use this rank's rows of both tables:
    ``as_tensor(embedding.table.local())`` and ``as_tensor(embedding.grad.local())``.

    With the order ``any``, the order of additions and so the last bits of gradients vary between runs. With the order ``fixed``
    they are the same in every run, and every backward pass is a collective call, in the same order of embeddings on all ranks: a
    rank without indices calls the embedding with an empty tensor. ``torch.use_deterministic_algorithms(True)`` requires ``fixed``.

    The rows are not parameters, because all ranks update them together. Operations on the parameters of a surrounding model do not
    apply to them: ``model.zero_grad()`` and ``optimizer.zero_grad()`` do not clear these gradients, and
    ``model.requires_grad_(False)`` does not freeze these rows. Call each embedding, on all ranks::

        for module in model.modules():
            if isinstance(module, wholemem.torch.Embedding):
                module.zero_grad()

    ``state_dict()`` does not contain the rows: save them with ``embedding.table.save(path)``, and create the next embedding from
    ``WholeTensor.load(comm, path)``, on all ranks. ``to()``, ``half()`` and similar calls neither move nor convert them, and
    ``copy.deepcopy`` raises an error.

    A compiler treats the table as a constant. If embeddings are compiled separately with ``fullgraph=True``,
    ``torch._dynamo.config.recompile_limit`` limits their number: compile the surrounding model, or raise the limit.

    Args:
        table: The table of rows, of floats.
        grad: The table of gradients, of the same shape and partition. ``None`` creates it in the first backward pass.
        order: The order in which gradients are added: ``any`` or ``fixed``.

    Raises:
        wholemem.errors.WrongType: The tables do not hold floats.
        wholemem.errors.WrongValue: The tables differ in shape or partition, or the order does not exist.

    >>> import torch, wholemem
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> table = wholemem.WholeTensor.create(comm, (1000, 2), "float32")
    >>> embedding = Embedding(table)
    >>> embedding(torch.tensor([5, 5])).sum().backward()
    >>> embedding.step(0.5)
    >>> embedding.eval()(torch.tensor([5, 6]))
    tensor([[-1., -1.],
            [ 0.,  0.]])
    """

    table: WholeTensor
    """The table of rows."""

    def __init__(self, table: WholeTensor, grad: Optional[WholeTensor] = None, *, order: Order = "any") -> None:
        super().__init__()
        check_kind("the table", table, WholeTensor)
        check_order(order)
        if grad is not None:
            check_kind("the table of gradients", grad, WholeTensor)
            _check_fits(table, grad)
        if not dtype_of(table).is_floating_point:
            raise WrongType(f"the table of an embedding must hold floats, but has {table.dtype}", hint="pass a table of floats")
        self.table = table
        self._gradients = Gradients(table, grad, order)
        # This leaf tensor makes autograd call the backward pass of the embedding, because torch does not see the table.
        self._anchor = torch.zeros((), device=table.device, requires_grad=True)

    @property
    def grad(self) -> WholeTensor:
        """The table of the embedding's gradients. The first use creates the table, which is a collective call."""
        return self._gradients.table

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the embedding at the indices. The result is differentiable in training mode.

        Args:
            indices: A tensor of int32 or int64.
        """
        if self.training and torch.is_grad_enabled() and self._anchor.requires_grad:
            check_tensor("the tensor of indices", indices)
            return OPS.embedding(self.table._handle, self._gradients.handle, self._anchor, indices)
        return gather(self.table, indices)

    def requires_grad_(self, requires_grad: bool = True) -> Embedding:
        """Sets whether gradients of the embedding's rows are computed. Call this method on the embedding, not on a surrounding
        module.

        Args:
            requires_grad: Whether gradients are computed.

        Returns:
            This embedding.
        """
        self._anchor.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients of all rows to zero. Every rank must call this method; ``zero_grad`` of a surrounding module does
        not call it.

        Args:
            set_to_none: Passed to ``torch.nn.Module.zero_grad``.
        """
        super().zero_grad(set_to_none)
        if self._gradients.created is not None:
            self._barrier()
            as_tensor(self.grad.local()).zero_()
            self._barrier()

    def step(self, lr: float) -> None:
        """Updates the rows by gradient descent, and sets the gradients to zero. Every rank must call this method.

        Args:
            lr: The learning rate.
        """
        self._barrier()
        # Every rank updates only the rows that it stores.
        rows, grad = as_tensor(self.table.local()), as_tensor(self.grad.local())
        rows.sub_(grad, alpha=lr)
        grad.zero_()
        self._barrier()

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        # The rows of an embedding belong to all ranks, so a deep copy would be a collective call.
        raise WrongType(
            "cannot copy this `Embedding`: its rows belong to all ranks",
            hint="`copy.copy` shares the rows; for new rows, create an `Embedding` of `table.like()` on all ranks",
        )

    def extra_repr(self) -> str:
        """Returns the shape and dtype of the table, which the printed form of the module contains."""
        return f"{', '.join(map(str, self.table.shape))}, dtype={self.table.dtype}"

    def _barrier(self) -> None:
        self.table.barrier(stream=raw_stream(self._anchor.get_device()))


def _check_fits(table: WholeTensor, grad: WholeTensor) -> None:
    """Raises an error unless ``grad`` can hold the gradients of a table: the shapes are equal, and each row is on the same rank
    in both.
    """
    if grad.shape != table.shape:
        raise WrongValue(f"gradients must have the shape {list(table.shape)}, but have {list(grad.shape)}")
    dtype, hint = dtype_of(grad), "create it with `table.like()`"
    if dtype not in NUMBERS or not dtype.is_floating_point:
        raise WrongType(f"gradients cannot be added to {dtype}", hint=hint)
    if _rows_of_each(table) != _rows_of_each(grad):
        raise WrongValue(
            f"the ranks have {_rows_of_each(table)} rows of the table, but {_rows_of_each(grad)} rows of its gradients", hint=hint
        )


def _rows_of_each(table: WholeTensor) -> list[int]:
    """Returns the number of the table's rows that each rank stores, up to the last rank that stores any. The result is equal on
    all ranks.
    """
    counts: list[int] = []
    while sum(counts) < len(table):
        counts.append(len(table.rows_of(len(counts))))
    return counts


def _embedding(table: int, gradients: int, anchor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _gather(table, indices)


def _embedding_fake(table: int, gradients: int, anchor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _gather_fake(table, indices)


def _backward(gradients: int, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    target = find(gradients, Gradients)
    scatter_rows(True, target.table, values, indices, target.order)
    return _backward_fake(gradients, values, indices)


def _backward_fake(gradients: int, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    check_indices(indices)
    return values.new_zeros((), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[int, int, torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    _, gradients, _, indices = inputs
    # The autograd context holds the gradients, because the embedding may be dropped before the backward pass.
    ctx.gradients = find(gradients, Gradients)
    ctx.save_for_backward(indices)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor, None]:
    (indices,) = ctx.saved_tensors
    return None, None, OPS.embedding_backward(ctx.gradients.handle, grad, indices), None


for name, kernel, fake in (
    ("embedding", _embedding, _embedding_fake),
    ("embedding_backward", _backward, _backward_fake),
):
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"wholemem::{name}", fake, lib=LIBRARY)
    register_ordered(f"wholemem::{name}")
torch.library.register_autograd("wholemem::embedding", _differentiate, setup_context=_setup, lib=LIBRARY)
