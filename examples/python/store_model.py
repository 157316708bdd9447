"""A model in a store: one process puts a .safetensors file there, and others attach to it without a copy.

    python examples/python/store_model.py

It serves a store of its own, with the program `wholemem`, which ends with it. Every process that attaches is this program
again, started as `store_model.py attach`. It needs numpy, and no GPU.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from wholemem import store

PROGRAM = os.environ.get("WHOLEMEM_PROGRAM", "wholemem")
WIDTH, LAYERS = 256, 8


def make_model() -> dict[str, np.ndarray]:
    """Layers that each turn their input round and add one."""
    weight = np.roll(np.eye(WIDTH, dtype=np.float32), 1, axis=0)
    model = {}
    for layer in range(LAYERS):
        model[f"layers.{layer}.weight"] = weight
        model[f"layers.{layer}.bias"] = np.ones(WIDTH, np.float32)
    return model


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The format is a length, a header in JSON, and the bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def map_of(array: np.ndarray) -> str:
    """The file behind an array's memory: where it is the same in two processes, their memory is the same."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            place, _, _, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in place.split("-"))
            if start <= address < end:
                return inode
    raise LookupError(address)


def run_model(model: store.Pack) -> tuple[np.ndarray, str]:
    """The model's answer, and where its weights are."""
    hidden = np.arange(WIDTH, dtype=np.float32)
    for layer in range(LAYERS):
        # Views of the store's memory, which they keep. Nothing is read before it is used.
        weight, bias = (np.from_dlpack(model[f"layers.{layer}.{part}"]) for part in ("weight", "bias"))
        hidden = weight @ hidden + bias
    return hidden, map_of(weight)


def attach() -> None:
    """What each other process does."""
    with store.Client() as client:
        model = client.get("model", timeout=60)
    # The client is closed, and the model stays.
    answer, memory = run_model(model)
    print(json.dumps({"tensors": len(model), "answer": answer[:4].tolist(), "memory": memory}))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket, path = os.path.join(folder, "socket"), Path(folder, "model.safetensors")
        os.environ["WHOLEMEM_SOCKET"] = socket
        serve = [PROGRAM, "serve", "--listen", socket, "--size", "256MiB", "--parent", str(os.getpid())]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout and server.stdout.readline().startswith("serving")
            write_safetensors(path, make_model())
            subprocess.run([PROGRAM, "put", "model", str(path)], check=True)
            me = [sys.executable, __file__, "attach"]
            said = [json.loads(subprocess.check_output(me)) for _ in range(2)]
            for number, one in enumerate(said, start=1):
                print(f"process {number} attached {one['tensors']} tensors, and answers {one['answer']}")
            mine = store.Client().get("model")
            same = {one["memory"] for one in said} == {run_model(mine)[1]}
            print("all of them read the same memory" if same else "each has its own memory")
            server.terminate()


if __name__ == "__main__":
    attach() if sys.argv[1:] == ["attach"] else main()
