"""Calls from torch beside the same calls from Rust, in one run: how much Python costs.

    python3 bench/python/from_torch.py --program target/release/wholemem [--device cuda] [--json FILE]

It needs the package `wholemem`, built for release, and torch. What is compared:

- `gather`: rows of 512 bytes from a large table, 64 MiB a call: one call by itself, from an idle device, and twenty behind each
  other, where a device that works hides what is done meanwhile. The output is given, as it is in Rust; on a GPU also made by
  torch in each call, out of what its allocator has: that alone takes microseconds before a launch.
- `gather by address`: the same by itself, with numbers in place of tensors: the least that a call from Python takes.
- `gather in a graph`: 1 MiB a call, a hundred calls recorded by `torch.cuda.graph`. On a GPU only.
- `allreduce`: `FastAllreduce.all_reduce(tensor, out)` of few bytes, call by call, for one rank and for two, which are
  processes; also with tensors that are registered. On a GPU, start an MPS server first, or the ranks take turns.

Rust's figures are `wholemem bench gather` and `wholemem bench allreduce`, with as many calls, in turns with torch's, each turn a
process of its own. Each side's best turn counts, since neither cores nor processes are equally fast. Indices are fresh in every
call, and what is gathered and reduced is checked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# On a processor torch's threads would go on spinning beside what is timed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import wholemem
import wholemem.torch as wm

ROW = 512
SIZES = [16, 1 << 10, 64 << 10]
CALLS = 1000
TURNS = 5


def rust(args, what, *more):
    """The cases of one of our own benches."""
    backend = "cuda" if args.device == "cuda" else "host"
    command = [args.program, "bench", what, "--backend", backend, "--json", "--rounds", str(args.rounds), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    report = json.loads(done.stdout)
    if not report["verified"]:
        sys.exit(f"{what}: wrong")
    return report


def in_turns(ask, work):
    """What `ask` and `work` tell, turn by turn: the smallest figure of each case."""
    asked, worked = [], []
    for _ in range(TURNS):
        asked.append(ask())
        worked.append(work())
    return ({key: min(turn[key] for turn in turns) for key in turns[0]} for turns in (asked, worked))


class Clock:
    """Seconds that work takes, on a GPU between two events."""

    def __init__(self, device):
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin(self):
        if self.on_gpu:
            torch.cuda.synchronize()
            self.events[0].record()
        else:
            self.began = time.perf_counter()

    def end(self):
        """The seconds since it began, once all has run."""
        if not self.on_gpu:
            return time.perf_counter() - self.began
        begin, end = self.events
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


class Table:
    """A table whose rows hold their own number."""

    def __init__(self, args):
        (self.comm,) = wholemem.Communicator.local(1, device=args.device)
        self.rows = args.table // ROW
        self.device = args.device
        self.table = wholemem.WholeTensor.create(self.comm, (self.rows, ROW // 4), "float32")
        local = wm.as_tensor(self.table.local())
        for first in range(0, self.rows, 1 << 20):
            part = local[first : first + (1 << 20)]
            part.copy_(self.held(torch.arange(first, first + len(part), device=args.device))[:, None].expand_as(part))
        self.finish()
        self.table.populate()

    def held(self, row):
        """What a row holds: its number, as far as a float can tell it from the next one."""
        return (row % (1 << 24)).float()

    def finish(self):
        self.comm.barrier(stream=torch.cuda.current_stream() if self.device == "cuda" else None)

    def indices(self, calls, rows):
        return list(torch.randint(0, self.rows, (calls, rows), device=self.device))

    def check(self, indices, gathered):
        for index, rows in zip(indices, gathered):
            if not torch.equal(rows, self.held(index)[:, None].expand_as(rows)):
                sys.exit("other rows were gathered than were asked for")


def gathers(args, table, rows, calls, given):
    """The seconds of a call, as the median of rounds of so many calls."""
    clock, times = Clock(args.device), []
    outputs = [None] * calls
    if given:
        outputs = [torch.zeros((rows, ROW // 4), device=args.device) for _ in range(calls)]
    for _ in range(args.rounds + 2):
        indices, gathered = table.indices(calls, rows), []
        asked, source = list(zip(indices, outputs)), table.table
        clock.begin()
        for index, out in asked:
            gathered.append(wm.gather(source, index, out=out))
        times.append(clock.end())
        table.check(indices, gathered)
    return statistics.median(times[2:]) / calls


def bare_gathers(args, table, rows, calls, given):
    """The same by addresses, which nobody looks at: the least that a call from Python takes."""
    out = torch.zeros((rows, ROW // 4), device=args.device)
    device = out.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device) if args.device == "cuda" else 0
    clock, times = Clock(args.device), []
    for _ in range(args.rounds + 2):
        (indices,) = table.indices(1, rows)
        source, asked, to = table.table, indices.data_ptr(), out.data_ptr()
        clock.begin()
        source.gather_at(asked, rows, True, to, 0, None, device, stream)
        times.append(clock.end())
        table.check([indices], [out])
    return statistics.median(times[2:])


def graph_gathers(args, table, rows, calls, given):
    """The same in a graph, whose indices are others in every round, and whose outputs are torch's."""
    clock, times = Clock(args.device), []
    indices = table.indices(calls, rows)
    wm.gather(table.table, indices[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathered = [wm.gather(table.table, index) for index in indices]
    for _ in range(args.rounds + 2):
        for index, fresh in zip(indices, table.indices(calls, rows)):
            index.copy_(fresh)
        clock.begin()
        graph.replay()
        times.append(clock.end())
        table.check(indices, gathered)
    return statistics.median(times[2:]) / calls


def gather_plan(args):
    """The cases: name, bytes, calls, whether the output is given, and who measures it."""
    plan = [("gather", 64 << 20, calls, True, gathers) for calls in (1, 20)]
    plan.append(("gather by address", 64 << 20, 1, True, bare_gathers))
    if args.device == "cuda":
        plan += [("gather", 64 << 20, calls, False, gathers) for calls in (1, 20)]
        plan.append(("gather in a graph", 1 << 20, 100, False, graph_gathers))
    return plan


def gather_turn(args):
    """Plays a turn: microseconds a call, case by case."""
    table, told = Table(args), {}
    for number, (_, length, calls, given, measure) in enumerate(gather_plan(args)):
        told[number] = measure(args, table, length // ROW, calls, given) * 1e6
    print(json.dumps(told))


def gather_cases(args):
    plan = gather_plan(args)

    def ask():
        told = {}
        for number, (_, length, calls, _, _) in enumerate(plan):
            words = ["--row-bytes", str(ROW), "--rows", str(length // ROW), "--table", str(args.table), "--calls", str(calls)]
            told[str(number)] = rust(args, "gather", *words)["cases"][0]["call_us"]
        return told

    # Processes of their own on both sides: how fast one is, is also chance.
    ours, found = in_turns(ask, lambda: json.loads(finished([started(args, "gather")])[0]))
    cases = []
    for number, (name, length, calls, given, _) in enumerate(plan):
        parameters = {"bytes": length, "calls": calls, "output": "given" if given else "new"}
        cases.append(case(name, parameters, found[str(number)], ours[str(number)]))
    return cases


def started(args, part, env=(), before=()):
    """A process that measures a part of torch's side, and prints what it found."""
    command = [sys.executable, __file__, "--part", part, "--program", args.program, "--device", args.device]
    command += ["--rounds", str(args.rounds), "--table", str(args.table)]
    return subprocess.Popen([*before, *command], env=os.environ | dict(env), stdout=subprocess.PIPE, text=True)


def finished(processes):
    """The last lines that processes print, once all have ended well."""
    try:
        told = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode != 0 for process in processes):
        sys.exit("a process of torch's failed")
    return [lines.splitlines()[-1] if lines else "" for lines in told]


def reduce_rank(args):
    """Plays a rank: the median microseconds of a call, by size, the slowest rank's."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        store = os.path.join(os.environ["BENCH_FOLDER"], "store")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    told, clock = {}, Clock(args.device)
    with wm.FastAllreduce(rank, ranks, device=args.device) as fast:
        for size in SIZES:
            for kind in ("staged", "window"):
                tensor = torch.full((size // 4,), rank + 1.0, device=args.device)
                out = torch.zeros_like(tensor)
                if kind == "window":
                    fast.register_buffer(tensor)
                    fast.register_buffer(out)
                times = []
                for _ in range(args.rounds + 2):
                    fast.comm.barrier()
                    clock.begin()
                    for _ in range(CALLS):
                        fast.all_reduce(tensor, out)
                    took = torch.tensor([clock.end()], dtype=torch.float64, device=args.device)
                    times.append(wm.all_reduce(fast.comm, took, "max").item())
                    if not (out == ranks * (ranks + 1) / 2).all():
                        sys.exit("the sum is wrong")
                told[f"{size} {kind}"] = statistics.median(times[2:]) / CALLS * 1e6
    if rank == 0:
        print(json.dumps(told))


def reduced(args, ranks):
    """Starts the ranks; what rank 0 tells."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "BENCH_FOLDER": folder}
            # Each on a core of its own, as Rust's ranks are.
            pinned = ["taskset", "-c", str(cores[rank])] if ranks <= len(cores) else []
            processes.append(started(args, "rank", env, pinned))
        return json.loads(finished(processes)[0])


def reduce_cases(args):
    cases = []
    for ranks in (1, 2):
        words = ["--ranks", str(ranks), "--sizes", ",".join(map(str, SIZES)), "--dtype", "f32", "--op", "sum"]
        words += ["--mode", "eager", "--place", "out", "--calls", str(CALLS)]
        ask = lambda: {
            f"{case['bytes']} {case['buffers']}": case["value"] for case in rust(args, "allreduce", *words)["cases"]
        }
        ours, found = in_turns(ask, lambda: reduced(args, ranks))
        for key, value in ours.items():
            size, kind = key.split()
            parameters = {"ranks": ranks, "bytes": int(size), "buffers": kind}
            cases.append(case("allreduce", parameters, found[key], value))
    return cases


def case(name, parameters, found, ours):
    digits = lambda value: float(f"{value:.4g}")
    return {
        "case": name,
        **parameters,
        "unit": "us",
        "torch": digits(found),
        "rust": digits(ours),
        "over": digits(found - ours),
        "ratio": digits(found / ours),
    }


def show(report):
    """A table for people."""
    print(f"torch {report['torch']} on {report['device']}; microseconds a call")
    for case in report["cases"]:
        what = ", ".join(f"{value} {name}" for name, value in case.items() if name in ("ranks", "bytes", "calls", "buffers", "output"))
        print(
            f"{case['case']:18} {what:40} torch {case['torch']:>9} rust {case['rust']:>9}"
            f" over {case['over']:>8} ratio {case['ratio']:>6}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", type=int, help="bytes [16 GiB on a GPU, 1 GiB elsewhere]")
    parser.add_argument("--only", choices=["gather", "allreduce"])
    parser.add_argument("--rounds", type=int, default=15)
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
