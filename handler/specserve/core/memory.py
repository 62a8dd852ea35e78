"""What a worker has memory for: its models, and as many tokens in the KV caches as are configured or can be used."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

from specserve.config import CacheType, HandlerConfig
from specserve.engine.llama_model import LlamaModel
from specserve.engine.recurrent import all_states_bytes, cell_values
from specserve.errors import ModelLoadError

logger = logging.getLogger(__name__)

# The most tokens of a sequence in the draft model's cache: it needs the last of them only, and reads some anew each
# time that these are used up. No command prints it.
DRAFT_LENGTH = 2048
# Bytes of a number in a KV cache. Beside it specserve's attention keeps 4 bytes for each head, and of q8_0 one more for
# each 32 numbers: 1/16 of a byte a number with heads of 64.
_VALUE: dict[CacheType, float] = {"f16": 2 + 1 / 16, "q8_0": 34 / 32 + 1 / 16 + 1 / 32}
# Memory beside weights and KV caches, for the buffers of passes, logits, grammars and Python, in bytes; the worker
# stays below (tests/real/test_coder_pair.py).
_REST = 400 * 2**20
# The least tokens that are worth serving where the operator asks for no number.
_LEAST = 4096
# Where memory is short, the KV cache has a whole number of such parts of the tokens that are asked for: a little more
# or less free memory gives the same cache at the next start, which then finds its costs.
_STEPS = 16
# What follows the reason why a draft model is left out.
WITHOUT_DRAFT = "Serving goes on without the draft model."


def check_weights(files: Sequence[Path], free: int) -> None:
    """Raise ModelLoadError at the first of these models that does not fit into `free` bytes beside those before it."""
    weights = 0
    for count, file in enumerate(files, 1):
        weights += _file_bytes(file)
        if weights + _REST > free:
            names = " and ".join(file.name for file in files[:count])
            raise ModelLoadError(
                f"{names}: no memory: the weights take {_mib(weights)} and the rest of the worker {_mib(_REST)}, but "
                f"{_mib(free)} are free; give the worker more memory, or choose a smaller model."
            )


def _file_bytes(file: Path) -> int:
    """The size of a model, of which llama.cpp also reads the parts beside a first one, NAME-00001-of-00003.gguf."""
    if not (first := re.fullmatch(r"(.*-)00001(-of-(\d{5})\.gguf)", file.name)):
        return file.stat().st_size
    parts = [file.with_name(f"{first[1]}{number:05d}{first[2]}") for number in range(1, int(first[3]) + 1)]
    return sum(part.stat().st_size for part in parts if part.exists())


def cache_bytes(config: HandlerConfig, target: LlamaModel, draft: LlamaModel | None) -> tuple[int, int]:
    """What a token of the target's KV cache takes; and its recurrent states with the draft model's whole cache."""
    per_token = math.ceil(cell_values(target) * _VALUE[config.cache_type])
    others = all_states_bytes(target, config.sequences)
    if draft:
        draft_tokens = config.sequences * min(config.context_length, DRAFT_LENGTH)
        others += math.ceil(draft.cell_values * _VALUE["f16"] * draft_tokens)
    return per_token, others


def loaded_bytes(config: HandlerConfig, target: LlamaModel, draft: LlamaModel | None) -> int:
    """The bytes that a worker takes with a `fitted` configuration, beside prefixes in host memory."""
    weights = sum(_file_bytes(model.path) for model in (target, draft) if model)
    per_token, other_bytes = cache_bytes(config, target, draft)
    return weights + per_token * config.cache_tokens + other_bytes + _REST


def fitted(config: HandlerConfig, target: LlamaModel, draft: LlamaModel | None, free: int) -> HandlerConfig:
    """The operator's configuration, with the `context_length` and `cache_tokens` that are served.

    Beside the models, which are loaded, `free` bytes of memory may be taken.

    Raises:
        ModelLoadError: the model was trained for less than the configured `context_length`, or there is no memory for
            one sequence.
    """
    given = config.model_fields_set
    if "context_length" in given and config.context_length > target.trained_context:
        raise ModelLoadError(
            f"{target.path}: was trained for {target.trained_context} tokens; "
            f"lower `context_length` from {config.context_length}."
        )
    context_length = min(config.context_length, target.trained_context)
    if "cache_tokens" in given:
        context_length = min(context_length, config.cache_tokens)
    # More than all sequences can hold would never be used.
    wanted = min(max(config.cache_tokens, context_length), config.sequences * context_length)
    least = context_length if "context_length" in given else min(context_length, _LEAST)
    cell, other_bytes = cache_bytes(config.model_copy(update={"context_length": context_length}), target, draft)
    n_cells = min(wanted, int(max(0, free - other_bytes - _REST) // cell))
    if n_cells < least:
        raise ModelLoadError(
            f"{target.path}: no memory for a KV cache of {least} tokens: it takes {_mib(least * cell + other_bytes)} "
            f"and the rest of the worker {_mib(_REST)}, but {_mib(free)} are free; give the worker more memory, or "
            "lower `context_length` or `sequences`."
        )
    if n_cells < wanted:
        n_cells = max(least, wanted * (_STEPS * n_cells // wanted) // _STEPS)
        sentence = "specserve: the KV cache holds %d tokens instead of %d, since only %s of memory are free"
        logger.warning(sentence, n_cells, wanted, _mib(free))
    sizes = n_cells, _mib(n_cells * cell), _mib(other_bytes), _mib(free)
    logger.info("specserve: the KV cache of %d tokens takes %s, other caches %s; %s were free", *sizes)
    return config.model_copy(update={"context_length": min(context_length, n_cells), "cache_tokens": n_cells})


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
