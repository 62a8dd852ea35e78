"""The table of long_prompts.py for tables.py."""

from __future__ import annotations

from common import Row
from result_tables import Column, Results, on_machines, section, table

SERVERS = {
    "specserve auto": "`auto`",
    "specserve off": "`off`",
    "llama-server plain": "llama-server",
    "ik_llama.cpp plain": "ik_llama.cpp",
}
# Digits after the point of what all servers have.
DIGITS = {"prefill_ms": 1, "tokens_per_second": 0, "second_turn_s": 2}


def long_prompts(results: Results) -> list[str]:
    """Passes, prefill, decoding and further turns, by the tokens of a prompt."""
    names = on_machines(results, "long_prompts")
    columns: dict[str, Column] = {}
    for name, machine in names.items():
        for tokens in dict.fromkeys(row["tokens"] for row in results[name]["rows"]):
            columns[f"{tokens:,}, {machine}"] = _column(results[name], tokens)
    measured = {row["server"] for name in names for row in results[name]["rows"]}
    others = [title for server, title in SERVERS.items() if server in measured and not server.startswith("specserve")]
    titles = {
        "pass": "a pass of one token, times its cost after 64",
        "v": "a pass of eight, times that of one",
        "prefill_ms": " / ".join(["prefill, ms a token: specserve", *others]),
        "tokens_per_second": " / ".join(["an edit, tokens a second: `auto`", "`off`", *others]),
        "second_turn_s": " / ".join(["second turn, first token, s: specserve", *others]),
        "third_turn_share": "third turn, after others have filled the pool: first token, share of the first turn's",
    }
    clients = [f"{_clients(results[name]['clients'])} ({machine})" for name, machine in names.items()]
    answer = (
        "Prompts of parts of Python's library. Eight clients with prompts of 4,000 tokens, of which they share 3,500, "
        f"get, in tokens a second and with the 99th percentile of gaps: {'; '.join(clients)}."
    )
    return section("What do long prompts cost?", answer, table("tokens", titles, columns), results, names)


def _column(result: Row, tokens: int) -> Column:
    """One length on one machine."""
    passes = {row["rows"]: row for row in result["passes"] if row["tokens"] == tokens}
    column = {"pass": f"{passes[1]['growth']:.2f}", "v": f"{passes[8]['v']:.2f}"} if passes else {}
    rows = {row["server"]: row for row in result["rows"] if row["tokens"] == tokens}
    for key, digits in DIGITS.items():
        values = [rows[server].get(key) for server in SERVERS if server in rows]
        column[key] = " / ".join(f"{value:.{digits}f}" for value in values if value is not None)
    return column | {"third_turn_share": f"{rows['specserve auto']['third_turn_share']:.3f}"}


def _clients(rows: list[Row]) -> str:
    """What the clients of each server get."""
    figures = [(row, f"{row['tokens_per_second']:.1f}, {row['gap_p99_s']:.2f} s") for row in rows]
    return ", ".join(f"{SERVERS[row['server']]} {figure}" for row, figure in figures)
