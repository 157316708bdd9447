"""Writes the reference of the Python package as Markdown: griffe reads sources and stubs, and griffe2md renders them.

    python3 reference.py FOLDER-OF-SOURCES FOLDER-OF-PAGES MODULE...

Nothing is imported, so neither must the package be built, nor must torch be installed. A reference in a docstring that leads
nowhere is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Callable, Iterator, Union

import griffe
from griffe2md import ConfigDict, default_config, render_object_docs

Object = Union[griffe.Object, griffe.Alias]
Link = Callable[[str], str]

CONFIG: ConfigDict = {
    **default_config,
    "heading_level": 2,
    "members_order": "source",
    "show_signature_annotations": True,
    "show_submodules": False,
    "summary": False,
}  # type: ignore[typeddict-item]


def add_overloads(owner: Union[griffe.Module, griffe.Class]) -> None:
    """Makes the last overload of a function in a stub the function, as griffe does where there is an implementation."""
    for name, overloads in list(owner.overloads.items()):
        if overloads and name not in owner.members:
            *others, last = overloads
            forms = "\n".join(one.signature() for one in others)
            said = last.docstring.value if last.docstring else ""
            last.docstring = griffe.Docstring(f"```python\n{forms}\n```\n\n{said}", parent=last)
            owner.set_member(name, last)
    for member in owner.members.values():
        if isinstance(member, (griffe.Module, griffe.Class)):
            add_overloads(member)


def add_private_bases(module: griffe.Module) -> None:
    """Gives classes the members of their private bases, which have no description of their own."""
    for one in list(module.classes.values()):
        for base in (module.classes.get(str(name)) for name in one.bases if str(name).startswith("_")):
            for name, member in base.members.items() if base else []:
                if name not in one.members:
                    one.set_member(name, griffe.Alias(name, member, parent=one))


def members(page: griffe.Module, pages: list[str]) -> Iterator[Object]:
    """What a page describes: what its module exports, unless another page describes it where it is defined."""
    for name in page.exports or []:
        member = page.members[str(name)]
        if not member.is_module and (not member.is_alias or member.target.module.path not in pages):
            yield member


def written(docstring: str, link: Link) -> str:
    """A docstring as Markdown: references become links, and examples blocks of code.

    >>> text = "Makes a :class:`~a.B`::\\n\\n    $ make\\n\\nThen:\\n\\n>>> 1\\n1\\n"
    >>> [line for line in written(text, lambda name: f"[{name}]").splitlines() if line]
    ['Makes a [~a.B]:', '    $ make', 'Then:', '```python', '>>> 1', '1', '```']
    """
    blocks = re.split(r"\n\n(?=\S)", docstring.strip())
    for number, block in enumerate(blocks):
        if block.startswith(">>>"):
            blocks[number] = f"```python\n{block}\n```"
        else:
            block = re.sub(r":\w+:`(.+?)`", lambda found: link(found[1]), block)
            blocks[number] = re.sub(r"::(?=\n\n)", ":", block)
    return "\n\n".join(blocks)


def linker(places: dict[str, str], page: str, inside: str) -> Link:
    """How a reference is linked in the docstring of ``inside``, on a page: by the nearest object of that name.

    >>> linker({"a.B": "a.md#a.B", "a.B.c": "a.md#a.B.c"}, "a", "a.B")("~B.c")
    '[`c`](a.md#a.B.c)'
    >>> linker({}, "a", "a.B")("gone")
    Traceback (most recent call last):
    SystemExit: error: `gone` in the docstring of `a.B` leads nowhere
    """

    def link(name: str) -> str:
        target = name.removeprefix("~")
        shown = target.split(".")[-1] if name.startswith("~") else target
        near = [f"{inside}.{target}", f"{page}.{target}", f"{page.split('.')[0]}.{target}", target]
        found = [path for path in near if path in places]
        # Or anywhere else, if there is only one of that name.
        found = found or [path for path in places if path.endswith(f".{target}")]
        if len(found) == 0 or (found[0] not in near and len(found) > 1):
            raise SystemExit(f"error: `{name}` in the docstring of `{inside}` leads nowhere")
        return f"[`{shown}`]({places[found[0]]})"

    return link


def objects(member: Object) -> Iterator[Object]:
    """An object and all that it has."""
    yield member
    if member.is_class:
        for inner in member.all_members.values():
            if not inner.name.startswith("_"):
                yield inner


def linked(text: str, places: dict[str, str]) -> str:
    """Headings get the path of what they describe as their place, and links to what no page describes are removed.

    >>> linked("### `a.B.c`\\n[B](#a.B) [int](#int)\\n", {"a.B": "a.md#a.B"})
    '### `a.B.c` {#a.B.c}\\n[B](a.md#a.B) int\\n'
    """
    text = re.sub(r"^(#+ `([\w.]+)`)$", r"\1 {#\2}", text, flags=re.M)
    link = lambda found: f"[{found[1]}]({places[found[2]]})" if found[2] in places else found[1]
    return re.sub(r"\[([^\]]+)\]\(#([\w.]+)\)", link, text)


def main() -> None:
    sources, folder, pages = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    package = griffe.load(pages[0].split(".")[0], search_paths=[sources], resolve_aliases=True, allow_inspection=False)
    add_overloads(package)
    modules = {page: package.modules_collection[page] for page in pages}
    for module in modules.values():
        add_private_bases(module)
    described = {page: list(members(module, pages)) for page, module in modules.items()}
    places = {page: f"{page}.md" for page in pages}
    for page, all_members in described.items():
        for one in (one for member in all_members for one in objects(member)):
            places.setdefault(one.path, f"{page}.md#{one.path}")
    done: set[int] = set()
    for page, all_members in described.items():
        module, parts = modules[page], [f"# {page}"]
        if module.docstring:
            parts.append(written(module.docstring.value, linker(places, page, page)))
        for member in all_members:
            for one in objects(member):
                # Classes share the docstrings that they inherit.
                if one.docstring and id(one.docstring) not in done:
                    one.docstring.value = written(one.docstring.value, linker(places, page, member.path))
                    done.add(id(one.docstring))
            parts.append(render_object_docs(member, CONFIG))
        (folder / f"{page}.md").write_text(linked("\n\n".join(parts), places))


if __name__ == "__main__":
    main()
