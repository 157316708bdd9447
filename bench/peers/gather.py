"""Compares the gather of wholemem with other libraries, in alternating runs.

    python3 bench/peers/gather.py host --program target/release/wholemem     numpy
    python3 bench/peers/gather.py gpu --program ./wholemem                   PyTorch, WholeGraph

`cargo xtask peers gather` prepares the environment and calls this script. All libraries have a table of the same length, the same
row sizes and numbers of rows, new random indices for every call, and outputs that have left the caches. The rows that another
library gathers are checked here; the benchmark of wholemem checks its own. The libraries alternate round by round, so that a
change of the machine's speed affects all of them. The reported ratio is the median of the rounds' ratios.

The calls: wholemem from Rust, `tensor.gather(&stream, &indices, &output)` with operands made beforehand; numpy
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
    """Returns the name of the widest integer type whose size divides the length of a row."""
    return next(f"int{8 * size}" for size in (8, 4, 2, 1) if row_bytes % size == 0)


class Numpy:
    """Gathers rows with `numpy.take` on the CPU, to compare wholemem with it."""

    name = "numpy"
    payload, most_rows, ring = 64 << 20, 4 << 20, 1 << 30

    def __init__(self, table_bytes):
        import numpy

        self.np, self.version = numpy, numpy.__version__
        self.memory = numpy.empty(table_bytes, numpy.uint8)
        self.filled = None
        self.random = numpy.random.default_rng(7)

    def elements(self, places, dtype):
        """Returns the elements that the table contains at the given positions."""
        return (places * FACTOR >> 20).astype(dtype)

    def begin(self, row_bytes, rows, calls, rounds):
        """Creates the table, and so many outputs that an output has left the caches before it is used again."""
        np, dtype = self.np, self.np.dtype(dtype_name(row_bytes))
        flat = self.memory.view(dtype)
        if self.filled != dtype:
            for first in range(0, flat.size, 1 << 22):
                part = flat[first : first + (1 << 22)]
                part[:] = self.elements(np.arange(first, first + part.size), dtype)
            self.filled = dtype
        width = row_bytes // dtype.itemsize
        table_rows = flat.size // width
        self.table = flat[: table_rows * width].reshape(table_rows, width)
        slots = max(1, min(rounds, self.ring // (2 * rows * calls * row_bytes)))
        self.outputs = [np.empty((calls, rows, width), dtype) for _ in range(slots)]
        self.prepared, self.used = [], []
        # The first round is a warm-up.
        self.turn()

    def turn(self):
        """Runs one round of gathers with `numpy.take`, and returns its duration in seconds."""
        if not self.prepared:
            self.check()
            for output in self.outputs:
                output.view(self.np.uint8)[...] = POISON
                indices = self.random.integers(0, self.table.shape[0], output.shape[:2])
                self.prepared.append((indices, output))
        indices, output = self.prepared.pop()
        calls, take = list(zip(indices, output)), self.table.take
        start = time.perf_counter()
        for index, rows in calls:
            take(index, 0, rows, "clip")
        took = time.perf_counter() - start
        self.used.append((indices, output))
        return took

    def check(self):
        """Compares all rows that were gathered since the last check with their expected content."""
        for indices, output in self.used:
            indices, output = indices.reshape(-1), output.reshape(-1, output.shape[2])
            width = output.shape[1]
            columns, step = self.np.arange(width), max(1, (1 << 22) // width)
            for first in range(0, len(indices), step):
                places = indices[first : first + step, None] * width + columns
                if not self.np.array_equal(self.elements(places, output.dtype), output[first : first + step]):
                    sys.exit(f"{self.name} gathered other rows than it was asked for")
        self.used = []

    def end(self):
        self.check()
        self.outputs = self.prepared = None


class Torch:
    """Gathers rows with `torch.index_select` on a GPU, to compare wholemem with it."""

    name = "pytorch"
    payload, most_rows, slots = 2 << 30, 32 << 20, 2

    def __init__(self, table_bytes):
        import torch

        self.torch, self.version = torch, torch.__version__
        self.table_bytes = table_bytes
        self.memory = None

    def elements(self, places, dtype):
        return ((places * FACTOR) >> 20).to(dtype)

    def fill(self, flat):
        step = 1 << 26
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            places = self.torch.arange(first, first + part.numel(), device="cuda")
            part.copy_(self.elements(places, flat.dtype))

    def open(self, rows, width, dtype):
        """Creates the table, and returns a function that gathers rows of the table."""
        if self.memory is None or self.memory.dtype != dtype:
            self.memory = None
            self.memory = self.torch.empty(self.table_bytes // dtype.itemsize, dtype=dtype, device="cuda")
            self.fill(self.memory)
        table = self.memory[: rows * width].view(rows, width)
        return lambda indices, output: self.torch.index_select(table, 0, indices, out=output)

    def begin(self, row_bytes, rows, calls, rounds):
        torch, dtype = self.torch, getattr(self.torch, dtype_name(row_bytes))
        width = row_bytes // dtype.itemsize
        self.table_rows, self.turns = self.table_bytes // row_bytes, 0
        self.gather = self.open(self.table_rows, width, dtype)
        shape = (calls, rows, width)
        self.outputs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(self.slots)]
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.turn()

    def turn(self):
        torch, (start, end) = self.torch, self.events
        output = self.outputs[self.turns % self.slots]
        self.turns += 1
        output.view(torch.uint8).fill_(POISON)
        indices = torch.randint(0, self.table_rows, output.shape[:2], device="cuda")
        calls = list(zip(indices, output))
        torch.cuda.synchronize()
        start.record()
        gathered = [self.gather(index, rows) for index, rows in calls]
        end.record()
        torch.cuda.synchronize()
        self.check(indices.view(-1), torch.cat(gathered) if len(gathered) > 1 else gathered[0])
        return start.elapsed_time(end) / 1e3

    def check(self, indices, output):
        torch, width = self.torch, output.shape[1]
        columns, step = torch.arange(width, device="cuda"), max(1, (1 << 25) // width)
        for first in range(0, len(indices), step):
            places = indices[first : first + step, None] * width + columns
            if not torch.equal(self.elements(places, output.dtype), output[first : first + step]):
                sys.exit(f"{self.name} gathered other rows than it was asked for")
        torch.cuda.synchronize()

    def end(self):
        self.outputs = None


class WholeGraph(Torch):
    """Gathers rows with WholeGraph and one rank, because WholeGraph cannot run several ranks on one GPU."""

    comm = None

    def __init__(self, table_bytes, kind):
        super().__init__(table_bytes)
        import pylibwholegraph
        import pylibwholegraph.torch as wgth

        self.name, self.kind, self.wgth = f"wholegraph {kind}", kind, wgth
        self.version = pylibwholegraph.__version__

    def communicator(self):
        if WholeGraph.comm is None:
            import torch.distributed as dist

            self.torch.cuda.set_device(0)
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            self.wgth.init(0, 1, 0, 1)
            WholeGraph.comm = self.wgth.get_global_communicator()
        return WholeGraph.comm

    def open(self, rows, width, dtype):
        self.tensor = self.wgth.create_wholememory_tensor(
            self.communicator(), self.kind, "cuda", [rows, width], dtype, [width, 1]
        )
        local, _ = self.tensor.get_local_tensor(host_view=False)
        self.fill(local.view(-1))
        return lambda indices, _: self.tensor.gather(indices)

    def end(self):
        super().end()
        self.gather = None
        self.wgth.destroy_wholememory_tensor(self.tensor)


class Wholemem:
    """Runs the gather benchmark of wholemem as a child process, which runs a round on request, for one row size and several
    numbers of rows."""

    def __init__(self, args, row_bytes, rows):
        command = [args.program, "bench", "gather", "--in-turns"]
        command += ["--backend", "cuda" if args.where == "gpu" else "host", "--table", str(args.table)]
        command += ["--row-bytes", str(row_bytes), "--rounds", str(args.rounds)]
        command += ["--rows", ",".join(map(str, rows))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"wholemem ended with {self.process.wait()}")
        return json.loads(line)

    def ready(self):
        """Waits until the benchmark of wholemem reports that it has prepared the next round."""
        if self.read() != "ready":
            sys.exit("wholemem is not ready for its turn")

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def end(self):
        report = self.read()
        if not report["verified"] or self.process.wait() != 0:
            sys.exit("wholemem gathered other rows than it was asked for")
        return report["device"]


def compare(args, rivals):
    """Measures wholemem and the other libraries for all row sizes. Each round measures all of them."""
    device, cases = None, []
    for row_bytes in args.row_bytes:
        numbers = sorted({*args.few, max(1, min(rivals[0].payload // row_bytes, rivals[0].most_rows))})
        ours = Wholemem(args, row_bytes, numbers)
        for rows in numbers:
            print(f"{rows} rows of {row_bytes} bytes", file=sys.stderr)
            rounds = []
            for _ in range(args.rounds):
                ours.ready()
                if not rounds:
                    calls = calls_of(row_bytes, rows, args.table)
                    for rival in rivals:
                        rival.begin(row_bytes, rows, calls, args.rounds)
                times = {rival.name: rival.turn() for rival in rivals}
                own = ours.turn()
                times |= {"wholemem": own["us"] / 1e6, "copy": own["copy_us"] / 1e6}
                rounds.append(times)
            if (own["rows"], own["calls"]) != (rows, calls):
                sys.exit(f"wholemem made {own['calls']} calls of {own['rows']} rows, and not {calls} of {rows}")
            for rival in rivals:
                rival.end()
            cases.append(summarize(row_bytes, rows, calls, rounds))
        device = ours.end()
    return device, cases


def calls_of(row_bytes, rows, table_bytes):
    """Returns how many gathers are timed together, by the rule of wholemem's benchmark."""
    return max(1, min(min(8 << 20, table_bytes) // (rows * row_bytes), 2048))


def summarize(row_bytes, rows, calls, rounds):
    """Summarizes one benchmark case: payload rates in GB/s, and the speed of wholemem relative to the other libraries."""
    payload, names = rows * calls * row_bytes / 1e9, list(rounds[0])
    digits = lambda value: float(f"{value:.4g}")
    rate = lambda pick: {name: digits(payload / pick(times[name] for times in rounds)) for name in names}
    against = lambda name: digits(statistics.median(times[name] / times["wholemem"] for times in rounds))
    median, best = rate(statistics.median), rate(min)
    return {
        "row_bytes": row_bytes,
        "rows": rows,
        "calls": calls,
        "unit": "GB/s",
        "limit": median.pop("copy"),
        "of_limit": against("copy"),
        "value": median,
        "best": best,
        "ratio": {name: against(name) for name in names if name not in ("wholemem", "copy")},
        "rounds": len(rounds),
    }


def machine(where, device):
    """Returns a description of the machine: the GPU, or the processor and the number of CPUs on which this
    process may run."""
    if where == "gpu":
        return device
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'processor'}, {len(os.sched_getaffinity(0))} cores"


def show(report):
    """Prints the results of the gather comparison as a table."""
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
    parser.add_argument("--rounds", type=int, default=15)
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
