"""Lists the texts of the source code, counts them by crate, or draws some at random for a reader.

A text is the first paragraph of a doc comment, a comment, an error message, or a docstring. Readers who do not know the project
explain each drawn text; a judge compares the explanations with the code:

    python3 xtask/texts.py count
    python3 xtask/texts.py list crates/comm
    python3 xtask/texts.py draw --seed 7 --count 40               # for a reader: texts without locations
    python3 xtask/texts.py draw --seed 7 --count 40 --places      # for the judge: the same texts with locations
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple

KINDS = ("summary", "comment", "error", "docstring")
RUST, CUDA, PYTHON = (".rs",), (".cu", ".cuh", ".h", ".cpp"), (".py", ".pyi")

# Generated files, whose texts are not listed.
GENERATED = ("crates/hal/src/generated/", "crates/wholemem/kernels/include/wholemem/abi.cuh", "crates/wholemem/kernels/include/ops/abi.cuh")

ERROR = re.compile(r'(?:#\[error\(|\b(?:bail|anyhow|ensure)!\()\s*(?:[^"\n]*,\s*)?"((?:[^"\\]|\\.)*)"', re.DOTALL)


class Text(NamedTuple):
    """A doc comment, comment, error message or docstring, with its kind, file and line."""

    kind: str
    path: str
    line: int
    words: str


def texts_of_rust_or_cpp(path: str, source: str) -> Iterator[Text]:
    """Yields the doc comments, comments and error messages of a Rust, C++ or CUDA file."""
    block: list[str] = []
    marker, start = "", 0
    for number, line in enumerate(source.splitlines() + [""], 1):
        found = re.match(r"\s*(//[/!]?)(?!/) ?(.*)", line)
        if found and found.group(1) == marker:
            block.append(found.group(2))
            continue
        if block:
            yield from texts_of_block(path, start, marker, block)
        block, marker = ([found.group(2)], found.group(1)) if found else ([], "")
        start = number
    for found in ERROR.finditer(source):
        words = re.sub(r"\\\n\s*", "", found.group(1))
        yield Text("error", path, source.count("\n", 0, found.start()) + 1, words)


def texts_of_block(path: str, line: int, marker: str, block: list[str]) -> Iterator[Text]:
    """Yields the first paragraph of a doc comment, or all of another comment."""
    if marker == "//":
        words = " ".join(block).strip()
        kind = "comment"
    else:
        text = "\n".join(block).strip("\n")
        words = " ".join(text.split("\n\n")[0].split())
        kind = "summary"
    if re.search(r"[a-z]{3}", words) and not words.startswith("```"):
        yield Text(kind, path, line, words)


def texts_of_python(path: str, source: str) -> Iterator[Text]:
    """Yields the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text("docstring", path, getattr(node, "lineno", 1), " ".join(docstring.split("\n\n")[0].split()))
    block: list[str] = []
    for number, line in enumerate(source.splitlines() + [""], 1):
        found = re.match(r"\s*# ?(.*)", line)
        if found:
            block.append(found.group(1))
        elif block:
            words = " ".join(block)
            if re.search(r"[a-z]{3}", words) and not words.startswith("!"):
                yield Text("comment", path, number - len(block), words)
            block = []


def texts(below: list[str]) -> list[Text]:
    """Returns all texts of the tracked files, sorted by file and line."""
    files = subprocess.run(["git", "ls-files", "--", *below], check=True, capture_output=True, text=True).stdout.splitlines()
    found: list[Text] = []
    for path in files:
        if path.startswith(GENERATED) or not path.endswith(RUST + CUDA + PYTHON):
            continue
        source = Path(path).read_text(encoding="utf-8")
        found += texts_of_python(path, source) if path.endswith(PYTHON) else texts_of_rust_or_cpp(path, source)
    return sorted(found, key=lambda text: (text.path, text.line))


def crate(path: str) -> str:
    """Returns the crate of a file, or its top folder if it is in no crate."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "crates" else parts[0]


def count(found: list[Text]) -> None:
    """Prints, for each crate, the number of files, the number of texts of each kind, and the number of words."""
    print(f"{'':20}{'files':>7}" + "".join(f"{kind + 's' if kind != 'summary' else 'summaries':>12}" for kind in KINDS) + f"{'words':>10}")
    crates = sorted({crate(text.path) for text in found})
    for name in [*crates, "total"]:
        own = [text for text in found if name in (crate(text.path), "total")]
        kinds = Counter(text.kind for text in own)
        row = "".join(f"{kinds[kind]:>12}" for kind in KINDS)
        print(f"{name:20}{len({text.path for text in own}):>7}{row}{sum(len(text.words.split()) for text in own):>10}")


def draw(found: list[Text], amount: int, seed: int, places: bool) -> None:
    """Prints texts drawn at random, an equal number of each kind if possible."""
    generator = random.Random(seed)
    drawn: list[Text] = []
    for position, kind in enumerate(KINDS):
        own = [text for text in found if text.kind == kind and len(text.words.split()) >= 4]
        drawn += generator.sample(own, min(len(own), (amount + position) // len(KINDS)))
    generator.shuffle(drawn)
    for number, text in enumerate(drawn, 1):
        place = f" {text.path}:{text.line}" if places else ""
        print(f"{number}. [{text.kind}]{place}\n   {text.words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, sentence in [("count", "count the texts by crate"), ("list", "print all texts"), ("draw", "print some texts, drawn at random")]:
        command = commands.add_parser(name, help=sentence)
        command.add_argument("below", nargs="*", default=["."], help="folders or files (default: all)")
        if name == "draw":
            command.add_argument("--seed", type=int, required=True, help="chosen by the reader")
            command.add_argument("--count", type=int, default=40, help="how many (default: 40)")
            command.add_argument("--places", action="store_true", help="print file and line of each text")
    arguments = parser.parse_args()
    found = texts(arguments.below)
    if arguments.command == "count":
        count(found)
    elif arguments.command == "draw":
        draw(found, arguments.count, arguments.seed, arguments.places)
    else:
        for text in found:
            print(f"{text.path}:{text.line}: {text.kind}: {text.words}")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
