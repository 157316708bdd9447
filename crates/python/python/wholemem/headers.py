"""The headers for kernels that reach into whole memory and windows by themselves."""

from __future__ import annotations

from pathlib import Path

__all__ = ["include"]


def include() -> Path:
    """The folder to give to a compiler, so that kernels can include ``<wholemem/window.cuh>`` and the others.

    >>> import wholemem
    >>> (wholemem.include() / "wholemem" / "window.cuh").is_file()
    True

    The headers are C++11, for CUDA and for the host: ``nvcc -I$(python -c 'import wholemem; print(wholemem.include())')``.
    They belong to this version of the package: kernels are compiled again when it changes.
    """
    folder = Path(__file__).resolve().parent / "include"
    if not (folder / "wholemem").is_dir():
        raise FileNotFoundError(
            f"this installation has no headers in {folder}\n"
            "hint: install a wheel of `cargo xtask wheel`, or `pip install .`"
        )
    return folder
