"""A feature store of PyTorch Geometric whose features are tables over all ranks.

::

    from torch_geometric.loader import NodeLoader
    from wholemem.data import FeatureStore

    features = FeatureStore(comm)
    features["paper", "x", None] = rows_of_this_rank        # all ranks call it
    loader = NodeLoader((features, graph), ..., filter_per_worker=False)

Every rank stores a part of the rows, in GPU or host memory, and gathers rows of all ranks. Without PyTorch Geometric, the class has
the methods of its base class that this package needs. Rows are gathered as tensors of torch, or as arrays of numpy if the indices
are such arrays or torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ._native import Communicator, WholeTensor
from .errors import BadIndex, NotFound, WrongType, WrongValue

if TYPE_CHECKING:
    from ._native import Kind, Location

__all__ = ["FeatureStore", "TensorAttr"]


class _PlainTensorAttr:
    """Names a feature, and rows of it, as the class of PyTorch Geometric with this name does.

    Args:
        group_name: The type of the nodes or edges.
        attr_name: The name of the feature, such as ``x``.
        index: The rows: a tensor or array of integers, a slice or an int. ``None`` is all rows.
    """

    def __init__(self, group_name: Any = None, attr_name: Optional[str] = None, index: Any = None) -> None:
        self.group_name, self.attr_name, self.index = group_name, attr_name, index

    def __repr__(self) -> str:
        return f"TensorAttr(group_name={self.group_name!r}, attr_name={self.attr_name!r}, index={self.index!r})"


class _PlainFeatureStore:
    """The methods of PyTorch Geometric's class ``FeatureStore``, for programs without it."""

    def __init__(self) -> None:
        pass

    def put_tensor(self, tensor: Any, *names: Any, **named: Any) -> bool:
        return bool(self._put_tensor(tensor, _attr_of(*names, **named)))  # type: ignore[attr-defined]

    def get_tensor(self, *names: Any, **named: Any) -> Any:
        return self._get_tensor(_attr_of(*names, **named))  # type: ignore[attr-defined]

    def get_tensor_size(self, *names: Any, **named: Any) -> Any:
        return self._get_tensor_size(_attr_of(*names, **named))  # type: ignore[attr-defined]

    def multi_get_tensor(self, attrs: List[Any]) -> List[Any]:
        return [self.get_tensor(attr) for attr in attrs]

    def update_tensor(self, tensor: Any, *names: Any, **named: Any) -> bool:
        return self.put_tensor(tensor, *names, **named)

    def remove_tensor(self, *names: Any, **named: Any) -> bool:
        return bool(self._remove_tensor(_attr_of(*names, **named)))  # type: ignore[attr-defined]

    def __getitem__(self, names: Tuple[Any, ...]) -> Any:
        return self.get_tensor(*names)

    def __setitem__(self, names: Tuple[Any, ...], tensor: Any) -> None:
        self.put_tensor(tensor, *names)

    def __delitem__(self, names: Tuple[Any, ...]) -> None:
        self.remove_tensor(*names)


def _attr_of(*names: Any, **named: Any) -> Any:
    if len(names) == 1 and not named and hasattr(names[0], "attr_name"):
        return names[0]
    return _PlainTensorAttr(*names, **named)


_Base: Any = _PlainFeatureStore
TensorAttr: Any = _PlainTensorAttr
if find_spec("torch_geometric") is not None:
    _geometric = import_module("torch_geometric.data")
    _Base, TensorAttr = _geometric.FeatureStore, _geometric.TensorAttr

# The name of a feature: its group, and its own name.
_Name = Tuple[Any, Optional[str]]


class FeatureStore(_Base):  # type: ignore[misc]
    """A feature store of PyTorch Geometric that gathers features from tables of all ranks.

    It is passed to loaders in place of a dictionary of tensors: ``NodeLoader((features, graph), ..., filter_per_worker=False)``.
    Workers of a loader cannot gather, because the communicator belongs to their parent, so ``filter_per_worker`` must be false if
    there are workers.

    Args:
        comm: The communicator.
        location: The memory of tables that are created: ``device`` is the device of each rank, ``host`` is host memory.
        kind: The kind of these tables: ``continuous`` or ``chunked``.

    >>> import numpy, wholemem
    >>> from wholemem.data import FeatureStore
    >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
    >>> features = FeatureStore(comm)
    >>> features["paper", "x", None] = numpy.arange(6.0).reshape(3, 2)
    >>> features["paper", "x", numpy.array([2, 0])].tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    >>> features.get_tensor_size("paper", "x", None)
    (3, 2)
    """

    def __init__(self, comm: Communicator, *, location: Location = "device", kind: Kind = "continuous") -> None:
        super().__init__()
        # The base class of PyTorch Geometric forbids other ways to set attributes.
        self.__dict__.update(_comm=comm, _location=location, _kind=kind, _tables={})

    def add_table(self, table: WholeTensor, group_name: Any, attr_name: str) -> None:
        """Makes an existing table, for example one that was loaded from a file, a feature of this store.

        Args:
            table: The table.
            group_name: The type of the nodes or edges.
            attr_name: The name of the feature.
        """
        self._tables[group_name, attr_name] = table

    def table(self, group_name: Any, attr_name: str) -> WholeTensor:
        """Returns the table of a feature.

        Args:
            group_name: The type of the nodes or edges.
            attr_name: The name of the feature.

        Raises:
            wholemem.errors.NotFound: The feature does not exist.
        """
        found: Dict[_Name, WholeTensor] = self._tables
        if (group_name, attr_name) not in found:
            known = ", ".join(str(name) for name in found) or "none"
            raise NotFound(f"there is no feature {attr_name!r} of {group_name!r}", hint=f"the features are: {known}")
        return found[group_name, attr_name]

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        """Creates or overwrites a feature, or writes some of its rows.

        If ``attr.index`` is ``None``, all ranks call it, and the tensor has the rows of this rank: the feature has the rows of all ranks,
        in their order. Otherwise the rows with these indices are written, by any rank; a barrier separates writes and reads.
        """
        name = (attr.group_name, attr.attr_name)
        if attr.index is not None:
            return self._write(self.table(*name), tensor, attr.index)
        comm: Communicator = self._comm
        dtype = _dtype_of(tensor)
        shape = tuple(int(length) for length in tensor.shape)
        rows = [int(count) for count in comm.all_gather(self._numbers([shape[0]])).reshape(-1)]
        table = WholeTensor.create(
            comm, (sum(rows), *shape[1:]), dtype, kind=self._kind, location=self._location, rows_of_each=rows
        )
        if shape[0] > 0:
            table.write(sum(rows[: comm.rank]), self._on_device(tensor))
        comm.barrier()
        self._tables[name] = table
        return True

    def _write(self, table: WholeTensor, tensor: Any, index: Any) -> bool:
        table.scatter(self._rows(table, index, tensor), self._on_device(tensor))
        return True

    def _get_tensor(self, attr: Any) -> Any:
        """Gathers rows of a feature: torch tensors on the device of this rank, or numpy arrays if the index is one or torch is missing."""
        table = self.table(attr.group_name, attr.attr_name)
        index = self._rows(table, attr.index, None)
        if type(index).__module__.split(".")[0] == "torch":
            from .torch import gather

            return gather(table, index)
        return table.gather(index)

    def _get_tensor_size(self, attr: Any) -> Tuple[int, ...]:
        return self.table(attr.group_name, attr.attr_name).shape

    def _remove_tensor(self, attr: Any) -> bool:
        return self._tables.pop((attr.group_name, attr.attr_name), None) is not None

    def get_all_tensor_attrs(self) -> List[Any]:
        """Returns the names of all features, as PyTorch Geometric's loaders need them."""
        return [TensorAttr(group_name=group, attr_name=name) for group, name in self._tables]

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        names = ", ".join(f"{name}: {table.shape}" for name, table in self._tables.items())
        return f"FeatureStore({names})"

    def _rows(self, table: WholeTensor, index: Any, like: Any) -> Any:
        """Returns the indices of rows, on the device of this rank if they are a tensor."""
        rows = table.shape[0]
        if index is None:
            index = slice(None)
        if isinstance(index, int):
            if not -rows <= index < rows:
                raise BadIndex(f"the row {index} is outside a feature of {rows} rows", index=index, rows=rows)
            index = slice(index % rows, index % rows + 1)
        if isinstance(index, slice):
            numbers = range(*index.indices(rows))
            return self._numbers(numbers, as_tensor=self._uses_torch(like))
        dtype = str(getattr(index, "dtype", ""))
        if dtype.endswith("bool"):
            raise WrongType("features cannot be indexed by a mask", hint="pass the numbers of the rows: `mask.nonzero()`")
        if hasattr(index, "to"):
            return index.to(self._comm.device)
        return index if dtype else _int64(index)

    def _numbers(self, values: Any, *, as_tensor: bool = False) -> Any:
        """Returns integers as a tensor on the device of this rank, or as an array of numpy, which only ranks on the host can use."""
        if as_tensor or self._comm.device != "cpu":
            import torch

            return torch.tensor(list(values), dtype=torch.int64, device=self._comm.device)
        return _int64(values)

    def _uses_torch(self, like: Any) -> bool:
        """Returns whether rows that are no tensor are given as a tensor: as the rows that are written, or if torch is installed."""
        return hasattr(like, "to") if like is not None else find_spec("torch") is not None

    def _on_device(self, tensor: Any) -> Any:
        if hasattr(tensor, "detach"):
            return tensor.detach().to(self._comm.device).contiguous()
        if self._comm.device != "cpu":
            raise WrongValue(f"an array in host memory cannot be written on {self._comm.device}", hint="pass a torch tensor")
        import numpy

        return numpy.ascontiguousarray(tensor)


def _int64(values: Any) -> Any:
    import numpy

    return numpy.array(list(values), dtype=numpy.int64)


def _dtype_of(tensor: Any) -> Any:
    if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
        raise WrongType(f"`{type(tensor).__name__}` is not a tensor", hint="pass a tensor of torch or an array of numpy")
    return tensor.dtype
