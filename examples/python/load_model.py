"""Loads a model of several .safetensors files in several processes, of which one reads each file and all map the same memory.

    python examples/python/load_model.py [FOLDER]

Without a folder, it saves a small model first: one of `transformers` with `--with transformers`, otherwise a plain torch module. It
serves its own store, with the program `wholemem`, which ends with it. Each process runs the model, and the outputs are compared with
that of the model that was saved. A folder must have been saved by `save_pretrained` of `transformers`; then only the processes are
compared with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, Optional

import wholemem
from wholemem import errors, store
from wholemem.safetensors import INDEX, load_file, load_model, names_of

PROGRAM = os.environ.get("WHOLEMEM_PROGRAM", "wholemem")
WIDTH, LAYERS, WORDS = 64, 4, 500
TOKENS = [3, 1, 4, 1, 5]


def plain_module() -> Any:
    """Creates a torch module whose tied weight is stored once, as in language models."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(WORDS, WIDTH)
            layers = [torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(LAYERS)]
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for layer in self.layers:
                x = layer(x)
            return x @ self.words.weight.T

    return Model().eval()


def save_sharded(module: Any, folder: Path, shards: int = 3) -> None:
    """Saves a torch module as several .safetensors files with an index, as `save_pretrained` of `transformers` does."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, data = {}, b""
        for name in list(tensors)[shard::shards]:
            content = tensors[name].numpy().tobytes()
            shape, offsets = list(tensors[name].shape), [len(data), len(data) + len(content)]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            data, weight_map[name] = data + content, file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save(folder: Path, way: str) -> Any:
    """Saves a small model in several files, and returns it."""
    import torch

    torch.manual_seed(0)
    if way == "torch":
        module = plain_module()
        save_sharded(module, folder)
        return module
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = dict(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, vocab_size=WORDS)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


def load(folder: Path, way: str) -> Any:
    """Creates the model with its parameters in the memory of the store."""
    import torch

    if way == "torch":
        with torch.device("meta"):  # without memory
            module = plain_module()
        load_model(module, folder)
        return module
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])
    # Creates the buffers that are not saved, ties weights, and takes the tensors as parameters.
    return model.from_pretrained(None, config=config, state_dict=load_file(folder)).eval()


def scores(model: Any) -> Any:
    import torch

    with torch.inference_mode():
        outcome = model(torch.tensor([TOKENS]))
    return getattr(outcome, "logits", outcome).float().numpy()


def shared_kib(model: Any) -> tuple[int, int]:
    """Returns how many KiB of the parameters are in the memory of the store, and how many KiB of that this process has copied."""
    addresses = {tensor.data_ptr() for tensor in model.parameters()}
    lengths = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    within, copied, found = False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = {address for address in addresses if start <= address < end}
            within = "wholemem-object" in line and bool(inside)
            found += sum(lengths[address] for address in inside) if within else 0
        elif within and line.startswith("Anonymous:"):
            copied += int(line.split()[1])
    return found >> 10, copied


def work(comm: wholemem.Communicator, folder: Path, way: str) -> Any:
    """Loads and runs the model in one process."""
    import torch

    torch.set_num_threads(1)
    with warnings_ignored():
        model = load(folder, way)
        result = scores(model)
    comm.barrier()  # no process counts pages that another one is still loading
    total = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in model.parameters()}.values())
    return result, total >> 10, *shared_kib(model)


@contextlib.contextmanager
def warnings_ignored() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(folder: Path, saved: Optional[Any], way: str, ranks: int) -> None:
    import numpy as np

    results = wholemem.run(work, folder, way, ranks=ranks, device="cpu")
    with store.Client() as client:
        versions = [client.stat(name).version for name in names_of(folder)]
    if set(versions) != {1}:
        sys.exit("error: a file was loaded more than once")
    print(f"{ranks} processes loaded {len(versions)} files, each file once, with {way}")
    expected = results[0][0] if saved is None else scores(saved)
    for rank, (result, total, shared, copied) in enumerate(results):
        if not np.allclose(result, expected, atol=1e-4):
            sys.exit(f"error: the output of rank {rank} differs")
        if shared < total or copied > 0:
            sys.exit(f"error: rank {rank} has {shared} of {total} KiB in the store, and a copy of {copied} KiB")
    print("all parameters are in the memory of the store, and no process has a copy")
    print("the outputs equal those of the saved model" if saved is not None else "the outputs of all processes are equal")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="a folder with a model of transformers")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="the device of the model")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="the number of processes (%(default)s)")
    parser.add_argument("--with", dest="way", choices=["torch", "transformers"], default="torch", help="what runs the model")
    options = parser.parse_args()
    way = "transformers" if options.folder else options.way
    for needed in dict.fromkeys(["torch", way]):
        if find_spec(needed) is None:
            parser.exit(1, f"error: {needed} is not installed, so this example did not run\nhint: pip install {needed}\n")
    if not shutil.which(PROGRAM):
        parser.error(f"there is no program `{PROGRAM}`: the wheel has it, see the README")
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as temporary, warnings_ignored():
        folder, saved = options.folder, None
        if folder is None:
            folder = Path(temporary, "model")
            folder.mkdir()
            saved = save(folder, options.way)
        socket = os.path.join(temporary, "socket")
        os.environ["WHOLEMEM_SOCKET"] = socket
        size = 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) + (64 << 20)
        serve = [PROGRAM, "serve", "--listen", socket, "--size", str(size), "--parent", str(os.getpid())]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout and server.stdout.readline().startswith("serving")
                run(folder, saved, "transformers" if options.folder else options.way, options.ranks)
            finally:
                server.terminate()


if __name__ == "__main__":
    try:
        main()
    except (errors.Error, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
