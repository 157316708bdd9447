"""Locates the C++ and CUDA headers with which users' kernels access tables and windows."""

from __future__ import annotations

from pathlib import Path

__all__ = ["include"]


def include() -> Path:
    """Returns the include folder of the package, which has headers for kernels, such as ``<wholemem/window.cuh>``.

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
