"""An embedding whose rows are divided among ranks, and whose gradients are too."""

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
from .effects import ordered
from .ops import LIBRARY, _gather, _gather_fake, gather, scatter_rows
from .order import check_order
from .tensors import NUMBERS, as_tensor, check_indices, check_kind, check_tensor, dtype_of, raw_stream

if TYPE_CHECKING:
    from .._native import Order

__all__ = ["Embedding"]

LIBRARY.define("embedding(int table, int gradients, Tensor anchor, Tensor indices) -> Tensor")
LIBRARY.define("embedding_backward(int gradients, Tensor values, Tensor indices) -> Tensor")

OPS = torch.ops.wholemem

FIRST = "take the first backward pass on all ranks, with the embeddings in the same order, or give `grad=table.like()`"
"""What can be done where ranks make the gradients of different tables."""


class Gradients:
    """The gradients of a table: a table like it, made when it is first needed; and the order in which they are added."""

    def __init__(self, table: WholeTensor, grad: Optional[WholeTensor], order: str) -> None:
        self.like = table
        self.made = grad
        self.order = order
        self.handle = _handles.give(self)
        self.home, self.making = os.getpid(), RLock()

    @property
    def table(self) -> WholeTensor:
        """The gradients. All ranks ask for them first together."""
        if self.made is None:
            # Threads that come first together make one. A forked child, which can make none, waits for no thread of its parent.
            with self.making if os.getpid() == self.home else nullcontext():
                if self.made is None:
                    self.made = self._make()
        return self.made

    def _make(self) -> WholeTensor:
        try:
            return self.like.like()
        except RanksDisagree as error:
            # It is the way through the model that was not the same.
            error.hint = error.hint or FIRST
            raise


class Embedding(torch.nn.Module):
    """Rows of a table by their indices, as ``torch.nn.Embedding`` has them; but the rows are those of all ranks.

    The backward pass adds the gradients of the rows to where they belong in ``grad``, a table like the first, whichever rank
    has them: nothing of the size of the table is made, sent or summed up elsewhere. A table that is not given is made in the
    first backward pass, which all ranks take with their embeddings in the same order, or else it raises
    :class:`~wholemem.errors.RanksDisagree`; who cannot promise that gives ``grad=table.like()``. :meth:`step` descends along the
    gradients; for another optimizer, take this rank's rows of both: ``as_tensor(embedding.table.local())`` and
    ``as_tensor(embedding.grad.local())``.

    Gradients are added in the order that the moment brings, and the last bits with it. With the order ``fixed`` they are the same
    in every run, and every backward pass is a call of all ranks, in the same order of embeddings: a rank without indices for one
    gives it none, and does not leave it out. ``torch.use_deterministic_algorithms(True)`` asks for it.

    The rows are no parameters, since all ranks clear and move them together. What torch does to the parameters of a model
    around this, it does not do here: neither ``model.zero_grad()`` nor ``optimizer.zero_grad()`` forgets these gradients, and
    ``model.requires_grad_(False)`` does not freeze these rows. Ask each embedding itself, on all ranks::

        for module in model.modules():
            if isinstance(module, wholemem.torch.Embedding):
                module.zero_grad()

    Nor does ``state_dict()`` hold the rows: save them by ``embedding.table.save(path)``, and make the next embedding of
    ``WholeTensor.load(comm, path)``, on all ranks. ``to()``, ``half()`` and the like neither move nor convert them, and
    ``copy.deepcopy`` is refused.

    A compiler takes the table for a constant. Embeddings compiled each by itself, with ``fullgraph=True``, are limited by
    ``torch._dynamo.config.recompile_limit``: compile the model around them, or raise the limit.

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
    """The rows."""

    def __init__(self, table: WholeTensor, grad: Optional[WholeTensor] = None, *, order: Order = "any") -> None:
        super().__init__()
        check_kind("the table", table, WholeTensor)
        check_order(order)
        if grad is not None:
            check_kind("the table of gradients", grad, WholeTensor)
            _check_fits(table, grad)
        if not dtype_of(table).is_floating_point:
            raise WrongType(f"an embedding learns floats, and the table holds {table.dtype}", hint="give a table of floats")
        self.table = table
        self._gradients = Gradients(table, grad, order)
        # A leaf by which the backward pass comes here: torch does not see the table, of which the rows are made.
        self._anchor = torch.zeros((), device=table.device, requires_grad=True)

    @property
    def grad(self) -> WholeTensor:
        """The gradients. All ranks ask for them first together."""
        return self._gradients.table

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows; with a way back to them, in training."""
        if self.training and torch.is_grad_enabled() and self._anchor.requires_grad:
            check_tensor("the tensor of indices", indices)
            return OPS.embedding(self.table._handle, self._gradients.handle, self._anchor, indices)
        return gather(self.table, indices)

    def requires_grad_(self, requires_grad: bool = True) -> Embedding:
        """Says whether rows are learned; if not, no way leads back to them. It is asked of the embedding itself."""
        self._anchor.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, of all rows. All ranks call it; that of a module around this does not."""
        super().zero_grad(set_to_none)
        if self._gradients.made is not None:
            self._barrier()
            as_tensor(self.grad.local()).zero_()
            self._barrier()

    def step(self, lr: float) -> None:
        """Moves the rows against their gradients, which are zero then: plain gradient descent. All ranks call it."""
        self._barrier()
        # Every rank moves its own rows.
        rows, grad = as_tensor(self.table.local()), as_tensor(self.grad.local())
        rows.sub_(grad, alpha=lr)
        grad.zero_()
        self._barrier()

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        # The rows are all ranks', and a copy of them would be made by all.
        raise WrongType(
            "cannot copy this `Embedding`: its rows are those of all ranks",
            hint="`copy.copy` shares the rows; for others, give a new `Embedding` a table of all ranks, by `table.like()`",
        )

    def extra_repr(self) -> str:
        """What ``print`` says of it."""
        return f"{', '.join(map(str, self.table.shape))}, dtype={self.table.dtype}"

    def _barrier(self) -> None:
        self.table.barrier(stream=raw_stream(self._anchor.get_device()))


def _check_fits(table: WholeTensor, grad: WholeTensor) -> None:
    """Raises unless a table takes the gradients of another, each row's at the rank that has the row."""
    if grad.shape != table.shape:
        raise WrongValue(f"gradients must have the shape {list(table.shape)}, and have {list(grad.shape)}")
    dtype, hint = dtype_of(grad), "make it by `table.like()`"
    if dtype not in NUMBERS or not dtype.is_floating_point:
        raise WrongType(f"gradients cannot be added to {dtype}", hint=hint)
    if _rows_of_each(table) != _rows_of_each(grad):
        raise WrongValue(
            f"the ranks have {_rows_of_each(table)} rows of the table, and {_rows_of_each(grad)} of its gradients", hint=hint
        )


def _rows_of_each(table: WholeTensor) -> list[int]:
    """How many rows each rank has, up to the last one that has any: all ranks find the same."""
    found: list[int] = []
    while sum(found) < len(table):
        found.append(len(table.rows_of(len(found))))
    return found


def _embedding(table: int, gradients: int, anchor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _gather(table, indices)


def _embedding_fake(table: int, gradients: int, anchor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return _gather_fake(table, indices)


def _backward(gradients: int, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    found = find(gradients, Gradients)
    scatter_rows(True, found.table, values, indices, found.order)
    return _backward_fake(gradients, values, indices)


def _backward_fake(gradients: int, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    check_indices(indices)
    return values.new_zeros((), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[int, int, torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    _, gradients, _, indices = inputs
    # Kept: the embedding may be dropped before the backward pass.
    ctx.gradients = find(gradients, Gradients)
    ctx.save_for_backward(indices)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor, None]:
    (indices,) = ctx.saved_tensors
    return None, None, OPS.embedding_backward(ctx.gradients.handle, grad, indices), None


for name, does, is_like in (
    ("embedding", _embedding, _embedding_fake),
    ("embedding_backward", _backward, _backward_fake),
):
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, does, key)
    torch.library.register_fake(f"wholemem::{name}", is_like, lib=LIBRARY)
    ordered(f"wholemem::{name}")
torch.library.register_autograd("wholemem::embedding", _differentiate, setup_context=_setup, lib=LIBRARY)
