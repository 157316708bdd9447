"""The stubs: they name what there is, with the arguments it has, and their examples run."""

import ast
import doctest
import inspect
from pathlib import Path
from typing import Iterator, Union

import pytest

import wholemem
from wholemem import _native

# One module, whose stub is in parts.
STUBS = sorted(Path(wholemem.__file__).parent.glob("_native*.pyi"))
TREES = [ast.parse(stub.read_text()) for stub in STUBS]

Documented = Union[ast.ClassDef, ast.FunctionDef]


def declared() -> Iterator[tuple[str, ast.stmt]]:
    """Everything that the stub declares, by its full name."""
    for node in [node for tree in TREES for node in tree.body]:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


DECLARED = dict(declared())


def found(name: str) -> object:
    value: object = _native
    for part in name.split("."):
        value = inspect.getattr_static(value, part)
    return value


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_is_there(name: str) -> None:
    found(name)


def test_what_is_there_is_declared() -> None:
    there = {name for name in vars(_native) if not name.startswith("__")}
    for kind in [value for value in vars(_native).values() if isinstance(value, type)]:
        there |= {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("__")}
    assert there - set(DECLARED) == set()


@pytest.mark.parametrize(
    "name", [name for name, node in DECLARED.items() if isinstance(node, ast.FunctionDef) and "__" not in name]
)
def test_arguments_are_as_declared(name: str) -> None:
    node = DECLARED[name]
    assert isinstance(node, ast.FunctionDef)
    if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
        return
    value = _native
    for part in name.split("."):
        value = getattr(value, part)
    signature = inspect.signature(value)
    several = [node.args.vararg] if node.args.vararg else []
    arguments = node.args.args + several + node.args.kwonlyargs
    declared = {argument.arg for argument in arguments if argument.arg not in ("self", "cls")}
    assert set(signature.parameters) - {"self"} == declared


def test_everything_public_is_documented() -> None:
    silent = [
        name
        for name, node in DECLARED.items()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and "__" not in name and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.usefixtures("store_of_examples")
@pytest.mark.parametrize("name", [name for name, node in DECLARED.items() if isinstance(node, ast.ClassDef)])
def test_examples_run(name: str) -> None:
    node = DECLARED[name]
    assert isinstance(node, ast.ClassDef)
    text = ast.get_docstring(node) or ""
    example = doctest.DocTestParser().get_doctest(text, {}, name, name, node.lineno)
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0
    assert outcome.attempted > 0
