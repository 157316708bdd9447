"""What the README shows runs as it is written there, and examples print what is said of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from world import PROGRAM, launch

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(
    r"^\$ wholemem launch (.*) -- python (.*)\n((?:\[.*\n)+)", (ROOT / "examples/python/README.md").read_text(), re.MULTILINE
)


def test_the_readme_runs() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    ended = launch(4, text)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_every_example_is_told_of() -> None:
    assert {Path(path).name for _, path, _ in EXAMPLES} == set(os.listdir(ROOT / "examples/python")) - {"README.md"}


@pytest.mark.parametrize(("options", "path", "printed"), EXAMPLES, ids=[path for _, path, _ in EXAMPLES])
def test_an_example_prints_what_is_said(options: str, path: str, printed: str) -> None:
    command = [PROGRAM, "launch", *options.split(), "--", sys.executable, path]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert sorted(ended.stdout.splitlines()) == sorted(printed.splitlines()), ended.stderr
