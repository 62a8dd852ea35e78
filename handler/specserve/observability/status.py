"""The response of v1/speculation: what this server runs, what that costs here, and what its controller has learned."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from typing_extensions import TypedDict

import specserve
from specserve.config import HandlerConfig, ModelConfig, processor, usable_cores
from specserve.engine.invariance import Invariance
from specserve.engine.kernels import Kernels, calls
from specserve.engine.llama_model import LlamaModel, build_description
from specserve.observability.control_group import Speedup
from specserve.speculation.cost import Cost
from specserve.speculation.drafters import Drafters

_PACKAGES = ("llama-cpp-python", "llguidance", "numpy", "pydantic", "torchserve")
_DIGITS = 4


class SpeculationStatus(TypedDict):
    """The response of v1/speculation, for operators."""

    object: Literal["speculation"]
    model: str
    versions: dict[str, str]
    build: str
    processor: str
    threads: int
    models: dict[str, dict[str, str | int | None]]
    batch_invariance: dict[str, float | str | None]
    kernels: dict[str, str | int | tuple[str, ...] | None]
    costs: dict[str, dict[str, list[int] | list[float]]]
    controller: dict[str, list[float]]
    limits: dict[str, int | str]
    sequences: dict[str, int]
    draft_model_up: bool
    holdback: dict[str, float] | None


def speculation_status(
    config: HandlerConfig,
    *,
    target: LlamaModel,
    draft: LlamaModel | None,
    kernels: Kernels,
    invariance: Invariance | None,
    drafters: Drafters,
    live: int,
    waiting: int,
    holdback: Speedup | None,
    max_wait_seconds: float,
) -> SpeculationStatus:
    """The response, from what is known already; nothing is measured for it.

    Args:
        config: of the server.
        target: the target's model file.
        draft: the draft model's, if it was loaded.
        kernels: those in use.
        invariance: the target's, if it was measured.
        drafters: their controller has the costs, and what drafts have shown.
        live: number of running sequences.
        waiting: number of waiting sequences.
        holdback: the speed-up against the control group.
        max_wait_seconds: the most that prefill may add to a round.
    """
    limits, controller = config.speculation, drafters.controller
    pairs = (("target", config.target, target), ("draft", config.draft, draft))
    costs: dict[str, Cost | None] = {"target": controller.target, "draft": controller.draft}
    return {
        "object": "speculation",
        "model": config.model_id,
        "versions": {"specserve": specserve.__version__, **{name: _version(name) for name in _PACKAGES}},
        "build": build_description(),
        "processor": next((line for line in processor().splitlines() if line.startswith("model name")), ""),
        "threads": config.threads or usable_cores(),
        "models": {role: _model(file, model) for role, file, model in pairs if file is not None and model is not None},
        "batch_invariance": {"sentence": "not measured"}
        if invariance is None
        else {**invariance._asdict(), "sentence": describe(invariance)},
        "kernels": {**kernels._asdict(), **calls()._asdict()},
        "costs": {role: _table(cost) for role, cost in costs.items() if cost is not None},
        # By source and kind of sampling: how often drafts are accepted, those of least confidence first.
        "controller": {
            f"{source}, {'sampled' if sampled else 'greedy'}": [round(rate, _DIGITS) for rate in rates]
            for (source, sampled), rates in controller.learned.items()
        },
        "limits": {
            "mode": limits.mode,
            "gamma": limits.gamma,
            "max_gamma": limits.max_gamma,
            "window": limits.window,
            "context_length": config.context_length,
            "max_wait_ms": round(1000 * max_wait_seconds),
            "idle_tokens": config.idle_tokens,
        },
        "sequences": {"live": live, "waiting": waiting, "slots": config.sequences},
        "draft_model_up": drafters.has_model,
        "holdback": None if holdback is None else holdback._asdict(),
    }


def describe(invariance: Invariance) -> str:
    """Whether greedy and seeded texts repeat, in one sentence for the operator."""
    if invariance.any_batch:
        return (
            "the target gave the same logits for all numbers of rows, prefill chunks, cache positions and neighbours "
            "that were tried: greedy and seeded outputs repeat exactly, as far as a short trial can tell"
        )
    causes = {
        "the number of rows in a forward pass": invariance.rows,
        "the prefill chunks": invariance.chunks,
        "the position in the cache": invariance.layout,
        "the neighbours in a forward pass": invariance.neighbours,
    }
    named = ", ".join(f"{cause} (by up to {difference:.2g})" for cause, difference in causes.items() if difference)
    exactly = (
        "repeat exactly alone in an empty cache; beside or after other requests they "
        if invariance.single_sequence
        else ""
    )
    return (
        f"the target's logits differ with {named}: greedy and seeded outputs {exactly}may differ between runs "
        "where two tokens are nearly equal"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _model(file: ModelConfig, model: LlamaModel) -> dict[str, str | int | None]:
    parameters, size = model.weights
    return {
        "file": None if file.path is None else file.path.name,
        "sha256": file.sha256,
        "description": model.description(),
        "parameters": parameters,
        "bytes": size,
    }


def _table(cost: Cost) -> dict[str, list[int] | list[float]]:
    near, far = cost.table.seconds
    return {
        "rows": list(cost.table.rows),
        "kv_len": list(cost.table.kv_len),
        "milliseconds_near": [round(1000 * seconds, _DIGITS) for seconds in near],
        "milliseconds_far": [round(1000 * seconds, _DIGITS) for seconds in far],
        "milliseconds_now": [round(1000 * cost.exactly(rows, 0), _DIGITS) for rows in cost.table.rows],
    }
