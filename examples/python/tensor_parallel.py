"""A layer of a transformer whose weights are divided among ranks: each computes its part, and an all-reduce adds them up.

Every rank keeps its part of the sum in a window, so that the others read it where it is.
"""

import numpy as np

import wholemem

TOKENS, WIDTH, HIDDEN = 32, 256, 1024


def main() -> None:
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

        whole = np.maximum(x @ up, 0) @ down
        same = comm.all_gather(y).numpy()
        print(
            f"rank {comm.rank} has columns {mine.start}..{mine.stop},",
            "close to the whole" if np.allclose(y, whole, atol=1e-5) else "far from the whole",
            "and the same on all ranks" if (same == y).all() else "and different on others",
            flush=True,
        )
        comm.barrier()


if __name__ == "__main__":
    main()
