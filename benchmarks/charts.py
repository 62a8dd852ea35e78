"""Draws the charts of README and benchmarks/README.md from what the benchmarks printed.

    .venv/bin/python benchmarks/charts.py [RESULT.json ...] [-o DIRECTORY]

A result is a file whose last line is the JSON object that a benchmark ends with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
# The most rows of a chart that can still be told apart.
_MOST_BARS = 8


def read(path: Path) -> dict[str, Any]:
    """The object on the last line of a file."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return result


def bars(axes: Axes, rows: list[dict[str, Any]], groups: list[str], series: list[str]) -> None:
    """A group of bars for every family, one for every mode; a line where plain decoding is."""
    width = 0.8 / len(series)
    for number, mode in enumerate(series):
        heights = [next((r["ratio"] for r in rows if (r["family"], r["mode"]) == (g, mode)), 0) for g in groups]
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, heights, width, label=mode)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("speed, plain decoding = 1")
    axes.legend(fontsize="small", ncols=min(4, len(series)))


def by_family(result: dict[str, Any], title: str, out: Path) -> None:
    """Speed-ups by family and mode, greedy."""
    rows = [row for row in result["rows"] if not row["temperature"] and row.get("machine") == _first_machine(result)]
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode != "plain"][:_MOST_BARS]
    figure, axes = plt.subplots(figsize=(10, 4))
    bars(axes, rows, list(dict.fromkeys(row["family"] for row in rows)), modes)
    axes.set_title(title)
    save(figure, out)


def _first_machine(result: dict[str, Any]) -> str | None:
    machine: str | None = result["rows"][0].get("machine")
    return machine


def _where(result: dict[str, Any]) -> str:
    """The machine, to be put behind a title."""
    return f" ({result['machine']['cpu']})"


def cost_curves(result: dict[str, Any], out: Path) -> None:
    """What n rows cost, in milliseconds, for every file: dashed under llama.cpp's kernels, drawn through under ours."""
    figure, axes = plt.subplots(figsize=(7, 4))
    rows = [row for row in result["rows"] if not row.get("prefill")]
    colours = {file: f"C{number}" for number, file in enumerate(dict.fromkeys(row["file"] for row in rows))}
    # (results before 0.2 are of llama.cpp's kernels only)
    for file, kernels in dict.fromkeys((row["file"], row.get("kernels", "stock")) for row in rows):
        mine = [row for row in rows if (row["file"], row.get("kernels", "stock")) == (file, kernels)]
        line = "--" if kernels == "stock" else "-"
        style: dict[str, Any] = {"linestyle": line, "color": colours[file], "marker": "o", "markersize": 3}
        axes.plot([row["rows"] for row in mine], [row["ms"] for row in mine], label=f"{file}, {kernels}", **style)
    axes.set(xlabel="rows of a pass", ylabel="ms", ylim=(0, None), title=f"What a forward pass costs{_where(result)}")
    axes.legend(fontsize="x-small")
    save(figure, out)


def acceptance(result: dict[str, Any], out: Path) -> None:
    """The share of drafts that stay, by how many a round has."""
    figure, axes = plt.subplots(figsize=(7, 4))
    fixed = [row for row in result["rows"] if row["mode"].startswith("fixed ") and not row["temperature"]]
    for family in dict.fromkeys(row["family"] for row in fixed):
        points = sorted(
            (int(row["mode"].split()[1]), row["acceptance_rate"]) for row in fixed if row["family"] == family
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=family)
    axes.set(xlabel="drafts a round", ylabel="share that stays", title="Acceptance by draft length, greedy")
    axes.legend(fontsize="small")
    save(figure, out)


def by_gamma(result: dict[str, Any], out: Path) -> None:
    """What every fixed number of drafts a round makes of each family, and the controller beside them."""
    greedy = [row for row in result["rows"] if not row["temperature"]]
    gammas = sorted({int(row["mode"].split()[1]) for row in greedy if row["mode"].startswith("fixed ")})
    figure, axes = plt.subplots(figsize=(9, 4))
    for family in dict.fromkeys(row["family"] for row in greedy):
        ratios = {row["mode"]: row["ratio"] for row in greedy if row["family"] == family}
        heights = [ratios[f"fixed {gamma}"] for gamma in gammas]
        (line,) = axes.plot(range(len(gammas)), heights, marker="o", markersize=3, label=family)
        axes.plot(len(gammas), ratios["adaptive"], marker="*", markersize=11, color=line.get_color())
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(gammas) + 1), [*map(str, gammas), "adaptive"])
    title = f"Greedy, by how far is guessed{_where(result)}"
    axes.set(xlabel="drafts a round", ylabel="speed, plain decoding = 1", title=title)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, out)


def under_load(result: dict[str, Any], out: Path) -> None:
    """What clients get, by how many there are: tokens a second of all, and what each waits for."""
    rows = [row for row in result["rows"] if row["load"].endswith(" clients") and "tokens_per_second" in row]
    wanted = {
        "tokens_per_second": "tokens a second, all clients",
        "first_text_s": "seconds to the first text, median",
        "gap_p99_s": "seconds between two pieces of text, p99",
    }
    figure, panels = plt.subplots(1, len(wanted), figsize=(13, 4))
    for axes, (column, title) in zip(panels, wanted.items(), strict=True):
        for server in dict.fromkeys(row["server"] for row in rows):
            mine = [row for row in rows if row["server"] == server]
            clients = [int(row["load"].split()[0]) for row in mine]
            axes.plot(clients, [row[column] for row in mine], marker="o", markersize=3, label=server)
        axes.set(xlabel="clients", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(row["load"].split()[0]) for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
    panels[0].legend(fontsize="small")
    save(figure, out)


def save(figure: Figure, out: Path) -> None:
    """Write a chart."""
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)
    print(out)


def draw(result: dict[str, Any], stem: str, out: Path) -> None:
    """All charts of one result."""
    kind = result["benchmark"]
    if kind == "cost_curve":
        cost_curves(result, out / f"{stem}.svg")
    elif kind == "simulate":
        by_family(result, f"SIMULATION, {_first_machine(result)}: every policy on the same texts", out / f"{stem}.svg")
    elif kind == "decode":
        by_family(result, f"{result['models']['target']}{_where(result)}", out / f"{stem}.svg")
        if len({row["mode"] for row in result["rows"] if row["mode"].startswith("fixed ")}) > 2:
            acceptance(result, out / f"{stem}-acceptance.svg")
            by_gamma(result, out / f"{stem}-gamma.svg")
    elif kind == "against_llama_server":
        title = f"Same files, same machine: llama-server's settings and ours{_where(result)}"
        by_family(result, title, out / f"{stem}.svg")
    elif kind == "load":
        under_load(result, out / f"{stem}.svg")


def main() -> None:
    """Draw what is given, or all results that are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS, help="where the charts go")
    options = parser.parse_args()
    mpl.use("svg")
    # The same input draws the same file.
    mpl.rcParams["svg.hashsalt"] = "specserve"
    for path in options.files or sorted(RESULTS.glob("*.json")):
        draw(read(path), path.stem, options.out)


if __name__ == "__main__":
    main()
