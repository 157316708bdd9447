"""Compares a benchmark of two versions of the program `wholemem`, in alternating runs.

    python3 bench/compare.py OLD NEW -- gather --backend host --row-bytes 64,512
    python3 bench/compare.py OLD NEW --pairs 15 --json FILE -- allreduce --backend cuda --ranks 2

Everything after `--` goes to `wholemem bench` of both programs. A pair is a run of each; every second pair begins with the new
program. For each case the figure is `value`, and the ratio of a pair is how much slower the new program is: 1.02 is 2 % slower. The
table shows the median of the ratios with a 95 % interval that assumes no distribution (order statistics); the JSON file also has the
figures of all runs. Cases are matched by
everything that is not a measured figure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from typing import Any

# The keys of a benchmark case in the JSON report that are measured figures. All other keys identify the case.
FIGURES = {"value", "unit", "limit", "of_limit", "median", "limit_median", "best", "limit_best", "call_us", "rounds", "p99", "max"}
FIGURES |= {"flag", "flag_by", "copy", "calls", "slots", "table_bytes", "caller", "elapsed"}

Case = tuple[tuple[str, Any], ...]


def run(program: str, arguments: list[str], seconds: float) -> dict[Case, tuple[float, str]]:
    """Runs the command ``bench`` of a program `wholemem`, and returns the value and unit of each measured case."""
    command = [program, "bench", *arguments, "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    if ended.returncode != 0:
        sys.exit(f"error: `{' '.join(command)}` failed with status {ended.returncode}")
    cases = json.loads(ended.stdout.splitlines()[-1])["cases"]
    return {name(case): (case["value"], case["unit"]) for case in cases}


def name(case: dict[str, Any]) -> Case:
    return tuple((key, value) for key, value in case.items() if key not in FIGURES)


def slowdown(old: tuple[float, str], new: tuple[float, str]) -> float:
    """Returns the factor by which the new figure is slower than the old: rates, such as GB/s, are better if larger; times are
    better if smaller."""
    (before, unit), (after, _) = old, new
    return before / after if "/s" in unit else after / before


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the narrowest pair of order statistics of the ratios that contains the median with a probability of at least 95
    %."""
    ordered, count = sorted(ratios), len(ratios)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += math.comb(count, rank) / 2**count
        if 2 * outside > 0.05:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[count - 1 - rank]


def summarize(case: Case, pairs: list[tuple[tuple[float, str], tuple[float, str]]]) -> dict[str, Any]:
    ratios = [slowdown(old, new) for old, new in pairs]
    low, high = interval(ratios)
    return {
        **dict(case),
        "unit": pairs[0][0][1],
        "old": statistics.median(old[0] for old, _ in pairs),
        "new": statistics.median(new[0] for _, new in pairs),
        "slowdown": round(statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "pairs": len(ratios),
        "old_runs": [old[0] for old, _ in pairs],
        "new_runs": [new[0] for _, new in pairs],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    results = {"unit", "old", "new", "slowdown", "low", "high", "pairs", "old_runs", "new_runs"}
    named = [key for key in rows[0] if key not in results and len({row.get(key) for row in rows}) > 1]
    for row in rows:
        label = " ".join(str(row.get(key)) for key in named)
        figures = f"{row['old']:>12.3f} {row['new']:>12.3f} {row['unit']:<5}"
        print(f"{label:<44}{figures} {row['slowdown']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="path of the old program")
    parser.add_argument("new", help="path of the new program")
    parser.add_argument("--pairs", type=int, default=15, help="number of alternating runs (default: 15)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run (default: 600)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("bench", nargs="+", metavar="ARGUMENT", help="arguments of `wholemem bench`, after `--`")
    args = parser.parse_args()

    programs = {"old": args.old, "new": args.new}
    measured: dict[Case, list[tuple[tuple[float, str], tuple[float, str]]]] = {}
    for number in range(args.pairs):
        order = ["old", "new"] if number % 2 == 0 else ["new", "old"]
        runs = {side: run(programs[side], args.bench, args.timeout) for side in order}
        for case in runs["old"].keys() & runs["new"].keys():
            measured.setdefault(case, []).append((runs["old"][case], runs["new"][case]))
        only = len(runs["old"].keys() ^ runs["new"].keys())
        note = f", {only} cases without a counterpart" if only else ""
        print(f"pair {number + 1} of {args.pairs}{note}", file=sys.stderr, flush=True)
    if not measured:
        sys.exit("error: the two programs have no case in common")
    order_of_cases = [case for case in runs["new"] if case in measured]
    rows = [summarize(case, measured[case]) for case in order_of_cases]
    print_table(rows)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"bench": args.bench, "pairs": args.pairs, "cases": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
