"""Writes the reference of the Python package as Markdown: griffe reads sources and stubs, and griffe2md renders them.

    python3 reference.py FOLDER-OF-SOURCES FOLDER-OF-PAGES MODULE...

No module is imported, so neither the compiled package nor torch is needed. An unresolved reference in a docstring is an error.
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
    """Adds functions that have overloads but no implementation (in stubs): the last overload becomes the function."""
    for name, overloads in list(owner.overloads.items()):
        if overloads and name not in owner.members:
            *others, last = overloads
            forms = "\n".join(one.signature() for one in others)
            text = last.docstring.value if last.docstring else ""
            last.docstring = griffe.Docstring(f"```python\n{forms}\n```\n\n{text}", parent=last)
            owner.set_member(name, last)
    for member in owner.members.values():
        if isinstance(member, (griffe.Module, griffe.Class)):
            add_overloads(member)


def add_private_bases(module: griffe.Module) -> None:
    """Adds the members of private base classes, which have no page entry of their own, to their subclasses."""
    for one in list(module.classes.values()):
        for base in (module.classes.get(str(name)) for name in one.bases if str(name).startswith("_")):
            for name, member in base.members.items() if base else []:
                if name not in one.members:
                    one.set_member(name, griffe.Alias(name, member, parent=one))


def members(page: griffe.Module, pages: list[str]) -> Iterator[Object]:
    """Yields the exported members of a module, except those that another page describes because their module is there."""
    for name in page.exports or []:
        member = page.members[str(name)]
        if not member.is_module and (not member.is_alias or member.target.module.path not in pages):
            yield member


def to_markdown(docstring: str, link: Link) -> str:
    """Converts a docstring to Markdown: references become links, and examples become code blocks.

    >>> text = "Makes a :class:`~a.B`::\\n\\n    $ make\\n\\nThen:\\n\\n>>> 1\\n1\\n"
    >>> [line for line in to_markdown(text, lambda name: f"[{name}]").splitlines() if line]
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


def linker(urls: dict[str, str], page: str, inside: str) -> Link:
    """Returns a function that turns a reference in the docstring of object ``inside`` into a link to the nearest object of that
    name.

    >>> linker({"a.B": "a.md#a.B", "a.B.c": "a.md#a.B.c"}, "a", "a.B")("~B.c")
    '[`c`](a.md#a.B.c)'
    >>> linker({}, "a", "a.B")("gone")
    Traceback (most recent call last):
    SystemExit: error: `gone` in the docstring of `a.B` cannot be resolved
    """

    def link(name: str) -> str:
        target = name.removeprefix("~")
        shown = target.split(".")[-1] if name.startswith("~") else target
        near = [f"{inside}.{target}", f"{page}.{target}", f"{page.split('.')[0]}.{target}", target]
        found = [path for path in near if path in urls]
        # If no near object has the name, the reference may be to any object with that name, if there is only one.
        found = found or [path for path in urls if path.endswith(f".{target}")]
        if len(found) == 0 or (found[0] not in near and len(found) > 1):
            raise SystemExit(f"error: `{name}` in the docstring of `{inside}` cannot be resolved")
        return f"[`{shown}`]({urls[found[0]]})"

    return link


def objects(member: Object) -> Iterator[Object]:
    """Yields a documented object and, if it is a class, its public members."""
    yield member
    if member.is_class:
        for inner in member.all_members.values():
            if not inner.name.startswith("_"):
                yield inner


def resolve_links(text: str, urls: dict[str, str]) -> str:
    """Adds anchors to headings, turns links to documented objects into URLs, and removes other links.

    >>> resolve_links("### `a.B.c`\\n[B](#a.B) [int](#int)\\n", {"a.B": "a.md#a.B"})
    '### `a.B.c` {#a.B.c}\\n[B](a.md#a.B) int\\n'
    """
    text = re.sub(r"^(#+ `([\w.]+)`)$", r"\1 {#\2}", text, flags=re.M)
    link = lambda found: f"[{found[1]}]({urls[found[2]]})" if found[2] in urls else found[1]
    return re.sub(r"\[([^\]]+)\]\(#([\w.]+)\)", link, text)


def main() -> None:
    sources, folder, pages = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    package = griffe.load(pages[0].split(".")[0], search_paths=[sources], resolve_aliases=True, allow_inspection=False)
    add_overloads(package)
    modules = {page: package.modules_collection[page] for page in pages}
    for module in modules.values():
        add_private_bases(module)
    described = {page: list(members(module, pages)) for page, module in modules.items()}
    urls = {page: f"{page}.md" for page in pages}
    for page, all_members in described.items():
        for documented in (documented for member in all_members for documented in objects(member)):
            urls.setdefault(documented.path, f"{page}.md#{documented.path}")
    done: set[int] = set()
    for page, all_members in described.items():
        module, parts = modules[page], [f"# {page}"]
        if module.docstring:
            parts.append(to_markdown(module.docstring.value, linker(urls, page, page)))
        for member in all_members:
            for one in objects(member):
                # Subclasses share inherited docstrings, so each docstring is converted only once.
                if one.docstring and id(one.docstring) not in done:
                    one.docstring.value = to_markdown(one.docstring.value, linker(urls, page, member.path))
                    done.add(id(one.docstring))
            parts.append(render_object_docs(member, CONFIG))
        (folder / f"{page}.md").write_text(resolve_links("\n\n".join(parts), urls))


if __name__ == "__main__":
    main()
