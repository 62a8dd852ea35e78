"""One forward pass with as many rows as are cheapest: where that saves time, rows that nobody reads are added."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from specserve.engine.base import Engine, FloatArray, Row
from specserve.speculation.cost import Cost, passes


def run_pass(engine: Engine, rows: list[Row], cost: Cost) -> FloatArray:
    """Run `rows` through the engine, with rows beside them that nobody reads where that is cheaper.

    The added rows stand behind a slot's own and are cut from its cache at once. They ask for logits only if all rows
    do: a prompt's chunk wants those of its last row alone.

    Args:
        engine: runs the pass.
        rows: each slot's in one piece, and the slots in order where they have caches of their own.
        cost: of the engine's passes.

    Returns:
        The logits of the rows that want them, as `Engine.forward` gives them.

    Raises:
        EngineError: the pass failed; the caches are as before.
    """
    wants = all(row.wants_logits for row in rows)
    most = min(engine.max_rows, engine.max_logits) if wants else engine.max_rows
    texts = {slot: list(own) for slot, own in groupby(rows, key=lambda row: row.slot)}
    counts = {slot: len(own) for slot, own in texts.items()}
    chosen = _filled(engine, counts, cost, most)
    if chosen == counts:
        return engine.forward(rows)
    given: list[Row] = []
    real: list[int] = []
    for slot, count in chosen.items():
        own = texts.get(slot, [])
        real += [len(given) + place for place, row in enumerate(own) if row.wants_logits]
        behind = own[-1].position + 1 if own else engine.held(slot)
        pads = range(behind, behind + count - len(own))
        given += own + [Row(rows[-1].token, slot, place, wants) for place in pads]
    logits = engine.forward(given)
    for slot, count in chosen.items():
        if count > counts.get(slot, 0):
            engine.cut(slot, engine.held(slot) - count + counts.get(slot, 0))
    # Pads among the rows want logits as these do, or none at all.
    if not wants:
        return logits
    return logits[: len(real)] if real == list(range(len(real))) else logits[real]


def _filled(engine: Engine, counts: dict[int, int], cost: Cost, most: int) -> dict[int, int]:
    """By slot, how many rows it should have: as many as it wants, or more where that is cheaper."""
    cells = engine.reach(counts)
    if not engine.separate or len(counts) == 1:
        rows = sum(counts.values())
        last = next(reversed(counts))
        extra = min(cost.padded(rows, cells), most) - rows
        extra = min(extra, engine.slot_length - engine.held(last) - counts[last])
        return {**counts, last: counts[last] + extra} if extra > 0 else counts
    fitting = [
        option
        for option in _options(engine, counts, cost, cells)
        if sum(option.values()) <= most
        and all(engine.held(slot) + count <= engine.slot_length for slot, count in option.items())
    ]
    return min(fitting, key=lambda option: _seconds(option, cost, cells), default=counts)


def _options(engine: Engine, counts: dict[int, int], cost: Cost, cells: int) -> Iterator[dict[int, int]]:
    """Ways to fill a pass up: slots alike, slots between them too, and neighbours or the longest one on top."""
    free = [slot for slot in range(engine.n_slots) if slot not in counts and engine.held(slot) <= cells]
    between = [slot for slot in free if min(counts) < slot < max(counts)]
    least, longest = min(counts.values()), max(counts.values())
    alike = dict.fromkeys(counts, longest)
    for option in (counts, counts | dict.fromkeys(between, least), alike, alike | dict.fromkeys(between, longest)):
        ordered = dict(sorted(option.items()))
        yield ordered
        rows = min(ordered.values())
        beside = [slot for slot in free if slot not in ordered]
        for number in range(1, len(beside) + 1):
            yield dict(sorted((ordered | dict.fromkeys(beside[:number], rows)).items()))
        top = max(ordered, key=lambda slot: ordered[slot])
        alone = ordered[top] - (sorted(ordered.values())[-2] if len(ordered) > 1 else 0)
        if alone:
            yield ordered | {top: ordered[top] + cost.padded(alone, cells) - alone}


def _seconds(counts: dict[int, int], cost: Cost, cells: int) -> float:
    by_slot = [counts.get(slot, 0) for slot in range(max(counts) + 1)]
    return sum(cost.exactly(size, cells) for size in passes(by_slot))
