"""Writes RESULTS.md: a question each, with one table that is made of results/QUESTION-MACHINE.json.

    .venv/bin/python benchmarks/tables.py

Such a file is the JSON object that a benchmark ends with. RESULTS.md is not edited by hand.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from charts import RESULTS, best_settings
from common import Row

PAGE = Path(__file__).parent / "RESULTS.md"
MACHINES = {"zen5": "Zen 5", "zen4": "Zen 4", "zen3": "Zen 3", "emerald": "Emerald Rapids"}
KINDS = {
    "code": "code",
    "json": "JSON",
    "schema": "JSON by a schema",
    "prose": "stories and essays",
    "chat": "chat",
    "summarise": "a summary of a long text",
    "edit": "an edit",
    "edit, predicted": "an edit with `prediction`",
    "long": "an answer of 1,000 tokens",
}
TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
# Of the longest gaps, those that are named.
WORST = 1
INTRODUCTION = """# Results

Two cores of shared AMD EPYCs (Zen 5, Zen 4, and Zen 3 with AVX2 alone) and an Intel Emerald Rapids. The pair \
is Qwen2.5-Coder 1.5B (Q4_K_M) with its 0.5B in pure Q4_0 as the draft; "3B" is the 1.5B at the cost of Qwen2.5 3B. \
Compare within a run only: between runs ratios vary by a tenth. `tables.py` writes this page from the linked \
files, which hold dates and commands."""
Results = Mapping[str, Row]
# Texts by the keys of their rows.
Column = dict[Any, str]


def read_results(directory: Path = RESULTS) -> dict[str, Row]:
    files = sorted(directory.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) for path in files}


def on_machines(results: Results, *questions: str) -> dict[str, str]:
    """The results of some questions: the title of the machine by the name of the file."""
    names = [(f"{question}-{machine}", title) for question in questions for machine, title in MACHINES.items()]
    return {name: title for name, title in names if name in results}


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(corner: str, titles: Mapping[Any, str], columns: Mapping[str, Column]) -> list[str]:
    """The lines of a table: a row for each key of `titles` that a column has."""
    rows = [
        line([title, *(column.get(key, "") for column in columns.values())])
        for key, title in titles.items()
        if any(key in column for column in columns.values())
    ]
    return [line([corner, *columns]), "|---" * (1 + len(columns)) + "|", *rows]


def own_titles(columns: Mapping[str, Column]) -> dict[str, str]:
    """Titles of rows whose keys are texts already."""
    return {key: key for column in columns.values() for key in column}


def source(name: str) -> str:
    """On which machine a result was measured, with a link to its file, which has date and command."""
    model = "3B, " if "-3b-" in name else ""
    return f"[{model}{MACHINES.get(name.rpartition('-')[2], name.replace('_', ' '))}](results/{name}.json)"


def section(question: str, answer: str, lines: list[str], results: Results, names: Iterable[str]) -> list[str]:
    """A question, what its figures are, where they come from, and its table."""
    names = list(names)
    scripts = ", ".join(
        dict.fromkeys(f"`{Path(results[name]['command'].split()[0]).name.rstrip(';')}`" for name in names)
    )
    sources = ", ".join(map(source, names))
    return ["", f"## {question}", f"{answer} ({scripts}: {sources})", *(["", *lines] if lines else [])]


def span(values: Iterable[float]) -> str:
    """The least and the largest of some ratios."""
    numbers = sorted(values)
    return f"{numbers[0]:.1f} to {numbers[-1]:.1f}"


def one_client(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    spans: dict[float, list[str]] = {}
    names = on_machines(results, "decode", "decode-3b")
    for name, machine in names.items():
        model = "3B, " if "-3b-" in name else ""
        rows = [row for row in results[name]["rows"] if row["mode"] == "adaptive"]
        for row in rows:
            if not row["temperature"] and not model:
                text = f"{row['ratio_with_prefill']:.2f}"
                if "least_with_prefill" in row:
                    text += f" ({row['least_with_prefill']:.2f})"
                columns.setdefault(machine, {})[row["family"]] = text
        for temperature in {row["temperature"]: None for row in rows if model or row["temperature"]}:
            of_all = span(row["ratio_with_prefill"] for row in rows if row["temperature"] == temperature)
            spans.setdefault(temperature, []).append(f"{of_all} ({model}{machine})")
    greedy, sampled = (", ".join(spans[temperature]) for temperature in (0.0, 0.8))
    answer = (
        "Multiples of the speed without speculation, prefill included: greedy medians, with the slowest prompt in "
        f"brackets. Others are {greedy} and, at temperature 0.8, {sampled}."
    )
    return section("How much faster is one client?", answer, table("", KINDS, columns), results, names)


def fixed_numbers(results: Results) -> list[str]:
    names = on_machines(results, "fixed")
    ahead, spans = [], []
    for name, machine in names.items():
        rows = results[name]["rows"]
        adaptive = {row["family"]: row["ratio"] for row in rows if row["mode"] == "adaptive"}
        fixed = [row for row in rows if row["mode"].startswith("fixed")]
        best = {family: max(row["ratio"] for row in fixed if row["family"] == family) for family in adaptive}
        ahead += [ratio >= best[family] for family, ratio in adaptive.items()]
        spans.append(f"{span(adaptive.values())} and {span(best.values())} ({machine})")
    answer = (
        f"Mode `auto` is at least as fast as the best fixed number in hindsight for {sum(ahead)} of {len(ahead)} kinds "
        f"of text and machines: {', '.join(spans)} times the speed without speculation, prefill excluded."
    )
    return section("Is it better than a fixed number of drafts?", answer, [], results, names)


def several_clients(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    servers = {"specserve auto": "`auto`", "specserve off": "`off`", "llama-server plain": "llama-server"}
    for name, machine in on_machines(results, "clients").items():
        for row in results[name]["rows"]:
            if row["server"] in servers:
                seconds = row["ttft_s"]
                text = f"{row['tokens_per_second']:.0f}, {seconds:.{2 if seconds < 1 else 1}f}"
                columns.setdefault(f"{servers[row['server']]}, {machine}", {})[row["load"]] = text
    gains = []
    for name, machine in on_machines(results, "load").items():
        speeds = {(row["load"], row["server"]): row["tokens_per_second"] for row in results[name]["rows"]}
        ratios = [
            f"{speed / speeds[load, 'specserve off']:.2f} for {load.removesuffix(' clients')}"
            for (load, server), speed in speeds.items()
            if server == "specserve auto"
        ]
        gains.append(f"{', '.join(ratios)} ({machine})")
    titles = {load: load.removesuffix(" clients") for load in own_titles(columns)}
    answer = (
        "Tokens per second of all clients together, and median seconds to the first token, for streams of up to 96 "
        f"tokens after prompts of 250. In runs of their own, `auto` is at these multiples of `off`: {'; '.join(gains)}."
    )
    names = on_machines(results, "clients", "load")
    return section("What do several clients get?", answer, table("clients", titles, columns), results, names)


def mixed_lengths(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    if not (names := on_machines(results, "mixed")):
        return []
    for name in names:
        for row in results[name]["rows"]:
            text = f"{row['alone_s']:.2f}, {row['beside_s']:.2f}, {row['beside_p99_s']:.2f}"
            kept = f"{row['within_bound']}/{row['requests']}"
            title = f"{row['prompt']}, {row['tokens']:,} tokens"
            columns.setdefault(row["server"].removesuffix(" plain"), {})[title] = f"{text}; {kept}"
    answer = (
        "Seconds to the first token: median alone, median and 99th percentile beside others; and how many waited at "
        "most three times as long as alone and a chunk, or 1.3 times for the long prompt."
    )
    lines = table("prompt", own_titles(columns), columns)
    return section("How long does a short prompt wait beside a long one?", answer, lines, results, names)


def cost_of_a_pass(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    growth = []
    for name, machine in on_machines(results, "cost_curve").items():
        rows = {(row["engine"], row["rows"]): row for row in results[name]["rows"] if row["file"] == TARGET}
        times = {key: row["ms_per_row" if row["prefill"] else "ms"] for key, row in rows.items()}
        columns[machine] = {
            count: f"{times['llama.cpp', count]:.1f}, {time:.1f} ({rows[engine, count]['times_roof']:.2f})"
            for (engine, count), time in times.items()
            if engine == "ours"
        }
        ours, theirs = (times[engine, 8] / times[engine, 1] for engine in ("ours", "llama.cpp"))
        growth.append(f"{ours:.1f} times ({machine}; llama.cpp {theirs:.1f})")
    titles = {count: f"{count}" for count in (1, 4, 8, 16)} | {512: "each of a prompt of 512"}
    answer = (
        f"Eight tokens cost {', '.join(growth)} as much as one. Milliseconds of the 1.5B with llama.cpp's kernels and "
        "with ours; in brackets our time over the least that memory and arithmetic allow."
    )
    names = on_machines(results, "cost_curve")
    return section("What does a forward pass cost?", answer, table("tokens", titles, columns), results, names)


def formats(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    names = on_machines(results, "formats")
    for name, machine in names.items():
        times = {
            (row["file"].removesuffix(".gguf"), row["engine"], row["rows"]): row["ms"] for row in results[name]["rows"]
        }
        for file_type, engine, _ in times:
            one, *more = (times[file_type, engine, rows] for rows in (1, 4, 8))
            cells = f"{one:.1f} ({', '.join(f'{time / one:.2f}' for time in more)})"
            columns.setdefault(f"{engine}, {machine}", {})[file_type.removesuffix("_S")] = cells
    answer = (
        "Milliseconds of a token on the 1.5B in each format of weights, and in brackets how many times as long four "
        "and eight tokens take, with llama.cpp's kernels and with ours."
    )
    return section("What do other formats cost?", answer, table("", own_titles(columns), columns), results, names)


def other_engines(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    engines = ("specserve", "llama-server", "ik_llama.cpp")
    names = on_machines(results, "requests")
    first, machine = next(iter(names.items()))
    best = {(row["family"], row["mode"].partition(",")[0]): row for row in best_settings(results[first]["rows"])}
    for engine in engines:
        columns[engine] = {family: f"{best[family, engine]['ratio']:.2f}" for family, _ in best}
    answer = (
        f"Decoding speed for one client as a multiple of llama-server's without drafts ({machine}): `auto`, and "
        "others at the best of their settings (no drafts, three drafts, n-grams)."
    )
    return section("How fast are other engines?", answer, table("", KINDS, columns), results, names)


def long_prompts(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    servers = {
        "specserve auto": "`auto`",
        "specserve off": "`off`",
        "llama-server plain": "llama-server",
        "ik_llama.cpp plain": "ik_llama.cpp",
    }
    titles = {"prefill_ms": "prefill", "tokens_per_second": "edit", "second_turn_s": "second turn"}
    names = on_machines(results, "long_prompts")
    rows = [row for name in names for row in results[name]["rows"]]
    for row in rows:
        found = {(key, row["server"]): f"{row[key]:.3g}" for key in titles if row.get(key) is not None}
        columns.setdefault(f"{row['tokens']:,}", {}).update(found)
    cells = {(key, server): f"{titles[key]}, {servers[server]}" for key in titles for server in servers}
    third = ", ".join(f"{row['third_turn_share']:.3f}" for row in rows if row.get("third_turn_share") is not None)
    answer = (
        "By tokens of the prompt: milliseconds of prefill per token, tokens per second of an edit, seconds to the "
        "first token of a second turn. A third turn, after others have filled the cache, begins "
        f"in {third} of the first one's time."
    )
    return section("What do long prompts cost?", answer, table("", cells, columns), results, names)


def perplexity(results: Results) -> list[str]:
    names = on_machines(results, "perplexity")
    rows = [row for name in names for row in results[name]["rows"] if row["file"] == TARGET]
    texts = [f"{row['stock']:.3f} and {row['ours']:.3f} on {row['family']} ({ratio(row)})" for row in rows]
    cache = " and ".join(f"{row['q8_0_cache']:.4f} ± {row['q8_0_error']:.4f}" for row in rows)
    most = 100 * max(abs(row["ratio"] - 1) for row in rows)
    columns: dict[str, Column] = {}
    others = on_machines(results, "perplexity-formats", "perplexity-models")
    for name, machine in others.items():
        for row in results[name]["rows"]:
            title = f"{row['file'].removesuffix('.gguf').removesuffix('_S')}, {row['family']}"
            columns.setdefault(machine, {})[title] = f"{row['stock']:.3f}, {row['ours']:.3f} ({ratio(row)})"
    answer = (
        f"The published file's perplexity differs by {most:.2f} % at most. With llama.cpp's kernels and with ours it "
        f"is {', '.join(texts)}; with `cache_type: q8_0` it is {cache} of ours."
    )
    if others:
        answer += " The table has the same of other files."
    lines = table("", own_titles(columns), columns) if others else []
    return section("Do our kernels change the model?", answer, lines, results, [*names, *others])


def ratio(row: Row) -> str:
    """A ratio of perplexities, with its standard error."""
    return f"{row['ratio']:.4f} ± {row['standard_error']:.4f}"


def schemas(results: Results) -> list[str]:
    sets, suite = results["schemas"]["rows"], results["schema_suite"]["rows"]
    verdicts = results["schemas"]["answers"]["off"]
    accepted, schemas, invalid, generated = (
        sum(row[key] for row in counted)
        for counted, key in ((sets, "accepted"), (sets, "schemas"), (suite, "invalid"), (suite, "invalid_accepted"))
    )
    answer = (
        f"{accepted:,} of {schemas:,} of JSON Schema Bench ({100 * accepted / schemas:.0f} %). Of "
        f"{sum(verdicts.values())} answers {verdicts['valid']} were valid, {verdicts.get('INVALID', 0)} invalid, the "
        f"others cut off by `max_tokens`. Of {invalid:,} instances that JSON Schema's own test suite calls invalid "
        f"{generated} could be generated."
    )
    return section("Which schemas are accepted?", answer, [], results, ("schemas", "schema_suite"))


def tools(results: Results) -> list[str]:
    names = on_machines(results, "tools")
    answers, ratios = [], []
    for name in names:
        rows = results[name]["rows"]
        asked, calls, faults, same, compared = (
            sum(row[key] for row in rows) for key in ("requests", "calls", "faults", "same as plain", "answers")
        )
        answers.append(
            f"{calls} calls of {asked} requests had {faults} faults, {same} of {compared} answers are the same"
        )
        ratios += [f"{row['choice']} {row['ratio']:.2f}" for row in rows if not row["temperature"]]
    answer = (
        f"{'; '.join(answers)} without speculation, whole and streamed, greedy and at 0.8. Median greedy speed-ups by "
        f"`tool_choice`: {', '.join(ratios)}."
    )
    return section("Are tool calls valid, and how fast?", answer, [], results, names)


def recurring(results: Results) -> list[str]:
    names = on_machines(results, "recurring")
    texts = [
        f"{row['kind']} {row['auto, first']:.0f}, {row['pool, first']:.0f}, {row['pool, second']:.0f}"
        for name in names
        for row in results[name]["rows"]
    ]
    answer = (
        "Tokens per second without drafts from earlier answers, and with them in a first and a second pass over the "
        f"same requests: {'; '.join(texts)}."
    )
    return section("What does recurring work gain?", answer, [], results, names)


def neighbours(results: Results) -> list[str]:
    columns: dict[str, Column] = {}
    lost = 0.0
    names = on_machines(results, "neighbours")
    for name, machine in names.items():
        for row in results[name]["rows"]:
            server = f"{row['server'].removesuffix(' plain').removeprefix('specserve ')}, {machine}"
            columns.setdefault(server, {})[row["neighbour"]] = f"{row['kept']:.2f}"
            lost = max(lost, row["kept"] - row["least"])
    answer = (
        f"The share of its quiet speed, the median of three prompts (the least is up to {lost:.2f} lower), also ten "
        "seconds after ten minutes of [neighbours](../config/README.md#beside-other-processes)."
    )
    lines = table("beside", own_titles(columns), columns)
    return section("What does it keep beside other processes?", answer, lines, results, names)


def worst_cases(results: Results) -> list[str]:
    names = on_machines(results, "worst_cases")
    texts = []
    for name in names:
        alone, *rows = (row for row in results[name]["rows"] if not row.get("newcomers"))
        rows.sort(key=lambda row: -float(row["longest_gap"]))
        worst = [f"{row['longest_gap']:.2f} s: {row['case']}" for row in rows[:WORST]]
        rest = f"{len(rows) - WORST} other cases: {rows[WORST]['longest_gap']:.2f} at most"
        texts.append("; ".join([*worst, rest, f"the stream alone: {alone['longest_gap']:.2f}"]))
    answer = f"The longest gap in another client's stream. {'; '.join(texts)}."
    return section("How long can one request interrupt others?", answer, [], results, names)


QUESTIONS = (
    one_client,
    fixed_numbers,
    several_clients,
    mixed_lengths,
    cost_of_a_pass,
    formats,
    other_engines,
    long_prompts,
    perplexity,
    schemas,
    tools,
    recurring,
    neighbours,
    worst_cases,
)


def page(results: Results) -> str:
    return "\n".join([INTRODUCTION, *(text for question in QUESTIONS for text in question(results))]) + "\n"


def main() -> None:
    PAGE.write_text(page(read_results()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
