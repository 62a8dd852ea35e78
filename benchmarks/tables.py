"""Writes RESULTS.md: a question each, with one table that is made of results/QUESTION-MACHINE.json.

    .venv/bin/python benchmarks/tables.py

Such a file is the JSON object that a benchmark ends with. RESULTS.md is not edited by hand.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
INTRODUCTION = """# Results

Two cores of shared AMD EPYCs (Zen 5, Zen 4, and Zen 3 with AVX2 alone) and an Intel Emerald Rapids. The pair \
is Qwen2.5-Coder 1.5B (Q4_K_M) with its 0.5B in pure Q4_0 as the draft; "3B" is the 1.5B at the cost of Qwen2.5 3B. \
Compare within a run only: between runs ratios vary by a tenth. `tables.py` writes this page from the linked \
files, which hold dates and commands."""
Results = Mapping[str, Row]
# Texts by column, and by the keys of their rows.
Columns = dict[str, dict[Any, str]]


def read_results(directory: Path = RESULTS) -> dict[str, Row]:
    files = sorted(directory.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) for path in files}


def results_of(results: Results, *questions: str) -> dict[str, str]:
    """The results of some questions: the title of the machine, if one is named, by the name of the file."""
    machines = {"": "", **{f"-{machine}": title for machine, title in MACHINES.items()}}
    names = ((question + machine, title) for question in questions for machine, title in machines.items())
    return {name: title for name, title in names if name in results}


def rows_of(results: Results, *questions: str) -> Iterator[tuple[str, Row]]:
    """The rows of these results, each after its machine's title."""
    for name, machine in results_of(results, *questions).items():
        yield from ((machine, row) for row in results[name]["rows"])


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(corner: str, titles: Mapping[Any, str], columns: Columns) -> list[str]:
    """The lines of a table: a row for each key of `titles` that a column has."""
    rows = [
        line([title, *(column.get(key, "") for column in columns.values())])
        for key, title in titles.items()
        if any(key in column for column in columns.values())
    ]
    return [line([corner, *columns]), "|---" * (1 + len(columns)) + "|", *rows]


def own_titles(columns: Columns) -> dict[str, str]:
    """Titles of rows whose keys are texts already."""
    return {key: key for column in columns.values() for key in column}


def source(name: str) -> str:
    """On which machine a result was measured, with a link to its file, which has date and command."""
    model = "3B, " if "-3b-" in name else ""
    return f"[{model}{MACHINES.get(name.rpartition('-')[2], name.replace('_', ' '))}](results/{name}.json)"


def section(question: str, answer: str, results: Results, *questions: str, lines: Sequence[str] = ()) -> list[str]:
    """A question, what its figures are, from which results they come, and its table."""
    names = results_of(results, *questions)
    scripts = (f"`{Path(results[name]['command'].split()[0]).name.rstrip(';')}`" for name in names)
    sources = f"{', '.join(dict.fromkeys(scripts))}: {', '.join(map(source, names))}"
    return ["", f"## {question}", f"{answer} ({sources})", *(["", *lines] if lines else [])]


def span(values: Iterable[float]) -> str:
    """The least and the largest of some ratios."""
    numbers = sorted(values)
    return f"{numbers[0]:.1f} to {numbers[-1]:.1f}"


def one_client(results: Results) -> list[str]:
    columns: Columns = defaultdict(dict)
    others: dict[tuple[float, str], list[float]] = defaultdict(list)
    for model in ("", "3B, "):
        for machine, row in rows_of(results, "decode-3b" if model else "decode"):
            with_prefill, temperature = row["ratio_with_prefill"], row["temperature"]
            if row["mode"] == "adaptive" and (model or temperature):
                others[temperature, f"{model}{machine}"].append(with_prefill)
            elif row["mode"] == "adaptive":
                least = f" ({row['least_with_prefill']:.2f})" if "least_with_prefill" in row else ""
                columns[machine][row["family"]] = f"{with_prefill:.2f}{least}"
    greedy, sampled = (
        ", ".join(f"{span(ratios)} ({where})" for (each, where), ratios in others.items() if each == temperature)
        for temperature in (0.0, 0.8)
    )
    answer = (
        "Multiples of the speed without speculation, prefill included: greedy medians, with the slowest prompt in "
        f"brackets. Others are {greedy} and, at temperature 0.8, {sampled}."
    )
    lines = table("", KINDS, columns)
    return section("How much faster is one client?", answer, results, "decode", "decode-3b", lines=lines)


def fixed_numbers(results: Results) -> list[str]:
    ahead, spans = [], []
    for name, machine in results_of(results, "fixed").items():
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
    return section("Is it better than a fixed number of drafts?", answer, results, "fixed")


def several_clients(results: Results) -> list[str]:
    columns: Columns = defaultdict(dict)
    servers = {"specserve auto": "`auto`", "specserve off": "`off`", "llama-server plain": "llama-server"}
    for machine, row in rows_of(results, "clients"):
        if row["server"] in servers:
            seconds = row["ttft_s"]
            text = f"{row['tokens_per_second']:.0f}, {seconds:.{2 if seconds < 1 else 1}f}"
            columns[f"{servers[row['server']]}, {machine}"][row["load"]] = text
    gains = []
    for name, machine in results_of(results, "load").items():
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
    lines = table("clients", titles, columns)
    return section("What do several clients get?", answer, results, "clients", "load", lines=lines)


def mixed_lengths(results: Results) -> list[str]:
    columns: Columns = defaultdict(dict)
    for _, row in rows_of(results, "mixed"):
        text = f"{row['alone_s']:.2f}, {row['beside_s']:.2f}, {row['beside_p99_s']:.2f}"
        title = f"{row['prompt']}, {row['tokens']:,} tokens"
        columns[row["server"].removesuffix(" plain")][title] = f"{text}; {row['within_bound']}/{row['requests']}"
    answer = (
        "Seconds to the first token: median alone, median and 99th percentile beside others; and how many waited at "
        "most three times as long as alone and a chunk, or 1.3 times for the long prompt."
    )
    lines = table("prompt", own_titles(columns), columns)
    return section("How long does a short prompt wait beside a long one?", answer, results, "mixed", lines=lines)


def cost_of_a_pass(results: Results) -> list[str]:
    columns: Columns = {}
    growth = []
    for name, machine in results_of(results, "cost_curve").items():
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
    lines = table("tokens", titles, columns)
    return section("What does a forward pass cost?", answer, results, "cost_curve", lines=lines)


def model_name(row: Row) -> str:
    """Return the name of a file or, if all its matrices have one format, of that."""
    return str(row["file"]).removesuffix(".gguf").removesuffix("_S").removesuffix("_MOE")


def formats(results: Results) -> list[str]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for machine, row in rows_of(results, "formats"):
        file_type = model_name(row)
        times[f"{row['engine']}, {machine}", file_type].append(row["ms"])
    columns: Columns = defaultdict(dict)
    for (engine, file_type), (one, *more) in times.items():
        columns[engine][file_type] = f"{one:.1f} ({', '.join(f'{time / one:.2f}' for time in more)})"
    answer = (
        "Milliseconds of a token on the 1.5B in each format of weights, and in brackets how many times as long four "
        "and eight tokens take, with llama.cpp's kernels and with ours."
    )
    lines = table("", own_titles(columns), columns)
    return section("What do other formats cost?", answer, results, "formats", lines=lines)


def other_engines(results: Results) -> list[str]:
    columns: Columns = {}
    engines = ("specserve", "llama-server", "ik_llama.cpp")
    first, machine = next(iter(results_of(results, "requests").items()))
    best = {(row["family"], row["mode"].partition(",")[0]): row for row in best_settings(results[first]["rows"])}
    for engine in engines:
        columns[engine] = {family: f"{best[family, engine]['ratio']:.2f}" for family, _ in best}
    answer = (
        f"Decoding speed for one client as a multiple of llama-server's without drafts ({machine}): `auto`, and "
        "others at the best of their settings (no drafts, three drafts, n-grams)."
    )
    return section("How fast are other engines?", answer, results, "requests", lines=table("", KINDS, columns))


def long_prompts(results: Results) -> list[str]:
    columns: Columns = defaultdict(dict)
    servers = {
        "specserve auto": "`auto`",
        "specserve off": "`off`",
        "llama-server plain": "llama-server",
        "ik_llama.cpp plain": "ik_llama.cpp",
    }
    titles = {"prefill_ms": "prefill", "tokens_per_second": "edit", "second_turn_s": "second turn"}
    rows = [row for _, row in rows_of(results, "long_prompts")]
    for row in rows:
        found = {(key, row["server"]): f"{row[key]:.3g}" for key in titles if row.get(key) is not None}
        columns[f"{row['tokens']:,}"].update(found)
    cells = {(key, server): f"{titles[key]}, {servers[server]}" for key in titles for server in servers}
    third = ", ".join(f"{row['third_turn_share']:.3f}" for row in rows if row.get("third_turn_share") is not None)
    answer = (
        "By tokens of the prompt: milliseconds of prefill per token, tokens per second of an edit, seconds to the "
        "first token of a second turn. A third turn, after others have filled the cache, begins "
        f"in {third} of the first one's time."
    )
    lines = table("", cells, columns)
    return section("What do long prompts cost?", answer, results, "long_prompts", lines=lines)


def perplexity(results: Results) -> list[str]:
    rows = [row for _, row in rows_of(results, "perplexity") if row["file"] == TARGET]
    texts = [f"{row['stock']:.3f} and {row['ours']:.3f} on {row['family']} ({ratio(row)})" for row in rows]
    cache = " and ".join(f"{row['q8_0_cache']:.4f} ± {row['q8_0_error']:.4f}" for row in rows)
    most = 100 * max(abs(row["ratio"] - 1) for row in rows)
    columns: Columns = defaultdict(dict)
    others = "perplexity-formats", "perplexity-models"
    for machine, row in rows_of(results, *others):
        title = f"{model_name(row)}, {row['family']}"
        columns[machine][title] = f"{row['stock']:.3f}, {row['ours']:.3f} ({ratio(row)})"
    answer = (
        f"The published file's perplexity differs by {most:.2f} % at most. With llama.cpp's kernels and with ours it "
        f"is {', '.join(texts)}; with `cache_type: q8_0` it is {cache} of ours. The table has the same of other files."
    )
    lines = table("", own_titles(columns), columns)
    return section("Do our kernels change the model?", answer, results, "perplexity", *others, lines=lines)


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
    return section("Which schemas are accepted?", answer, results, "schemas", "schema_suite")


def tools(results: Results) -> list[str]:
    rows = [row for _, row in rows_of(results, "tools")]
    asked, calls, faults, same, compared = (
        sum(row[key] for row in rows) for key in ("requests", "calls", "faults", "same as plain", "answers")
    )
    ratios = [f"{row['choice']} {row['ratio']:.2f}" for row in rows if not row["temperature"]]
    answer = (
        f"{calls} calls of {asked} requests had {faults} faults, {same} of {compared} answers are the same without "
        "speculation, whole and streamed, greedy and at 0.8. Median greedy speed-ups by `tool_choice`: "
        f"{', '.join(ratios)}."
    )
    return section("Are tool calls valid, and how fast?", answer, results, "tools")


def recurring(results: Results) -> list[str]:
    texts = [
        f"{row['kind']} {row['auto, first']:.0f}, {row['pool, first']:.0f}, {row['pool, second']:.0f}"
        for _, row in rows_of(results, "recurring")
    ]
    answer = (
        "Tokens per second without drafts from earlier answers, and with them in a first and a second pass over the "
        f"same requests: {'; '.join(texts)}."
    )
    return section("What does recurring work gain?", answer, results, "recurring")


def neighbours(results: Results) -> list[str]:
    columns: Columns = defaultdict(dict)
    lost = max(row["kept"] - row["least"] for _, row in rows_of(results, "neighbours"))
    for machine, row in rows_of(results, "neighbours"):
        server = f"{row['server'].removesuffix(' plain').removeprefix('specserve ')}, {machine}"
        columns[server][row["neighbour"]] = f"{row['kept']:.2f}"
    answer = (
        f"The share of its quiet speed, the median of three prompts (the least is up to {lost:.2f} lower), also ten "
        "seconds after ten minutes of [neighbours](../config/README.md#beside-other-processes)."
    )
    lines = table("beside", own_titles(columns), columns)
    return section("What does it keep beside other processes?", answer, results, "neighbours", lines=lines)


def worst_cases(results: Results) -> list[str]:
    alone, *rows = (row for _, row in rows_of(results, "worst_cases") if not row.get("newcomers"))
    worst, second, *_ = sorted(rows, key=lambda row: -float(row["longest_gap"]))
    answer = (
        f"The longest gap in another client's stream. {worst['longest_gap']:.2f} s: {worst['case']}; {len(rows) - 1} "
        f"other cases: {second['longest_gap']:.2f} at most; the stream alone: {alone['longest_gap']:.2f}."
    )
    return section("How long can one request interrupt others?", answer, results, "worst_cases")


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
