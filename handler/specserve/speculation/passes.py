"""One forward pass with as many rows as are cheapest: where that saves time, rows that nobody reads are added."""

from __future__ import annotations

from specserve.engine.base import Engine, FloatArray, Row
from specserve.speculation.cost import Cost


def run_pass(engine: Engine, rows: list[Row], cost: Cost) -> FloatArray:
    """Run `rows` through the engine, with rows behind them that nobody reads where that is cheaper.

    The added rows follow the last one's sequence and are cut from its cache at once. They ask for logits only if all
    rows do: a prompt's chunk wants those of its last row alone.

    Args:
        engine: runs the pass.
        rows: each slot's in one piece.
        cost: of the engine's passes.

    Returns:
        The logits of the rows that want them, as `Engine.forward` gives them.

    Raises:
        EngineError: the pass failed; the caches are as before.
    """
    wants = all(row.wants_logits for row in rows)
    most = min(engine.max_rows, engine.max_logits) if wants else engine.max_rows
    last = rows[-1]
    end = last.position + 1
    padded = min(cost.padded(len(rows), engine.kv_len({row.slot for row in rows})), most)
    extra = min(padded - len(rows), engine.slot_length - end)
    if extra <= 0:
        return engine.forward(rows)
    logits = engine.forward(rows + [Row(last.token, last.slot, end + n, wants) for n in range(extra)])
    engine.truncate(last.slot, end)
    return logits[: len(rows)] if wants else logits
