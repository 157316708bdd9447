"""Compares the all-reduce of wholemem with Open MPI on CPUs, or with PyTorch's symmetric memory on a GPU, in alternating runs.

    allreduce.py host --program PATH --rival PATH --mpirun PATH [--json FILE]
    allreduce.py gpu --program PATH [--json FILE]

Both sides are measured alike: ranks are processes, they begin a round together, make the same number of calls on the same
number of buffers, and the slowest rank counts; elements are others in every round, and what comes out is compared. Buffers
are used again and again on both sides, so what fits the caches is in them. Short runs take turns, and the reported ratio is
the median of the turns' ratios: theirs divided by ours, so more than one is faster.

On a host: f32, sum; two ranks are bound to a core each on both sides, more of them than cores are bound to none. Open MPI
reduces from one buffer to another, or in its place by MPI_IN_PLACE. On a GPU: bf16, sum; the ranks share it under MPS;
eager, and in a graph of a hundred calls; of PyTorch's algorithms, the better one at each size.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HOST_SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
GPU_SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]
CALLS = 100
WARM_UP = 2


def output_of(command, env=None, seconds=600):
    """Returns the standard output of a command. Exits if the command fails."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=seconds)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}")
    return done.stdout


def wholemem(args, what, ranks, *more):
    """Runs the collective benchmark of wholemem once, and returns its report."""
    backend = "cuda" if args.where == "gpu" else "host"
    command = [args.program, "bench", what, "--backend", backend, "--json"]
    command += ["--ranks", str(ranks), "--rounds", str(args.rounds), *more]
    report = json.loads(output_of(command))
    if not report["verified"]:
        sys.exit("wholemem's sums are wrong")
    return report


def open_mpi(args, ranks, cases):
    """Runs the benchmark of Open MPI once. Returns times by size and by whether the call is in place."""
    command = [args.mpirun, "-np", str(ranks), "--mca", "btl", "self,vader", "--mca", "pml", "ob1"]
    command += ["--bind-to", "core"] if ranks <= len(os.sched_getaffinity(0)) else ["--oversubscribe", "--bind-to", "none"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    lines = output_of([*command, args.rival, str(args.rounds), *cases]).splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return {(case["bytes"], case["place"]): statistics.median(case["us"]) for case in told}


def host_turn(args, ranks, sizes):
    """Runs wholemem and Open MPI once on CPUs. Returns the times of both for each case."""
    if sizes == [0]:
        report = wholemem(args, "barrier", ranks)
        [case] = report["cases"]
        theirs = open_mpi(args, ranks, [f"0:{case['calls']}:1:out"])
        return report["device"], {(ranks, 0, "", "", "eager"): (case["value"], {"open mpi": theirs[0, "out"]}, "")}
    words = ["--sizes", ",".join(map(str, sizes)), "--dtype", "f32", "--op", "sum"]
    report = wholemem(args, "allreduce", ranks, *words)
    place = lambda case: (case["bytes"], case["place"])
    asked = {place(case): f"{case['bytes']}:{case['calls']}:{case['slots']}:{case['place']}" for case in report["cases"]}
    theirs = open_mpi(args, ranks, asked.values())
    turn = {}
    for case in report["cases"]:
        key = (ranks, case["bytes"], case["buffers"], case["place"], "eager")
        turn[key] = (case["value"], {"open mpi": theirs[place(case)]}, case["algorithm"])
    return report["device"], turn


def gpu_turn(args, ranks, sizes):
    """Runs wholemem and PyTorch once on a GPU. Returns the times of both for each case."""
    words = ["--sizes", ",".join(map(str, sizes)), "--mode", "eager,graph", "--calls", str(CALLS)]
    report = wholemem(args, "allreduce", ranks, *words, "--dtype", "bf16", "--op", "sum", "--place", "out")
    theirs = torch_ranks(args, ranks, sizes)
    turn = {}
    for case in report["cases"]:
        key = (ranks, case["bytes"], case["buffers"], case["place"], case["mode"])
        turn[key] = (case["value"], theirs[f"{case['bytes']} {case['mode']}"], case["algorithm"])
    return report["device"], turn


def torch_ranks(args, ranks, sizes):
    """Starts the processes that measure PyTorch's all-reduce as ranks, and returns the results of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
            command = [sys.executable, __file__, "torch-rank", "--program", folder, "--rounds", str(args.rounds)]
            command += ["--sizes", ",".join(map(str, sizes))]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        try:
            told = [process.communicate(timeout=180)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode != 0 for process in processes):
        sys.exit("PyTorch's ranks failed")
    return json.loads(told[0].splitlines()[-1])


def torch_rank(args):
    """Measures PyTorch's all-reduce as one rank. Rank 0 prints the times."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{args.program}/store", rank=rank, world_size=ranks)
    torch.cuda.set_device(0)
    name = dist.group.WORLD.group_name
    ops = torch.ops.symm_mem
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    told = {}

    def timed(handle, work):
        """Runs ``work`` on all ranks, and returns the time of the slowest rank in milliseconds."""
        dist.barrier()
        handle.barrier(channel=0)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times = [None] * ranks
        dist.all_gather_object(times, begin.elapsed_time(end))
        return max(times)

    for size in args.sizes:
        count = size // 2
        tensor = symm.empty(count, dtype=torch.bfloat16, device="cuda")
        handle = symm.rendezvous(tensor, group=name)
        output = torch.empty_like(tensor)
        if hasattr(ops, "one_shot_all_reduce_out"):
            one_shot = lambda: ops.one_shot_all_reduce_out(tensor, "sum", name, output)
        else:
            one_shot = lambda: output.copy_(ops.one_shot_all_reduce(tensor, "sum", name))
        two_shot = lambda: ops.two_shot_all_reduce_(tensor, "sum", name)

        for algorithm, call in (("one-shot", one_shot), ("two-shot", two_shot)):

            def check(number):
                places = torch.arange(count, device="cuda") % 7
                tensor.copy_((places + rank + number).to(torch.bfloat16))
                torch.cuda.synchronize()
                dist.barrier()
                call()
                torch.cuda.synchronize()
                expected = sum((places + other + number).to(torch.float32) for other in range(ranks)).to(torch.bfloat16)
                if not torch.equal(output if algorithm == "one-shot" else tensor, expected):
                    sys.exit(f"PyTorch's {algorithm} is wrong at {size} bytes")
                dist.barrier()
                tensor.zero_()
                torch.cuda.synchronize()
                dist.barrier()

            check(1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    call()
            eager = lambda: [call() for _ in range(CALLS)]
            for mode, work in (("eager", eager), ("graph", graph.replay)):
                times = [timed(handle, work) for _ in range(WARM_UP + args.rounds)][WARM_UP:]
                told.setdefault(f"{size} {mode}", {})[f"pytorch {algorithm}"] = statistics.median(times) * 1e3 / CALLS
            check(2)
            del graph
    if rank == 0:
        print(json.dumps(told))


@contextlib.contextmanager
def mps():
    """Runs a private CUDA MPS server for ranks that share the GPU while the ``with`` block runs, unless one is configured in the
    environment."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    folder = tempfile.mkdtemp()
    for word in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{word}_DIRECTORY"] = folder
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def summarize(key, turns):
    """Summarizes one benchmark case: microseconds, and the speed of wholemem relative to the fastest algorithm of the other
    library."""
    ranks, size, buffers, place, mode = key
    digits = lambda value: float(f"{value:.4g}")
    names = list(turns[0][1])
    ratio = statistics.median(min(theirs.values()) / ours for ours, theirs, _ in turns)
    ratios = sorted(min(theirs.values()) / ours for ours, theirs, _ in turns)
    return {
        "what": "allreduce" if size else "barrier",
        "ranks": ranks,
        "bytes": size,
        "buffers": buffers,
        "place": place,
        "mode": mode,
        "algorithm": turns[0][2],
        "unit": "us",
        "wholemem": digits(statistics.median(ours for ours, _, _ in turns)),
        "peers": {name: digits(statistics.median(theirs[name] for _, theirs, _ in turns)) for name in names},
        "ratio": digits(ratio),
        "ratios": [digits(ratios[0]), digits(ratios[-1])],
        "turns": len(turns),
    }


def machine(args, device):
    """Returns a description of the machine: the GPU, or the processor and the number of CPUs on which this
    process may run."""
    if args.where == "gpu":
        return device
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'processor'}, {len(os.sched_getaffinity(0))} cores"


def show(report):
    """Prints the results of the all-reduce comparison as a table."""
    names = list(report["cases"][0]["peers"])
    lines = [["ranks", "bytes", "buffers", "place", "mode", "algorithm", "wholemem", *names, "ratio", "from", "to"]]
    for case in report["cases"]:
        line = [str(case[key]) for key in ("ranks", "bytes", "buffers", "place", "mode", "algorithm")]
        line += [f"{case['wholemem']:.4g}", *(f"{case['peers'][name]:.4g}" for name in names)]
        lines.append(line + [f"{value:.2f}" for value in (case["ratio"], *case["ratios"])])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"all-reduce of {report['dtype']} on {report['machine']}; microseconds; ratios of {report['turns']} turns")
    for line in lines:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["host", "gpu", "torch-rank"])
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--rival", help="the program of bench/peers/allreduce.c")
    parser.add_argument("--mpirun", default="mpirun")
    numbers = lambda text: [int(word) for word in text.split(",") if word]
    parser.add_argument("--ranks", type=numbers)
    parser.add_argument("--sizes", type=numbers)
    parser.add_argument("--rounds", type=int, default=7, help="of each run")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    on_gpu = args.where != "host"
    args.sizes = args.sizes or (GPU_SIZES if on_gpu else HOST_SIZES)
    if args.where == "torch-rank":
        torch_rank(args)
        return
    args.ranks = args.ranks or ([2, 4] if on_gpu else [2, 8])
    # PyTorch starts slowly, so one run of its ranks measures all sizes. On CPUs there is one run for each size, and one for the
    # barrier.
    groups = [args.sizes] if on_gpu else [[size] for size in [0, *args.sizes]]
    turns, device = {}, None
    with mps() if on_gpu else contextlib.nullcontext():
        for ranks in args.ranks:
            for sizes in groups:
                print(f"{ranks} ranks, {', '.join(map(str, sizes))} bytes", file=sys.stderr)
                for _ in range(args.turns):
                    device, turn = (gpu_turn if on_gpu else host_turn)(args, ranks, sizes)
                    for key, times in turn.items():
                        turns.setdefault(key, []).append(times)
    report = {
        "bench": "peers-allreduce",
        "backend": "cuda" if on_gpu else "host",
        "device": device,
        "machine": machine(args, device),
        "dtype": "bf16" if on_gpu else "f32",
        "verified": True,
        "turns": args.turns,
        "rounds": args.rounds,
        "cases": [summarize(key, times) for key, times in turns.items()],
    }
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
