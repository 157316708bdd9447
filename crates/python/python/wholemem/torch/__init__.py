"""Provides the gathers, scatters and collectives of wholemem as torch operators, and ``FastAllreduce``, an
all-reduce for short tensors that bypasses torch's dispatcher.

The functions accept and return torch tensors on the CPU and on GPUs. Work runs on torch's current stream, and outputs come from
torch's allocator, so they can be captured in CUDA graphs.

>>> import torch, wholemem, wholemem.torch as wm
>>> (comm,) = wholemem.Communicator.local(1, device="cpu")
>>> table = wholemem.WholeTensor.create(comm, (1000, 2), "float32")
>>> wm.scatter_add(table, torch.tensor([7, 8, 7]), torch.ones(3, 2))
>>> wm.gather(table, torch.tensor([7, 9]))
tensor([[2., 2.],
        [0., 0.]])
>>> wm.all_reduce(comm, torch.arange(3))
tensor([0, 1, 2])

The operators are ``torch.ops.wholemem.*`` and work under ``torch.compile(fullgraph=True)``: a compiler neither eliminates nor
reorders them. Collectives are differentiable: the backward pass runs the matching collective. Forward-mode AD is not supported:
torch treats the tangents as zero. :class:`Embedding` is an embedding whose rows are divided among ranks. For the shortest calls,
:class:`FastAllreduce` bypasses the dispatcher.

Inputs may have any strides and are copied if they are not contiguous. Outputs, and the tensors of :class:`FastAllreduce`, must be
contiguous.

Importing this package imports torch, and loads no driver.
"""

from __future__ import annotations

from . import gradients  # registers the gradients of the operators
from .allreduce import FastAllreduce
from .embedding import Embedding
from .ops import all_gather, all_reduce, broadcast, gather, scatter, scatter_add
from .tensors import as_tensor

__all__ = [
    "Embedding",
    "FastAllreduce",
    "all_gather",
    "all_reduce",
    "as_tensor",
    "broadcast",
    "gather",
    "scatter",
    "scatter_add",
]
