"""Compares putting and getting arrays from Python in the stores of wholemem and Vineyard, in alternating runs.

    python3 bench/peers/store_python.py --program target/release/wholemem --vineyard FOLDER --vineyardd PROGRAM

`cargo xtask peers store-python` builds the package, fetches Vineyard and calls it. Each side has its own daemon, behind a
socket in a private folder, which ends with this program. They take turns in this process, round by round; the reported ratio is
the median of the rounds' ratios.

What is timed, and how each is called:

  get        an object that the client has had before, up to the buffer object: `client.get(name)`, which finds it by its
             name and knows shape and type, and Vineyard's `get_blob(id)`, by its number and as bytes
  get numpy  the same, up to an array of numpy: `numpy.from_dlpack(client.get(name))`, and `numpy.frombuffer(get_blob(id))`
  put        an array of numpy: `client.put(name, array)`, and `create_blob`, `BlobBuilder.copy`, `seal`

Vineyard's own Python layers (`vineyard.connect`, `client.get`) come on top of these calls and are left out: they want pandas
and pyarrow, and ask the daemon for metadata besides.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

from store import Vineyard, machine
from wholemem import store

SIZES = [4 << 10, 1 << 20, 64 << 20]
WHAT = ["get", "get numpy", "put"]


class Ours:
    """Runs a wholemem store, and puts and gets arrays with its Python client."""

    def __init__(self, program, size, folder):
        socket = os.path.join(folder, "wholemem.sock")
        command = [program, "serve", "--listen", socket, "--size", f"{size}B", "--parent", str(os.getpid())]
        self.daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if not self.daemon.stdout.readline().startswith("serving"):
            sys.exit("wholemem did not begin to serve")
        self.client = store.Client(socket)

    def put(self, array):
        self.client.put("object", array)
        return "object"

    def get(self, name):
        return self.client.get(name)

    def get_numpy(self, name, dtype):
        return numpy.from_dlpack(self.client.get(name))

    def delete(self, name):
        self.client.delete(name)

    def end(self):
        self.daemon.terminate()
        self.daemon.wait()


class Theirs(Vineyard):
    """Runs a Vineyard daemon, and puts and gets arrays with its C++ client, called from Python."""

    def put(self, array):
        builder = self.client.create_blob(array.nbytes)
        builder.copy(0, array.ctypes.data, array.nbytes)
        return builder.seal(self.sealer).id

    def get(self, number):
        return self.client.get_blob(number)

    def get_numpy(self, number, dtype):
        return numpy.frombuffer(self.client.get_blob(number), dtype)

    def delete(self, number):
        self.client.delete([number])


def turn(side, array, gets):
    """Puts, gets and deletes an array in one store, and returns the time of each call in seconds."""
    now, taken = time.perf_counter, {}
    start = now()
    name = side.put(array)
    taken["put"] = now() - start
    got = side.get_numpy(name, array.dtype)
    if got.nbytes != array.nbytes or (got.flat[0], got.flat[-1]) != (array.flat[0], array.flat[-1]):
        sys.exit(f"{type(side).__name__} gave another array than was put")
    del got
    get, get_numpy, dtype, each = side.get, side.get_numpy, array.dtype, range(gets)
    start = now()
    for _ in each:
        get(name)
    taken["get"] = (now() - start) / gets
    start = now()
    for _ in each:
        get_numpy(name, dtype)
    taken["get numpy"] = (now() - start) / gets
    side.delete(name)
    return taken


def compare(args, ours, theirs):
    """Measures wholemem and Vineyard for all array sizes. Each round measures both; the one that is measured first alternates."""
    cases = []
    for size in args.sizes:
        rounds = []
        for number in range(args.rounds):
            array = numpy.full(size // 4, number, numpy.float32)
            sides = [ours, theirs] if number % 2 else [theirs, ours]
            taken = {}
            for side in sides:
                time.sleep(args.pause)
                taken[side] = turn(side, array, args.gets)
            rounds.append((taken[ours], taken[theirs]))
        digits = lambda value: float(f"{value:.4g}")
        median = lambda values: digits(statistics.median(values))
        for what in WHAT:
            # The first round is not counted, because its caches are cold.
            times = [(own[what], other[what]) for own, other in rounds[1:]]
            cases.append(
                {
                    "bytes": size,
                    "what": what,
                    "unit": "us",
                    "value": {
                        "wholemem": median(1e6 * own for own, _ in times),
                        "vineyard": median(1e6 * other for _, other in times),
                    },
                    "ratio": median(other / own for own, other in times),
                    "rounds": len(times),
                }
            )
    return cases


def version_of(folder):
    """Returns the version of Vineyard that is installed in a folder."""
    found = importlib.metadata.distributions(name="vineyard", path=[folder])
    return next((package.version for package in found), "unknown")


def show(report):
    """Prints the results of the comparison of stores from Python as a table."""
    lines = [["bytes", "what", "wholemem", "vineyard", "ratio"]]
    for case in report["cases"]:
        value = case["value"]
        line = [str(case["bytes"]), case["what"], f"{value['wholemem']:.4g}", f"{value['vineyard']:.4g}"]
        lines.append(line + [f"{case['ratio']:.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"arrays of a store from Python on {report['machine']}; microseconds")
    for line in lines:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="wholemem, built for release")
    parser.add_argument("--vineyard", required=True, help="the folder of Vineyard's Python package")
    parser.add_argument("--vineyardd", required=True, help="Vineyard's daemon")
    sizes = lambda text: [int(word) for word in text.split(",") if word]
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="bytes, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gets", type=int, default=2000, help="how many gets are timed together")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds before every turn")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    size = 4 * max(args.sizes) + (256 << 20)
    with tempfile.TemporaryDirectory() as folder:
        theirs = Theirs(*map(os.path.abspath, (args.vineyard, args.vineyardd)), size, folder)
        ours = Ours(args.program, size, folder)
        try:
            cases = compare(args, ours, theirs)
        finally:
            ours.end()
            theirs.end()
    report = {
        "bench": "peers-store-python",
        "backend": "host",
        "machine": machine(),
        "peers": {"vineyard": version_of(args.vineyard)},
        "clients": {"wholemem": "Python", "vineyard": "Python over its C++ client"},
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
