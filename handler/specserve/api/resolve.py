"""Resolves requests: what their fields mean together, with the defaults and limits of this server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from specserve.api.logprobs import MAX_RESPONSE_BYTES, ResponseSize
from specserve.api.prompt import BYTES_PER_TOKEN, Prompt, PromptTooLong, check_tokens
from specserve.api.reasoning import ThinkingTags
from specserve.api.request_schema import (
    MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Regex,
    SpeculationOptions,
    StreamOptions,
    text_of,
)
from specserve.config import HandlerConfig
from specserve.core.detokenizer import with_control_tokens
from specserve.core.generation import Generation
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.grammar.call_form import CallForm
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.grammar.tool_calls import CallConstraint, CallSyntax, Reasoning
from specserve.observability.records import family_label
from specserve.sequence import Group, RequestInfo, SamplingParams, SpeculationParams, Verification

# Bytes of JSON per log-probability, about; a response that is too large by this estimate is refused at once.
_SCORE_BYTES = 80
# Tokens that an answer is expected to have at most where the request does not limit it; if it has more and the response
# becomes too large, it ends with an error then.
_UNSTATED = 1024
# vLLM and llama.cpp take this seed for "choose one", and llama.cpp this number of tokens for "no limit".
_ANY_SEED = _UNLIMITED = -1


@dataclass(frozen=True)
class ResponseForm:
    """Says what a response consists of, the same for every route.

    Args:
        prompts: as tokens and text.
        choices: how many answers each has, the best candidates.
        top_logprobs: number of most probable tokens to return at every position; None returns no log-probabilities.
        echo: whether each choice begins with its prompt.
        sources: whether to return who wrote each piece of the text.
        stream: whether it is a stream of events.
        include_usage: whether the stream ends with the totals.
        continuous_usage: whether each of its events has the tokens so far, too.
        call_forms: how calls of tools are written, if there are any tools.
        tools: their names.
        thinking: the tags around the model's reasoning; None where it is not told apart.
        thinks_at_once: whether the prompt ends with the first of these.
        relaxed: keywords of tools' schemas that calls may break.
    """

    prompts: list[Prompt]
    choices: int
    top_logprobs: int | None
    echo: bool
    sources: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    call_forms: tuple[CallForm, ...] = ()
    tools: frozenset[str] = frozenset()
    thinking: ThinkingTags | None = None
    thinks_at_once: bool = False
    relaxed: tuple[str, ...] = ()

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are returned too."""
        return self.echo and self.top_logprobs is not None

    @property
    def echoed_bytes(self) -> int:
        """How many bytes of JSON echoed prompts take in all choices."""
        times = self.choices * (1 + self.sources) if self.echo else 0
        return times and times * sum(len(json.dumps(prompt.text)) for prompt in self.prompts)


def resolve(
    request: CompletionRequest | ChatRequest,
    prompts: list[Prompt],
    vocabulary: Vocabulary,
    grammars: GrammarCompiler,
    config: HandlerConfig,
    *,
    calls: CallSyntax | None = None,
    thinking: ThinkingTags | None = None,
    request_id: str = "",
    client: str = "",
    held_back: bool = False,
) -> tuple[ResponseForm, list[list[Generation]]]:
    """Resolve a valid request into the form of its response, and by prompt the candidates to generate for that.

    A request that is `held_back` was drawn for the control group, which it joins unless it sets `speculation`; `calls`
    is how the model writes calls of tools, `thinking` how it marks its reasoning.

    Raises:
        RequestError: 400; a prompt, a grammar or `speculation` does not fit, or the operator's caps are exceeded.
    """
    options = request.speculation or SpeculationOptions()
    choices = request.n or 1
    if isinstance(request, ChatRequest):
        prompt_field, candidates, echo = "messages", choices, False
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        prompt_field, candidates, echo = "prompt", request.best_of or choices, bool(request.echo)
        top_logprobs = request.logprobs
    streaming = request.stream_options or StreamOptions()
    limit_field, limit = request.output_limit
    tools = request.callable_tools if isinstance(request, ChatRequest) else {}
    syntax = calls if calls and tools else CallSyntax(())
    has_format = isinstance(request.response_format, JsonSchema | JsonObject)
    if not isinstance(request, ChatRequest) or request.forbids_reasoning:
        thinking = None
    form = ResponseForm(
        prompts,
        choices,
        top_logprobs,
        echo,
        sources=options.sources,
        stream=bool(request.stream),
        include_usage=streaming.include_usage,
        continuous_usage=streaming.include_usage and streaming.continuous_usage_stats,
        # Where the grammar holds from the first token on, it has the model's own form only.
        call_forms=syntax.forms[:1] if has_format else syntax.forms,
        tools=frozenset(tools),
        thinking=thinking,
        thinks_at_once=thinking is not None and prompts[0].text.rstrip().endswith(thinking.begin),
    )
    reasoning = Reasoning(*thinking, form.thinks_at_once) if thinking else None
    limit = None if limit == _UNLIMITED else limit
    if limit is not None and config.max_tokens is not None and limit > config.max_tokens:
        raise RequestError.invalid(limit_field, f"An answer has at most {config.max_tokens} tokens here.")
    sampling = _sampling(request, vocabulary)
    # Only requests that leave speculation to the server, and the server to the controller, are randomised.
    randomised = request.speculation is None and config.speculation.mode == "auto"
    mode = config.speculation.mode if options.mode == "auto" else options.mode
    group: Group = "holdback" if randomised and held_back else mode
    family = family_label((request.metadata or {}).get("prompt_family", ""))
    info = RequestInfo(request_id, family, group, randomised, client, request.cache_salt or "")
    speculation = _speculation(options, sampling, config, group, client)
    constraint = _constraint(request, grammars, syntax, reasoning)
    prediction = _prediction(request, vocabulary, config)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    stops, marks = with_control_tokens(filter(None, stops), vocabulary)
    size = ResponseSize(
        vocabulary,
        chat=isinstance(request, ChatRequest),
        sources=form.sources,
        choices=choices,
        initial=form.echoed_bytes,
    )
    groups = [
        [
            Generation(
                prompt.tokens,
                sampling,
                speculation,
                vocabulary,
                stops,
                marks=marks,
                stop_tokens=frozenset(request.stop_token_ids or ()),
                includes_stop=bool(request.include_stop_str_in_output),
                spells_control=request.skip_special_tokens is False,
                max_seconds=(request.t_max_predict_ms or 0) / 1000,
                reuses_prefix=request.cache_prompt is not False,
                tags=syntax.tags(vocabulary) | (thinking.names(vocabulary) if thinking else {}),
                info=info,
                index=number * candidates + choice,
                size=size,
                max_tokens=_max_tokens(limit, prompt, prompt_field, config),
                choice=choice,
                # The best candidates are those with the highest log-probability.
                top_logprobs=0 if top_logprobs is None and candidates > choices else top_logprobs,
                scores_prompt=form.scores_prompts and choice == 0,
                constraint=None if constraint is None else constraint.fork(),
                prediction=prediction,
                keeps_sources=form.sources,
            )
            for choice in range(candidates)
        ]
        for number, prompt in enumerate(prompts)
    ]
    _check_response_size(
        form, groups, limit or _UNSTATED, "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    )
    return (form if constraint is None else replace(form, relaxed=constraint.relaxed)), groups


def _max_tokens(limit: int | None, prompt: Prompt, prompt_field: str, config: HandlerConfig) -> int:
    """Return how many tokens may be generated, by the request, the operator, and the room in the context."""
    # A prompt without output may fill it.
    rest = config.context_length - len(prompt.tokens)
    if rest < (limit != 0):
        raise PromptTooLong(prompt_field, config.context_length, len(prompt.tokens))
    return min(tokens for tokens in (rest, limit, config.max_tokens) if tokens is not None)


def _check_response_size(
    form: ResponseForm, groups: list[list[Generation]], expected: int, logprobs_field: str
) -> None:
    """Refuse a request whose response would be too large for TorchServe, if answers have the `expected` tokens."""
    positions = sum(
        min(group[0].max_tokens, expected) + form.scores_prompts * group[0].prompt_length for group in groups
    )
    scores = 0 if form.top_logprobs is None else positions * (1 + form.top_logprobs) * _SCORE_BYTES
    # Scores spell the prompt's tokens again.
    echoed = (1 + form.scores_prompts) * form.echoed_bytes
    size = form.choices * scores + echoed
    if size > MAX_RESPONSE_BYTES:
        raise RequestError.invalid(
            logprobs_field if scores > echoed else "echo",
            f"The log-probabilities and echoed prompts of this request may take {size // 2**20} MB, over "
            f"{MAX_RESPONSE_BYTES // 2**20}: ask for fewer answers, tokens or alternatives, or set 'max_tokens'.",
        )


def _sampling(request: GenerationRequest, vocabulary: Vocabulary) -> SamplingParams:
    """Resolve how tokens are sampled; null is the default, and end tokens that are ignored are never sampled."""
    never = vocabulary.end_tokens() if request.ignore_eos else []
    stop_tokens, allowed = request.stop_token_ids or [], request.allowed_token_ids
    check_tokens("stop_token_ids", stop_tokens, vocabulary)
    check_tokens("allowed_token_ids", allowed or [], vocabulary)
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=None if request.seed == _ANY_SEED else request.seed,
        logit_bias=(*_biases(request.logit_bias or {}, vocabulary), *((token, -math.inf) for token in never)),
        allowed_tokens=None if allowed is None else tuple(allowed),
        bad_words=_bad_words(request.bad_words or [], vocabulary),
        min_tokens=request.min_tokens or 0,
        end_tokens=(*vocabulary.end_tokens(), *stop_tokens) if request.min_tokens else (),
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )


def _biases(
    biases: dict[str, float] | list[list[bool | float | str]], vocabulary: Vocabulary
) -> tuple[tuple[int, float], ...]:
    """Return the biases by token; in llama.cpp's pairs also of all tokens of a text, and false forbids a token."""
    result: list[tuple[int, float]] = []
    for name, bias in biases.items() if isinstance(biases, dict) else biases:
        if isinstance(name, str) and isinstance(biases, list):
            tokens = vocabulary.encode(name, begin=False)
        else:
            digits = str(name).removesuffix(".0")
            if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) < vocabulary.size):
                sentence = f"'logit_bias' names tokens by their ids, 0 to {vocabulary.size - 1}; '{digits}' is none."
                raise RequestError.invalid("logit_bias", sentence)
            tokens = [int(digits)]
        if isinstance(bias, str) or bias is True or not -100 <= bias <= 100 or len(result) + len(tokens) > MAX_TOKENS:
            sentence = f"Pairs of 'logit_bias' need a bias from -100 to 100 or false, and at most {MAX_TOKENS} tokens."
            raise RequestError.invalid("logit_bias", sentence)
        result += [(token, -math.inf if bias is False else bias) for token in tokens]
    return tuple(result)


def _bad_words(words: Iterable[str], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Return the words as tokens, both at the beginning of a text and after a space, as vLLM forbids them."""
    forms = (tuple(vocabulary.encode(space + word.lstrip(), begin=False)) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(form for form in forms if form))


def _speculation(
    options: SpeculationOptions, sampling: SamplingParams, config: HandlerConfig, group: Group, client: str
) -> SpeculationParams:
    """Resolve how drafts are made and verified, within the operator's limits."""
    limits = config.speculation
    drafter = None if options.drafter == "auto" else options.drafter
    if config.draft is None and drafter == "model":
        raise RequestError.invalid("speculation.drafter", "This server has no draft model.")
    mode = "off" if group == "holdback" else group
    fixed = limits.gamma if options.gamma is None else options.gamma
    gamma = {"auto": limits.max_gamma, "fixed": fixed, "off": 0}[mode]
    if gamma > limits.max_gamma:
        raise RequestError.invalid(
            "speculation.gamma", f"'speculation.gamma' may be at most {limits.max_gamma} on this server."
        )
    # With a seed the text has to repeat; the default is else the rule that accepts most. Greedy, all rules are the
    # same, and `token` is the name that describes `accept_equal` best.
    default: Verification = "token" if sampling.temperature == 0 else "block" if sampling.seed is None else "coupled"
    pool = None if options.pool == "" else (client, options.pool or "default")
    return SpeculationParams(gamma, options.verification or default, drafter, mode, pool)


def _constraint(
    request: CompletionRequest | ChatRequest,
    grammars: GrammarCompiler,
    syntax: CallSyntax,
    reasoning: Reasoning | None,
) -> Constraint | CallConstraint | None:
    """Compile the grammar that the output follows, if there is one."""
    if request.grammar is not None:
        return grammars.gbnf(request.grammar)
    form = request.response_format
    if isinstance(form, Regex):
        return grammars.regex(form.regex)
    schema = form.json_schema.json_schema if isinstance(form, JsonSchema) else None
    if isinstance(request, ChatRequest) and syntax.forms:
        return grammars.calls(
            request.callable_tools,
            syntax,
            required=request.requires_call,
            parallel=request.parallel_tool_calls is not False,
            strict=request.strict_tools,
            otherwise={"type": "object"} if isinstance(form, JsonObject) else schema,
            reasoning=reasoning,
        )
    if isinstance(form, JsonObject):
        return grammars.json_object()
    return None if schema is None else grammars.json_schema(schema)


def _prediction(request: GenerationRequest, vocabulary: Vocabulary, config: HandlerConfig) -> list[int]:
    """Tokenize the predicted output, as far as an output can reach."""
    text = "" if request.prediction is None else text_of(request.prediction.content)
    beginning = text[: BYTES_PER_TOKEN * config.context_length]
    return vocabulary.encode(beginning, begin=False)[: config.context_length] if text else []
