"""`scripts/report`: summarise traces by prompt family, by draft length and by position, as tables."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specserve.errors import ConfigError

_FIGURES = ("rounds", "tokens", "tokens a round", "drafted", "accepted", "ms a token")


def tables(traces: Iterable[Path]) -> list[Table]:
    # Rounds, tokens, drafts, accepted drafts and seconds by family, and by family and gamma.
    families: dict[tuple[str], list[float]] = defaultdict(lambda: [0] * 5)
    gammas: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0] * 5)
    # By drafter and position, from 1: drafts whose predecessors were all accepted, and those accepted.
    positions: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for entry in _rounds(traces):
        family, drafts, accepted = entry["family"] or "none named", entry["drafts"], entry["accepted"]
        numbers = (1, entry["tokens"], len(drafts), accepted, sum(entry["seconds"]))
        for sums in (families[family,], gammas[family, len(drafts)]):
            sums[:] = map(add, sums, numbers)
        for i, drafter in enumerate(drafts[: accepted + 1]):
            tested = positions[drafter, i + 1]
            tested[0] += 1
            tested[1] += i < accepted
    if not families:
        raise ConfigError("no round is recorded; set `trace` in the model's YAML and ask the server.")
    by_family = [(*key, *_figures(*sums)) for key, sums in sorted(families.items())]
    by_gamma = [(*key, *_figures(*sums)) for key, sums in sorted(gammas.items())]
    by_position = [(*key, tested, f"{kept / tested:.0%}") for key, (tested, kept) in sorted(positions.items())]
    title = "By position in the round, if all drafts before were accepted"
    return [
        _table("By prompt family", ("family", *_FIGURES), by_family),
        _table("By draft length", ("family", "gamma", *_FIGURES), by_gamma),
        _table(title, ("drafter", "position", "drafted", "accepted"), by_position),
    ]


def _figures(rounds: float, tokens: float, drafted: float, accepted: float, seconds: float) -> tuple[object, ...]:
    """Return the cells of a table's row, as `_FIGURES` names them."""
    rate = f"{accepted / drafted:.0%}" if drafted else "-"
    per_token = f"{1000 * seconds / tokens:.1f}" if tokens else "-"
    return rounds, tokens, f"{tokens / rounds:.2f}", drafted, rate, per_token


def _rounds(traces: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rounds of all files, without a line that a full disk has truncated."""
    for path in traces:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        entry = json.loads(line)
                    except ValueError:
                        continue
                    if entry["event"] == "round":
                        yield entry
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def _table(title: str, columns: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in {"family", "drafter"} else "right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def run(options: Namespace) -> int:
    console = Console(record=options.out is not None)
    for table in tables(options.traces):
        console.print(table)
    if options.out:
        console.save_html(str(options.out))
    return 0
