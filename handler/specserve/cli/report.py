"""`scripts/report`: summarise traces in an HTML page that loads nothing else."""

from __future__ import annotations

import json
import math
from codecs import getincrementaldecoder
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from specserve.cli import cli
from specserve.errors import ConfigError, EnvironmentFailure

# Bars of the chart over time.
_COLUMNS = 80
_MAX_ANSWERS = 20


class Piece(NamedTuple):
    """The text that a token has, and its kind: `accepted`, `recovered`, `bonus` or `plain`."""

    text: str
    kind: str


@dataclass
class Family:
    """What the rounds and answers of a prompt family add up to."""

    answers: int = 0
    rounds: int = 0
    tokens: int = 0
    # By drafter.
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    # By position in the round, from 1: drafts of which all before were accepted, and how many of them were accepted.
    tested_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    # Drafting, verifying, everything else.
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    ttft_seconds: list[float] = field(default_factory=list)
    # By group: controller, fixed gamma, control group.
    tpot_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count_round(self, entry: dict[str, Any]) -> None:
        """Add a round of a sequence."""
        drafts, accepted = entry["drafts"], entry["accepted"]
        self.rounds += 1
        self.tokens += entry["tokens"]
        self.seconds = [mine + more for mine, more in zip(self.seconds, entry["seconds"], strict=True)]
        for i, drafter in enumerate(drafts):
            self.drafted[drafter] += 1
            self.accepted[drafter] += i < accepted
        for i in range(min(accepted + 1, len(drafts))):
            self.tested_at[i + 1] += 1
            self.accepted_at[i + 1] += i < accepted

    def count_end(self, entry: dict[str, Any]) -> None:
        """Add the end of a sequence."""
        self.answers += 1
        if entry["ttft"] is not None:
            self.ttft_seconds.append(entry["ttft"])
        if entry["tpot"] is not None:
            self.tpot_seconds[entry["group"]].append(entry["tpot"])

    @property
    def acceptance_by_position(self) -> list[tuple[int, float, int]]:
        """Positions in a round, the acceptance rate of the drafts that were tested there, and their number."""
        return [(i, self.accepted_at[i] / count, count) for i, count in sorted(self.tested_at.items())]

    @property
    def shares(self) -> list[float]:
        """The shares of the time that drafting, verifying and everything else took."""
        total = sum(self.seconds) or 1.0
        return [seconds / total for seconds in self.seconds]

    @property
    def median_ttft_seconds(self) -> float | None:
        """The median of the seconds that the first tokens took."""
        return median(self.ttft_seconds) if self.ttft_seconds else None

    @property
    def median_tpot_seconds(self) -> dict[str, float]:
        """The median of the seconds that an output token took, by group."""
        return {group: median(seconds) for group, seconds in sorted(self.tpot_seconds.items())}


@dataclass
class Report:
    """Everything that the page shows."""

    files: list[str]
    families: dict[str, Family]
    answers: dict[str, list[Piece]]
    mean_gammas: list[tuple[float, float]]
    begun: float
    ended: float
    skipped: int

    @property
    def has_control_group(self) -> bool:
        """Whether a traced request was drawn to go without drafts (`speculation.holdback`)."""
        return any("holdback" in family.tpot_seconds for family in self.families.values())

    @property
    def minutes(self) -> float:
        """The minutes that lie between the first record and the last."""
        return (self.ended - self.begun) / 60


def read(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the records of a file; None for a line that is no record, such as one truncated by a full disk.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield _record(line)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def _begun(path: Path) -> float:
    """When a file's first record was written, in seconds."""
    return next((float(entry["time"]) for entry in read(path) if entry), math.inf)


def _record(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    known = isinstance(entry, dict) and entry.get("event") in {"round", "end"} and {"time", "request"} <= entry.keys()
    return entry if known else None


def summarise(paths: Sequence[Path]) -> Report:
    """Add up the records of trace files.

    Raises:
        ConfigError: a file cannot be read, or none contains a round.
    """
    families: dict[str, Family] = defaultdict(Family)
    answers: dict[str, list[Piece]] = defaultdict(list)
    rounds: list[tuple[float, int]] = []
    times: list[float] = []
    skipped = 0
    # A shell names rotated files in another order than they were written in.
    for entry in chain.from_iterable(map(read, sorted(paths, key=_begun))):
        if entry is None:
            skipped += 1
            continue
        times.append(entry["time"])
        family = families[entry["family"] or "none named"]
        if entry["event"] == "end":
            family.count_end(entry)
            continue
        family.count_round(entry)
        rounds.append((entry["time"], len(entry["drafts"])))
        if "text" in entry:
            answers[f"{entry['request']} ({entry['choice'] + 1})"] += pieces(entry)
    if not rounds:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no round is recorded; set `trace` in the model's YAML and ask the server."
        )
    shown = {name: whole_characters(written) for name, written in list(answers.items())[-_MAX_ANSWERS:]}
    files = [path.name for path in paths]
    return Report(
        files, dict(sorted(families.items())), shown, gamma_over_time(rounds), min(times), max(times), skipped
    )


def pieces(entry: dict[str, Any]) -> list[Piece]:
    """Return the tokens that a round emitted: accepted drafts and the target's own; undecoded bytes as in the trace.

    After a recovered token that the target had read as an alternative comes a bonus token.
    """
    accepted, drafts = entry["accepted"], len(entry["drafts"])
    last = "plain" if not drafts else "bonus" if accepted == drafts else "recovered"
    kinds = ["accepted"] * accepted + [last, "bonus"]
    return [Piece(text, kind) for text, kind in zip(entry["text"], kinds, strict=False)]


def whole_characters(written: list[Piece]) -> list[Piece]:
    """Decode an answer: a character that spans several tokens is shown with the last of them."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    shown = [Piece(decoder.decode(text.encode(errors="surrogateescape")), kind) for text, kind in written]
    if incomplete := decoder.decode(b"", final=True):
        shown.append(Piece(incomplete, written[-1].kind))
    return shown


def gamma_over_time(rounds: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Return the mean number of drafts a round in equal intervals: where each begins, from 0 to 1, and the mean."""
    begun, ended = min(rounds)[0], max(rounds)[0]
    width = (ended - begun) / _COLUMNS or 1.0
    intervals: dict[int, list[int]] = defaultdict(list)
    for time, gamma in rounds:
        intervals[min(_COLUMNS - 1, int((time - begun) / width))].append(gamma)
    return [(i / _COLUMNS, sum(gammas) / len(gammas)) for i, gammas in sorted(intervals.items())]


def page(report: Report) -> str:
    """Render the HTML, which loads nothing from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(report=report)


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = cli.Parser("report")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="files that a server's `trace` wrote")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.html", help="the page")
    options = parser.parse_args(arguments)
    html = page(summarise(options.traces))
    try:
        options.out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(f"{options.out}: cannot be written ({error.strerror}).") from error
    cli.say(str(options.out))
    return 0
