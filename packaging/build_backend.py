"""The build backend of `pip install .`: maturin, with the program and the headers for kernels added to the wheel.

If Rust is missing, the backend exits with one error line. maturin alone would install Rust into a temporary folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import maturin

ROOT = Path(__file__).resolve().parent.parent
# The folder `data` of pyproject.toml, from which maturin adds files to the wheel. maturin requires that the folder exists.
DATA = ROOT / "target/wheel-data"
HEADERS = ROOT / "crates/wholemem/kernels/include/wholemem"

# The files with the completions for each shell, in the folder `share` of an environment.
COMPLETIONS = {
    "bash": "bash-completion/completions/wholemem",
    "zsh": "zsh/site-functions/_wholemem",
    "fish": "fish/vendor_completions.d/wholemem.fish",
}

Settings = Optional[Mapping[str, Any]]


def prepare() -> None:
    """Exits with an error if cargo is missing, and creates the folder from which maturin adds files to the wheel."""
    if shutil.which("cargo") is None:
        sys.exit(
            "error: cannot build wholemem from source: `cargo` is not on the PATH; "
            "hint: install Rust from https://rustup.rs and try again"
        )
    DATA.mkdir(parents=True, exist_ok=True)


def stage() -> None:
    """Builds the program `wholemem`, and copies the program, its manual pages and completions, and the headers to the folder from which maturin adds files to the
    wheel."""
    prepare()
    build = ["cargo", "build", "--locked", "--profile", "dist", "--package", "wholemem-cli"]
    messages = [*build, "--message-format", "json-render-diagnostics"]
    result = subprocess.run(messages, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit("error: cargo cannot build the program `wholemem`")
    executables = [json.loads(line).get("executable") for line in result.stdout.splitlines()]
    (program,) = filter(None, executables)
    shutil.rmtree(DATA)
    (DATA / "scripts").mkdir(parents=True)
    shutil.copy2(program, DATA / "scripts/wholemem")
    share = DATA / "data/share"
    subprocess.run([program, "man", "--dir", share / "man/man1"], check=True)
    for shell, name in COMPLETIONS.items():
        path = share / name
        path.parent.mkdir(parents=True)
        path.write_bytes(subprocess.run([program, "completions", shell], check=True, stdout=subprocess.PIPE).stdout)
    shutil.copytree(HEADERS, DATA / "platlib/wholemem/include/wholemem")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    prepare()
    return []


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    prepare()
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: Optional[str] = None) -> str:
    stage()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: Optional[str] = None) -> str:
    stage()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    prepare()
    return maturin.build_sdist(sdist_directory, config_settings)
