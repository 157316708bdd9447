"""Shares a model through a store: one process puts a .safetensors file into the store, and others attach to it without a copy.

    python examples/python/store_model.py [MODEL.safetensors]

Without a file it creates a small model, runs it in every process that attaches, and compares the outputs with its own. With a
file, every byte of every tensor is compared. It serves its own store, with the program `wholemem`, which ends with it. It uses
torch if that is installed, and otherwise numpy. With `--device cuda` the store holds the model in GPU memory, once for all
processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import numpy as np

from wholemem import Array, errors, store

PROGRAM = os.environ.get("WHOLEMEM_PROGRAM", "wholemem")
WIDTH, LAYERS = 256, 8


def make_model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    model = {}
    for layer in range(LAYERS):
        model[f"layers.{layer}.weight"] = rng.standard_normal((WIDTH, WIDTH), np.float32) / 16
        model[f"layers.{layer}.bias"] = rng.standard_normal(WIDTH, np.float32)
    return model


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors as a .safetensors file: a length, a header in JSON, and the bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def digests_of_file(path: Path) -> dict[str, str]:
    """Returns a digest of each tensor in a .safetensors file."""
    file = np.memmap(path, np.uint8, "r")
    start = 8 + int(file[:8].view("<u8")[0])
    header = json.loads(bytes(file[8:start]))
    header.pop("__metadata__", None)
    ranges = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: digest(file[start + first : start + end]) for name, (first, end) in ranges.items()}


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def bytes_of(array: Array) -> Any:
    if array.device == "cpu":
        return array.memoryview()
    import torch

    return torch.from_dlpack(array).cpu().reshape(-1).view(torch.uint8).numpy()


def run_numpy(model: Any) -> np.ndarray:
    x = np.ones(WIDTH, np.float32)
    for layer in range(LAYERS):
        x = np.tanh(model[f"layers.{layer}.weight"] @ x + model[f"layers.{layer}.bias"])
    return x


def run_torch(pack: store.Pack, device: str) -> np.ndarray:
    """Runs the model as a torch module whose parameters are in the store's memory: no process has a copy of them."""
    import torch

    with torch.device("meta"):
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    module.load_state_dict({name: torch.from_dlpack(array) for name, array in pack.items()}, assign=True)
    x = torch.ones(WIDTH, device=device)
    with torch.inference_mode():
        for layer in module["layers"]:
            x = torch.tanh(layer(x))
    parameters = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    if device == "cpu":
        # torch may write to a tensor, so each tensor has a copy-on-write mapping of its own: its address differs from the
        # array's, but the file is the same, and so are the pages as long as the tensor is not written.
        assert inodes(parameters.values()) == inodes(array.data_ptr() for array in pack.values())
        assert copied_kib(parameters.values()) == 0
    else:
        assert parameters == {name: array.data_ptr() for name, array in pack.items()}
    return x.cpu().numpy()


def maps_of(addresses: Iterable[int]) -> list[dict[str, int]]:
    """Returns, for each address, the mapping of this process that contains it, as `/proc/self/smaps` describes it
    (proc_pid_smaps(5))."""
    maps: list[dict[str, int]] = []
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first:
                start, end = (int(part, 16) for part in first.split("-"))
                maps.append({"start": start, "end": end, "inode": int(rest[3])})
            elif rest[-1] == "kB":
                maps[-1][first] = int(rest[0])
    return [next(one for one in maps if one["start"] <= address < one["end"]) for address in addresses]


def inodes(addresses: Iterable[int]) -> set[int]:
    """Returns the inodes of the files that back memory. If they are equal in two processes, so is the memory."""
    return {one["inode"] for one in maps_of(addresses)}


def copied_kib(addresses: Iterable[int]) -> int:
    """Returns the KiB of copy-on-write mappings that only this process has, because it has written to the pages."""
    return sum(one["Anonymous:"] for one in maps_of(addresses))


def attach(options: argparse.Namespace) -> dict[str, Any]:
    """Attaches to the model in the store, runs it, and returns its digests, the identity of its memory and its output."""
    with store.Client() as client:
        pack = client.get("model", timeout=60)
        # GPU memory has no inode, so the id of the object identifies it.
        memory = [client.stat("model").id]
    # The client is closed, but the memory of the model stays mapped.
    if options.device == "cpu":
        memory = sorted(inodes(array.data_ptr() for array in pack.values()))
    said = {"digests": {name: digest(bytes_of(array)) for name, array in pack.items()}, "memory": memory}
    if options.model is None:
        if options.way == "torch":
            answer = run_torch(pack, options.device)
        else:
            answer = run_numpy({name: array.numpy() for name, array in pack.items()})
        said["answer"] = answer.tolist()
    return said


def move_to_gpu() -> None:
    """Puts the model of the store into GPU memory under the same name: one copy for all processes that attach later."""
    import torch

    with store.Client() as client:
        on_host = client.get("model")
        client.put("model", {name: torch.from_dlpack(array).cuda() for name, array in on_host.items()})


def check(results: list[dict[str, Any]], path: Path, expected: Optional[np.ndarray]) -> None:
    """Compares the results of the processes that attached with the model file, and with the output of this process."""
    digests = digests_of_file(path)
    for number, result in enumerate(results, start=1):
        if result["digests"] != digests:
            sys.exit(f"error: the bytes of process {number} differ from the file")
        if expected is not None and not np.allclose(result["answer"], expected, atol=1e-4):
            sys.exit(f"error: the output of process {number} differs from that of this process")
        equal = "the bytes equal the file" if expected is None else "the bytes equal the file, and the output the model's"
        print(f"process {number} attached {len(digests)} tensors: {equal}")
    if len({tuple(result["memory"]) for result in results}) != 1:
        sys.exit("error: the processes use different memory")
    print("all processes use the same memory")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.safetensors", help="a model file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the device of the model")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="the number of processes (%(default)s)")
    parser.add_argument("--with", dest="way", choices=["torch", "numpy"], help="default: torch, if it is installed")
    parser.add_argument("--attach", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.way = options.way or ("torch" if find_spec("torch") else "numpy")
    if (options.way, options.device) == ("numpy", "cuda"):
        parser.error("numpy cannot use a GPU: install torch")
    if options.model and options.model.suffix != ".safetensors":
        parser.error(f"{options.model} is not a .safetensors file")
    if not shutil.which(PROGRAM):
        parser.error(f"there is no program `{PROGRAM}`: the wheel has it, see the README")
    if options.processes < 1:
        parser.error("at least one process is needed")
    return options


def main() -> None:
    options = parse()
    if options.attach:
        print(json.dumps(attach(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = None if options.model else make_model()
        path = options.model or Path(folder, "model.safetensors")
        if model is not None:
            write_safetensors(path, model)
        socket = os.path.join(folder, "socket")
        os.environ["WHOLEMEM_SOCKET"] = socket
        size = str(2 * path.stat().st_size + (64 << 20))
        serve = [PROGRAM, "serve", "--listen", socket, "--size", size, "--parent", str(os.getpid())]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout and server.stdout.readline().startswith("serving")
                subprocess.run([PROGRAM, "put", "model", str(path)], check=True)
                if options.device == "cuda":
                    move_to_gpu()
                command = [sys.executable, __file__, "--attach", "--device", options.device, "--with", options.way]
                command += [str(options.model)] if options.model else []
                # The processes run in sessions of their own, so that Ctrl-C interrupts only this process, which ends them.
                output = [subprocess.check_output(command, start_new_session=True) for _ in range(options.processes)]
                results = [json.loads(text) for text in output]
                if model is not None:
                    print(f"the model ran in {options.processes} other processes, with {options.way} on {options.device}")
                check(results, path, None if model is None else run_numpy(model))
            finally:
                server.terminate()


if __name__ == "__main__":
    try:
        main()
    except (errors.Error, subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
