"""The costs of the loaded models' forward passes: measured when they are loaded, and again where they are doubtful."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from specserve.engine import kernels
from specserve.engine.base import Engine
from specserve.engine.llama_model import build_description
from specserve.engine.placement import Placement
from specserve.errors import EngineError, ModelLoadError
from specserve.speculation.cost import Cost
from specserve.speculation.cost_files import measured_again, measured_cost
from specserve.speculation.measure import Interrupted

logger = logging.getLogger(__name__)


class _Measured(NamedTuple):
    """A model whose passes were measured; `code` identifies what computes them."""

    engine: Engine
    path: Path
    code: str
    cost: Cost


class Costs:
    """Measures models with all compute threads, and with half of them, as where neighbours keep cores busy.

    Args:
        placement: of the compute threads.
        clock: seconds.
    """

    def __init__(self, placement: Placement, clock: Callable[[], float] = perf_counter) -> None:
        self.placement = placement
        self._clock = clock
        self._measured: list[_Measured] = []

    def measure(self, engine: Engine, path: Path, target: Cost | None = None) -> Cost:
        """The cost of a model's passes, from an earlier start if nothing it depends on has changed.

        Args:
            engine: computes with the threads of the placement.
            path: the model's file.
            target: the target's cost if the model is its draft.

        Raises:
            ModelLoadError: a forward pass failed.
        """
        code = f"{kernels.identity()} {build_description()} {'a draft' if target else ''}"
        all_cores = self.placement.cores
        tables = {}
        try:
            for cores in dict.fromkeys([all_cores[: (1 + len(all_cores)) // 2], all_cores]):
                self.placement.run_on(cores)
                tables[len(cores)] = measured_cost(engine, path, threads=len(cores), kernels=code, clock=self._clock)
        except EngineError as error:
            raise ModelLoadError(f"{path}: its forward passes cannot be timed: {error}") from error
        cost = Cost(tables, target=target)
        self._measured.append(_Measured(engine, path, code, cost))
        self.placement.follow(lambda cores: cost.use_threads(len(cores)))
        return cost

    @property
    def doubtful(self) -> bool:
        """Whether passes have become faster than a table says."""
        return any(measured.cost.doubtful for measured in self._measured)

    def measure_doubtful(self, interrupted: Callable[[], bool]) -> None:
        """Measure the passes again that have become faster than their table says; belongs to the engine thread.

        Args:
            interrupted: asked before each pass; the rest is left to the next idle time.
        """
        before = self.placement.cores
        try:
            for engine, path, code, cost in self._measured:
                for threads, table in cost.tables.items() if cost.doubtful else ():
                    self.placement.run_on(tuple(sorted(self.placement.usable.cores[:threads])))
                    again = measured_again(
                        engine, path, table, threads=threads, kernels=code, interrupted=interrupted, clock=self._clock
                    )
                    cost.replace_table(threads, again)
        except Interrupted:
            logger.info("specserve: a request has come; the rest is measured later")
        except EngineError as error:
            logger.warning("specserve: the forward passes cannot be measured again: %s", error)
        finally:
            self.placement.run_on(before)
