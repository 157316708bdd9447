"""What the README shows runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

from world import launch

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_runs() -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    ended = launch(4, text)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
