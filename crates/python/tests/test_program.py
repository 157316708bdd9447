"""Tests ``python -m wholemem``, and the headers that come with the package. The xtask step `wheel` tests both in a wheel."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wholemem
from wholemem import __main__ as program


def test_the_program_is_found_by_the_record_of_the_installation(tmp_path: Path, monkeypatch: Any) -> None:
    class Recorded:
        def __init__(self, path: Path) -> None:
            self.path, self.name, self.parent = path, path.name, path.parent

        def locate(self) -> Path:
            return self.path

    (tmp_path / "bin").mkdir()
    installed = tmp_path / "bin" / "wholemem"
    installed.write_text("#!/bin/sh\n")
    files = [Recorded(tmp_path / "lib" / "wholemem"), Recorded(installed)]
    monkeypatch.setattr(program.metadata, "files", lambda name: files)
    if program.find_program() == installed:
        pytest.fail("a file that cannot be executed was found")
    installed.chmod(0o755)
    assert program.find_program() == installed


def test_an_installation_without_the_program_says_how_to_get_it() -> None:
    # In this process, the metadata of the package lists no files.
    text = "from wholemem import __main__ as m; m.metadata.files = lambda name: None; m.__file__ = '/nowhere/a/b'; m.main()"
    ended = subprocess.run([sys.executable, "-c", text], env=os.environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "error: this installation has no program `wholemem`\n"
        "hint: install a wheel of `cargo xtask wheel`, or `pip install .`\n"
    )


def test_the_headers_come_with_the_package(monkeypatch: Any) -> None:
    names = {path.name for path in (wholemem.include() / "wholemem").iterdir()}
    assert {"abi.cuh", "barrier.cuh", "global_ref.cuh", "ll.cuh", "window.cuh"} <= names
    monkeypatch.setattr("wholemem.headers.__file__", "/nowhere/headers.py")
    with pytest.raises(FileNotFoundError, match="no headers in /nowhere/include\nhint: "):
        wholemem.include()
