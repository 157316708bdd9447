"""wholemem for torch: gathers, scatters and collectives as operators, and an all-reduce without a detour.

What is here takes and returns tensors of torch, on the processor and on GPUs. Work goes to torch's current stream, and
outputs come from torch's own allocator, so that they live in the pools of CUDA graphs.

>>> import torch, wholemem, wholemem.torch as wm
>>> (comm,) = wholemem.Communicator.local(1, device="cpu")
>>> table = wholemem.WholeTensor.create(comm, (1000, 2), "float32")
>>> wm.scatter_add(table, torch.tensor([7, 8, 7]), torch.ones(3, 2))
>>> wm.gather(table, torch.tensor([7, 9]))
tensor([[2., 2.],
        [0., 0.]])
>>> wm.all_reduce(comm, torch.arange(3))
tensor([0, 1, 2])

The operators are ``torch.ops.wholemem.*``, and work under ``torch.compile(fullgraph=True)``: a compiler keeps all of them, and
their order. Collectives have gradients, which are collectives; derivatives forward do not go through them, and torch takes their
tangents for zero without a word. An embedding whose rows are all ranks' is :class:`Embedding`; where every microsecond counts,
reduce by :class:`FastAllreduce`.

What is read may have any strides, and is copied where it has gaps; what is written, and what :class:`FastAllreduce` takes, may not.

Importing this imports torch, and touches no driver.
"""

from __future__ import annotations

from . import gradients  # it tells torch of them
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
