"""Gathers rows with wholemem and with its rivals, in one run, and prints how they compare.

    python3 bench/peers/gather.py host --program target/release/wholemem     numpy
    python3 bench/peers/gather.py gpu --program ./wholemem                   PyTorch, WholeGraph

`cargo xtask peers gather` prepares what it needs and calls it. All sides have a table of the same length, the same row
sizes and the same numbers of rows, fresh random indices for every call, and outputs that have left the caches. Whatever
a rival gathers is compared with what each row must hold; wholemem's own bench does that itself. For each row size the
sides take turns, lap after lap, and the ratio told is the median of the laps' ratios.

How each is called: wholemem from Rust, `tensor.gather(&stream, &indices, &output)` with operands made beforehand; numpy
as `table.take(indices, 0, output, "clip")`, the fastest of its ways to a given output (with "raise" it gathers to a
buffer first); PyTorch as `index_select(table, 0, indices, out=output)`; WholeGraph as `tensor.gather(indices)`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROW_BYTES = [4, 8, 12, 16, 32, 64, 100, 128, 130, 256, 512, 1024, 2048, 4096, 8192]
FEW_ROWS = [1, 10, 100]
POISON = 0xEE
FACTOR = -7046029254386353131  # odd: its multiples differ


def dtype_name(row_bytes):
    """The widest integers that a row is made of."""
    return next(f"int{8 * size}" for size in (8, 4, 2, 1) if row_bytes % size == 0)


class Numpy:
    """The rival on a host."""

    name = "numpy"
    payload, most_rows, ring = 64 << 20, 4 << 20, 1 << 30

    def __init__(self, table_bytes):
        import numpy

        self.np, self.version = numpy, numpy.__version__
        self.memory = numpy.empty(table_bytes, numpy.uint8)
        self.filled = None
        self.random = numpy.random.default_rng(7)

    def elements(self, first, count, dtype):
        places = self.np.arange(first, first + count, dtype=self.np.int64)
        return (places * FACTOR >> 20).astype(dtype)

    def table(self, row_bytes):
        dtype = self.np.dtype(dtype_name(row_bytes))
        flat = self.memory.view(dtype)
        if self.filled != dtype:
            for first in range(0, flat.size, 1 << 22):
                part = flat[first : first + (1 << 22)]
                part[:] = self.elements(first, part.size, dtype)
            self.filled = dtype
        width = row_bytes // dtype.itemsize
        rows = flat.size // width
        return flat[: rows * width].reshape(rows, width)

    def prepare(self, row_bytes, rows, calls, rounds):
        table = self.table(row_bytes)
        slots = max(1, min(rounds, self.ring // (2 * rows * calls * row_bytes)))
        outputs = [self.np.empty((calls, rows, table.shape[1]), table.dtype) for _ in range(slots)]
        return table, outputs

    def lap(self, table, outputs, rounds):
        """The times of some rounds, each with an output of its own."""
        prepared = []
        for output in outputs[:rounds]:
            output.view(self.np.uint8)[...] = POISON
            indices = self.random.integers(0, table.shape[0], output.shape[:2])
            prepared.append((list(indices), list(output), indices, output))
        times = []
        for indices, output, _, _ in prepared:
            take = table.take
            start = time.perf_counter()
            for index, rows in zip(indices, output):
                take(index, 0, rows, "clip")
            times.append(time.perf_counter() - start)
        for _, _, indices, output in prepared:
            self.check(indices.reshape(-1), output.reshape(-1, table.shape[1]))
        return times

    def check(self, indices, output):
        width = output.shape[1]
        columns = self.np.arange(width, dtype=self.np.int64)
        step = max(1, (1 << 22) // width)
        for first in range(0, len(indices), step):
            places = indices[first : first + step, None] * width + columns
            expected = (places * FACTOR >> 20).astype(output.dtype)
            if not self.np.array_equal(expected, output[first : first + step]):
                sys.exit(f"{self.name} gathered other rows than it was asked for")

    def measure(self, row_bytes, rows, calls, rounds):
        """The times of so many rounds, in seconds."""
        table, outputs = self.prepare(row_bytes, rows, calls, rounds)
        self.lap(table, outputs, 1)
        times = []
        while len(times) < rounds:
            times += self.lap(table, outputs, rounds - len(times))
        return times


class Torch:
    """A rival on a GPU."""

    name = "pytorch"
    payload, most_rows, slots = 2 << 30, 32 << 20, 2

    def __init__(self, table_bytes):
        import torch

        self.torch, self.version = torch, torch.__version__
        self.table_bytes = table_bytes
        self.memory = None

    def fill(self, flat):
        """Has every element say where it is."""
        torch, step = self.torch, 1 << 26
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            places = torch.arange(first, first + part.numel(), dtype=torch.int64, device="cuda")
            part.copy_((places * FACTOR) >> 20)

    def shape(self, row_bytes):
        dtype = getattr(self.torch, dtype_name(row_bytes))
        width = row_bytes // dtype.itemsize
        return self.table_bytes // row_bytes, width, dtype

    def open(self, row_bytes):
        """Makes the table, and the function that gathers from it."""
        rows, width, dtype = self.shape(row_bytes)
        if self.memory is None or self.memory.dtype != dtype:
            self.memory = None
            self.memory = self.torch.empty(self.table_bytes // dtype.itemsize, dtype=dtype, device="cuda")
            self.fill(self.memory)
        table = self.memory[: rows * width].view(rows, width)
        return lambda indices, output: self.torch.index_select(table, 0, indices, out=output)

    def close(self):
        pass

    def measure(self, row_bytes, rows, calls, rounds):
        torch = self.torch
        gather = self.open(row_bytes)
        table_rows, width, dtype = self.shape(row_bytes)
        shape = (calls, rows, width)
        outputs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(self.slots)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for turn in range(rounds + 1):
            output = outputs[turn % self.slots]
            output.view(torch.uint8).fill_(POISON)
            indices = torch.randint(0, table_rows, (calls, rows), device="cuda")
            pairs = list(zip(indices, output))
            torch.cuda.synchronize()
            start.record()
            gathered = [gather(index, part) for index, part in pairs]
            end.record()
            torch.cuda.synchronize()
            if turn > 0:
                times.append(start.elapsed_time(end) / 1e3)
            self.check(indices.view(-1), torch.cat(gathered) if calls > 1 else gathered[0])
            del gathered
        self.close()
        return times

    def check(self, indices, output):
        torch, width = self.torch, output.shape[1]
        columns = torch.arange(width, device="cuda")
        step = max(1, (1 << 25) // width)
        for first in range(0, len(indices), step):
            places = indices[first : first + step, None] * width + columns
            expected = ((places * FACTOR) >> 20).to(output.dtype)
            if not torch.equal(expected, output[first : first + step]):
                sys.exit(f"{self.name} gathered other rows than it was asked for")


class WholeGraph(Torch):
    """The rival that wholemem is a successor of: one rank, as it cannot run several on one GPU."""

    def __init__(self, table_bytes, kind):
        super().__init__(table_bytes)
        import pylibwholegraph
        import pylibwholegraph.torch as wgth

        self.name, self.kind, self.wgth = f"wholegraph {kind}", kind, wgth
        self.version = getattr(pylibwholegraph, "__version__", "")
        self.tensor = None

    comm = None

    def communicator(self):
        if WholeGraph.comm is None:
            import torch.distributed as dist

            store = dist.HashStore()
            self.torch.cuda.set_device(0)
            dist.init_process_group("nccl", store=store, rank=0, world_size=1)
            self.wgth.init(0, 1, 0, 1)
            WholeGraph.comm = self.wgth.get_global_communicator()
        return WholeGraph.comm

    def open(self, row_bytes):
        rows, width, dtype = self.shape(row_bytes)
        self.tensor = self.wgth.create_wholememory_tensor(
            self.communicator(), self.kind, "cuda", [rows, width], dtype, [width, 1]
        )
        local, _ = self.tensor.get_local_tensor(host_view=False)
        self.fill(local.view(-1))
        return lambda indices, _: self.tensor.gather(indices)

    def close(self):
        self.torch.cuda.synchronize()
        self.wgth.destroy_wholememory_tensor(self.tensor)
        self.tensor = None


def wholemem(program, where, table_bytes, row_bytes, rows, rounds):
    """wholemem's cases, one for each number of rows."""
    command = [program, "bench", "gather", "--json", "--backend", "cuda" if where == "gpu" else "host"]
    command += ["--table", str(table_bytes), "--row-bytes", str(row_bytes), "--rounds", str(rounds)]
    command += ["--rows", ",".join(map(str, rows))]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if not report["verified"]:
        sys.exit("wholemem gathered other rows than it was asked for")
    return report


def compare(args, rivals):
    """All sides for all sizes, lap after lap."""
    device, cases = None, {}
    for row_bytes in args.row_bytes:
        usual = max(1, min(rivals[0].payload // row_bytes, rivals[0].most_rows))
        rows = [*args.few, usual]
        for lap in range(args.laps):
            print(f"rows of {row_bytes} bytes, lap {lap + 1} of {args.laps}", file=sys.stderr)
            report = wholemem(args.program, args.where, args.table, row_bytes, rows, args.rounds)
            device = report["device"]
            for ours in report["cases"]:
                case = cases.setdefault((row_bytes, ours["rows"]), {"limit": [], "of_limit": [], "laps": []})
                case["calls"] = ours["calls"]
                case["limit"].append(ours["limit"])
                case["of_limit"].append(ours["of_limit"])
                rates, bests = {"wholemem": ours["value"]}, {"wholemem": ours["best"]}
                payload = ours["rows"] * ours["calls"] * row_bytes / 1e9
                for rival in rivals:
                    times = rival.measure(row_bytes, ours["rows"], ours["calls"], args.rounds)
                    rates[rival.name] = payload / statistics.median(times)
                    bests[rival.name] = payload / min(times)
                case["laps"].append((rates, bests))
    return device, [told(*key, case) for key, case in sorted(cases.items())]


def told(row_bytes, rows, case):
    """One case, as it is kept."""
    names = case["laps"][0][0]
    median = {name: statistics.median(rates[name] for rates, _ in case["laps"]) for name in names}
    best = {name: max(bests[name] for _, bests in case["laps"]) for name in names}
    ratio = {
        name: statistics.median(rates["wholemem"] / rates[name] for rates, _ in case["laps"])
        for name in names
        if name != "wholemem"
    }
    digits = lambda values: {name: float(f"{value:.4g}") for name, value in values.items()}
    return {
        "row_bytes": row_bytes,
        "rows": rows,
        "calls": case["calls"],
        "unit": "GB/s",
        "limit": float(f"{statistics.median(case['limit']):.4g}"),
        "of_limit": float(f"{statistics.median(case['of_limit']):.3g}"),
        "value": digits(median),
        "best": digits(best),
        "ratio": digits(ratio),
        "laps": len(case["laps"]),
    }


def machine(where, device):
    """What it ran on, for people."""
    if where == "gpu":
        return device
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'processor'}, {len(os.sched_getaffinity(0))} cores"


def show(report):
    """A table for people."""
    names = list(report["peers"])
    head = ["row", "rows", "wholemem", "copy", "of limit"]
    head += [word for name in names for word in (name, "ratio")]
    lines = [head]
    for case in report["cases"]:
        line = [str(case["row_bytes"]), str(case["rows"])]
        line += [f"{case['value']['wholemem']:.4g}", f"{case['limit']:.4g}", f"{case['of_limit']:.2f}"]
        for name in names:
            line += [f"{case['value'][name]:.4g}", f"{case['ratio'][name]:.2f}"]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"gathering from a table of {report['table_bytes'] >> 20} MiB on {report['machine']}; GB/s of payload")
    for line in lines:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["host", "gpu"])
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--table", type=int, help="bytes [4 GiB on a host, 16 GiB on a GPU]")
    sizes = lambda text: [int(word) for word in text.split(",") if word]
    parser.add_argument("--row-bytes", type=sizes, default=ROW_BYTES)
    parser.add_argument("--few", type=sizes, default=FEW_ROWS, help="small numbers of rows, beside the usual one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    args.table = args.table or (16 << 30 if args.where == "gpu" else 4 << 30)
    if args.where == "host":
        rivals = [Numpy(args.table)]
    else:
        rivals = [Torch(args.table)]
        try:
            rivals += [WholeGraph(args.table, kind) for kind in ("chunked", "continuous")]
        except (ImportError, OSError) as error:
            print(f"WholeGraph is left out: {error}", file=sys.stderr)
    device, cases = compare(args, rivals)
    report = {
        "bench": "peers-gather",
        "backend": "cuda" if args.where == "gpu" else "host",
        "device": device,
        "machine": machine(args.where, device),
        "table_bytes": args.table,
        "peers": {rival.name: rival.version for rival in rivals},
        "verified": True,
        "rounds": args.rounds,
        "cases": cases,
    }
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
