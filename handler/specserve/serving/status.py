"""The route v1/speculation: what this server runs, what that costs here, and what its controller has learned."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import specserve
from specserve.config import HandlerConfig, ModelConfig, processor, usable_cores
from specserve.engine.kernels import calls
from specserve.engine.llama_model import LlamaModel, build_description
from specserve.observability.control_group import Speedup
from specserve.serving.loading import Models, describe
from specserve.serving.openai.response_schema import Speculator
from specserve.serving.scheduler import Scheduler
from specserve.speculation.controller import Controller
from specserve.speculation.cost import Cost

_PACKAGES = ("llama-cpp-python", "llguidance", "numpy", "pydantic", "torchserve")
_DIGITS = 4


def speculator(
    config: HandlerConfig,
    models: Models,
    scheduler: Scheduler,
    comparisons: tuple[Speedup | None, Speedup | None],
    max_wait_seconds: float,
) -> Speculator:
    """The response; all of it is at hand, nothing is measured for it.

    Args:
        config: of the server.
        models: that it has loaded.
        scheduler: what it does.
        comparisons: with requests that are held back, and with rounds.
        max_wait_seconds: what prompts may add to a round.
    """
    held_back, plain_rounds = (None if found is None else found._asdict() for found in comparisons)
    controller = models.drafters.controller
    limits = config.speculation
    return {
        "object": "speculation",
        "model": config.model_id,
        "versions": {"specserve": specserve.__version__, **{name: _version(name) for name in _PACKAGES}},
        "build": build_description(),
        "processor": next((line for line in processor().splitlines() if line.startswith("model name")), ""),
        "threads": config.threads or usable_cores(),
        "models": _models(config, models),
        "batch_invariance": _invariance(models),
        "kernels": {**models.kernels._asdict(), **calls()._asdict()},
        "costs": _costs(controller),
        "controller": _learned(controller),
        "limits": {
            "mode": limits.mode,
            "gamma": limits.gamma,
            "max_gamma": limits.max_gamma,
            "window": limits.window,
            "context_length": config.context_length,
            "max_wait_ms": round(1000 * max_wait_seconds),
            "idle_tokens": config.idle_tokens,
        },
        "sequences": {"live": scheduler.live, "waiting": scheduler.waiting, "slots": config.sequences},
        "draft_model_up": models.drafters.has_model,
        "holdback": held_back,
        "plain_rounds": plain_rounds,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _models(config: HandlerConfig, models: Models) -> dict[str, dict[str, str | int | None]]:
    pairs = (("target", config.target, models.vocabulary), ("draft", config.draft, models.draft))
    return {role: _model(file, model) for role, file, model in pairs if file is not None and model is not None}


def _model(file: ModelConfig, model: LlamaModel) -> dict[str, str | int | None]:
    parameters, size = model.weights
    name = None if file.path is None else file.path.name
    return {
        "file": name,
        "sha256": file.sha256,
        "description": model.description(),
        "parameters": parameters,
        "bytes": size,
    }


def _invariance(models: Models) -> dict[str, float | str | None]:
    if models.invariance is None:
        return {"sentence": "not measured"}
    return {**models.invariance._asdict(), "sentence": describe(models.invariance)}


def _costs(controller: Controller) -> dict[str, dict[str, list[int] | list[float]]]:
    costs: dict[str, Cost | None] = {"target": controller.target, "draft": controller.draft}
    return {role: _table(cost) for role, cost in costs.items() if cost is not None}


def _table(cost: Cost) -> dict[str, list[int] | list[float]]:
    near, far = cost.table.seconds
    return {
        "rows": list(cost.table.rows),
        "kv_len": list(cost.table.kv_len),
        "milliseconds_near": [round(1000 * seconds, _DIGITS) for seconds in near],
        "milliseconds_far": [round(1000 * seconds, _DIGITS) for seconds in far],
        "milliseconds_now": [round(1000 * cost.exactly(rows, 0), _DIGITS) for rows in cost.table.rows],
    }


def _learned(controller: Controller) -> dict[str, list[float]]:
    """By source and kind of sampling, how often drafts stay, those that their source is least sure of first."""
    return {
        f"{source}, {'sampled' if sampled else 'greedy'}": [round(chance, _DIGITS) for chance in chances]
        for (source, sampled), chances in controller.learned.items()
    }
