"""Trains on a graph whose features are one table over all ranks, with PyTorch Geometric, torch or numpy.

    wholemem launch -n 4 -- python examples/python/graph.py

Each rank samples neighbours of its own nodes, gathers their features from all ranks, and computes the gradient of a GraphSAGE
layer; the ranks average their gradients. At the end the weights are compared with those that a single process trains from its own
copy of the features.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from typing import Any, Iterator

import numpy as np

import wholemem

NODES, WIDTH, CLASSES = 20_000, 32, 4
BATCH, NEIGHBOURS, STEPS, RATE = 256, 8, 30, 0.5

Batch = tuple[np.ndarray, np.ndarray]
Weights = tuple[np.ndarray, np.ndarray]


def make_features(first: int, end: int) -> np.ndarray:
    """Computes the features of a range of nodes from their numbers, so that every process can compute them."""
    nodes = np.arange(first, end)
    features = np.sin(nodes[:, None] * (1 + np.arange(WIDTH)) * 0.7)
    features[np.arange(len(nodes)), nodes % CLASSES] += 0.5
    return features.astype(np.float32)


class Graph:
    """A graph: the neighbours of a node are ``targets[offsets[node] : offsets[node + 1]]``, and are of the same class as the
    node."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.degrees = rng.integers(1, 30, NODES)
        self.offsets = np.concatenate([[0], self.degrees.cumsum()])
        distance = CLASSES * rng.integers(-50, 50, self.offsets[-1])
        self.targets = (np.repeat(np.arange(NODES), self.degrees) + distance) % NODES

    def seeds(self, rank: int) -> np.ndarray:
        """Returns the nodes that a rank trains on, for all of its batches."""
        return np.random.default_rng(rank).integers(0, NODES, STEPS * BATCH)

    def neighbours(self, nodes: np.ndarray) -> np.ndarray:
        """Samples neighbours of each node, with replacement. The samples depend only on the nodes."""
        picks = np.random.default_rng(nodes[0]).random((len(nodes), NEIGHBOURS)) * self.degrees[nodes][:, None]
        return self.targets[self.offsets[nodes][:, None] + picks.astype(np.int64)]

    def batches(self, rank: int) -> Iterator[Batch]:
        for nodes in self.seeds(rank).reshape(STEPS, BATCH):
            yield nodes, self.neighbours(nodes)


def gradient(weights: Weights, own: np.ndarray, mean: np.ndarray, labels: np.ndarray) -> Weights:
    """Computes the gradient of softmax and cross entropy with respect to the weights."""
    scores = own @ weights[0] + mean @ weights[1]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    error = scores / scores.sum(1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    return own.T @ error / len(labels), mean.T @ error / len(labels)


def single_process(graph: Graph, ranks: int) -> Weights:
    """Trains in one process on the batches of all ranks, with a copy of all features."""
    features = make_features(0, NODES)
    weights = (np.zeros((WIDTH, CLASSES), np.float32), np.zeros((WIDTH, CLASSES), np.float32))
    for batches in zip(*(graph.batches(rank) for rank in range(ranks))):
        gradients = [
            gradient(weights, features[nodes], features[near].mean(1), nodes % CLASSES) for nodes, near in batches
        ]
        for weight, *of_ranks in zip(weights, *gradients):
            weight -= RATE * sum(of_ranks) / ranks
    return weights


def in_numpy(comm: wholemem.Communicator, table: wholemem.WholeTensor, graph: Graph) -> Weights:
    weights = (np.zeros((WIDTH, CLASSES), np.float32), np.zeros((WIDTH, CLASSES), np.float32))
    for nodes, near in graph.batches(comm.rank):
        own, around = table.gather(nodes), table.gather(near)
        for weight, mine in zip(weights, gradient(weights, own, around.mean(1), nodes % CLASSES)):
            weight -= RATE * comm.all_reduce(mine, op="avg")
    return weights


def train(comm: wholemem.Communicator, model: Any, batches: Iterator[tuple[Any, Any]]) -> None:
    """Trains a torch model on batches of inputs and labels, with gradients that are averaged over all ranks."""
    import torch
    import wholemem.torch as wm

    # Ranks on one host share its cores, so each uses an equal part of the threads.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, labels in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(*inputs), labels).backward()
        for weight in model.parameters():
            weight.grad = wm.all_reduce(comm, weight.grad.contiguous(), op="avg")
        optimizer.step()


def in_torch(comm: wholemem.Communicator, table: wholemem.WholeTensor, graph: Graph) -> Weights:
    import torch
    import wholemem.torch as wm

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.Parameter(torch.zeros(WIDTH, CLASSES, device=comm.device))
            self.near = torch.nn.Parameter(torch.zeros(WIDTH, CLASSES, device=comm.device))

        def forward(self, own: torch.Tensor, around: torch.Tensor) -> torch.Tensor:
            return own @ self.own + around.mean(1) @ self.near

    def batches() -> Iterator[tuple[Any, Any]]:
        for nodes, near in (map(torch.from_numpy, batch) for batch in graph.batches(comm.rank)):
            nodes, near = nodes.to(comm.device), near.to(comm.device)
            yield (wm.gather(table, nodes), wm.gather(table, near)), nodes % CLASSES

    layer = Layer()
    train(comm, layer, batches())
    return layer.own.detach().cpu().numpy(), layer.near.detach().cpu().numpy()


def in_pyg(comm: wholemem.Communicator, table: wholemem.WholeTensor, graph: Graph) -> Weights:
    import torch
    from torch_geometric.loader import NodeLoader
    from torch_geometric.nn import SAGEConv
    from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
    from wholemem.data import FeatureStore

    class Sampler(BaseSampler):
        """A sampler of PyTorch Geometric that samples neighbours of this example's graph. For its own graphs, PyTorch Geometric
        has samplers in pyg-lib."""

        def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
            nodes = index.node.numpy()
            near = graph.neighbours(nodes)
            others, positions = np.unique(near, return_inverse=True)
            return SamplerOutput(
                node=torch.from_numpy(np.concatenate([nodes, others])),
                row=torch.from_numpy(len(nodes) + positions.reshape(-1)),
                col=torch.arange(len(nodes)).repeat_interleave(NEIGHBOURS),
                edge=None,
                metadata=(index.input_id, index.time),
            )

        def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
            raise NotImplementedError("this example samples from nodes only")

    features = FeatureStore(comm)
    features.add_table(table, None, "x")
    loader = NodeLoader(
        (features, None), Sampler(), torch.from_numpy(graph.seeds(comm.rank)), batch_size=BATCH, shuffle=False
    )

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(WIDTH, CLASSES, aggr="mean", bias=False).to(comm.device)
            for weight in self.conv.parameters():
                torch.nn.init.zeros_(weight)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.conv(batch.x, batch.edge_index.to(comm.device))[: batch.batch_size]

    layer = Layer()
    train(comm, layer, (((batch,), batch.n_id[: batch.batch_size].to(comm.device) % CLASSES) for batch in loader))
    near, own = (lin.weight.detach().cpu().numpy().T for lin in (layer.conv.lin_l, layer.conv.lin_r))
    return own, near


VARIANTS = {"pyg": in_pyg, "torch": in_torch, "numpy": in_numpy}
NAMES = {"pyg": "PyTorch Geometric", "torch": "torch", "numpy": "numpy"}
NEEDED = {"pyg": "torch_geometric", "torch": "torch", "numpy": "numpy"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the device of the ranks")
    parser.add_argument("--location", choices=["device", "host"], default="device", help="the memory of the features")
    parser.add_argument("--with", dest="way", choices=VARIANTS, help="default: the first of these that is installed")
    options = parser.parse_args()
    variant = options.way or next(variant for variant in VARIANTS if find_spec(NEEDED[variant]))
    if (variant, options.device) == ("numpy", "cuda"):
        parser.error("numpy has no arrays on a GPU: install torch")

    with wholemem.Communicator.from_env(device=options.device) as comm:
        table = wholemem.WholeTensor.create(comm, (NODES, WIDTH), "float32", location=options.location)
        mine = make_features(*table.local_rows)
        if options.device == "cpu":
            table.local().numpy()[:] = mine
        else:
            import torch

            torch.cuda.set_device(torch.device(comm.device))
            torch.from_dlpack(table.local()).copy_(torch.from_numpy(mine))
        comm.barrier()

        graph = Graph()
        trained = VARIANTS[variant](comm, table, graph)

        if comm.rank == 0:
            reference = single_process(graph, comm.size)
            same = all(np.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(trained, reference))
            rows = STEPS * BATCH * (1 + NEIGHBOURS)
            print(f"{comm.size} ranks gathered {rows} rows each, with {NAMES[variant]} on {options.device}", flush=True)
            if not same:
                sys.exit("error: the weights differ from those of a single process")
            print("the weights equal those of a single process", flush=True)
        comm.barrier()


if __name__ == "__main__":
    try:
        main()
    except wholemem.errors.Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
