"""Writes RESULTS.md: a question each, with one table that is made of results/QUESTION-MACHINE.json.

    .venv/bin/python benchmarks/tables.py

Such a file is the JSON object that a benchmark ends with. RESULTS.md is not edited by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from charts import best_settings
from common import Row
from long_prompts_table import long_prompts
from result_tables import Column, Results, on_machines, own_titles, read_results, section, side_by_side, table

PAGE = Path(__file__).parent / "RESULTS.md"
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
DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m.pure-q4_0.gguf"
SIMULATED = {
    "2 cores of Zen 5, our kernels, 1.5B by 0.5B": "1.5B, Zen 5",
    "2 cores of Zen 5 apart, our kernels, 3B by 0.5B": "3B, Zen 5",
    "2 cores, fast memory, our kernels, 1.5B by 0.5B": "1.5B, Zen 4",
    "2 cores, fast memory, our kernels, 3B by 0.5B": "3B, Zen 4",
}
# Of the longest gaps, those that have a row.
WORST = 2
INTRODUCTION = """# Results

Two cores of shared machines: AMD EPYCs of Zen 5, Zen 4 and Zen 3 (which has AVX2 alone), and an Intel Emerald \
Rapids. The pair is Qwen2.5-Coder 1.5B as published (Q4_K_M), drafted for by the 0.5B in pure Q4_0; the 3B is cost- \
matched: the text of the 1.5B at the cost of Qwen2.5 3B. Compare within a run, in which engines and modes take \
turns; from run to run ratios vary by a tenth. `tables.py` writes this page from the linked files, which have the \
whole commands. Conclusions: \
[decisions](decisions/README.md)."""


def span(values: Iterable[float]) -> str:
    """The least and the largest of some ratios."""
    numbers = sorted(values)
    return f"{numbers[0]:.1f} to {numbers[-1]:.1f}"


def one_client(results: Results) -> list[str]:
    """Speed relative to plain decoding, by kind of text (decode.py)."""
    columns: dict[str, Column] = {}
    spans = []
    names = on_machines(results, "decode", "decode-3b")
    for name, machine in names.items():
        model = "3B" if "-3b-" in name else "1.5B"
        rows = [row for row in results[name]["rows"] if row["mode"] == "adaptive"]
        for row in rows:
            temperature = f"at {row['temperature']}" if row["temperature"] else "greedy"
            text = f"{row['ratio_with_prefill']:.2f}"
            if "least_with_prefill" in row:
                text += f" ({row['least_with_prefill']:.2f})"
            columns.setdefault(f"{model}, {machine}, {temperature}", {})[row["family"]] = text
        greedy = span(row["ratio_with_prefill"] for row in rows if not row["temperature"])
        spans.append(f"{greedy} ({model}, {machine})")
    answer = (
        f"Greedy {', '.join(spans)} times plain decoding, prefill included. The median of a kind's prompts, and in "
        "brackets the least of them."
    )
    return section("How much faster is one client?", answer, table("", KINDS, columns), results, names)


def fixed_numbers(results: Results) -> list[str]:
    """Mode `auto` beside the best of fixed numbers of drafts (decode.py)."""
    columns: dict[str, Column] = {}
    ahead = []
    names = on_machines(results, "fixed")
    for name, machine in names.items():
        rows = results[name]["rows"]
        adaptive = {row["family"]: row["ratio"] for row in rows if row["mode"] == "adaptive"}
        # In ascending order, so the best of a family comes last; of equal ones the first that was run.
        fixed = sorted((row for row in reversed(rows) if row["mode"].startswith("fixed")), key=lambda row: row["ratio"])
        best = {row["family"]: row for row in fixed}
        ahead += [ratio >= best[family]["ratio"] for family, ratio in adaptive.items()]
        columns[f"{machine}, best fixed number"] = {
            family: f"{row['ratio']:.2f} with {row['mode'].removeprefix('fixed ')}" for family, row in best.items()
        }
        columns[f"{machine}, adaptive"] = {family: f"{ratio:.2f}" for family, ratio in adaptive.items()}
    answer = (
        f"It is at least as good for {sum(ahead)} of {len(ahead)} kinds of text and machines. Times plain decoding, "
        "without prefill; the fixed number of the model's drafts is the best in hindsight."
    )
    return section("Is it better than a fixed number of drafts?", answer, table("", KINDS, columns), results, names)


def several_clients(results: Results) -> list[str]:
    """Tokens a second and time to first token, by clients (peers.py clients, load.py)."""
    columns: dict[str, Column] = {}
    servers = {"specserve auto": "`auto`", "specserve off": "`off`", "llama-server plain": "llama-server"}
    for name, machine in on_machines(results, "clients").items():
        for row in results[name]["rows"]:
            if row["server"] in servers:
                seconds = row["ttft_s"]
                text = f"{row['tokens_per_second']:.0f}, {seconds:.{2 if seconds < 1 else 1}f} s"
                columns.setdefault(f"{servers[row['server']]}, {machine}", {})[row["load"]] = text
    for name, machine in on_machines(results, "load").items():
        speeds = {(row["load"], row["server"]): row["tokens_per_second"] for row in results[name]["rows"]}
        columns[f"`auto` / `off`, {machine}"] = {
            load: f"{speed / speeds[load, 'specserve off']:.2f}"
            for (load, server), speed in speeds.items()
            if server == "specserve auto"
        }
    titles = {load: load.removesuffix(" clients") for load in own_titles(columns)}
    answer = (
        "Tokens a second of all clients, and the median time to first token: streams of up to 96 tokens after prompts "
        "of about 250 ([chart](results/clients-zen5.svg)). The last columns are runs of their own, of 2 or "
        "3 turns, on Zen 4 with up to 256 tokens."
    )
    names = on_machines(results, "clients", "load")
    return section("What do several clients get?", answer, table("clients", titles, columns), results, names)


def mixed_lengths(results: Results) -> list[str]:
    """Waits for the first token by the length of the prompt, alone and beside others (load.py --mixed)."""
    columns: dict[str, Column] = {}
    if not (names := on_machines(results, "mixed")):
        return []
    for name, machine in names.items():
        for row in results[name]["rows"]:
            text = f"{row['alone_s']:.2f} / {row['beside_s']:.2f} / {row['beside_p99_s']:.2f}"
            kept = f"{row['within_bound']} of {row['requests']} within {row['bound_s']:.2f}"
            title = f"{row['prompt']}, {row['tokens']:,} tokens"
            columns.setdefault(f"{row['server']}, {machine}", {})[title] = f"{text}, {kept}"
    answer = (
        "Seconds to the first token: alone, beside others, the 99th percentile of that, and how many were within the "
        "bound: three times alone and a prefill chunk, for the long prompt 1.3 times."
    )
    lines = table("prompt", own_titles(columns), columns)
    return section("How long does a short prompt wait beside a long one?", answer, lines, results, names)


def cost_of_a_pass(results: Results) -> list[str]:
    """Milliseconds of a pass by its rows (cost_curve.py, peers.py passes)."""
    columns: dict[str, Column] = {}
    growth = []
    for file, model in {TARGET: "1.5B", DRAFT: "draft"}.items():
        for name, machine in on_machines(results, "cost_curve").items():
            rows = {(row["engine"], row["rows"]): row for row in results[name]["rows"] if row["file"] == file}
            times = {key: _milliseconds(row) for key, row in rows.items()}
            columns[f"{model}, {machine}: llama.cpp / ours"] = {
                count: f"{times['llama.cpp', count]:.1f} / {time:.1f} ({rows[engine, count]['times_roof']:.2f})"
                for (engine, count), time in times.items()
                if engine == "ours"
            }
            if file == TARGET:
                ours, theirs = (times[engine, 8] / times[engine, 1] for engine in ("ours", "llama.cpp"))
                growth.append(f"{ours:.1f} times ({machine}; llama.cpp's kernels {theirs:.1f})")
    engines = ("ours", "ik_llama.cpp", "OpenVINO")
    for name, machine in on_machines(results, "passes").items():
        passes = [row for row in results[name]["rows"] if row["file"] == TARGET]
        times = {(row["engine"], row["rows"]): _milliseconds(row) for row in passes}
        columns[f"1.5B, {machine}: {' / '.join(engines)}"] = {
            count: " / ".join(f"{time:.1f}" if (time := times.get((engine, count))) else "-" for engine in engines)
            for _, count in times
        }
    titles = {count: f"{count}" for count in (1, 2, 4, 8, 16)} | {512: "each of a prompt of 512"}
    answer = (
        f"Eight tokens cost {', '.join(growth)} as much as one. Milliseconds; in brackets our time over the least "
        "that memory and arithmetic allow."
    )
    names = on_machines(results, "cost_curve", "passes")
    return section("What does a forward pass cost?", answer, table("tokens", titles, columns), results, names)


def _milliseconds(row: Row) -> float:
    """Of a pass, or of each token of a prompt."""
    return float(row["ms_per_row" if row["prefill"] else "ms"])


def other_engines(results: Results) -> list[str]:
    """The best settings of each engine, by kind of text (peers.py requests)."""
    columns: dict[str, Column] = {}
    engines = ("specserve", "llama-server", "ik_llama.cpp", "OpenVINO", "llama-cpp-python")
    modes = {"specserve adaptive": "specserve", "specserve fixed 3": "3 drafts", "specserve plain": "plain"}
    for name, machine in on_machines(results, "requests").items():
        best = {(row["family"], row["mode"].partition(",")[0]): row for row in best_settings(results[name]["rows"])}
        columns[f"1.5B, {machine}: {' / '.join(engines)}"] = {
            family: " / ".join(f"{best[family, engine]['ratio']:.2f}" for engine in engines) for family, _ in best
        }
    for name, machine in on_machines(results, "requests-3b").items():
        ratios = {(row["family"], row["mode"]): row["ratio"] for row in results[name]["rows"]}
        columns[f"3B, {machine}: {' / '.join(modes.values())}"] = {
            family: " / ".join(f"{ratios[family, mode]:.2f}" for mode in modes) for family, _ in ratios
        }
    answer = (
        "Tokens a second of decoding for one client, times llama-server's without drafts. specserve is in mode `auto`, "
        "the others have the best of their settings (plain, three drafts, n-grams); of the 3B our other modes."
    )
    names = on_machines(results, "requests", "requests-3b")
    return section("How fast are other engines?", answer, table("", KINDS, columns), results, names)


def perplexity(results: Results) -> list[str]:
    """Perplexity with llama.cpp's kernels and with ours (perplexity.py)."""
    columns: dict[str, Column] = {}
    names = on_machines(results, "perplexity")
    published = []
    for name, machine in names.items():
        for row in results[name]["rows"]:
            file = "pure Q4_0" if "pure-q4_0" in row["file"] else "published Q4_K_M"
            text = f"{row['stock']:.3f} / {row['ours']:.3f}, {row['ratio']:.4f} ± {row['standard_error']:.4f}"
            in_8_bits = f"{row['q8_0_cache']:.4f} ± {row['q8_0_error']:.4f}"
            title = f"1.5B, {file}, {machine}: llama.cpp / ours, ratio; with `cache_type: q8_0`, of ours"
            columns.setdefault(title, {})[row["family"]] = f"{text}; {in_8_bits}"
            if row["file"] == TARGET:
                published.append(abs(row["ratio"] - 1))
    answer = (
        f"The published file's perplexity differs by {100 * max(published):.2f} % at most. Windows of 512 tokens, with "
        "standard errors of the logarithm of the ratio."
    )
    lines = table("", own_titles(columns), columns)
    return section("Do our kernels change the model?", answer, lines, results, names)


def schemas(results: Results) -> list[str]:
    """Accepted schemas of each set, and what is generated (schemas.py, schema_suite.py)."""
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
    rows = [[row["set"], f"{row['accepted']:,} of {row['schemas']:,}"] for row in sets]
    lines = side_by_side(["set", "accepted"], rows, 12)
    return section("Which schemas are accepted?", answer, lines, results, ("schemas", "schema_suite"))


def tools(results: Results) -> list[str]:
    """Calls of tools: whether they are valid, and how fast they are written (tools.py)."""
    names = on_machines(results, "tools")
    answers, ratios = [], []
    for name, machine in names.items():
        rows = results[name]["rows"]
        asked, calls, faults, same, compared = (
            sum(row[key] for row in rows) for key in ("requests", "calls", "faults", "same as plain", "answers")
        )
        answers.append(
            f"{calls} calls of {asked} requests had {faults} faults, {same} of {compared} answers are the same"
        )
        ratios += [f"{row['choice']} {row['ratio']:.2f} at {row['temperature']} ({machine})" for row in rows]
    answer = (
        f"{'; '.join(answers)} without speculation, whole and streamed, greedy and at 0.8. Times plain decoding, "
        f"medians: {', '.join(ratios)}."
    )
    return section("Are calls of tools valid, and how fast?", answer, [], results, names)


def recurring(results: Results) -> list[str]:
    """What finished answers bring to later ones (recurring.py)."""
    names = on_machines(results, "recurring")
    texts = [
        f"{row['kind']} {row['auto, first']:.0f}, {row['pool, first']:.0f}, {row['pool, second']:.0f}"
        for name in names
        for row in results[name]["rows"]
    ]
    answer = (
        "Tokens a second by `auto` without a pool, and with one in a first and a second pass over a bank of requests: "
        f"{'; '.join(texts)}."
    )
    return section("What does recurring work gain?", answer, [], results, names)


def torchserve(results: Results) -> list[str]:
    """What TorchServe adds, and what a cached prefix saves (load.py)."""
    columns: dict[str, Column] = {}
    names = on_machines(results, "overhead", "prefix")
    titles = {
        "overhead of a request": "TorchServe's part of a request, ms",
        "overhead of a call": "its part of each further call of a stream, ms",
        "cold_s": "first token after a new prompt of 1,500 tokens, s",
        "cached_s": "the same, cached, s",
        "cached_in_use_s": "the same, cached and in use by another stream, s",
    }
    for name, machine in names.items():
        for row in results[name]["rows"]:
            if not row["server"].startswith("specserve"):
                continue
            values = {row["load"]: row["ms"]} if "ms" in row else row
            columns.setdefault(machine, {}).update({key: f"{values[key]}" for key in values if key in titles})
    answer = "Medians of 20 requests and streams; the prompts are one trial."
    lines = table("", titles, columns)
    return section("What does TorchServe add, and a cached prefix save?", answer, lines, results, names)


def neighbours(results: Results) -> list[str]:
    """The share of its quiet speed that a server keeps beside other processes (neighbours.py)."""
    columns: dict[str, Column] = {}
    names = on_machines(results, "neighbours")
    for name, machine in names.items():
        for row in results[name]["rows"]:
            text = f"{row['kept']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            columns.setdefault(f"{row['server']}, {machine}", {})[row["neighbour"]] = text
    answer = (
        "The share of its quiet speed, median and range of three prompts, also ten seconds after ten minutes of "
        "neighbours; the [operator's guide](../config/README.md#beside-other-processes) says what to set."
    )
    lines = table("beside", own_titles(columns), columns)
    return section("What does it keep beside other processes?", answer, lines, results, names)


def worst_cases(results: Results) -> list[str]:
    """The longest gaps that one request puts into another client's stream (worst_cases.py)."""
    columns: dict[str, Column] = {"bounded by": {}}
    others = []
    names = on_machines(results, "worst_cases")
    for name, machine in names.items():
        alone, *rows = (row for row in results[name]["rows"] if not row.get("newcomers"))
        rows.sort(key=lambda row: -float(row["longest_gap"]))
        for row in rows[:WORST]:
            columns["bounded by"][row["case"]] = row["limit"]
            columns.setdefault(f"gap, s, {machine}", {})[row["case"]] = f"{row['longest_gap']:.2f}"
            columns.setdefault(f"MiB more, {machine}", {})[row["case"]] = f"{row['mebibytes']}"
        gaps = rows[WORST]["longest_gap"], alone["longest_gap"]
        others.append(f"in {len(rows) - WORST} other cases at most {gaps[0]:.2f} s, in the stream alone {gaps[1]:.2f}")
    answer = f"The longest gap in another client's stream; {'; '.join(others)}."
    lines = table("request", own_titles(columns), columns)
    return section("How long can one request interrupt others?", answer, lines, results, names)


QUESTIONS = (
    one_client,
    fixed_numbers,
    several_clients,
    mixed_lengths,
    cost_of_a_pass,
    other_engines,
    long_prompts,
    perplexity,
    schemas,
    tools,
    recurring,
    torchserve,
    neighbours,
    worst_cases,
)


def page(results: Results) -> str:
    """The text of RESULTS.md."""
    return "\n".join([INTRODUCTION, *(text for question in QUESTIONS for text in question(results))]) + "\n"


def main() -> None:
    """Write RESULTS.md."""
    PAGE.write_text(page(read_results()), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
