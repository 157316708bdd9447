"""Runs a small transformer whose heads and matrices are divided among ranks, with two all-reduces in each layer.

    wholemem launch -n 2 -- python examples/python/transformer.py

Every rank generates the same tokens and compares them with those of the whole model, which it also runs. It needs torch;
`tensor_parallel.py` is one layer in numpy.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Callable

try:
    import torch
except ModuleNotFoundError:
    sys.exit("error: torch is not installed\nhint: examples/python/tensor_parallel.py needs numpy only")

import wholemem
import wholemem.torch as wm

LAYERS, HEADS, WIDTH, HIDDEN, WORDS = 4, 8, 256, 1024, 1000
CONTEXT, TOKENS = 32, 24

# A function that sums a tensor over all ranks in place.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def share(count: int, rank: int, size: int) -> slice:
    """Returns the range of ``count`` elements (heads or columns) that one rank has."""
    return slice(rank * count // size, (rank + 1) * count // size)


class Transformer:
    """A rank's share of the model: some heads of each attention block, and some columns and rows of the feed-forward matrices."""

    def __init__(self, rank: int, size: int, part: torch.Tensor, reduce: Reduce) -> None:
        # All ranks create the same model; a real program would load only the share of each rank.
        generator = torch.Generator().manual_seed(0)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[0] ** 0.5

        self.part, self.reduce = part, reduce
        self.words, self.places = matrix(WORDS, WIDTH).to(part.device), matrix(CONTEXT, WIDTH).to(part.device)
        self.layers = []
        for _ in range(LAYERS):
            attend, leave = matrix(WIDTH, 3, HEADS, WIDTH // HEADS), matrix(HEADS, WIDTH // HEADS, WIDTH)
            up, down = matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)
            heads, columns = share(HEADS, rank, size), share(HIDDEN, rank, size)
            shares = attend[:, :, heads].flatten(1), leave[heads].flatten(0, 1), up[:, columns], down[columns]
            self.layers.append([weight.contiguous().to(part.device) for weight in shares])

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all words of the vocabulary for the next token."""
        x = self.words[tokens] + self.places
        for attend, leave, up, down in self.layers:
            x = x + self.sum(self.attention(norm(x) @ attend), leave)
            x = x + self.sum(torch.relu(norm(x) @ up), down)
        return norm(x)[-1] @ self.words.T

    def attention(self, mixed: torch.Tensor) -> torch.Tensor:
        """Computes the attention of this rank's heads."""
        query, key, value = mixed.view(CONTEXT, 3, -1, WIDTH // HEADS).permute(1, 2, 0, 3)
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return output.transpose(0, 1).flatten(1)

    def sum(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Multiplies by a matrix whose rows are divided among ranks, and sums the products of all ranks."""
        torch.mm(x, rows, out=self.part)
        return self.reduce(self.part)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (WIDTH,))


def generate(scores_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Generates tokens greedily: each is the most likely next token. Returns the tokens, and the scores of the whole vocabulary
    from which the last token was chosen."""
    tokens = torch.arange(CONTEXT, device=device)
    for _ in range(TOKENS):
        scores = scores_of(tokens)
        tokens = torch.cat([tokens[1:], scores.argmax(keepdim=True)])
    return tokens[-TOKENS:], scores


def captured(model: Transformer, fast: wm.FastAllreduce) -> Callable[[torch.Tensor], torch.Tensor]:
    """Captures the model, including its all-reduces, in a CUDA graph, and returns a function that replays the graph."""
    tokens, stream, graph = torch.arange(CONTEXT, device=fast.device), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(tokens)  # libraries initialize in their first call, which cannot be captured
    torch.cuda.current_stream().wait_stream(stream)
    with fast.capture(), torch.cuda.graph(graph):
        scores = model(tokens)

    def replay(inputs: torch.Tensor) -> torch.Tensor:
        tokens.copy_(inputs)
        graph.replay()
        return scores.clone()

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the device of the ranks")
    parser.add_argument("--graph", action="store_true", help="capture the model in a CUDA graph and replay it")
    options = parser.parse_args()
    if options.graph and options.device == "cpu":
        parser.error("`--graph` needs a GPU: add `--device cuda`")

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))

    with torch.inference_mode(), wm.FastAllreduce(rank, size, device=device) as fast:
        part = torch.zeros(CONTEXT, WIDTH, device=device)
        fast.register_buffer(part)
        model = Transformer(rank, size, part, lambda part: fast.all_reduce(part, part))
        tokens, scores = generate(captured(model, fast) if options.graph else model, device)

        whole = Transformer(0, 1, torch.zeros(CONTEXT, WIDTH, device=device), lambda part: part)
        expected, expected_scores = generate(whole, device)
        all_scores = wm.all_gather(fast.comm, scores)
        where = f"{options.device}, in a graph" if options.graph else options.device
        heads = share(HEADS, rank, size)
        print(f"rank {rank} has heads {heads.start}..{heads.stop}, and generated {TOKENS} tokens on {where}", flush=True)
        if not (tokens == expected).all() or not torch.allclose(scores, expected_scores, atol=1e-3):
            sys.exit("error: the tokens or scores differ from those of the whole model")
        if not (all_scores == scores).all():
            sys.exit("error: the ranks have different scores")
        print("the tokens equal those of the whole model, and the scores are bitwise equal on all ranks", flush=True)
        fast.comm.barrier()


if __name__ == "__main__":
    try:
        main()
    except wholemem.errors.Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
