"""Draws the newest reports of `cargo xtask peers` in `docs/measured` as SVG plots, with colours for light and dark pages.

    python3 plots.py REPORTS PLOTS DIGEST

The same reports give the same bytes. The first line of each plot contains DIGEST. If a backend has several reports, the one in the
folder whose name sorts last is drawn.
"""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any, Iterable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

Report = dict[str, Any]
Points = list[tuple[int, float]]

# The names of the compared projects, as they write them.
NAMES = {
    "numpy": "NumPy",
    "open mpi": "Open MPI",
    "pytorch": "PyTorch",
    "pytorch one-shot": "PyTorch symmetric memory",
    "wholegraph chunked": "WholeGraph, chunked",
    "wholegraph continuous": "WholeGraph, continuous",
}

# The colours on light pages, and their replacements on dark pages.
TEXT, GRID, LIMIT, OURS = "#57606a", "#d0d7de", "#6b7280", "#0f766e"
PEERS = ["#b45309", "#6d28d9", "#be185d", "#1d4ed8"]
DARK = {
    TEXT: "#9ca3af",
    GRID: "#3d444d",
    LIMIT: "#9ca4b0",
    OURS: "#2dd4bf",
    **dict(zip(PEERS, ["#fbbf24", "#a78bfa", "#f472b6", "#60a5fa"])),
}

# The maximum number of tick labels on the size axis.
MAX_LABELS = 14

STYLE = {
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.labelcolor": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titleweight": "bold",
    "figure.figsize": (9, 4.4),
    "font.family": "sans-serif",
    # DejaVu Sans is part of matplotlib and determines the layout.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "system-ui"],
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "wholemem",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def size(count: float, _: int = 0) -> str:
    """Formats a number of bytes with a binary unit.

    >>> [size(4), size(8192), size(64 << 20)]
    ['4', '8K', '64M']
    """
    for unit, shift in ("M", 20), ("K", 10):
        if count >= 1 << shift:
            return f"{count / (1 << shift):g}{unit}"
    return f"{count:g}"


def peer_name(peer: str) -> str:
    """Returns the name of a peer as its project writes it.

    >>> [peer_name("numpy"), peer_name("wholegraph chunked"), peer_name("another")]
    ['NumPy', 'WholeGraph, chunked', 'another']
    """
    return NAMES.get(peer, peer)


def draw_line(axes: Axes, points: Points, label: str, color: str, *, limit: bool = False) -> None:
    """Draws sizes that are powers of two as a line, and other sizes as hollow markers."""
    powers = [point for point in points if point[0] & (point[0] - 1) == 0]
    others = [point for point in points if point not in powers]
    if limit:
        axes.plot(*zip(*powers), color=color, label=label, linestyle="--", linewidth=1.5)
        return
    width, front = (2.6, 3) if color == OURS else (1.6, 2)
    axes.plot(*zip(*powers), color=color, label=label, linewidth=width, marker="o", markersize=4, zorder=front)
    if others:
        hollow = {"markerfacecolor": "none", "markeredgecolor": color, "markersize": 5}
        axes.plot(*zip(*others), linestyle="none", marker="o", zorder=front, **hollow)


def gather(report: Report, axes: Axes) -> str:
    """Draws GB/s by row size, for the calls with the most rows. Returns the subtitle."""
    largest: dict[int, dict[str, Any]] = {}
    for case in sorted(report["cases"], key=lambda case: case["rows"]):
        largest[case["row_bytes"]] = case
    cases = sorted(largest.items())
    draw_line(axes, [(row, case["limit"]) for row, case in cases], "plain copy", LIMIT, limit=True)
    draw_line(axes, [(row, case["value"]["wholemem"]) for row, case in cases], "wholemem", OURS)
    versions = []
    for color, (peer, version) in zip(PEERS, report["peers"].items()):
        draw_line(axes, [(row, case["value"][peer]) for row, case in cases], peer_name(peer), color)
        versions.append(f"{peer_name(peer).split(',')[0]} {version.split('+')[0]}")
    axes.set_xlabel("bytes per row")
    axes.set_ylabel("GB/s of payload")
    axes.set_title(f"Gathering random rows of a {report['table_bytes'] >> 30} GiB table", loc="left", pad=26)
    return f"{report['machine']}; {', '.join(dict.fromkeys(versions))}"


def allreduce(report: Report, axes: Axes) -> str:
    """Draws the speedup of two ranks over the peer, out of place, in CUDA graphs if available. Returns the subtitle."""
    mode = "graph" if report["backend"] == "cuda" else "eager"
    cases = [case for case in report["cases"] if (case["ranks"], case["place"], case["mode"]) == (2, "out", mode)]
    peer = peer_name(next(iter(cases[0]["peers"])))
    for buffers, label, color in ("window", "wholemem, window", OURS), ("staged", "wholemem, staged", PEERS[0]):
        points = [(case["bytes"], case["ratio"]) for case in cases if case["buffers"] == buffers]
        draw_line(axes, points, label, color)
    axes.axhline(1, color=LIMIT, label=peer, linestyle="--", linewidth=1.5)
    axes.set_xlabel("bytes per rank")
    axes.set_ylabel(f"speedup over {peer}")
    axes.set_title(f"All-reduce of two ranks, compared with {peer}", loc="left", pad=26)
    return f"sum of {report['dtype']}; {report['machine']}"


def finish(axes: Axes, subtitle: str) -> Figure:
    """Adds the subtitle and the legend of a plot, sets the scales and ticks of its axes, and returns the figure."""
    axes.text(0, 1.03, subtitle, transform=axes.transAxes)
    axes.set_xscale("log", base=2)
    sizes = sorted({count for line in axes.lines for count in line.get_xdata() if count > 1})
    powers = [2**power for power in range(1, 40) if sizes[0] <= 2**power <= sizes[-1]]
    axes.set_xticks(powers[:: -(-len(powers) // MAX_LABELS)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(size))
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    if any(line.get_markerfacecolor() == "none" for line in axes.lines if line.get_marker() == "o"):
        handles.append(Line2D([], [], color=TEXT, linestyle="none", marker="o", markerfacecolor="none"))
        labels.append("not a power of two")
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def svg(figure: Figure, digest: str) -> str:
    """Renders a figure as SVG with a style sheet for dark pages."""
    file = StringIO()
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    svg_text = file.getvalue()
    rules = "".join(
        f' [style*="{kind}: {light}"] {{ {kind}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    svg_text = svg_text[svg_text.index("<svg") :]
    head, rest = svg_text.split(">\n", 1)
    style = f"<style>\n@media (prefers-color-scheme: dark) {{\n{rules}}}\n</style>\n"
    label = f"<!-- Generated by `cargo xtask plots`. The digest of its inputs: {digest} -->\n"
    lines = [line.rstrip() for line in f"{label}{head}>\n{style}{rest}".splitlines()]
    return "\n".join(lines) + "\n"


def newest(folder: Path, name: str) -> dict[str, Report]:
    """Returns the newest report of each backend."""
    reports: Iterable[Report] = (json.loads(path.read_text()) for path in sorted(folder.glob(f"*/peers-{name}.json")))
    return {report["backend"]: report for report in reports}


def main() -> None:
    reports, plots, digest = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    plt.rcParams.update(STYLE)
    for draw in gather, allreduce:
        for backend, report in newest(reports, draw.__name__).items():
            if report["verified"] is not True:
                raise SystemExit(f"error: the results of {draw.__name__} on {backend} were not verified")
            _, axes = plt.subplots()
            figure = finish(axes, draw(report, axes))
            (plots / f"{draw.__name__}-{backend}.svg").write_text(svg(figure, digest))


if __name__ == "__main__":
    main()
