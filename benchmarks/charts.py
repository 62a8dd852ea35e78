"""Draws the charts of the pages, each from the result of peers.py that has its name.

.venv/bin/python benchmarks/charts.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"


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
    """Bars of the speed of each engine by family (peers.py)."""
    rows = best_settings(result["rows"])
    ratios = {(row["family"], row["mode"]): row["ratio"] for row in rows}
    families = list(dict.fromkeys(row["family"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        positions = [index + (number - (len(modes) - 1) / 2) * width for index in range(len(families))]
        axes.bar(positions, [ratios.get((family, mode), 0) for family in families], width, label=mode)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(families)), families)
    axes.set(
        ylabel="speed, llama-server without drafts = 1",
        title=f"{result['models']['target']} ({result['machine']['cpu']})",
    )
    figure.legend(loc="outside lower center", fontsize="small", ncols=min(3, len(modes)))
    return figure


def main() -> None:
    mpl.use("svg")
    # The same input draws the same file.
    mpl.rcParams["svg.hashsalt"] = "specserve"
    for path in sorted(RESULTS.glob("*.svg")):
        figure = speed_by_family(json.loads(path.with_suffix(".json").read_text(encoding="utf-8").splitlines()[-1]))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
