"""Tests that the stubs declare all names, arguments and docstrings of the native module, and that their examples run."""

import ast
import doctest
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Iterator

import pytest

import wholemem
from wholemem import _native, store

# The stub of the native module is in several files.
STUB = Path(wholemem.__file__).parent / "_native.pyi"
STUBS = sorted(STUB.parent.glob("_native*.pyi"))
TREES = [ast.parse(stub.read_text()) for stub in STUBS]


def declarations() -> Iterator[tuple[str, ast.stmt]]:
    """Yields every declaration in the stubs of the native module, by qualified name."""
    for node in [node for tree in TREES for node in tree.body]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


DECLARED = dict(declarations())
# If a function is overloaded, only its last declaration has a docstring.
OVERLOADS = [(name, node) for name, node in declarations() if isinstance(node, ast.FunctionDef) and "__" not in name]
CLASSES = {name: node for name, node in DECLARED.items() if isinstance(node, ast.ClassDef)}
DOCSTRINGS = {
    name: ast.get_docstring(node)
    for name, node in DECLARED.items()
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ("__" not in name or ast.get_docstring(node))
}


def static_attribute(name: str) -> object:
    value: object = _native
    for part in name.split("."):
        value = inspect.getattr_static(value, part)
    return value


def attribute(name: str) -> Any:
    """Returns an attribute of the native module, or of one of its classes, by qualified name."""
    value: Any = _native
    for part in name.split("."):
        value = getattr(value, part)
    return value


def native_names() -> Iterator[str]:
    """Yields the names of everything in the native module, qualified by class."""
    for name, value in vars(_native).items():
        if not name.startswith("__"):
            yield name
        if isinstance(value, type):
            yield from (f"{name}.{inner}" for inner in vars(value) if not inner.startswith("__"))


@pytest.mark.parametrize("name", DECLARED)
def test_declared_names_exist(name: str) -> None:
    static_attribute(name)


def test_existing_names_are_declared() -> None:
    assert set(native_names()) - set(DECLARED) == set()


@pytest.mark.parametrize(("name", "node"), OVERLOADS)
def test_arguments_match_the_stub(name: str, node: ast.FunctionDef) -> None:
    if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
        return
    signature = inspect.signature(attribute(name))
    several = [node.args.vararg] if node.args.vararg else []
    arguments = node.args.args + several + node.args.kwonlyargs
    declared = {argument.arg for argument in arguments if argument.arg not in ("self", "cls")}
    assert set(signature.parameters) - {"self"} == declared


def test_everything_public_is_documented() -> None:
    assert [name for name in native_names() if not inspect.getdoc(attribute(name))] == []


def test_the_module_docstring_matches_the_stub() -> None:
    assert inspect.getdoc(_native) == ast.get_docstring(ast.parse(STUB.read_text()))


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_docstrings_match_the_stub(name: str) -> None:
    assert inspect.getdoc(attribute(name)) == DOCSTRINGS[name]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_cannot_be_subclassed_are_final(name: str) -> None:
    is_final = any(isinstance(mark, ast.Name) and mark.id == "final" for mark in CLASSES[name].decorator_list)
    try:
        type("Kind", (attribute(name),), {})
    except TypeError:
        assert is_final
    else:
        assert not is_final


def test_the_socket_is_declared_as_a_path(client: store.Client) -> None:
    node = DECLARED["Client.socket"]
    assert isinstance(node, ast.FunctionDef) and node.returns is not None
    assert isinstance(client.socket, Path) and ast.unparse(node.returns) == Path.__name__


def test_a_shape_may_be_declared_as_one_int() -> None:
    node = DECLARED["WholeTensor.create"]
    assert isinstance(node, ast.FunctionDef)
    (declared,) = (ast.unparse(argument.annotation) for argument in node.args.args if argument.arg == "shape" and argument.annotation)
    (comm,) = wholemem.Communicator.local(1, device="cpu")
    assert wholemem.WholeTensor.create(comm, 10, "float32").shape == (10,)
    assert wholemem.ChunkedTensor(comm, 10, "float32").shape == (10,)
    assert wholemem.ChunkedTensor.__init__.__annotations__["shape"] == declared == "Union[int, Sequence[int]]"


def test_mappings_are_declared_as_mappings() -> None:
    mappings = {name for name in CLASSES if issubclass(attribute(name), Mapping)}
    assert store.Pack.__name__ in mappings
    declared = {name for name, node in CLASSES.items() for base in node.bases if "Mapping" in ast.unparse(base)}
    assert declared == mappings


@pytest.mark.usefixtures("store_of_examples")
@pytest.mark.parametrize("name", CLASSES)
def test_examples_run(name: str) -> None:
    node = CLASSES[name]
    text = ast.get_docstring(node) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, name, node.lineno)
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0
    assert outcome.attempted > 0


PROGRAM = """
from typing import Any
import numpy as np, wholemem
from numpy.typing import NDArray

def typed(table: wholemem.WholeTensor, comm: wholemem.Communicator, indices: NDArray[np.int64], own: wholemem.Array) -> None:
    rows: NDArray[Any] = table.gather(indices)
    ours: wholemem.Array = table.gather([1, 2])
    ours = table.gather(3, dtype="float16")
    ours = table.gather(range(4))
    ours = table.gather(own)
    ours = table.gather(indices, own)
    rows = comm.all_reduce(rows, op="max")
    ours = comm.all_gather(own)
    ours = comm.broadcast(own)
    {wrong}
"""

WRONG = [
    ("", ""),
    ("ours = table.gather(indices)", "Incompatible types in assignment"),
    ("rows = table.gather([1, 2])", "Incompatible types in assignment"),
    ('comm.all_reduce(rows, op="mean")', "No overload variant"),
    ('table.scatter(indices, rows, order="sorted")', "has incompatible type"),
    ('wholemem.WholeTensor.create(comm, 3, "float32", kind="striped")', "has incompatible type"),
    ('wholemem.WholeTensor.create(comm, 3, "float32", location="disk")', "has incompatible type"),
]


def test_type_checkers_infer_results_and_reject_unknown_names(tmp_path: Path) -> None:
    api: Any = pytest.importorskip("mypy.api", reason="mypy is not installed")
    programs = [tmp_path / f"program_{number}.py" for number in range(len(WRONG))]
    for program, (wrong, _) in zip(programs, WRONG):
        program.write_text(PROGRAM.replace("{wrong}", wrong))
    output, errors, _ = api.run(["--strict", "--cache-dir", str(tmp_path / "cache"), *map(str, programs)])
    assert errors == ""
    for program, (_, message) in zip(programs, WRONG):
        reported = [line for line in output.splitlines() if line.startswith(str(program)) and ": error:" in line]
        assert (len(reported) > 0) == (message != "") and message in "".join(reported), output
