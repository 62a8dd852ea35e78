"""Loads the models of a configuration, opens their engines, and measures them."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specserve.config import HandlerConfig
from specserve.core.memory import DRAFT_LENGTH, WITHOUT_DRAFT, check_weights, fitted, loaded_bytes
from specserve.core.prefix_store import PrefixStore
from specserve.engine import kernels
from specserve.engine.draft_head import DraftHead
from specserve.engine.kernels import Kernels, Left
from specserve.engine.kv_cache import KVCache
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, able_to_draft, build_description, check_same_vocabulary
from specserve.engine.placement import Placement, Workers
from specserve.engine.recurrent import RecurrentEngine, earlier_states
from specserve.engine.thread_pool import ThreadPool
from specserve.errors import EngineError, ModelLoadError
from specserve.grammar.compiler import GrammarCompiler
from specserve.machine import free_memory, usable_cores
from specserve.speculation.costs import PassCosts
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.drafters import Drafters
from specserve.speculation.measure import measured_costs
from specserve.speculation.ngram import LookupProposer, Pools, PredictionProposer
from specserve.speculation.policy import Controller
from specserve.speculation.proposers import GrammarProposer
from specserve.weights.find import find

logger = logging.getLogger(__name__)

# The most rows of a forward pass with logits, which are the largest buffers by far: 0.6 MB a row for 151,936 tokens,
# twice.
_MAX_LOGITS = 64
# The most alternatives to drafts in a pass of the target (speculation/alternatives.py): on no machine seen more pay.
_MAX_ALTERNATIVES = 8
# The most prompt tokens in a round.
PREFILL_ROWS = 64
# Tokens before the end of a sequence that the draft model reads when it joins one (benchmarks/decisions/tried.md).
_DRAFT_WINDOW = 96
# The memory that prefixes may fill by default, in MiB, which holds a whole context of the default target; and the most
# of what is free, which leaves a quarter for each of two more workers and another one for the rest of the machine.
_PREFIX_MIB, _PREFIX_SHARE = 1024, 0.25


@dataclass(frozen=True)
class Models:
    vocabulary: LlamaModel  # the target's
    grammars: GrammarCompiler
    target: KVCache
    drafters: Drafters
    placement: Placement
    kernels: Kernels
    config: HandlerConfig  # with the numbers of tokens that are served (memory.py)
    # Of the target, on which alone it depends whether outputs repeat: with greedy and coupled verification they do not
    # depend on the drafts.
    left: Left
    draft: LlamaModel | None = None
    memory_bytes: int = 0  # that the worker takes at most, beside prefixes in host memory


def load_models(config: HandlerConfig) -> Models:
    """Load target and draft model, check that they match, and measure what their forward passes cost.

    A draft model that cannot be read, has another vocabulary, or for which there is no memory, is left out.

    Raises:
        ModelLoadError: the target's file is missing or unusable.
    """
    # This also starts llama.cpp, which has to be done before two models are loaded at a time.
    placement = _placement(config)
    target_file, draft_file = find(config.target, config), None
    check_weights([target_file], free_memory())
    with _or_no_draft():
        if config.draft:
            found = find(config.draft, config)
            check_weights([target_file, found], free_memory())
            draft_file = found
    in_use = kernels.use(config.kernels)
    logger.info("specserve: %s", in_use.sentence)
    draft_model = None
    # This thread runs all passes, and the first pass binds it to one core. The loading thread runs no pass; it starts
    # before the first pass, because it inherits this thread's cores.
    with ThreadPoolExecutor(1, "loading") as beside:
        loading = beside.submit(LlamaModel, draft_file) if draft_file else None
        target_model = LlamaModel(target_file)
        if loading:
            with _or_no_draft():
                draft_model = able_to_draft(loading.result())
        config, draft_model = _fitted(config, target_model, draft_model)
        grammars = GrammarCompiler(target_model)

        def check_draft() -> None:
            if draft_model:
                check_same_vocabulary(target_model, draft_model)

        fits = beside.submit(check_draft)
        # Otherwise all streams would wait for it when the first grammar comes.
        reading, pools = beside.submit(grammars.prepare), _pools(config, target_model)
        target, drafters = open_engines(
            target_model,
            draft_model,
            config,
            placement,
            pools,
            before_draft=fits.result,
            before_timing=reading.result,
        )
    for is_named, lacks in (
        (target_model.has_splitter, "pre-tokenizer, so answers may be worse"),
        (target_model.has_end, "end token, so answers may end too early"),
    ):
        if not is_named:
            logger.warning("specserve: %s: names no %s: convert the model again", target_model.path, lacks)
    if target.rollback is not None:
        sentence = "specserve: %s: has recurrent layers: at most %d tokens are drafted, if one sequence decodes alone"
        logger.warning(sentence, target_model.path, target.rollback)
    if draft_model and not drafters.model:
        draft_model.close()
        draft_model = None
    left = target.left_to_llama_cpp
    logger.log(logging.INFO if left.exact else logging.WARNING, "specserve: %s", left.sentence)
    return Models(
        target_model,
        grammars,
        KVCache(target),
        drafters,
        placement,
        in_use,
        config,
        left,
        draft_model,
        loaded_bytes(config, target_model, draft_model) + kernels.growth(),
    )


def _fitted(
    config: HandlerConfig, target: LlamaModel, draft: LlamaModel | None
) -> tuple[HandlerConfig, LlamaModel | None]:
    """`fitted`, without the draft model, which is closed, where the target's cache has room only then."""
    try:
        return fitted(config, target, draft, free_memory()), draft
    except ModelLoadError as error:
        if draft is None:
            raise
        draft.close()
        config = fitted(config, target, None, free_memory())
        logger.error("specserve: %s %s", error, WITHOUT_DRAFT)
        return config, None


@contextmanager
def _or_no_draft() -> Iterator[None]:
    """Serve without the draft model where it cannot be loaded."""
    try:
        yield
    except ModelLoadError as error:
        logger.error("specserve: %s %s", error, WITHOUT_DRAFT)


def _placement(config: HandlerConfig) -> Placement:
    """Where the compute threads run; workers of one user divide the cores unless the operator has chosen them."""
    usable = usable_cores(config.cores, config.threads)
    workers = None
    if config.cores is None:
        try:
            workers = Workers(usable.cores)
        except OSError as error:
            logger.warning("specserve: other workers cannot be seen (%s); give each its own `cores`", error)
    if config.threads and config.threads > usable.threads:
        logger.warning("specserve: `threads: %d`, but only %d cores may be used", config.threads, usable.threads)
    return Placement(usable, ThreadPool(), workers)


def _pools(config: HandlerConfig, model: LlamaModel) -> Pools:
    """What lookups search beside a sequence's own text: finished answers, and the operator's files."""
    texts = []
    for path in config.speculation.corpus:
        try:
            texts.append(model.encode(path.read_text(encoding="utf-8", errors="replace"), begin=False))
        except OSError as error:
            raise ModelLoadError(f"handler.speculation.corpus: {path} cannot be read: {error.strerror}.") from error
    return Pools(config.speculation.history_tokens, texts)


def open_engines(
    target_model: LlamaModel,
    draft_model: LlamaModel | None,
    config: HandlerConfig,
    placement: Placement,
    pools: Pools,
    *,
    before_draft: Callable[[], object] = lambda: None,
    before_timing: Callable[[], object] = lambda: None,
) -> tuple[LlamaEngine, Drafters]:
    """Open engines for loaded models, with their drafters; a model may have several engines.

    `config` is that of `Models`. `before_draft` raises ModelLoadError if the draft model is not to be used;
    `before_timing` waits for what must not run beside passes that are timed.

    Raises:
        ModelLoadError: there is no memory for the target's cache, or a forward pass of it failed.
    """
    target = _engine(
        target_model,
        config,
        placement,
        context_length=config.context_length,
        n_cells=config.cache_tokens,
        max_logits=_MAX_LOGITS,
        max_alternatives=_MAX_ALTERNATIVES if draft_model and not target_model.recurrent else 0,
        states=earlier_states(target_model, config.sequences),
        cache_type=config.cache_type,
    )
    draft = model = None
    if draft_model:
        # The target's, which end answers; the draft's own may be others.
        ends = [token for token in target_model.end_tokens() if token < draft_model.size]
        with _or_no_draft():
            before_draft()
            if target.rollback == 0:
                raise ModelLoadError(f"{target_model.path}: cannot go back after a rejected draft.")
            draft = _engine(
                draft_model,
                config,
                placement,
                context_length=min(config.context_length, DRAFT_LENGTH),
                max_logits=max(_MAX_LOGITS // 2, config.sequences),
                head=DraftHead(draft_model.size, ends),
            )
    before_timing()
    target_cost = _pass_costs(target, target_model, placement)
    if draft_model and draft:
        with _or_no_draft():
            model = DraftModel(
                KVCache(draft),
                _pass_costs(draft, draft_model, placement, target_cost),
                window=_DRAFT_WINDOW,
                max_rows=PREFILL_ROWS,
                vocabulary=target_model.size,
                context_length=draft.slot_length,
                mask_token=draft_model.mask_token,
            )
            costs = 1000 * target_cost.seconds(1, 0), 1000 * model.cost.seconds(1, 0), draft_model.block_length
            sentence = (
                "specserve: a pass of one token takes %.1f ms on the target, %.1f on the draft (which drafts up to %d)"
            )
            logger.info(sentence, *costs)
    block_length = draft_model.block_length if draft_model else 1
    drafters = Drafters(
        Controller(target_cost, model.cost if model else None, block_length=block_length),
        PredictionProposer(),
        GrammarProposer(),
        LookupProposer(pools),
        model=model,
        end_tokens=target_model.end_tokens(),
    )
    return target, drafters


def _engine(model: LlamaModel, config: HandlerConfig, placement: Placement, **options: Any) -> LlamaEngine:
    """Open an engine with these `options`, and log what specserve's kernels leave to llama.cpp's while in use."""
    engine = (RecurrentEngine if model.recurrent else LlamaEngine)(
        model,
        n_slots=config.sequences,
        threads=placement.usable.threads,
        max_rows=PREFILL_ROWS + _MAX_LOGITS,
        pool=placement.pool,
        **options,
    )
    left = engine.left_to_llama_cpp
    if kernels.in_use().variant and any(left):
        logger.warning(
            "specserve: %s: llama.cpp's own kernels compute %s of this model, in part or whole, so a draft token costs "
            "more than it could (specserve's are for weights in %s)",
            model.path,
            " and ".join((*left.parts, *(f"products of {name} weights" for name in left.formats))),
            ", ".join(kernels.in_use().formats),
        )
    return engine


def _pass_costs(
    engine: LlamaEngine, model: LlamaModel, placement: Placement, target: PassCosts | None = None
) -> PassCosts:
    """The costs of a model's passes, a draft's by the target's; ModelLoadError, the engine closed, if one fails."""
    code = f"{kernels.identity()} {build_description()} {'a draft' if target else ''}"
    try:
        table = measured_costs(engine, model.path, threads=placement.usable.threads, kernels=code)
    except EngineError as error:
        engine.close()
        raise ModelLoadError(f"{model.path}: its forward passes cannot be timed: {error}") from error
    return PassCosts(table, target=target)


def open_store(config: HandlerConfig, models: Models) -> PrefixStore:
    """Make the store of the target's prefixes; it keeps nothing without memory, or if the engine cannot save any."""
    token_bytes, mebibytes = models.target.engine.token_bytes, config.prefix_cache_mib
    if mebibytes is None:
        mebibytes = min(_PREFIX_MIB, int(_PREFIX_SHARE * free_memory()) >> 20)
    if token_bytes is None:
        logger.info("specserve: no prefixes are kept in host memory: this model's keys and values cannot be copied")
    if token_bytes is None or not mebibytes:
        return PrefixStore()
    max_bytes = mebibytes << 20
    logger.info("specserve: up to %d MiB of host memory keep prefixes: %d tokens", mebibytes, max_bytes // token_bytes)
    return PrefixStore(token_bytes, max_bytes)
