"""`scripts/report`: one self-contained HTML page of what traces say."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from specserve.errors import ConfigError, EnvironmentFailure
from specserve.tools import cli

_COLUMNS = 80
_MOST_TEXTS = 20


class Piece(NamedTuple):
    """A token's text, and what it was: `accepted`, `recovered`, `bonus` or `plain`."""

    text: str
    kind: str


@dataclass
class Family:
    """What the rounds of one kind of prompt come to."""

    texts: int = 0
    rounds: int = 0
    tokens: int = 0
    reached: Counter[int] = field(default_factory=Counter)
    stayed: Counter[int] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    firsts: list[float] = field(default_factory=list)
    paces: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count_round(self, entry: dict[str, Any]) -> None:
        """One round of one text."""
        drafts, accepted = entry["drafts"], entry["accepted"]
        self.rounds += 1
        self.tokens += entry["tokens"]
        self.seconds = [mine + more for mine, more in zip(self.seconds, entry["seconds"], strict=True)]
        for place, drafter in enumerate(drafts):
            self.drafters[drafter] += 1
            self.kept[drafter] += place < accepted
        for place in range(min(accepted + 1, len(drafts))):
            self.reached[place + 1] += 1
            self.stayed[place + 1] += place < accepted

    def count_end(self, entry: dict[str, Any]) -> None:
        """One text came to its end."""
        self.texts += 1
        if entry["ttft"] is not None:
            self.firsts.append(entry["ttft"])
        if entry["tpot"] is not None:
            self.paces[entry["group"]].append(entry["tpot"])

    @property
    def places(self) -> list[tuple[int, float, int]]:
        """By place of a round: the share of drafts that stayed where they were reached, and how many were."""
        return [(place, self.stayed[place] / count, count) for place, count in sorted(self.reached.items())]

    @property
    def shares(self) -> list[float]:
        """Of the time: drafting, verifying, elsewhere."""
        whole = sum(self.seconds) or 1.0
        return [seconds / whole for seconds in self.seconds]

    @property
    def first(self) -> float | None:
        """Seconds to the first token, the median."""
        return median(self.firsts) if self.firsts else None

    @property
    def pace(self) -> dict[str, float]:
        """Seconds a token, the median, by who decided on the drafts."""
        return {group: median(paces) for group, paces in sorted(self.paces.items())}


@dataclass
class Report:
    """All that the page shows."""

    files: list[str]
    families: dict[str, Family]
    texts: dict[str, list[Piece]]
    gammas: list[tuple[float, float]]
    begun: float
    ended: float
    skipped: int

    @property
    def minutes(self) -> float:
        """From the first record to the last."""
        return (self.ended - self.begun) / 60


def read(paths: Sequence[Path]) -> Iterator[dict[str, Any] | None]:
    """The records of all files; None for a line that is no record, such as one that a full disk has cut.

    Raises:
        ConfigError: a file cannot be read.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    yield _record(line)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def _record(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    known = isinstance(entry, dict) and entry.get("event") in {"round", "end"} and {"time", "request"} <= entry.keys()
    return entry if known else None


def summarise(paths: Sequence[Path]) -> Report:
    """What the records come to.

    Raises:
        ConfigError: a file cannot be read, or there is no round in any.
    """
    families: dict[str, Family] = defaultdict(Family)
    texts: dict[str, list[Piece]] = defaultdict(list)
    rounds: list[tuple[float, int]] = []
    times: list[float] = []
    skipped = 0
    for entry in read(paths):
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
            texts[f"{entry['request']} ({entry['choice'] + 1})"] += pieces(entry)
    if not rounds:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no round is recorded; set `trace` in the model's YAML and ask the server."
        )
    shown = {name: whole_characters(written) for name, written in list(texts.items())[-_MOST_TEXTS:]}
    files = [path.name for path in paths]
    return Report(files, dict(sorted(families.items())), shown, over_time(rounds), min(times), max(times), skipped)


def pieces(entry: dict[str, Any]) -> list[Piece]:
    """What a round wrote: the drafts that stayed, and the token that the target added; spelled as in the trace."""
    accepted, drafts = entry["accepted"], len(entry["drafts"])
    last = "plain" if not drafts else "bonus" if accepted == drafts else "recovered"
    return [Piece(text, "accepted" if place < accepted else last) for place, text in enumerate(entry["text"])]


def whole_characters(written: list[Piece]) -> list[Piece]:
    """A text's pieces to be read: a character that several tokens spell is part of the one that completes it."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    shown = [Piece(decoder.decode(text.encode(errors="surrogateescape")), kind) for text, kind in written]
    if cut := decoder.decode(b"", final=True):
        shown.append(Piece(cut, written[-1].kind))
    return shown


def over_time(rounds: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Drafts a round in equal stretches of time: where each begins, from 0 to 1, and the mean."""
    begun, ended = min(rounds)[0], max(rounds)[0]
    width = (ended - begun) / _COLUMNS or 1.0
    stretches: dict[int, list[int]] = defaultdict(list)
    for moment, gamma in rounds:
        stretches[min(_COLUMNS - 1, int((moment - begun) / width))].append(gamma)
    return [(place / _COLUMNS, sum(gammas) / len(gammas)) for place, gammas in sorted(stretches.items())]


def page(report: Report) -> str:
    """The HTML; it loads nothing from anywhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(report=report)


def main(arguments: Sequence[str]) -> int:
    """Write the page and say where it is."""
    parser = cli.Parser(prog="report", description=__doc__)
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


if __name__ == "__main__":
    cli.run(main)
