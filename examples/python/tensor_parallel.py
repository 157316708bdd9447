"""Computes a transformer layer whose weights are divided among ranks: each rank computes its part, and an all-reduce sums the
parts.

    wholemem launch -n 2 -- python examples/python/tensor_parallel.py

Every rank writes its part of the sum to a window, so that other ranks read it in place, and compares the sum with the result of the
whole layer. It needs only numpy; `transformer.py` is a whole model in torch.
"""

import argparse
import sys

import numpy as np

import wholemem

TOKENS, WIDTH, HIDDEN = 32, 256, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with wholemem.Communicator.from_env(device="cpu") as comm:
        # All ranks create the same weights; a real program would load only the part of each rank.
        rng = np.random.default_rng(0)
        x = rng.standard_normal((TOKENS, WIDTH), np.float32)
        up = rng.standard_normal((WIDTH, HIDDEN), np.float32) / WIDTH
        down = rng.standard_normal((HIDDEN, WIDTH), np.float32) / HIDDEN

        mine = slice(comm.rank * HIDDEN // comm.size, (comm.rank + 1) * HIDDEN // comm.size)
        window = comm.mem_alloc(TOKENS * WIDTH * 4)
        y = window.local("float32", (TOKENS, WIDTH)).numpy()
        np.matmul(np.maximum(x @ up[:, mine], 0), down[mine], out=y)
        comm.all_reduce(y, y)

        outputs = comm.all_gather(y)
        if not np.allclose(y, np.maximum(x @ up, 0) @ down, atol=1e-5):
            sys.exit("error: the sum differs from the result of the whole layer")
        if not (outputs == y).all():
            sys.exit("error: the ranks have different sums")
        print(
            f"rank {comm.rank} has columns {mine.start}..{mine.stop}: the sum equals that of the whole layer,",
            "and is bitwise equal on all ranks",
            flush=True,
        )
        comm.barrier()


if __name__ == "__main__":
    try:
        main()
    except wholemem.errors.Error as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
