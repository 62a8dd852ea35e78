"""`scripts/report`: summarise traces by prompt family, by draft length and by position, as tables."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from specserve.errors import ConfigError


@dataclass
class Sum:
    """What rounds of sequences, and the ends of these, add up to."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ttft_seconds: list[float] = field(default_factory=list)
    # Without drafts for the whole answer, and with them.
    plain_tpot_seconds: list[float] = field(default_factory=list)
    tpot_seconds: list[float] = field(default_factory=list)

    def count_round(self, entry: dict[str, Any]) -> None:
        """Add a round of a sequence."""
        self.rounds += 1
        self.tokens += entry["tokens"]
        self.drafted += len(entry["drafts"])
        self.accepted += entry["accepted"]
        self.seconds += sum(entry["seconds"])

    def count_end(self, entry: dict[str, Any]) -> None:
        """Add the end of a sequence."""
        if entry["ttft"] is not None:
            self.ttft_seconds.append(entry["ttft"])
        if entry["tpot"] is not None:
            plain = entry["group"] in {"off", "holdback"}
            (self.plain_tpot_seconds if plain else self.tpot_seconds).append(entry["tpot"])


@dataclass
class Report:
    """The sums of a trace, by what the tables show."""

    families: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    # By family and number of draft tokens in the round.
    gammas: dict[tuple[str, int], Sum] = field(default_factory=lambda: defaultdict(Sum))
    # By drafter and position in the round, from 1: drafts whose predecessors were all accepted, and those accepted.
    positions: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def count(self, entry: dict[str, Any]) -> None:
        """Add a record."""
        family = entry["family"] or "none named"
        if entry["event"] == "end":
            self.families[family].count_end(entry)
            return
        drafts, accepted = entry["drafts"], entry["accepted"]
        self.families[family].count_round(entry)
        self.gammas[family, len(drafts)].count_round(entry)
        for i, drafter in enumerate(drafts[: accepted + 1]):
            tested = self.positions[drafter, i + 1]
            tested[0] += 1
            tested[1] += i < accepted


def summarise(traces: Iterable[Path]) -> Report:
    """Add up the records of trace files; a line that a full disk has truncated is left out.

    Raises:
        ConfigError: a file cannot be read, or none contains a round.
    """
    report = Report()
    for path in traces:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for entry in _records(file):
                    report.count(entry)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    if not report.gammas:
        raise ConfigError("no round is recorded; set `trace` in the model's YAML and ask the server.")
    return report


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def tables(report: Report) -> Iterator[Table]:
    """Yield the tables."""
    columns = (
        "family",
        "rounds",
        "tokens",
        "tokens a round",
        "drafted",
        "accepted",
        "ms a token",
        "TTFT, ms",
        "speed-up",
    )
    yield _table(
        "By prompt family",
        columns,
        (
            [family, *_figures(found), _milliseconds(found.ttft_seconds), _speedup(found)]
            for family, found in sorted(report.families.items())
        ),
    )
    yield _table(
        "By draft length",
        ("family", "gamma", *columns[1:7]),
        ([family, str(gamma), *_figures(found)] for (family, gamma), found in sorted(report.gammas.items())),
    )
    yield _table(
        "By position in the round, if all drafts before were accepted",
        ("drafter", "position", "drafted", "accepted"),
        (
            [drafter, str(position), str(tested), f"{accepted / tested:.0%}"]
            for (drafter, position), (tested, accepted) in sorted(report.positions.items())
        ),
    )


def _figures(found: Sum) -> list[str]:
    rate = f"{found.accepted / found.drafted:.0%}" if found.drafted else "-"
    per_round = f"{found.tokens / found.rounds:.2f}" if found.rounds else "-"
    per_token = f"{1000 * found.seconds / found.tokens:.1f}" if found.tokens else "-"
    return [str(found.rounds), str(found.tokens), per_round, str(found.drafted), rate, per_token]


def _milliseconds(seconds: list[float]) -> str:
    return f"{1000 * median(seconds):.0f}" if seconds else "-"


def _speedup(found: Sum) -> str:
    """Return the ratio of the medians without and with drafts; without a control group there is none."""
    groups = found.plain_tpot_seconds, found.tpot_seconds
    return f"{median(groups[0]) / median(groups[1]):.2f}" if all(groups) else "-"


def _table(title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in {"family", "drafter"} else "right")
    for row in rows:
        table.add_row(*row)
    return table


def run(options: Namespace) -> int:
    """Print the tables and, with --out, write them into a page."""
    console = Console(record=options.out is not None)
    for table in tables(summarise(options.traces)):
        console.print(table)
    if options.out:
        console.save_html(str(options.out))
    return 0
