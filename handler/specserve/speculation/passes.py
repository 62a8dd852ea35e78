"""One forward pass with as many rows as are cheapest: between two stairs of the cost, empty rows are added."""

from __future__ import annotations

from specserve.engine.base import Engine, FloatArray, Row
from specserve.speculation.cost import Cost


def run_pass(engine: Engine, rows: list[Row], cost: Cost) -> FloatArray:
    """Run `rows` through the engine, with rows behind them that nobody reads where that is cheaper.

    The added rows continue the last row's slot and are cut from its cache at once. They ask for logits only if all
    rows do: a prompt's chunk wants those of its last row alone.

    Returns:
        The logits of the rows that want them, as `Engine.forward` gives them.

    Raises:
        EngineError: the pass failed; the caches are as before.
    """
    last = rows[-1]
    wanted = sum(row.wants_logits for row in rows)
    wants = wanted == len(rows)
    most = min(engine.max_rows, engine.max_logits) if wants else engine.max_rows
    extra = min(cost.padded(len(rows), engine.cells), most) - len(rows)
    extra = min(extra, engine.slot_length - last.position - 1)
    if extra <= 0:
        return engine.forward(rows)
    pads = [Row(last.token, last.slot, last.position + i, wants) for i in range(1, extra + 1)]
    logits = engine.forward(rows + pads)
    engine.cut(last.slot, last.position + 1)
    return logits[:wanted]
