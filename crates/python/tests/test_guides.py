"""Tests that examples, tutorials and the README run as written and print the documented output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from launcher import PROGRAM, launch, run, script

import wholemem

# The root folder of the repository, or of a test bundle on another machine.
ROOT = next(folder for folder in Path(__file__).parents if (folder / "examples/python").is_dir())
# The requirement, the command and the expected output of each example.
EXAMPLES = re.findall(
    r"^```console(?: (\w+))?\n\$ (.*?)\n(.*?)^```",
    (ROOT / "examples/python/README.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
TUTORIALS = sorted((ROOT / "docs/python").glob("*.md"))


def there_is(needed: str) -> bool:
    """Returns whether the requirement of an example or tutorial is met: a GPU for torch, or a module."""
    if needed == "cuda":
        torch = find_spec("torch") and import_module("torch")
        return bool(torch and torch.cuda.is_available())
    return not needed or find_spec(needed) is not None


@pytest.mark.parametrize(("needs", "command", "prints"), EXAMPLES, ids=[command for _, command, _ in EXAMPLES])
def test_an_example_prints_the_documented_output(needs: str, command: str, prints: str) -> None:
    if not there_is(needs):
        pytest.skip(f"needs {needs}")
    programs = {"python": sys.executable, "wholemem": PROGRAM}
    words = [programs.get(word, word) for word in shlex.split(command)]
    environment = {**os.environ, "WHOLEMEM_PROGRAM": PROGRAM, "NO_COLOR": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    # The order in which ranks print their lines varies, so the lines are sorted.
    order = sorted if words[0] == PROGRAM else list
    assert (order(ended.stdout.splitlines()), ended.stderr) == (order(prints.splitlines()), "")


def test_every_example_is_documented() -> None:
    described = {word for _, command, _ in EXAMPLES for word in shlex.split(command) if word.endswith(".py")}
    assert described == {str(path.relative_to(ROOT)) for path in (ROOT / "examples/python").glob("*.py")}


@pytest.mark.parametrize("path", sorted((ROOT / "examples/python").glob("*.py")), ids=lambda path: str(path.stem))
def test_the_help_of_an_example_names_its_launcher(path: Path) -> None:
    if path.stem == "transformer" and not there_is("torch"):
        pytest.skip("needs torch")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.run([sys.executable, path, "--help"], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert f"python examples/python/{path.name}" in process.stdout
    wrong = subprocess.run([sys.executable, path, "--device", "tpu"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2 and "usage:" in wrong.stderr


INTERRUPTED = """
import runpy, signal, sys

def handle(number, frame):
    # Raises `KeyboardInterrupt`, as Ctrl-C does, when the example has imported its modules and runs `main`.
    if frame.f_code.co_name == "main":
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_ctrl_c_ends_an_example_without_a_traceback() -> None:
    # The example waits for a rank that does not exist.
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "WHOLEMEM_ID": wholemem.unique_id()}
    command = [*script(INTERRUPTED), str(ROOT / "examples/python/tensor_parallel.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("needs", ["", "torch"])
def test_the_readme_runs(needs: str) -> None:
    if not there_is(needs):
        pytest.skip(f"needs {needs}")
    block = rf"^```python{needs and ' ' + needs}\n(.*?)^```"
    (text,) = re.findall(block, (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    # The README's program with numpy arrays runs on the host, so GPUs are hidden.
    environment = {**os.environ, **({} if needs else {"CUDA_VISIBLE_DEVICES": ""})}
    ended = launch(4, text, env=environment)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def blocks(path: Path, has: set[str]) -> str:
    """Returns the Python code of a tutorial, without the blocks that need modules or devices other than those in ``has``."""
    found = re.findall(r"^```python(?: (\w+))?\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(text for needs, text in found if not needs or needs in has)


def play(path: Path, text: str, folder: Path) -> None:
    """Runs the Python code of a tutorial: as the number of ranks in its first ``wholemem launch -n`` command, or as one process if
    it has no such command."""
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
    text = blocks(path, {needed for needed in ("torch", "cuda") if there_is(needed)})
    if not there_is("torch"):
        pytest.skip("needs torch")
    if text == blocks(path, set()):
        pytest.skip("has nothing of torch")
    play(path, text, tmp_path)
