"""Compares creating, getting and deleting store objects in wholemem and in Vineyard, in alternating runs.

    python3 bench/peers/store.py --program target/release/wholemem --vineyard FOLDER --vineyardd PROGRAM

`cargo xtask peers store` fetches Vineyard and calls it. Each side has its own daemon, behind a socket in a private folder,
which ends with this program. Both copy the same bytes out of ordinary memory into an object, seal it, and read its first
and last byte through another connection. They take turns, round by round, and each rests while the other has its
turn. The reported ratio is the median of the rounds' ratios.

How each is called: wholemem from Rust, `client.put(name, bytes)`, `client.get(name)` and `client.delete(id)`; Vineyard from
Python, by its own C++ client underneath and none of its Python layers: `create_blob`, `BlobBuilder.copy` and `seal`, then
`get_blob` and `delete`. "get first" is by a connection that has mapped nothing, "get" by one that has had the object before.

Before every turn there is a pause, the same for both: wholemem gives deleted memory back to the kernel and makes new memory
ahead when there is time, where Vineyard writes again into the memory it has. `--burst N` makes N objects in a row
without any pause before they are deleted, which is more than wholemem has made ahead.
"""

import argparse
import importlib.metadata
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types

SIZES = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
WHAT = ["create+write+seal", "get first", "get", "delete"]
CACHED = 20  # gets of the rival that are timed together


class Vineyard:
    """Runs a Vineyard daemon, and measures creating, getting and deleting objects with a client of it."""

    def __init__(self, folder, program, size, socket_folder):
        # The Python package of Vineyard is not imported, because it imports pandas and pyarrow. Only its C++ client is timed,
        # which does not need them.
        package = types.ModuleType("vineyard")
        package.__path__ = [os.path.join(folder, "vineyard")]
        sys.modules["vineyard"] = package
        import vineyard._C as client

        self.socket = os.path.join(socket_folder, "vineyard.sock")
        command = [program, "-meta", "local", "-rpc=false", "-socket", self.socket, "-size", str(size)]
        quiet = subprocess.DEVNULL
        self.daemon = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd=socket_folder)
        deadline = time.monotonic() + 60
        while not os.path.exists(self.socket):
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                sys.exit("vineyardd did not begin to serve")
            time.sleep(0.01)
        self.client = client._connect(self.socket)
        # `seal` of Vineyard's blob builder expects a client of Vineyard's Python layer, of which it uses this attribute only.
        self.sealer = types.SimpleNamespace(ipc_client=self.client)
        # All Vineyard clients are kept, because closing one of them closes all.
        self.others = []

    def begin(self, size):
        self.source = ctypes.create_string_buffer(size)
        self.count = 0

    def turn(self, burst):
        """Runs one round of store operations and returns the time of each operation in seconds."""
        now, size, client = time.perf_counter, len(self.source), self.client
        self.count += 1
        value = self.count % 251
        ctypes.memset(self.source, value, size)
        address, objects, times = ctypes.addressof(self.source), [], {what: [] for what in WHAT}
        for _ in range(burst):
            start = now()
            builder = client.create_blob(size)
            builder.copy(0, address, size)
            sealed = builder.seal(self.sealer)
            times["create+write+seal"].append(now() - start)
            objects.append(sealed.id)
            del builder, sealed
        other = client.fork()
        self.others.append(other)
        start = now()
        got = other.get_blob(objects[-1])
        times["get first"].append(now() - start)
        view = memoryview(got).cast("B")
        if len(view) != size or (view[0], view[-1]) != (value, value):
            sys.exit("Vineyard gave another object than was put")
        del view, got
        start = now()
        for _ in range(CACHED):
            other.get_blob(objects[-1])
        times["get"].append((now() - start) / CACHED)
        for number in objects:
            start = now()
            client.delete([number])
            times["delete"].append(now() - start)
        return {what: statistics.median(taken) for what, taken in times.items()}

    def end(self):
        self.daemon.kill()
        self.daemon.wait()


class Wholemem:
    """Runs the store benchmark of wholemem as a child process, which runs a round on request, for one object size."""

    def __init__(self, args, size, rounds):
        command = [args.program, "bench", "store", "--in-turns", "--sizes", str(size)]
        command += ["--rounds", str(rounds), "--burst", str(args.burst)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"wholemem ended with {self.process.wait()}")
        return json.loads(line)

    def ready(self):
        """Waits until the child process that runs wholemem's store benchmark reports that it is ready for the next round."""
        if self.read() != "ready":
            sys.exit("wholemem is not ready for its turn")

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return {what: time / 1e6 for what, time in self.read().items() if what in WHAT}

    def end(self):
        if self.process.wait() != 0:
            sys.exit("wholemem gave another object than was put")


def compare(args, rival):
    """Measures wholemem and Vineyard for all object sizes. Each round measures both; the one that is measured first alternates."""
    cases = []
    for size in args.sizes:
        rounds = max(5, min(args.rounds, (16 << 30) // (size * args.burst)))
        pause = args.pause * (0.02 + 0.4 * args.burst * size / (1 << 30))
        ours, times = Wholemem(args, size, rounds), []
        rival.begin(size)
        for number in range(rounds):
            ours.ready()
            time.sleep(pause)
            turns = [rival.turn, ours.turn] if number % 2 else [ours.turn, rival.turn]
            taken = []
            for turn in turns:
                taken.append(turn(args.burst) if turn == rival.turn else turn())
                time.sleep(pause)
            times.append(taken[::-1] if number % 2 else taken)
        ours.end()
        for what in WHAT:
            cases.append(summarize(size, what, [(own[what], other[what]) for own, other in times]))
        print(f"{size} bytes: done", file=sys.stderr)
    return cases


def summarize(size, what, rounds):
    """Summarizes one benchmark case: microseconds, and the speed of wholemem relative to Vineyard. The first round, with cold
    caches, is reported separately."""
    digits = lambda value: float(f"{value:.4g}")
    median = lambda values: digits(statistics.median(values))
    later = rounds[1:] or rounds
    return {
        "bytes": size,
        "what": what,
        "unit": "us",
        "value": {"wholemem": median(1e6 * own for own, _ in later), "vineyard": median(1e6 * its for _, its in later)},
        "first": {"wholemem": digits(1e6 * rounds[0][0]), "vineyard": digits(1e6 * rounds[0][1])},
        "ratio": median(its / own for own, its in later),
        "rounds": len(rounds),
    }


def machine():
    """Returns a description of the machine: the processor, and the number of CPUs on which this process may run."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'processor'}, {len(os.sched_getaffinity(0))} cores"


def version_of(folder):
    """Returns the version of Vineyard that is installed in a folder."""
    found = importlib.metadata.distributions(name="vineyard", path=[folder])
    return next((package.version for package in found), "unknown")


def show(report):
    """Prints the results of the store comparison as a table."""
    lines = [["bytes", "what", "wholemem", "vineyard", "ratio", "first", "first", "rounds"]]
    for case in report["cases"]:
        value, first = case["value"], case["first"]
        line = [str(case["bytes"]), case["what"], f"{value['wholemem']:.4g}", f"{value['vineyard']:.4g}"]
        line += [f"{case['ratio']:.2f}", f"{first['wholemem']:.4g}", f"{first['vineyard']:.4g}", str(case["rounds"])]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines)]
    clients = ", ".join(f"{name} from {how}" for name, how in report["clients"].items())
    print(f"objects of a store on {report['machine']}; microseconds; {clients}")
    print(f"bursts of {report['burst']}, pauses {report['pause']}; `first` is each side's first round")
    for line in lines:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--vineyard", required=True, help="the folder of Vineyard's Python package")
    parser.add_argument("--vineyardd", required=True, help="Vineyard's daemon")
    sizes = lambda text: [int(word) for word in text.split(",") if word]
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="bytes, separated by commas")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--burst", type=int, default=1, help="how many objects are made in a row")
    parser.add_argument("--pause", type=float, default=1.0, help="how many times the usual pause there is before a turn")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    largest = max(args.sizes) * args.burst
    with open("/proc/meminfo", encoding="utf-8") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    if 4 * largest > available:
        sys.exit(f"{largest >> 20} MiB at once on both sides are too much: {available >> 20} MiB are available")
    with tempfile.TemporaryDirectory() as folder:
        rival = Vineyard(*map(os.path.abspath, (args.vineyard, args.vineyardd)), largest + (256 << 20), folder)
        try:
            cases = compare(args, rival)
        finally:
            rival.end()
    report = {
        "bench": "peers-store",
        "backend": "host",
        "machine": machine(),
        "peers": {"vineyard": version_of(args.vineyard)},
        "clients": {"wholemem": "Rust", "vineyard": "Python over its C++ client"},
        "burst": args.burst,
        "pause": args.pause,
        "verified": True,
        "cases": cases,
    }
    show(report)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
