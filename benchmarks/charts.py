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
        figure = speed_by_family(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]))
        figure.savefig(options.out / f"{path.stem}.svg", metadata={"Date": None})
        plt.close(figure)
        print(options.out / f"{path.stem}.svg")


if __name__ == "__main__":
    main()
