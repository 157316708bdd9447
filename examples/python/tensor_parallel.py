"""A layer of a transformer whose weights are divided among ranks: each computes its part, and all-reduce adds them up.

    wholemem launch -n 2 -- python examples/python/tensor_parallel.py

Every rank keeps its part of the sum in a window, so that the others read it where it is, and compares the sum with what the whole
layer gives. It needs numpy only; `transformer.py` is a whole model in torch.
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
        # The same on every rank; a program would load its own part only.
        rng = np.random.default_rng(0)
        x = rng.standard_normal((TOKENS, WIDTH), np.float32)
        up = rng.standard_normal((WIDTH, HIDDEN), np.float32) / WIDTH
        down = rng.standard_normal((HIDDEN, WIDTH), np.float32) / HIDDEN

        mine = slice(comm.rank * HIDDEN // comm.size, (comm.rank + 1) * HIDDEN // comm.size)
        window = comm.mem_alloc(TOKENS * WIDTH * 4)
        y = window.local("float32", (TOKENS, WIDTH)).numpy()
        np.matmul(np.maximum(x @ up[:, mine], 0), down[mine], out=y)
        comm.all_reduce(y, y)

        of_all = comm.all_gather(y)
        if not np.allclose(y, np.maximum(x @ up, 0) @ down, atol=1e-5):
            sys.exit("error: the whole layer gives something else")
        if not (of_all == y).all():
            sys.exit("error: another rank has something else")
        print(
            f"rank {comm.rank} has columns {mine.start}..{mine.stop}, and the sum is that of the whole layer,",
            "the same bits on all ranks",
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
