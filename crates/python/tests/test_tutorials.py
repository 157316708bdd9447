"""Tests that the tutorials that start from an empty folder, and the notebook, run as written and print what they show.

In a shown output, numbers stand for any number: they are measurements.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest
from launcher import PROGRAM, script

ROOT = next(folder for folder in Path(__file__).parents if (folder / "docs/python").is_dir())
TUTORIALS = sorted((ROOT / "docs/python/tutorials").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs/python/tutorials").glob("*.ipynb"))
LIMIT = 300

# A step of a tutorial: a program with the file name that the text before it gives, or commands with their output.
STEP = re.compile(r"(?:[Ss]ave this as\s+`(?P<file>[\w.]+)`(?:(?!```).)*?)?^```(?P<kind>python|console)(?: (?P<needs>\w+))?\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)


class Step(NamedTuple):
    kind: str
    needs: str
    file: str
    text: str


def steps_of(path: Path) -> list[Step]:
    found = [Step(m["kind"], m["needs"] or "", m["file"] or "", m["text"]) for m in STEP.finditer(path.read_text())]
    assert all(step.file for step in found if step.kind == "python"), f"a program of {path.name} has no file name"
    assert len(found) == path.read_text().count("\n```") / 2, f"a block of {path.name} is not a step"
    return found


def general(text: str) -> list[str]:
    """Returns the lines of an output with every number replaced."""
    return [re.sub(r"\d+(\.\d+)?", "#", line).rstrip() for line in text.splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands, in which `python` and `wholemem` are those under test, and the store is in the test's folder."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, program in [("python", sys.executable), ("wholemem", PROGRAM)]:
        (programs / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    unset = ("WHOLEMEM_SOCKET", "RANK", "WORLD_SIZE")
    yield {
        **{name: value for name, value in os.environ.items() if name not in unset},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "NO_COLOR": "1",
    }


def play(path: Path, folder: Path, environment: dict[str, str], has: set[str]) -> None:
    """Follows a tutorial in an empty folder."""
    background: list[subprocess.Popen[str]] = []
    try:
        for step in steps_of(path):
            if step.needs and step.needs not in has:
                continue
            if step.kind == "python":
                (folder / step.file).write_text(step.text)
                continue
            command, *shown = step.text.splitlines()
            assert command.startswith("$ "), command
            if command.endswith(" &"):
                process = subprocess.Popen(
                    ["exec " + command[2:-2]],
                    shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
                )
                background.append(process)
                assert process.stdout and process.stdout.readline().startswith("serving ")
                continue
            ended = subprocess.run(
                command[2:], shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
            assert general(ended.stdout) == general("\n".join(shown)), ended.stdout
    finally:
        for process in background:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()


@pytest.mark.parametrize("path", TUTORIALS, ids=[path.stem for path in TUTORIALS])
def test_a_tutorial_can_be_followed(path: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    play(path, tmp_path / "empty", shell, set())


@pytest.mark.parametrize("path", TUTORIALS, ids=[path.stem for path in TUTORIALS])
def test_a_tutorial_can_be_followed_with_torch(path: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    if not any(step.needs == "torch" for step in steps_of(path)):
        pytest.skip("has nothing of torch")
    if find_spec("torch") is None:
        pytest.skip("needs torch")
    pytest.importorskip("torch", reason="torch is not installed")
    play(path, tmp_path / "empty", shell, {"torch"})


# Runs the cells of a notebook as IPython does: in `__main__`, which has no file, and with their source in `linecache`.
CELLS = """
import linecache, sys, types, json, contextlib, io
cells = json.load(sys.stdin)
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
for number, text in enumerate(cells):
    name = f"<ipython-input-{number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(text, name, "exec"), main.__dict__)
    print(json.dumps(output.getvalue()))
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_and_prints_what_it_shows(path: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ended = subprocess.run(
        script(CELLS),
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        cwd=tmp_path / "empty", env=shell, capture_output=True, text=True, timeout=LIMIT,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    printed = [json.loads(line) for line in ended.stdout.splitlines()]
    shown = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]
    assert [general(text) for text in printed] == [general(text) for text in shown]


def test_there_are_tutorials_and_a_notebook() -> None:
    assert [path.stem for path in TUTORIALS] == ["all-reduce", "dataset", "features", "weights"] and len(NOTEBOOKS) == 1
