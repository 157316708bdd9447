"""Tests the feature store for PyTorch Geometric, with its base class where it is installed, and without it."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import wholemem
from launcher import run_ranks
from wholemem import Communicator, errors

with warnings.catch_warnings():
    # PyTorch Geometric warns about its own code.
    warnings.simplefilter("ignore")
    from wholemem.data import FeatureStore, TensorAttr

pytestmark = pytest.mark.filterwarnings("ignore")

TORCH: Any = pytest.importorskip("torch", reason="torch is not installed") if find_spec("torch") else None
WIDTH = 6


def make(first: int, end: int) -> np.ndarray:
    return np.arange(first * WIDTH, end * WIDTH, dtype=np.float32).reshape(-1, WIDTH)


def at(values: Any) -> Any:
    """Returns the indices of rows: a tensor if torch is installed, since PyTorch Geometric accepts no arrays of numpy."""
    return values if TORCH is None else TORCH.from_numpy(np.asarray(values))


def plain(rows: Any) -> np.ndarray:
    """Returns gathered rows as an array, and checks that they are a tensor if torch is installed."""
    assert TORCH is None or isinstance(rows, (TORCH.Tensor, np.ndarray))
    return np.asarray(rows)


def test_ranks_put_their_rows_and_get_the_rows_of_all() -> None:
    whole = make(0, 16)
    bounds = [0, 3, 3, 16]

    def work(comm: Communicator) -> None:
        features = FeatureStore(comm)
        mine = whole[bounds[comm.rank] : bounds[comm.rank + 1]]
        features["paper", "x", None] = mine
        features["paper", "y", None] = np.arange(bounds[comm.rank], bounds[comm.rank + 1])
        features[("a", "to", "b"), "weight", None] = np.asfortranarray(mine)
        for index in [np.array([15, 0, 3, 3]), np.array([[7, 2]], np.int32), np.array([], np.int64)]:
            np.testing.assert_array_equal(plain(features["paper", "x", at(index)]), whole[index])
        for index in [None, slice(2, 14, 3), slice(None, None, -1), slice(-3, None), slice(0, 0)]:
            expected = whole if index is None else whole[index]
            np.testing.assert_array_equal(plain(features.get_tensor("paper", "x", index)), expected)
        assert plain(features["paper", "x", -1]).tolist() == [whole[15].tolist()]
        assert plain(features["paper", "y", at([4])]).tolist() == [4]
        np.testing.assert_array_equal(plain(features[("a", "to", "b"), "weight", slice(5)]), whole[:5])
        attr = TensorAttr("paper", "x", at([1]))
        np.testing.assert_array_equal(plain(features.multi_get_tensor([attr])[0]), whole[[1]])
        assert features.get_tensor_size(TensorAttr("paper", "x", None)) == (16, WIDTH)
        names = [(attr.group_name, attr.attr_name) for attr in features.get_all_tensor_attrs()]
        assert names == [("paper", "x"), ("paper", "y"), (("a", "to", "b"), "weight")] and len(features) == 3
        comm.barrier()
        if comm.rank == 1:
            features["paper", "x", at([2, 9])] = np.zeros((2, WIDTH), np.float32)
            features.put_tensor(np.ones((1, WIDTH), np.float32), "paper", "x", 15)
        comm.barrier()
        assert plain(features["paper", "x", at([9, 15, 8])])[:, 0].tolist() == [0, 1, 48]
        assert features.remove_tensor("paper", "y", None) and len(features) == 2
        comm.barrier()

    run_ranks(3, work)


def test_existing_tables_are_features() -> None:
    def work(comm: Communicator) -> None:
        table = wholemem.WholeTensor.create(comm, (8, WIDTH), "float32", location="host")
        first, end = table.local_rows
        table.local().numpy()[:] = make(first, end)
        comm.barrier()
        features = FeatureStore(comm)
        features.add_table(table, None, "x")
        assert features.table(None, "x") is table and "(8, 6)" in repr(features)
        np.testing.assert_array_equal(plain(features[None, "x", slice(1, 7)]), make(1, 7))
        comm.barrier()

    run_ranks(2, work)


def test_mistakes_raise_errors_with_hints() -> None:
    def work(comm: Communicator) -> None:
        features = FeatureStore(comm)
        features["paper", "x", None] = make(0, 4)
        for call, kind, message in [
            (lambda: features["paper", "z", None], errors.NotFound, "there is no feature 'z' of 'paper'"),
            (lambda: features["paper", "x", 4], errors.BadIndex, "the row 4 is outside a feature of 4 rows"),
            (lambda: features["paper", "x", at(np.ones(4, bool))], errors.WrongType, "indexed by a mask"),
            (lambda: features.put_tensor([1], "paper", "v", None), errors.WrongType, "`list` is not a tensor"),
        ]:
            with pytest.raises(kind, match=message) as caught:
                call()
            assert caught.value.hint or kind is errors.BadIndex

    run_ranks(1, work)


@pytest.mark.skipif(TORCH is None, reason="torch is not installed")
def test_tensors_are_put_and_gathered() -> None:
    def work(comm: Communicator) -> None:
        features = FeatureStore(comm, kind="chunked", location="host")
        rows = TORCH.from_numpy(make(4 * comm.rank, 4 * comm.rank + 4)).requires_grad_()
        features["paper", "x", None] = rows
        features["paper", "half", None] = rows.detach().to(TORCH.bfloat16)
        nodes = TORCH.tensor([7, 1, 1])
        found = features["paper", "x", nodes]
        assert isinstance(found, TORCH.Tensor) and TORCH.equal(found, TORCH.from_numpy(make(0, 8))[nodes])
        assert features["paper", "half", nodes].dtype == TORCH.bfloat16
        comm.barrier()
        if comm.rank == 0:
            features["paper", "x", nodes[:1]] = TORCH.full((1, WIDTH), 5.0)
        comm.barrier()
        assert features["paper", "x", TORCH.tensor([7])].tolist() == [[5.0] * WIDTH]
        comm.barrier()

    run_ranks(2, work)


@pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")
def test_a_loader_of_pytorch_geometric_gathers_from_the_store() -> None:
    from torch_geometric import data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class Sampler(BaseSampler):
        def sample_from_nodes(self, index: Any, **_: Any) -> Any:
            node = TORCH.cat([index.node, (index.node + 1) % 8])
            row, col = TORCH.arange(len(index.node)) + len(index.node), TORCH.arange(len(index.node))
            return SamplerOutput(node=node, row=row, col=col, edge=None, metadata=(index.input_id, index.time))

        def sample_from_edges(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    (comm,) = Communicator.local(1, device="cpu")
    features = FeatureStore(comm)
    assert isinstance(features, data.FeatureStore) and TensorAttr is data.TensorAttr
    features[None, "x", None] = TORCH.from_numpy(make(0, 8))
    assert TORCH.equal(features[None, "x"][TORCH.tensor([3])], TORCH.from_numpy(make(3, 4)))  # a view of the base class
    for workers in [0, 2]:
        nodes = TORCH.arange(8)
        loader = NodeLoader(
            (features, None), Sampler(), nodes, batch_size=4, num_workers=workers, filter_per_worker=False
        )
        batches = list(loader)
        assert len(batches) == 2
        for batch in batches:
            assert TORCH.equal(batch.x, TORCH.from_numpy(make(0, 8))[batch.n_id])
