"""Examples, tutorials and the README: they run as they are written, and print what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from world import PROGRAM, launch, run

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", (ROOT / "examples/python/README.md").read_text(), re.DOTALL | re.MULTILINE)
TUTORIALS = sorted((ROOT / "docs/python").glob("*.md"))


@pytest.mark.parametrize(("command", "prints"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_prints_what_its_description_says(command: str, prints: str) -> None:
    programs = {"python": sys.executable, "wholemem": PROGRAM}
    words = [programs.get(word, word) for word in shlex.split(command)]
    environment = {**os.environ, "WHOLEMEM_PROGRAM": PROGRAM, "NO_COLOR": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    # Ranks write when they come to it.
    order = sorted if words[0] == PROGRAM else list
    assert (order(ended.stdout.splitlines()), ended.stderr) == (order(prints.splitlines()), "")


def test_every_example_is_described() -> None:
    described = {word for command, _ in EXAMPLES for word in shlex.split(command) if word.endswith(".py")}
    assert described == {str(path.relative_to(ROOT)) for path in (ROOT / "examples/python").glob("*.py")}


def test_the_readme_runs() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    ended = launch(4, text)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def blocks(path: Path, has: set[str]) -> str:
    """The Python of a tutorial: all that needs nothing else, or no more than what there is."""
    found = re.findall(r"^```python(?: (\w+))?\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(text for needs, text in found if not needs or needs in has)


def play(path: Path, text: str, folder: Path) -> None:
    """Runs a tutorial as its first command starts it: as ranks, or as a process."""
    launched = re.search(r"^wholemem launch -n (\d+) ", path.read_text(), re.MULTILINE)
    ended = launch(int(launched[1]), text, cwd=folder) if launched else run(text, cwd=folder)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended.stderr


@pytest.mark.usefixtures("store_of_examples")
@pytest.mark.parametrize("path", TUTORIALS, ids=[path.stem for path in TUTORIALS])
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    play(path, blocks(path, set()), tmp_path)


@pytest.mark.usefixtures("store_of_examples")
@pytest.mark.parametrize("path", TUTORIALS, ids=[path.stem for path in TUTORIALS])
def test_a_tutorial_runs_with_torch(path: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    has = {"torch", "cuda"} if torch.cuda.is_available() else {"torch"}
    text = blocks(path, has)
    if text == blocks(path, set()):
        pytest.skip("has nothing of torch")
    play(path, text, tmp_path)
