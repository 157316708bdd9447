"""``python -m wholemem``: runs the program `wholemem` that was installed with this package.

The process becomes the program, so that signals and the exit code are the program's own.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Optional


def find_program() -> Optional[Path]:
    """Returns the path of the installed program ``wholemem``: a file of the package's record, or ``bin/wholemem`` after ``pip
    install --target``.
    """
    files = metadata.files("wholemem") or []
    recorded = [Path(str(file.locate())) for file in files if file.name == "wholemem" and file.parent.name == "bin"]
    beside = Path(__file__).resolve().parent.parent / "bin" / "wholemem"
    return next((path for path in [*recorded, beside] if os.access(path, os.X_OK) and path.is_file()), None)


def main() -> None:
    program = find_program()
    if program is None:
        sys.exit(
            "error: this installation has no program `wholemem`\n"
            "hint: install a wheel of `cargo xtask wheel`, or `pip install .`"
        )
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
