"""Draws the charts of the pages from what the benchmarks printed.

    .venv/bin/python benchmarks/charts.py [RESULT.json ...] [-o DIRECTORY]

The last line of a file is the JSON object that a benchmark ends with. An SVG is named after its file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
MAX_MODES = 8
# Of ours, llama.cpp and other engines.
LINE_STYLES = ("-", "--", ":", "-.")


def best_settings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our adaptive mode, and the fastest setting of every other engine for each family, named after the engine."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        engine = row["mode"].split()[0]
        if engine == "specserve" and row["mode"] != "specserve adaptive":
            continue
        mode = "specserve" if engine == "specserve" else f"{engine}, its best setting"
        key = row["family"], mode
        if key not in best or best[key]["ratio"] < row["ratio"]:
            best[key] = row | {"mode": mode}
    return sorted(best.values(), key=lambda row: row["mode"] != "specserve")


def speed_by_family(result: dict[str, Any]) -> Figure:
    """Bars of greedy speed relative to plain decoding, by family and mode (decode.py, peers.py requests)."""
    rows = [row for row in result["rows"] if not row["temperature"]]
    plain = "plain decoding"
    if result["benchmark"] == "peers":
        rows, plain = best_settings(rows), "llama-server without drafts"
    ratios = {(row["family"], row["mode"]): row["ratio"] for row in rows}
    families = list(dict.fromkeys(row["family"] for row in rows))
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode != "plain"][:MAX_MODES]
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        positions = [index + (number - (len(modes) - 1) / 2) * width for index in range(len(families))]
        axes.bar(positions, [ratios.get((family, mode), 0) for family in families], width, label=mode)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(families)), families)
    axes.set(ylabel=f"speed, {plain} = 1", title=f"{result['models']['target']} ({result['machine']['cpu']})")
    figure.legend(loc="outside lower center", fontsize="small", ncols=min(3, len(modes)))
    return figure


def cost_by_rows(result: dict[str, Any]) -> Figure:
    """Milliseconds of a pass by its number of rows, a line for each file and engine (cost_curve.py)."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in result["rows"]:
        if not row["prefill"]:
            lines.setdefault((row["file"], row["engine"]), []).append((row["rows"], row["ms"]))
    colours = {file: f"C{number}" for number, file in enumerate(dict.fromkeys(file for file, _ in lines))}
    engines = sorted(
        {engine for _, engine in lines}, key=lambda engine: (engine != "ours", engine != "llama.cpp", engine)
    )
    for (file, engine), points in lines.items():
        style: dict[str, Any] = {"linestyle": LINE_STYLES[engines.index(engine)], "color": colours[file]}
        axes.plot(*zip(*points, strict=True), label=f"{file}, {engine}", marker="o", markersize=3, **style)
    axes.set(xlabel="rows of a pass", ylabel="ms", ylim=(0, None), title=f"Cost of a pass ({result['machine']['cpu']})")
    axes.legend(fontsize="x-small")
    return figure


def load_by_clients(result: dict[str, Any]) -> Figure:
    """Throughput, time to first token and gaps between chunks, by clients (load.py, peers.py clients)."""
    rows = [row for row in result["rows"] if row["load"].endswith(" clients") and "tokens_per_second" in row]
    columns = {
        "tokens_per_second": "tokens a second, all clients",
        "ttft_s": "time to first token, s, median",
        "gap_p99_s": "gap between chunks, s, p99",
    }
    figure, panels = plt.subplots(1, len(columns), figsize=(13, 4), layout="constrained")
    for axes, (column, title) in zip(panels, columns.items(), strict=True):
        for server in dict.fromkeys(row["server"] for row in rows):
            mine = [row for row in rows if row["server"] == server]
            clients = [int(row["load"].split()[0]) for row in mine]
            axes.plot(clients, [row[column] for row in mine], marker="o", markersize=3, label=server)
        axes.set(xlabel="clients", title=title, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(row["load"].split()[0]) for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small", ncols=5)
    return figure


def draw(result: dict[str, Any]) -> Figure | None:
    """The chart of a result, if there is one for its kind."""
    first = result["rows"][0]
    if first.get("load", "").endswith(" clients"):
        return load_by_clients(result)
    if "engine" in first:
        return cost_by_rows(result)
    return speed_by_family(result) if result["benchmark"] in {"decode", "peers"} else None


def main() -> None:
    """Draw the files given, or the committed results that have a chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: those of benchmarks/results with a chart")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS, help="the directory for the charts")
    options = parser.parse_args()
    mpl.use("svg")
    # The same input draws the same file.
    mpl.rcParams["svg.hashsalt"] = "specserve"
    for path in options.files or [chart.with_suffix(".json") for chart in sorted(RESULTS.glob("*.svg"))]:
        figure = draw(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]))
        if figure:
            figure.savefig(options.out / f"{path.stem}.svg", metadata={"Date": None})
            plt.close(figure)
            print(options.out / f"{path.stem}.svg")


if __name__ == "__main__":
    main()
