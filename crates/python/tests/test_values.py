"""Tests the values of arrays: printing, indexing, comparison and conversion through numpy, and errors without numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fake_gpu import on_a_gpu
from launcher import run

import wholemem
from wholemem import Array, Communicator, WholeTensor, errors


def ours(values: Any) -> Array:
    return wholemem.asarray(np.array(values))


KEYS: list[Any] = [
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(None, None, -2),
    slice(3, 1),
    ...,
    None,
    (slice(None), 2),
    (1, slice(None, None, 2)),
    (..., -1),
    (1, ..., slice(2)),
    (None, 2, None),
    (slice(None), slice(None), slice(1, None)),
    (1, 2, ...),
    (1, 2, 3, ...),
    np.int64(2),
    (),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_basic_indexing_matches_numpy(key: Any) -> None:
    whole = np.arange(60, dtype=np.int32).reshape(4, 3, 5)
    for operand in (whole, whole[::-1], whole.transpose(2, 0, 1)):
        if operand.shape[0] == 5 and isinstance(key, tuple) and len(key) == 4:
            continue
        found, expected = wholemem.asarray(operand)[key], operand[key]
        assert isinstance(found, Array) and found.shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)
        # The selected array is a view: writes to it are visible in the original array, and the reverse.
        if expected.size:
            found.numpy()[...] = -1
            assert (operand[key] == -1).all()
            operand[...] = np.arange(60).reshape(operand.shape)


def test_one_element_is_a_number() -> None:
    array = ours([[1.5, 2.5], [3.5, 4.5]])
    assert array[1, 0] == 3.5 and type(array[1, 0]) is float
    assert type(ours([True])[0]) is bool and type(ours([7])[-1]) is int
    assert array[0, 1, ...].shape == ()


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        (4, errors.BadIndex, "index 4 is out of range for a dimension of 4 elements"),
        ((0, -4), errors.BadIndex, "index -4 is out of range for a dimension of 3 elements"),
        ((0, 0, 0), errors.BadIndex, "3 indices and 0 ellipses do not fit 2 dimensions"),
        ((..., ...), errors.BadIndex, "2 ellipses"),
        (1.5, errors.WrongType, "an array cannot be indexed by a `float`"),
        ("a", errors.WrongType, "an array cannot be indexed by a `str`"),
        (True, errors.WrongType, "an array cannot be indexed by a `bool`"),
        ([0, 1], errors.WrongType, "an array cannot be indexed by a `list`"),
        (np.array([0, 1]), errors.WrongType, "an array cannot be indexed by a `ndarray`"),
    ],
    ids=str,
)
def test_unsupported_indices_are_rejected(key: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        wholemem.zeros((4, 3), "float32")[key]
    assert (caught.value.hint is not None) == (kind is errors.WrongType)


def test_conversions_to_numbers_match_numpy() -> None:
    array = ours([[1, 2], [3, 4]])
    assert array.tolist() == [[1, 2], [3, 4]] and [row.tolist() for row in array] == array.tolist()
    assert list(ours([1.5, 2.5])) == [1.5, 2.5] and len(array) == 2 and 3 in array[1]
    one = ours([[2.75]])
    assert (one.item(), float(one), int(one), bool(one)) == (2.75, 2.75, 2, True)
    assert not ours([0]) and wholemem.zeros((), "int8").item() == 0
    with pytest.raises(errors.WrongValue, match="an array of 4 elements cannot be converted to a number"):
        array.item()
    with pytest.raises(errors.WrongValue, match="an array of 4 elements"):
        float(array)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(array)
    with pytest.raises(errors.WrongType, match="an array without dimensions has no length"):
        iter(wholemem.zeros((), "int8"))


def test_comparison_is_element_by_element() -> None:
    array = ours([1, 2, 3])
    for other in (np.array([1, 5, 3]), [1, 5, 3], ours([1, 5, 3])):
        assert (array == other).tolist() == [True, False, True]
        assert (array != other).tolist() == [False, True, False]
    assert (array == 2).tolist() == [False, True, False] and (ours([[1], [2]]) == array).shape == (2, 3)
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


def test_printing_shows_values() -> None:
    assert repr(ours([1.5, 2.0])) == "Array([1.5, 2. ], shape=(2,), dtype=float64, device=cpu)"
    assert repr(ours([1]).as_readonly()) == "Array([1], shape=(1,), dtype=int64, device=cpu, readonly)"
    assert "..." in repr(wholemem.zeros((1000, 1000), "int8"))
    assert str(wholemem.zeros((2, 2), "bool")).startswith("Array([[False, False],\n       [False, False]], ")
    # numpy does not have the type `float8_e5m2`, and must not show the bits of such elements as values.
    assert repr(wholemem.zeros(2, "float8_e5m2")) == "Array(shape=(2,), dtype=float8_e5m2, device=cpu)"
    with pytest.raises(errors.Unsupported, match="numpy has no type float8_e5m2"):
        wholemem.zeros(2, "float8_e5m2").tolist()


def test_bfloat16_values_are_converted_to_float32() -> None:
    array = wholemem.zeros((2, 3), "bfloat16")
    array.memoryview().cast("B").cast("H")[1] = 0xBFC0
    assert array.tolist() == [[0, -1.5, 0], [0, 0, 0]] and array[0, 1] == -1.5 and (array == -1.5).sum() == 1
    assert repr(array[0]) == "Array([ 0. , -1.5,  0. ], shape=(3,), dtype=bfloat16, device=cpu)"


def test_numpy_imports_a_table_in_host_memory() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (4, 3), "float32")
    whole = np.asarray(table)
    whole[2] = 7
    assert table.gather(2).tolist() == [7, 7, 7] and np.asarray(table, dtype="float64").dtype == np.float64
    assert np.asarray(table.columns(1, 2)).shape == (4, 1)
    ranks = Communicator.local(2, device="cpu")
    import threading

    made: list[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = WholeTensor.create(ranks[rank], (4, 3), "float32", kind="chunked")

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with pytest.raises(errors.Error) as caught:
        np.asarray(made[0])
    assert caught.value.hint == "a chunked table is not one range of addresses: use `rows_of` for each rank"


def test_an_error_names_numpy_if_it_is_missing() -> None:
    text = """
    import sys
    sys.modules["numpy"] = None
    import wholemem
    array = wholemem.zeros((2, 3), "float32")
    print(array, array[1].shape, len(array))
    for call in (array.tolist, lambda: array[0, 0], lambda: array == array):
        try:
            call()
        except wholemem.errors.Unsupported as error:
            print(error)
    """
    ended = run(text)
    output = "reading the values of an array requires numpy, which is not installed\nhint: install numpy, or use torch: `torch.from_dlpack(array)`\n"
    assert (ended.stdout, ended.stderr) == ("Array(shape=(2, 3), dtype=float32, device=cpu) (3,) 2\n" + 3 * output, "")


def test_values_of_a_gpu_are_copied_to_the_host(tmp_path: Path) -> None:
    output = on_a_gpu(
        tmp_path,
        """
other = wholemem.WholeTensor.create(comm, (2, 4), "float32", location="host")
other.local().numpy()[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
table.write(0, other.local())
comm.barrier()
local = table.rows(0, 2).local()
print(local.device, local.tolist(), local[1, 2], local[::-1, 1:3].tolist(), bool((local == 5).any()))
print(local[0])
print(wholemem.WholeTensor.create(comm, (1 << 20, 4), "float32").local())
refused(errors.Unsupported, lambda: np.asarray(table))
""",
    )
    assert output.splitlines() == [
        "cuda:0 [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]] 7.0 [[6.0, 7.0], [2.0, 3.0]] True",
        "Array([1., 2., 3., 4.], shape=(4,), dtype=float32, device=cuda:0)",
        "Array(shape=(1048576, 4), dtype=float32, device=cuda:0)",
        "numpy cannot access memory on cuda:0",
        "hint: use torch or CuPy: `torch.from_dlpack(array)`",
    ]


@pytest.mark.parametrize("step", [2**62, -(2**62), 2**63 - 1, 2**70])
def test_a_step_beyond_the_array_selects_one_element(step: int) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    selected = wholemem.asarray(values)[::step]
    assert np.array_equal(np.asarray(selected), values[::step])


@pytest.mark.parametrize("address", [0, 2**64 - 8])
def test_an_array_interface_without_memory_is_rejected(address: int) -> None:
    class Nowhere:
        __array_interface__ = {"version": 3, "data": (address, False), "typestr": "<i8", "shape": (4,)}

    with pytest.raises(errors.WrongValue, match="has the invalid address"):
        wholemem.asarray(Nowhere())


def test_a_mask_is_rejected_with_a_hint() -> None:
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (3, 2), "float32")
    with pytest.raises(errors.WrongType) as raised:
        table.gather(np.array([True, False, True]))  # type: ignore[call-overload,unused-ignore]
    assert "flatnonzero" in str(raised.value)


def test_indices_that_change_while_they_are_read_are_an_error() -> None:
    class Shrinks:
        def __index__(self) -> int:
            indices.pop()
            return 0

    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (3, 2), "float32")
    indices: list[Any] = [Shrinks(), 1, 2]
    with pytest.raises(errors.WrongValue, match="expected 3 indices, but the sequence had 2"):
        table.gather(indices)
