"""Features of a graph's nodes in one table over all ranks: each rank samples nodes of its own, gathers them and their
neighbours, wherever they are, and adds gradients to what they came from.
"""

import numpy as np

import wholemem

NODES, WIDTH, BATCH, NEIGHBOURS = 10_000, 32, 64, 5


def main() -> None:
    with wholemem.Communicator.from_env(device="cpu") as comm:
        features = wholemem.WholeTensor.create(comm, (NODES, WIDTH), "float32", location="host")
        (first, end) = features.local_rows
        features.local().numpy()[:] = np.arange(first, end, dtype=np.float32)[:, None]
        gradients = wholemem.WholeTensor.create(comm, (NODES, WIDTH), "float32")
        comm.barrier()

        rng = np.random.default_rng(comm.rank)
        nodes = rng.integers(0, NODES, BATCH)
        neighbours = (nodes[:, None] + np.arange(NEIGHBOURS)) % NODES
        rows = features.gather(neighbours).numpy()
        assert rows.shape == (BATCH, NEIGHBOURS, WIDTH)
        assert (rows[..., 0] == neighbours).all()

        # The mean over neighbours, and back: each of them gets its share.
        share = np.full((BATCH, NEIGHBOURS, WIDTH), 1 / NEIGHBOURS, np.float32)
        gradients.scatter_add(share, neighbours)
        comm.barrier()
        total = comm.all_reduce(gradients.local().numpy().sum(keepdims=True)).numpy()
        if comm.rank == 0:
            expected = comm.size * BATCH * WIDTH
            print(f"{comm.size} ranks gathered {rows.size} features each; gradients add up to {expected}:",
                  np.isclose(total.item(), expected), flush=True)  # fmt: skip
        comm.barrier()


if __name__ == "__main__":
    main()
