"""Loads ``.safetensors`` files through a store: one process reads the file, and all processes map the same memory.

The functions have the names and arguments of ``safetensors.torch``, which is not needed::

    from wholemem.safetensors import load_file

    state = load_file("model.safetensors")                  # or model.safetensors.index.json, or the folder of the model
    model.load_state_dict(state, assign=True)

The first process that loads a file copies it to the store, and the others wait for it and then use its memory. Each file becomes one
pack, which stays in the store after the processes have ended, until it is deleted: ``client.delete(name)`` for each name of
:func:`names_of`. A file that was changed is loaded again, under another name. If several processes load a model of several files at
once, each file is read by one of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import time
from math import prod
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from ._native import Array
from .errors import BadFile, OverQuota, Timeout, Unsupported
from .store import Client, Pack

__all__ = ["load_arrays", "load_file", "load_model", "names_of"]

StrPath = Union[str, "os.PathLike[str]"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The names of element types in `.safetensors` files, with their names in this package and their sizes in bytes.
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}

# The longest header of a file, which is that of the reference implementation.
_MAX_HEADER = 100_000_000

# The seconds between two attempts to lock a file that another process loads.
_PAUSE = 0.02


class _Tensor(NamedTuple):
    """A tensor in a file: its element type and shape, and the range of its bytes in the file."""

    dtype: str
    shape: Tuple[int, ...]
    start: int
    end: int


def load_arrays(
    path: StrPath, *, client: Optional[Client] = None, name: Optional[str] = None, timeout: Optional[float] = None
) -> Dict[str, Array]:
    """Returns the tensors of a ``.safetensors`` file, or of a model of several files, as arrays in the memory of a store.

    ``array.numpy()`` and ``torch.from_dlpack(array)`` use the memory without a copy, and keep it alive.

    Args:
        path: The file, the ``.safetensors.index.json`` of a model of several files, or the folder of a model.
        client: A client of the store. ``None`` connects to the default store.
        name: The beginning of the names of the objects. ``None`` derives it from the files, their sizes and their times. Objects that
            have the given names already are used as they are.
        timeout: Seconds to wait for a file that another process is loading. ``None`` is no limit.

    Returns:
        The arrays by the names of the tensors.

    Raises:
        wholemem.errors.BadFile: A file is missing or invalid.
        wholemem.errors.OverQuota: The model is larger than the free memory of the store.
        wholemem.errors.Timeout: Another process did not finish loading in time.
        wholemem.errors.Unsupported: A tensor has an element type that this package does not have.
    """
    if client is None:
        with Client() as own:
            return load_arrays(path, client=own, name=name, timeout=timeout)
    files, wanted = _files_of(Path(path))
    objects = dict(zip(files, _object_names(files, name)))
    packs: Dict[Path, Pack] = {}
    end = None if timeout is None else time.monotonic() + timeout
    # In the first round, each process loads files that no other process is loading.
    for is_waiting in (False, True):
        for file in files:
            if file not in packs:
                pack = _load(file, client, objects[file], end if is_waiting else 0.0)
                if pack is not None:
                    packs[file] = pack
    if len(packs) < len(files):
        missing = next(file for file in files if file not in packs)
        raise Timeout(f"another process did not finish loading {missing} within {timeout:g} seconds")
    arrays = {tensor: array for pack in packs.values() for tensor, array in pack.items()}
    if wanted is None:
        return arrays
    for tensor, file in wanted.items():
        if tensor not in packs[file]:
            raise BadFile(f"{file} has no tensor `{tensor}`, which the index of the model lists")
    return {tensor: arrays[tensor] for tensor in wanted}


def load_file(
    filename: StrPath,
    device: Any = "cpu",
    *,
    client: Optional[Client] = None,
    name: Optional[str] = None,
    timeout: Optional[float] = None,
) -> Dict[str, Any]:
    """Returns the tensors of a ``.safetensors`` file as torch tensors in the memory of a store, as ``safetensors.torch.load_file`` does
    in memory of the process. It also accepts a model of several files.

    The tensors are copy-on-write: a page that a process writes is copied for that tensor of that process.

    Args:
        filename: The file, the ``.safetensors.index.json`` of a model of several files, or the folder of a model.
        device: The device of the tensors. On a GPU, each process has its own copy, made from the memory of the store.
        client: A client of the store. ``None`` connects to the default store.
        name: The beginning of the names of the objects. ``None`` derives it from the files, their sizes and their times.
        timeout: Seconds to wait for a file that another process is loading. ``None`` is no limit.

    Returns:
        The tensors by their names.

    Raises:
        wholemem.errors.BadFile: A file is missing or invalid.
        wholemem.errors.OverQuota: The model is larger than the free memory of the store.
        wholemem.errors.Timeout: Another process did not finish loading in time.
    """
    import torch

    arrays = load_arrays(filename, client=client, name=name, timeout=timeout)
    return {tensor: torch.from_dlpack(array).to(device) for tensor, array in arrays.items()}


def load_model(
    model: Any,
    filename: StrPath,
    strict: bool = True,
    device: Any = "cpu",
    *,
    client: Optional[Client] = None,
    name: Optional[str] = None,
    timeout: Optional[float] = None,
) -> Tuple[List[str], List[str]]:
    """Makes the tensors of a ``.safetensors`` file the parameters and buffers of a torch module, without a copy. The module may have been
    created on the device ``meta``, without memory.

    Args:
        model: The module.
        filename: The file, the ``.safetensors.index.json`` of a model of several files, or the folder of a model.
        strict: Whether the names of the module and of the file must be the same.
        device: The device of the tensors.
        client: A client of the store. ``None`` connects to the default store.
        name: The beginning of the names of the objects. ``None`` derives it from the files, their sizes and their times.
        timeout: Seconds to wait for a file that another process is loading. ``None`` is no limit.

    Returns:
        The names that only the module has, and the names that only the file has.

    Raises:
        RuntimeError: Names or shapes differ, and ``strict`` is true.
        wholemem.errors.BadFile: A file is missing or invalid.
    """
    tensors = load_file(filename, device, client=client, name=name, timeout=timeout)
    outcome = model.load_state_dict(tensors, strict=strict, assign=True)
    return list(outcome.missing_keys), list(outcome.unexpected_keys)


def names_of(path: StrPath, *, name: Optional[str] = None) -> List[str]:
    """Returns the names of the objects that a model has in a store, one for each file.

    Args:
        path: The file, the ``.safetensors.index.json`` of a model of several files, or the folder of a model.
        name: The beginning of the names, as passed to :func:`load_arrays`.

    Raises:
        wholemem.errors.BadFile: A file is missing or invalid.
    """
    return _object_names(_files_of(Path(path))[0], name)


def _files_of(path: Path) -> Tuple[List[Path], Optional[Dict[str, Path]]]:
    """Returns the files of a model, and for several files the file of each tensor."""
    if path.is_dir():
        index = path / INDEX
        path = index if index.is_file() else path / SINGLE
    if path.suffix != ".json":
        return [path], None
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        wanted = {str(tensor): path.parent / str(file) for tensor, file in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"cannot read the index {path}: {error!r}") from error
    return sorted(set(wanted.values())), wanted


def _object_names(files: List[Path], name: Optional[str]) -> List[str]:
    if name is not None:
        return [name] if len(files) == 1 else [f"{name}.{number}" for number in range(len(files))]
    return [f"safetensors/{_digest(file)}" for file in files]


def _digest(file: Path) -> str:
    """Returns a text that identifies the content of a file, as far as its metadata shows."""
    try:
        stat = file.stat()
    except OSError as error:
        raise BadFile(f"cannot open {file}: {error.strerror}") from error
    identity = (str(file.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()


def _load(file: Path, client: Client, name: str, end: Optional[float]) -> Optional[Pack]:
    """Returns the pack of a file, and loads it if no process has. Returns ``None`` if another process is loading it until ``end``."""
    found = _pack(client, name)
    if found is not None:
        return found
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BadFile(f"cannot open {file}: {error.strerror}") from error
    try:
        while not _lock(descriptor):
            if end is not None and time.monotonic() >= end:
                return None
            time.sleep(_PAUSE)
        # Another process may have loaded the file before it was locked.
        found = _pack(client, name)
        if found is None:
            _copy(file, descriptor, client, name)
            found = client.get(name)
        return found
    finally:
        os.close(descriptor)  # releases the lock


def _pack(client: Client, name: str) -> Optional[Pack]:
    found = client.get(name, default=None)
    if found is not None and not isinstance(found, Pack):
        raise BadFile(f"the object `{name}` of the store is not a pack", hint="pass another name")
    return found


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks: several processes may load the file, and the last one replaces the objects of the others.
    return True


def _copy(file: Path, descriptor: int, client: Client, name: str) -> None:
    """Copies the tensors of a file to a new pack."""
    tensors = _parse(file, descriptor)
    layouts = {tensor: (entry.shape, entry.dtype) for tensor, entry in tensors.items()}
    if not tensors:
        client.put(name, {})
        return
    try:
        draft = client.create_pack(name, layouts)
    except OverQuota as error:
        error.hint = "serve the store with more memory: `wholemem serve --size`"
        raise
    with draft:
        for tensor, entry in tensors.items():
            _read(file, descriptor, draft[tensor].memoryview(), entry)


def _read(file: Path, descriptor: int, view: memoryview, entry: _Tensor) -> None:
    # Sealing the draft requires that no view of its memory is left.
    with view, view.cast("B") as data:
        done = 0
        while done < len(data):
            with data[done:] as rest:
                count = os.preadv(descriptor, [rest], entry.start + done)
            if count == 0:
                raise BadFile(f"{file} became shorter while it was loaded")
            done += count


def _parse(file: Path, descriptor: int) -> Dict[str, _Tensor]:
    """Parses and checks the header of a file."""

    def check(condition: bool, reason: str) -> None:
        if not condition:
            raise BadFile(f"{file} is not a valid .safetensors file: {reason}")

    size = os.fstat(descriptor).st_size
    first = os.pread(descriptor, 8, 0)
    check(len(first) == 8, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", first)
    check(length <= min(_MAX_HEADER, size - 8), f"the length of its header is {length}")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except ValueError as error:
        raise BadFile(f"{file} is not a valid .safetensors file: {error}") from error
    check(isinstance(header, dict), "its header is not an object")
    return {tensor: _parse_tensor(file, tensor, value, 8 + length, size) for tensor, value in header.items() if tensor != "__metadata__"}


def _parse_tensor(file: Path, tensor: str, value: Any, start: int, size: int) -> _Tensor:
    invalid = BadFile(f"{file} is not a valid .safetensors file: the description of `{tensor}` is invalid")
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise invalid from None
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise invalid
    if dtype not in _DTYPES:
        raise Unsupported(f"the tensor `{tensor}` of {file} has the element type {dtype}, which is not supported")
    element, length = _DTYPES[dtype]
    if end - begin != prod(shape) * length or start + end > size:
        raise invalid
    return _Tensor(element, shape, start + begin, start + end)
