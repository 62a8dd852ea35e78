"""Turns validated requests into generations: tokenizes prompts, compiles grammars, and applies the server's limits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal, Protocol

from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.observability.records import Group, RequestInfo, family_label
from specserve.sequence import Constraint, SamplingParams, SpeculationParams, Verification
from specserve.serving.generation import Generation
from specserve.serving.openai.logprobs import MAX_RESPONSE_BYTES, ResponseSize
from specserve.serving.openai.request_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    SpeculationOptions,
    text_of,
)


class Grammar(Constraint, Protocol):
    """A constraint that several sequences can follow independently."""

    def fork(self) -> Grammar:
        """An independent copy."""


class Grammars(Protocol):
    """Compiles constraints; what cannot be compiled is a RequestError that says why."""

    def begin_round(self, seconds: float) -> None:
        """Give the masks of a round this much time, of all sequences together; further ones are deferred."""

    def json_object(self) -> Grammar:
        """Any JSON object."""

    def json_schema(self, schema: dict[str, object]) -> Grammar:
        """JSON that follows a schema."""

    def gbnf(self, text: str) -> Grammar:
        """Text that follows a grammar in llama.cpp's notation."""


# The most bytes per token, on average over a whole text; tokenizing takes more than linear time.
_BYTES_PER_TOKEN = 8
# Bytes of JSON per log-probability, about; a response that is too large by this estimate is refused at once.
_SCORE_BYTES = 80


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and as the text that `echo` returns."""

    tokens: list[int]
    text: str


class Tokenizer:
    """Tokenizes prompts; one that cannot fit is refused before it is tokenized as a whole."""

    def __init__(self, vocabulary: Vocabulary, config: HandlerConfig) -> None:
        self._vocabulary = vocabulary
        self._most = config.context_length
        longest = max(len(vocabulary.name(token)) for token in range(vocabulary.size))
        # 512 KiB for 4,096 tokens of up to 128 bytes.
        self._most_bytes = self._most * longest

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of v1/completions; with a suffix, in the model's fill-in-the-middle form.

        Raises:
            RequestError: 400; a prompt is too long, a token id is out of range, or the model cannot fill in the middle.
        """
        suffix = self._tokens(request.suffix, "suffix", begin=False) if request.suffix else []
        return [self._prompt(prompt, suffix) for prompt in request.prompts]

    def _prompt(self, prompt: str | list[int], suffix: list[int]) -> Prompt:
        vocabulary = self._vocabulary
        if isinstance(prompt, str):
            text = prompt
            tokens = self._tokens(prompt, "prompt", special=True, begin=not suffix)
        else:
            tokens = prompt
            if len(tokens) > self._most:
                raise _too_long("prompt", self._most, str(len(tokens)))
            if any(not 0 <= token < vocabulary.size for token in tokens):
                raise _invalid("prompt", f"Token ids must lie between 0 and {vocabulary.size - 1}.")
            text = b"".join(map(vocabulary.piece, tokens)).decode("utf-8", errors="replace")
        if suffix:
            between = vocabulary.infill(tokens, suffix)
            if between is None:
                raise _invalid(
                    "suffix", "This model has no tokens for filling in the middle, so it cannot use a 'suffix'."
                )
            tokens = between
        return Prompt(self._not_empty(tokens, "prompt"), text)

    def chat(self, text: str) -> Prompt:
        """The prompt that a chat template has rendered.

        Raises:
            RequestError: 400; it is too long, or it is empty and the model needs at least one token.
        """
        return Prompt(self._not_empty(self._tokens(text, "messages", special=True), "messages"), text)

    def _tokens(self, text: str, param: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """The tokens of a text; one with too many bytes is refused, and of a long one the beginning is tried first."""
        if len(text.encode()) > self._most_bytes:
            raise _too_long(param, self._most, f"more than {self._most}")
        beginning = text[: _BYTES_PER_TOKEN * self._most]
        if len(beginning) < len(text):
            least = len(self._vocabulary.encode(beginning, special=special, begin=begin))
            # Twice as many, since the beginning may be cut inside a word.
            if least > 2 * self._most:
                raise _too_long(param, self._most, f"more than {self._most}")
        return self._vocabulary.encode(text, special=special, begin=begin)

    def _not_empty(self, tokens: list[int], param: str) -> list[int]:
        """The tokens; instead of none, the model's start token."""
        if tokens:
            return tokens
        start = self._vocabulary.bos_token()
        if start is None:
            raise RequestError("The prompt is empty; this model needs at least one token.", param=param)
        return [start]


def to_generations(
    request: GenerationRequest,
    prompts: list[Prompt],
    vocabulary: Vocabulary,
    grammars: Grammars,
    config: HandlerConfig,
    *,
    request_id: str = "",
    held_back: bool = False,
) -> list[list[Generation]]:
    """The sequences of a request: by prompt, the candidates of which the best are returned.

    Args:
        request: as validated.
        prompts: its prompts.
        vocabulary: the target's.
        grammars: compiles constraints.
        config: of the server.
        request_id: TorchServe's.
        held_back: whether the request is drawn for the control group; it is not if it sets `speculation`.

    Raises:
        RequestError: 400; a prompt, a grammar or `speculation` does not fit.
    """
    _check_caps(request, prompts, config)
    sampling = _sampling(request, vocabulary)
    # Only requests that leave speculation to the server, and the server to the controller, are randomised.
    randomised = request.speculation is None and config.speculation.mode == "auto"
    group: Group = "holdback" if randomised and held_back else _mode(request, config)
    family = family_label((request.metadata or {}).get("prompt_family", ""))
    info = RequestInfo(request_id, family, group, randomised)
    speculation = _speculation(request, sampling, config, group)
    grammar = _grammar(request, grammars)
    prediction = "" if request.prediction is None else text_of(request.prediction.content)
    # As far as an output can reach.
    most = config.context_length
    predicted = vocabulary.encode(prediction[: _BYTES_PER_TOKEN * most], begin=False)[:most] if prediction else []
    scored = request.scored
    if scored is None and request.candidates > request.choices:
        scored = 0  # the best candidates are those with the highest log-probability
    size = ResponseSize(
        vocabulary,
        chat=isinstance(request, ChatRequest),
        sources=request.wants_sources,
        choices=request.choices,
        initial=_echoed(request, prompts),
    )
    result = [
        [
            Generation(
                prompt.tokens,
                sampling,
                speculation,
                vocabulary,
                request.stop or (),
                info=info,
                index=number * request.candidates + choice,
                size=size,
                max_tokens=_max_tokens(request, prompt, config),
                choice=choice,
                top_logprobs=scored,
                scores_prompt=request.scores_prompt and choice == 0,
                constraint=None if grammar is None else grammar.fork(),
                prediction=predicted,
                keeps_sources=request.wants_sources,
            )
            for choice in range(request.candidates)
        ]
        for number, prompt in enumerate(prompts)
    ]
    _check_response_size(request, prompts, result)
    return result


def _max_tokens(request: GenerationRequest, prompt: Prompt, config: HandlerConfig) -> int:
    """The most output tokens, as far as the context has room after the prompt."""
    # A prompt without output may fill it.
    room = config.context_length - len(prompt.tokens)
    if room < (request.most_tokens != 0):
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise _too_long(param, config.context_length, str(len(prompt.tokens)))
    most = room if config.max_tokens is None else min(room, config.max_tokens)
    return most if request.most_tokens is None else min(request.most_tokens, most)


def _check_caps(request: GenerationRequest, prompts: list[Prompt], config: HandlerConfig) -> None:
    """Refuse what exceeds the operator's caps."""
    asked, cap = request.most_tokens, config.max_tokens
    if asked is not None and cap is not None and asked > cap:
        chat = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        raise _invalid("max_completion_tokens" if chat else "max_tokens", f"An answer has at most {cap} tokens here.")
    if len(prompts) * request.candidates > config.max_answers:
        raise _invalid(
            "n" if request.candidates == request.choices else "best_of",
            f"A request may ask for at most {config.max_answers} answers in all on this server.",
        )


def _echoed(request: GenerationRequest, prompts: list[Prompt]) -> int:
    """Bytes of JSON that echoed prompts take in all choices."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return 0
    times = request.choices * (1 + request.wants_sources)
    return times * sum(len(json.dumps(prompt.text)) for prompt in prompts)


def _check_response_size(request: GenerationRequest, prompts: list[Prompt], groups: list[list[Generation]]) -> None:
    """Refuse a request whose response would be too large for TorchServe."""
    positions = sum(group[0].max_tokens for group in groups)
    if request.scores_prompt:
        positions += sum(group[0].prompt_length for group in groups)
    scores = 0 if request.scored is None else positions * (1 + request.scored) * _SCORE_BYTES
    # Scores spell the prompt's tokens again.
    echoed = (1 + request.scores_prompt) * _echoed(request, prompts)
    size = request.choices * scores + echoed
    if size > MAX_RESPONSE_BYTES:
        chat = isinstance(request, ChatRequest)
        raise _invalid(
            "top_logprobs" if chat else "logprobs" if scores > echoed else "echo",
            f"The log-probabilities and echoed prompts of this request may take {size // 2**20} MB, over "
            f"{MAX_RESPONSE_BYTES // 2**20}: ask for fewer answers, tokens or alternatives, or set 'max_tokens'.",
        )


def _sampling(request: GenerationRequest, vocabulary: Vocabulary) -> SamplingParams:
    never = vocabulary.end_tokens() if request.ignore_eos else []
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=request.seed,
        logit_bias=(*_biases(request.logit_bias or {}, vocabulary), *((token, -math.inf) for token in never)),
        repetition_penalty=request.repetition_penalty or 1.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )


def _biases(biases: dict[str, float], vocabulary: Vocabulary) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary.size):
            raise _invalid(
                "logit_bias",
                f"'logit_bias' names tokens by their ids, 0 to {vocabulary.size - 1}; '{token}' is none.",
            )
    return tuple((int(token), bias) for token, bias in biases.items())


def _grammar(request: GenerationRequest, grammars: Grammars) -> Grammar | None:
    if request.grammar is not None:
        return grammars.gbnf(request.grammar)
    if isinstance(request.response_format, JsonSchema):
        return grammars.json_schema(request.response_format.json_schema.json_schema)
    if isinstance(request.response_format, JsonObject):
        return grammars.json_object()
    return None


def _mode(request: GenerationRequest, config: HandlerConfig) -> Literal["auto", "fixed", "off"]:
    """The request's speculation mode; `auto` is the server's."""
    if request.speculation is not None and request.speculation.mode != "auto":
        return request.speculation.mode
    return config.speculation.mode


def _speculation(
    request: GenerationRequest, sampling: SamplingParams, config: HandlerConfig, group: Group
) -> SpeculationParams:
    options = request.speculation or SpeculationOptions()
    limits = config.speculation
    drafter = None if options.drafter == "auto" else options.drafter
    if config.draft is None and drafter == "model":
        raise _invalid("speculation.drafter", "This server has no draft model.")
    verification = options.verification or _verification(sampling)
    if group == "auto":
        return SpeculationParams(limits.max_gamma, verification, drafter, "adaptive")
    if group != "fixed":
        return SpeculationParams(0, verification, drafter, "off")
    gamma = limits.gamma if options.gamma is None else options.gamma
    if gamma > limits.max_gamma:
        raise _invalid("speculation.gamma", f"'speculation.gamma' may be at most {limits.max_gamma} on this server.")
    return SpeculationParams(gamma, verification, drafter, "fixed")


def _verification(sampling: SamplingParams) -> Verification:
    """`coupled` with a seed, so that the text repeats; else the rule that accepts most. Greedy, all are the same."""
    if sampling.temperature == 0:
        return "token"  # the name that describes `verify_greedy` best
    return "block" if sampling.seed is None else "coupled"


def _too_long(param: str, most: int, length: str) -> RequestError:
    return RequestError(
        f"This model's context holds {most} tokens, prompt and answer together; the prompt alone has {length}.",
        param=param,
        code="context_length_exceeded",
    )


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
