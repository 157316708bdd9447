"""Compares calls of wholemem from torch with the same calls from Rust, in alternating runs: the overhead of Python.

    python3 bench/python/from_torch.py --program target/release/wholemem [--device cuda] [--json FILE]

It needs the package `wholemem`, built for release, and torch. The cases:

- `gather`: rows of 512 bytes from a large table, 64 MiB per call: a single call on an idle device, and twenty back to back, where
  the device hides the time of the host. The caller passes the output, as in Rust; on a GPU also with an output that torch
  allocates in each call, which takes microseconds before the launch.
- `gather by the native call`: a single call without the check whether torch's dispatcher is needed: the lower bound of a call
  from Python.
- `gather in a graph`: 1 MiB per call, 100 calls captured by `torch.cuda.graph`. On a GPU only.
- `allreduce`: `FastAllreduce.all_reduce(tensor, out)` of few bytes, one call at a time, for one rank and for two ranks in two
  processes; also with registered tensors. On a GPU, start an MPS server first, or the ranks are time-sliced.

The figures of Rust are those of `wholemem bench gather` and `wholemem bench allreduce` with the same number of calls. The two sides
alternate, each run in a process of its own, on a GPU with the same cores. The best run of each side counts, since cores and
processes differ in speed; `usual_ratio` is the median of the runs' ratios. Both sides use the same rounds: indices are new in every
call, gathers are prepared before the rounds and checked after them, each with a plain copy, and reductions are checked too. The
indices of a graph are written before each round, and its rows are checked after it.
"""

import argparse
import functools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# On CPUs, torch's threads would otherwise keep spinning while other work is timed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import wholemem
import wholemem.torch as wm
from wholemem.torch.tensors import EXCHANGE

ROW = 512
SIZES = [16, 1 << 10, 64 << 10]
CALLS = 1000
# The number of warm-up rounds.
WARM_UP = 1
# The number of bytes that are gathered and copied, by device, before the results are checked.
BATCH_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}


def on_cores(first, count=1):
    """Returns the command prefix (``taskset``) that pins a process to ``count`` of the available cores, from core number ``first``
    on, which wraps around. Callers that pass another ``first`` in each run use other cores in each run."""
    cores = sorted(os.sched_getaffinity(0))
    taken = {cores[(first + number) % len(cores)] for number in range(count)}
    return ["taskset", "-c", ",".join(map(str, sorted(taken)))]


def rust(args, what, *more, before=()):
    """Runs one of wholemem's Rust benchmarks and returns its report."""
    backend = "cuda" if args.device == "cuda" else "host"
    command = [*before, args.program, "bench", what, "--backend", backend, "--json", "--rounds", str(args.rounds), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    report = json.loads(done.stdout)
    if not report["verified"]:
        sys.exit(f"{what}: wrong")
    return report


def in_turns(args, ask, work):
    """Runs ``ask`` (Rust) and ``work`` (torch) alternately, and returns the measurements of both for each case, one per run."""
    asked, worked = [], []
    for turn in range(args.turns):
        asked.append(ask(turn))
        worked.append(work(turn))
    return ({key: [turn[key] for turn in turns] for key in turns[0]} for turns in (asked, worked))


class Clock:
    """Measures the time of a block of work in seconds; on a GPU with two CUDA events."""

    def __init__(self, device):
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            # `begin` is not a Python function, because the GPU would wait for work while a Python function returns.
            record = super(torch.cuda.Event, self.events[0]).record
            self.begin = functools.partial(record, torch.cuda.current_stream())

    def settle(self):
        """Waits until all work on the GPU has finished."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def begin(self):
        self.began = time.perf_counter()

    def end(self):
        """Waits for the timed work and returns its time in seconds."""
        if not self.on_gpu:
            return time.perf_counter() - self.began
        begin, end = self.events
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


class Table:
    """A wholemem table in which each row contains its own row number."""

    def __init__(self, args):
        (self.comm,) = wholemem.Communicator.local(1, device=args.device)
        self.rows = args.table // ROW
        self.device = args.device
        self.table = wholemem.WholeTensor.create(self.comm, (self.rows, ROW // 4), "float32")
        local = wm.as_tensor(self.table.local())
        for first in range(0, self.rows, 1 << 20):
            part = local[first : first + (1 << 20)]
            part.copy_(self.contents(torch.arange(first, first + len(part), device=args.device)))
        self.finish()
        self.table.populate()

    def contents(self, row):
        """Returns the contents of table rows: the row number in two parts, repeated. A single float32 cannot represent all row
        numbers."""
        return torch.stack((row >> 16, row & 0xFFFF), dim=-1).float().repeat(1, ROW // 8)

    def finish(self):
        self.comm.barrier(stream=torch.cuda.current_stream() if self.device == "cuda" else None)

    def indices(self, calls, rows):
        return list(torch.randint(0, self.rows, (calls, rows), device=self.device))

    def check(self, indices, gathered):
        for index, rows in zip(indices, gathered):
            if not torch.equal(rows, self.contents(index)):
                sys.exit("the gathered rows are wrong")

    def rounds_of(self, args, rows, calls, given):
        """Yields rounds of several gathers, like the Rust benchmark: some rounds are prepared, then run back to back, then
        checked.

        Each round also has a copy of the same number of bytes. Gather and copy alternate in going first, since the writes of the
        first may still be in flight during the second.
        """
        most = max(1, BATCH_BYTES[self.device] // (2 * calls * rows * ROW))
        begun, batch = 0, []
        while begun < WARM_UP + args.rounds:
            batch.clear()
            # The warm-up rounds are prepared and run as a batch of their own, before the timed rounds.
            count = WARM_UP if begun == 0 else min(most, WARM_UP + args.rounds - begun)
            batch += [Round(self, rows, calls, given) for _ in range(count)]
            for number, current in enumerate(batch, begun):
                if number % 2 == 0:
                    yield current
                current.copy()
                if number % 2 == 1:
                    yield current
            for current in batch:
                self.check(current.indices, current.gathered)
            begun += count


class Round:
    """The inputs and outputs of the gathers of one round."""

    def __init__(self, table, rows, calls, given):
        self.indices, self.gathered = table.indices(calls, rows), []
        self.outputs = [None] * calls
        if given:
            self.outputs = [torch.full((rows, ROW // 4), math.nan, device=table.device) for _ in range(calls)]
        count = min(calls * rows, table.rows)
        first = random.randrange(table.rows - count + 1)
        self.part = wm.as_tensor(table.table.local())[first : first + count]
        self.plain = torch.full_like(self.part, math.nan)

    def copy(self):
        """Copies as many bytes as the gathers of the round, to compare their time with that of a plain copy."""
        self.plain.copy_(self.part)


def gathers(args, table, rows, calls, given):
    """Measures `wm.gather`, and returns the median time of a call in seconds."""
    clock, times, source = Clock(args.device), [], table.table
    for current in table.rounds_of(args, rows, calls, given):
        asked = list(zip(current.indices, current.outputs))
        clock.settle()
        clock.begin()
        gathered = [wm.gather(source, index, out=out) for index, out in asked]
        times.append(clock.end())
        current.gathered.extend(gathered)
    return statistics.median(times[WARM_UP:]) / calls


def native_gathers(args, table, rows, calls, given):
    """Measures the native call below torch's operator, which is the lower bound of a gather from Python. Returns the median
    time of a call in seconds."""
    clock, times, source = Clock(args.device), [], table.table
    for current in table.rounds_of(args, rows, calls, given):
        asked = list(zip(current.indices, current.outputs))
        clock.settle()
        clock.begin()
        for index, out in asked:
            EXCHANGE.gather(source, index, out)
        times.append(clock.end())
        current.gathered.extend(current.outputs)
    return statistics.median(times[WARM_UP:]) / calls


def graph_gathers(args, table, rows, calls, given):
    """Measures gathers in a CUDA graph, with new indices in every round and with outputs that torch allocates. Returns the
    median time of a gather in seconds."""
    clock, times = Clock(args.device), []
    indices = table.indices(calls, rows)
    wm.gather(table.table, indices[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = [wm.gather(table.table, index) for index in indices]
    for _ in range(args.rounds + WARM_UP):
        for index, fresh in zip(indices, table.indices(calls, rows)):
            index.copy_(fresh)
        clock.settle()
        clock.begin()
        graph.replay()
        times.append(clock.end())
        table.check(indices, gathered)
    return statistics.median(times[WARM_UP:]) / calls


def gather_plan(args):
    """Returns the gather cases: name, gathered bytes per call, calls per round, whether the caller passes the output, and the
    function that measures the case."""
    plan = [("gather", 64 << 20, calls, True, gathers) for calls in (1, 20)]
    plan.append(("gather by the native call", 64 << 20, 1, True, native_gathers))
    if args.device == "cuda":
        plan += [("gather", 64 << 20, calls, False, gathers) for calls in (1, 20)]
        plan.append(("gather in a graph", 1 << 20, 100, False, graph_gathers))
    return plan


def gather_turn(args):
    """Runs all gather cases once, and prints the microseconds per call of each case."""
    table, results = Table(args), {}
    for number, (_, length, calls, given, measure) in enumerate(gather_plan(args)):
        results[number] = measure(args, table, length // ROW, calls, given) * 1e6
    print(json.dumps(results))


def gather_cases(args):
    plan = gather_plan(args)

    # Torch and Rust use the same core, and another one in each run, since cores differ in speed. On CPUs a gather uses all
    # cores.
    core = on_cores if args.device == "cuda" else lambda turn: []

    def ask(turn):
        results = {}
        for length, calls in {(length, calls): None for _, length, calls, _, _ in plan}:
            words = ["--row-bytes", str(ROW), "--rows", str(length // ROW), "--table", str(args.table), "--calls", str(calls)]
            (measured,) = rust(args, "gather", *words, before=core(turn))["cases"]
            # The time of the median round is used, as for torch.
            results[length, calls] = measured["call_us"] * measured["value"] / measured["median"]
        return results

    def work(turn):
        return json.loads(finished([started(args, "gather", before=core(turn))])[0])

    ours, found = in_turns(args, ask, work)
    cases = []
    for number, (name, length, calls, given, _) in enumerate(plan):
        parameters = {"bytes": length, "calls": calls, "output": "given" if given else "new"}
        cases.append(case(name, parameters, found[str(number)], ours[length, calls]))
    return cases


def started(args, part, env=(), before=()):
    """Starts a process that measures some of the calls of wholemem from torch (``part``: gathers, or one rank of the all-reduces)
    and prints the results."""
    command = [sys.executable, __file__, "--part", part, "--program", args.program, "--device", args.device]
    command += ["--rounds", str(args.rounds), "--table", str(args.table)]
    return subprocess.Popen([*before, *command], env=os.environ | dict(env), stdout=subprocess.PIPE, text=True)


def finished(processes):
    """Returns the last line that each process prints, after all processes have exited successfully."""
    try:
        results = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode != 0 for process in processes):
        sys.exit("a process that measures calls from torch failed")
    return [lines.splitlines()[-1] if lines else "" for lines in results]


def reduce_rank(args):
    """Measures all-reduces as one rank. A round makes ``CALLS`` calls, and its time is that of the slowest rank. For each size and
    kind of buffer, rank 0 prints the median over all rounds of the time of a call, in microseconds."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        store = os.path.join(os.environ["BENCH_FOLDER"], "store")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    results, clock = {}, Clock(args.device)
    with wm.FastAllreduce(rank, ranks, device=args.device) as fast:
        for size in SIZES:
            for kind in ("staged", "window", "registered"):
                if kind == "window":
                    tensor, out = (fast.empty(size // 4).fill_(value) for value in (rank + 1.0, 0))
                else:
                    tensor = torch.full((size // 4,), rank + 1.0, device=args.device)
                    out = torch.zeros_like(tensor)
                if kind == "registered":
                    fast.register_buffer(tensor)
                    fast.register_buffer(out)
                staged = fast.comm.staged_calls
                times = []
                for _ in range(args.rounds + WARM_UP):
                    out.fill_(math.nan)
                    # Waits until the output is filled, before other ranks write to it.
                    clock.settle()
                    fast.comm.barrier()
                    clock.begin()
                    for _ in range(CALLS):
                        fast.all_reduce(tensor, out)
                    took = torch.tensor([clock.end()], dtype=torch.float64, device=args.device)
                    if kind != "staged" and fast.comm.staged_calls != staged:
                        sys.exit(f"calls on {kind} tensors are staged")
                    times.append(wm.all_reduce(fast.comm, took, "max").item())
                    staged = fast.comm.staged_calls
                    if not (out == ranks * (ranks + 1) / 2).all():
                        sys.exit("the sum is wrong")
                results[f"{size} {kind}"] = statistics.median(times[WARM_UP:]) / CALLS * 1e6
    if rank == 0:
        print(json.dumps(results))


def reduced(args, ranks, cores):
    """Starts the ranks of an all-reduce on the given cores, and returns the results of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "BENCH_FOLDER": folder}
            processes.append(started(args, "rank", env, cores(rank)))
        return json.loads(finished(processes)[0])


def reduce_cases(args):
    cases = []
    for ranks in (1, 2):
        words = ["--ranks", str(ranks), "--sizes", ",".join(map(str, SIZES)), "--dtype", "f32", "--op", "sum"]
        words += ["--mode", "eager", "--place", "out", "--calls", str(CALLS)]

        def ask(turn):
            # On a GPU the ranks of torch and of Rust use the same cores. On CPUs each rank of the Rust benchmark pins itself to
            # a core.
            before = on_cores(ranks * turn, ranks) if args.device == "cuda" else []
            results = rust(args, "allreduce", *words, before=before)["cases"]
            return {f"{case['bytes']} {case['buffers']}": case["value"] for case in results}

        def work(turn):
            if args.device == "cuda":
                return reduced(args, ranks, lambda rank: on_cores(ranks * turn, ranks))
            return reduced(args, ranks, lambda rank: on_cores(rank) if ranks <= len(os.sched_getaffinity(0)) else [])

        ours, found = in_turns(args, ask, work)
        for key, value in ours.items():
            size, kind = key.split()
            parameters = {"ranks": ranks, "bytes": int(size), "buffers": kind}
            cases.append(case("allreduce", parameters, found[key], value))
    return cases


def case(name, parameters, found, ours):
    """Summarizes the runs of torch and of Rust: the best run of each, and the median of the rounds within a run."""
    digits = lambda value: float(f"{value:.4g}")
    return {
        "case": name,
        **parameters,
        "unit": "us",
        "torch": digits(min(found)),
        "rust": digits(min(ours)),
        "over": digits(min(found) - min(ours)),
        "ratio": digits(min(found) / min(ours)),
        "usual_ratio": digits(statistics.median(one / other for one, other in zip(found, ours))),
        "torch_turns": [digits(turn) for turn in found],
        "rust_turns": [digits(turn) for turn in ours],
    }


def show(report):
    """Prints the results of the comparison with Rust as a table."""
    print(f"torch {report['torch']} on {report['device']}; microseconds a call")
    for case in report["cases"]:
        what = ", ".join(f"{value} {name}" for name, value in case.items() if name in ("ranks", "bytes", "calls", "buffers", "output"))
        print(
            f"{case['case']:18} {what:40} torch {case['torch']:>9} rust {case['rust']:>9}"
            f" over {case['over']:>8} ratio {case['ratio']:>6}, usually {case['usual_ratio']:>6}"
        )


def positive(text):
    """Parses a positive integer."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main():
    # SIGTERM raises an exception, which ends the processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", type=positive, help="bytes [16 GiB on a GPU, 1 GiB elsewhere]")
    parser.add_argument("--only", choices=["gather", "allreduce"])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--turns", type=positive, default=7, help="processes of each side")
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--part", choices=["gather", "rank"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.table = args.table or (16 << 30 if args.device == "cuda" else 1 << 30)
    if args.part:
        {"gather": gather_turn, "rank": reduce_rank}[args.part](args)
        return
    cases = []
    if args.only != "allreduce":
        cases += gather_cases(args)
    if args.only != "gather":
        cases += reduce_cases(args)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "the processor"
    report = {"bench": "torch", "device": device, "torch": torch.__version__, "wholemem": wholemem.__version__}
    report |= {"python": sys.version.split()[0], "verified": True, "rounds": args.rounds, "cases": cases}
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
