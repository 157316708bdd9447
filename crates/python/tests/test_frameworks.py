"""Tests that calls return arrays of the framework of their arguments: torch, numpy, or wholemem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fake_gpu import on_a_gpu
from launcher import run, run_ranks

import wholemem
from wholemem import Array, Communicator, WholeTensor, errors


def filled(dtype: str = "float32") -> tuple[WholeTensor, np.ndarray]:
    (comm,) = Communicator.local(1, device="cpu")
    whole = np.arange(60, dtype=np.float32).reshape(20, 3)
    table = WholeTensor.create(comm, whole.shape, dtype)
    table.scatter(range(20), whole, convert=True)
    return table, whole


def test_numpy_arguments_return_numpy_arrays() -> None:
    table, whole = filled()
    for indices in (np.array([3, 1]), np.array([[5], [7]], np.int32), np.array(4), np.zeros(0, np.int64)):
        rows = table.gather(indices)
        assert type(rows) is np.ndarray and rows.dtype == np.float32
        np.testing.assert_array_equal(rows, whole[indices])
    # numpy does not have the type `bfloat16`, so the gather returns an array of wholemem.
    assert isinstance(table.gather(np.array([1]), dtype="bfloat16"), Array)

    def work(comm: Communicator) -> None:
        total, every = comm.all_reduce(np.ones(3)), comm.all_gather(np.full(2, comm.rank))
        assert type(total) is np.ndarray and total.tolist() == [2, 2, 2]
        assert type(every) is np.ndarray and every.tolist() == [[0, 0], [1, 1]]

    run_ranks(2, work)


def test_torch_arguments_return_torch_tensors() -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in ("float32", "bfloat16"):
        table, whole = filled(dtype)
        indices = torch.tensor([[3, 1]])
        rows = table.gather(indices)
        assert type(rows) is torch.Tensor and str(rows.dtype) == f"torch.{dtype}"
        assert torch.equal(rows.float(), torch.from_numpy(whole)[indices])
        out = torch.zeros(1, 2, 3, dtype=rows.dtype)
        assert table.gather(indices, out) is out and torch.equal(out, rows)
        assert torch.equal(table.gather(indices, dtype=torch.float64), rows.double())
    (comm,) = Communicator.local(1, device="cpu")
    assert type(comm.all_reduce(rows)) is torch.Tensor and comm.all_gather(rows).shape == (1, 1, 2, 3)
    # A tensor that requires a gradient is rejected, because its gradient would be lost silently.
    with pytest.raises(errors.WrongValue, match="cannot be imported") as caught:
        table.scatter(indices[0], rows[0].requires_grad_())
    assert "tensor.detach()" in str(caught.value.hint)


def test_other_arguments_return_arrays_of_this_package() -> None:
    table, whole = filled()
    for indices in (wholemem.asarray(np.array([3, 1])), [3, 1], (3, 1), range(3, 0, -2)):
        rows = table.gather(indices)
        assert isinstance(rows, Array)
        np.testing.assert_array_equal(rows.numpy(), whole[[3, 1]])
    assert table.gather(4).shape == (3,) and table.gather(4).numpy().tolist() == whole[4].tolist()
    assert table.gather([]).shape == (0, 3)
    assert table.gather([np.int32(2), np.int64(5)]).numpy().tolist() == whole[[2, 5]].tolist()
    out = np.zeros((2, 3), np.float32)
    assert table.gather([3, 1], out) is out
    np.testing.assert_array_equal(out, whole[[3, 1]])


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        ([True, False], errors.WrongType, "an index is a `bool`"),
        (True, errors.WrongType, "`bool` is not an array"),
        ([0.5], errors.WrongType, "an index is a `float`"),
        ([[1, 2]], errors.WrongType, "an index is a `list`"),
        (1 << 70, errors.WrongValue, "the index 1180591620717411303424 does not fit"),
        ("12", errors.WrongType, "`str` is not an array"),
        ([0, 20], errors.BadIndex, "index 20 at position 1 is out of range"),
        (-1, errors.BadIndex, "index -1 at position 0 is out of range"),
    ],
)
def test_invalid_int_indices_are_rejected(indices: Any, kind: type, message: str) -> None:
    table, _ = filled()
    with pytest.raises(kind, match=message):
        table.gather(indices)


def test_swapped_scatter_arguments_get_a_hint() -> None:
    table, whole = filled()
    for call in (table.scatter, table.scatter_add):
        with pytest.raises(errors.WrongType, match="indices must be int32 or int64, but are float32") as caught:
            call(whole[:2], np.array([0, 1]))
        assert caught.value.hint == "pass the indices first, then the rows"
        call(array=whole[:2], indices=np.array([0, 1]))


def test_calls_import_no_framework() -> None:
    text = """
    import sys, wholemem
    (comm,) = wholemem.Communicator.local(1, device="cpu")
    table = wholemem.WholeTensor.create(comm, (4, 2), "float32")
    table.scatter([1], wholemem.zeros((1, 2), "float32"))
    print(type(table.gather([1, 2])).__name__, {"numpy", "torch"} & set(sys.modules))
    """
    assert run(text).stdout == "Array set()\n"


def test_host_arrays_are_copied_to_a_gpu_before_the_launch(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
indices, rows = np.array([1, 2]), np.ones((2, 4), "float32")
nothing = table.gather(indices[:0])
print(type(nothing).__name__, nothing.shape, table.gather([]).device)
refused(errors.WrongStride, lambda: table.gather(np.arange(4)[::2]))
refused(errors.ReadOnly, lambda: table.gather(indices, wholemem.asarray(rows).as_readonly()))
# The fake CUDA driver cannot launch the kernels of these calls.
for call in [
    lambda: table.gather(indices),
    lambda: table.gather([1, 2]),
    lambda: table.gather(indices, rows),
    lambda: table.scatter(indices, rows),
    lambda: table.scatter_add(range(2), rows),
]:
    refused(errors.Error, call)
""",
    ).splitlines()
    assert output[:5] == [
        "ndarray (0, 4) cpu",
        "the array of indices is not contiguous: it has strides [2] and shape [2]",
        "hint: make it contiguous first",
        "cannot write to the output: it is read-only",
        "hint: pass a writable array",
    ]
    assert len(output) == 10 and all("launch" in line for line in output[5:]), output
