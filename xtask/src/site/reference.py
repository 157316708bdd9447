"""The reference of a Python package as Markdown, made of its sources: docstrings, and the signatures of stubs.

    python3 reference.py FOLDER-OF-THE-PACKAGE MODULE...

It prints a page for each of these modules, as a JSON object of texts by name. Nothing is imported, so that a module is
described also where what it needs is not installed; that stubs name what there is, tests of the package see to. A reference
in a docstring that leads nowhere is an error.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Optional, Union

# Longer signatures have a line for each argument.
WIDTH = 88

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
Link = Callable[[str], str]


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    name: str
    is_package: bool
    tree: ast.Module

    def exports(self) -> list[str]:
        """The names in ``__all__``."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        return []

    def definitions(self) -> dict[str, ast.stmt]:
        """What it defines, by name."""
        return {name: node for node in self.tree.body if (name := name_of(node))}

    def imports(self) -> dict[str, tuple[str, str]]:
        """What it has from other modules of the package: which module, and the name there."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                up = node.level - self.is_package
                folder = self.name.split(".")[: -up or None]
                module = ".".join([*folder, *filter(None, [node.module])])
                found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        return found


@dataclass(frozen=True)
class Item:
    """Something that a page describes, and the module that defines it."""

    name: str
    node: ast.stmt
    home: Module


def name_of(node: ast.stmt) -> Optional[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


class Package:
    """The modules of a package, and the place of everything that is described."""

    def __init__(self, modules: dict[str, Module], pages: list[str]) -> None:
        self.modules = modules
        self.root = pages[0]
        self.pages = {page: list(self.items(page, pages)) for page in pages}
        self.places = {page: f"{page}.md" for page in pages}
        for page, items in self.pages.items():
            for item in items:
                names = [item.name]
                if isinstance(item.node, ast.ClassDef):
                    names += [f"{item.name}.{name}" for name, _, _ in self.members(item)]
                self.places.update({f"{page}.{name}": f"{page}.md#{page}.{name}" for name in names})

    def find(self, module: str, name: str) -> Optional[Item]:
        """What a name means in a module: nothing, if it is a module itself."""
        there = self.modules[module]
        if name in there.definitions():
            return Item(name, there.definitions()[name], there)
        if name not in there.imports() or ".".join(there.imports()[name]) in self.modules:
            return None
        found = self.find(*there.imports()[name])
        return found and Item(name, found.node, found.home)

    def items(self, page: str, pages: list[str]) -> Iterator[Item]:
        """What a page describes: what its module exports, unless the module that defines it has a page too."""
        for name in self.modules[page].exports():
            item = self.find(page, name)
            if item and (item.home.name == page or item.home.name not in pages):
                yield item

    def elsewhere(self, page: str) -> Iterator[str]:
        """The full names of what a page's module exports, and another page describes."""
        described = {item.name for item in self.pages[page]}
        for name in self.modules[page].exports():
            item = self.find(page, name)
            full = f"{item.home.name if item else page}.{name}"
            if name not in described and full in self.places:
                yield full

    def members(self, item: Item) -> Iterator[tuple[str, ast.stmt, Optional[str]]]:
        """Name, definition and description of what a class has, also from bases that nobody sees."""
        assert isinstance(item.node, ast.ClassDef)
        for base in item.node.bases:
            hidden = self.find(item.home.name, ast.unparse(base))
            if hidden and hidden.name.startswith("_"):
                yield from self.members(hidden)
        body = item.node.body
        for node, following in zip(body, [*body[1:], None]):
            name = name_of(node)
            if name and not name.startswith("_"):
                yield name, node, said(node, following)

    def bases(self, item: Item) -> list[str]:
        """The bases of a class that people see."""
        assert isinstance(item.node, ast.ClassDef)
        names: list[str] = []
        for base in map(ast.unparse, item.node.bases):
            hidden = self.find(item.home.name, base) if base.startswith("_") else None
            names += self.bases(hidden) if hidden else [base]
        return names

    def link(self, page: str, inside: str) -> Link:
        """How names are linked in what a page says of something."""

        def linked(name: str) -> str:
            shown, target = name, name
            if name.startswith("~"):
                shown, target = name.split(".")[-1], name[1:]
            near = [f"{page}.{inside}.{target}", f"{page}.{target}", f"{self.root}.{target}", target]
            found = [full for full in near if full in self.places]
            # Or anywhere else, if there is only one of that name.
            far = [full for full in self.places if full.endswith(f".{target}")]
            if found or len(far) == 1:
                return f"[`{shown}`]({self.places[(found or far)[0]]})"
            raise SystemExit(f"error: `{name}` in what {page} says of `{inside or page}` leads nowhere")

        return linked

    def page(self, name: str) -> str:
        """What a page says."""
        parts = [f"# {name}", prose(ast.get_docstring(self.modules[name].tree), self.link(name, ""))]
        elsewhere = [self.link(name, "")(other) for other in self.elsewhere(name)]
        parts += [f"Described on pages of their own: {', '.join(elsewhere)}."] if elsewhere else []
        for item in self.pages[name]:
            parts += self.described(name, item)
        return "\n\n".join(part for part in parts if part) + "\n"

    def described(self, page: str, item: Item) -> Iterator[str]:
        yield f"## `{item.name}` {{#{page}.{item.name}}}"
        node, link = item.node, self.link(page, item.name)
        if isinstance(node, ast.ClassDef):
            yield code(constructor(item.name, node, self.bases(item)))
            yield prose(ast.get_docstring(node), link)
            for name, member, text in self.members(item):
                yield heading(name, member, f"{page}.{item.name}.{name}")
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_property(member):
                    yield code(signature(name, member))
                yield prose(text, link)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield code(signature(item.name, node))
            yield prose(ast.get_docstring(node), link)
        elif isinstance(node, ast.AnnAssign):
            yield code(f"{item.name}: {ast.unparse(node.annotation)}")


def said(node: ast.stmt, following: Optional[ast.stmt]) -> Optional[str]:
    """The docstring of a definition: inside it, or, for a value, behind it."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return ast.get_docstring(node)
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return inspect.cleandoc(str(following.value.value))
    return None


def heading(name: str, node: ast.stmt, place: str) -> str:
    """The heading of a member: of a value with its type."""
    kind = None
    if isinstance(node, ast.AnnAssign):
        kind = node.annotation
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and is_property(node):
        kind = node.returns
    text = f"{name}: {ast.unparse(kind)}" if kind else name
    return f"### `{text}` {{#{place}}}"


def marks(node: Function) -> list[str]:
    return [ast.unparse(mark) for mark in node.decorator_list]


def is_property(node: Function) -> bool:
    return any(mark.split(".")[-1] in ("property", "cached_property") for mark in marks(node))


def constructor(name: str, node: ast.ClassDef, bases: list[str]) -> str:
    """What a class is one of, and how it is made.

    >>> constructor("A", ast.parse("class A:\\n def __init__(self, x: int = 1) -> None: ...").body[0], [])
    'class A(x: int = 1)'
    >>> constructor("Lost", ast.parse("class Lost(_Hidden): ...").body[0], ["Error", "OSError"])
    'class Lost(Error, OSError)'
    >>> print(constructor("B", ast.parse("class B(A):\\n def __init__(self, x) -> None: ...").body[0], ["A"]))
    class B(A)
    B(x)
    """
    made = [
        signature(name, inner, returns=False)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
    ]
    if bases:
        return "\n".join([f"class {name}({', '.join(bases)})", *made])
    return f"class {made[0] if made else name}"


def signature(name: str, node: Function, *, returns: bool = True) -> str:
    """A function as it is called.

    >>> signature("f", ast.parse("def f(self, a, *, b: int = 2) -> str: ...").body[0])
    'f(a, *, b: int = 2) -> str'
    >>> print(signature("f", ast.parse(f"@classmethod\\ndef f(cls, {'a' * 50}, {'b' * 50}): ...").body[0]))
    @classmethod
    f(
        aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa,
        bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb,
    )
    """
    shown = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(shown, (ast.FunctionDef, ast.AsyncFunctionDef))
    given = shown.args.posonlyargs or shown.args.args
    if given and given[0].arg in ("self", "cls"):
        del given[0]
    marked = [f"@{mark}\n" for mark in marks(node) if mark in ("classmethod", "staticmethod")]
    result = f" -> {ast.unparse(node.returns)}" if node.returns and returns else ""
    arguments = list(apart(shown.args))
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){result}"])
    return "".join(marked) + line


def apart(arguments: ast.arguments) -> Iterator[str]:
    """The arguments one by one.

    >>> list(apart(ast.parse("def f(a, b: int = 1, *, c=(2, 3), **d): ...").body[0].args))
    ['a', 'b: int = 1', '*', 'c=(2, 3)', '**d']
    """
    places = [*arguments.posonlyargs, *arguments.args]
    defaults: list[Optional[ast.expr]] = [None] * (len(places) - len(arguments.defaults))
    for number, (argument, default) in enumerate(zip(places, [*defaults, *arguments.defaults]), start=1):
        yield one(argument, default)
        if number == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield one(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def one(argument: ast.arg, default: Optional[ast.expr]) -> str:
    if default is None:
        return ast.unparse(argument)
    value = ast.unparse(default)
    if isinstance(default, ast.Constant) and isinstance(default.value, str):
        # In quotes as everybody writes them, and not as Python prints them.
        value = json.dumps(default.value)
    equals = " = " if argument.annotation else "="
    return f"{ast.unparse(argument)}{equals}{value}"


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def prose(docstring: Optional[str], link: Link) -> str:
    """A docstring as Markdown: references become links, and examples blocks of code.

    >>> text = "Makes a :class:`~a.B`::\\n\\n    $ make\\n\\nThen:\\n\\n>>> 1\\n1\\n"
    >>> [line for line in prose(text, lambda name: f"[{name}]").splitlines() if line]
    ['Makes a [~a.B]:', '```text', '$ make', '```', 'Then:', '```python', '>>> 1', '1', '```']
    """
    parts: list[str] = []
    for block in re.split(r"\n\n(?=\S)", (docstring or "").strip()):
        if block.startswith(">>>"):
            parts.append(code(block))
            continue
        said, literal, shown = block.partition("::\n\n")
        said = re.sub(r":\w+:`(.+?)`", lambda found: link(found[1]), said)
        parts.append(said + ":" if literal else said)
        if literal:
            parts.append(f"```text\n{inspect.cleandoc(shown)}\n```")
    return "\n\n".join(parts)


def read(folder: Path) -> dict[str, Module]:
    """The modules in a folder. Of a source and its stub, the stub says more."""
    modules = {}
    for path in sorted(folder.rglob("*.py")) + sorted(folder.rglob("*.pyi")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, is_package, ast.parse(path.read_text(), str(path)))
    return modules


def main() -> None:
    folder, *pages = sys.argv[1:]
    package = Package(read(Path(folder)), pages)
    json.dump({page: package.page(page) for page in pages}, sys.stdout)


if __name__ == "__main__":
    main()
