"""OpenAI's requests become what the scheduler runs: prompts of tokens, settings, and every limit applied."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Protocol

from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.observability.records import Group, Origin, plain_family
from specserve.sequence import Constraint, SamplingParams, Sequence, SpeculationParams, Verification
from specserve.serving.generation import Generation
from specserve.serving.openai.response_size import MAX_RESPONSE_BYTES, ResponseSize
from specserve.serving.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    SpeculationOptions,
    text_of,
)


class Grammar(Constraint, Protocol):
    """A constraint that several answers can follow, each for itself."""

    def fork(self) -> Grammar:
        """An independent copy."""


class Grammars(Protocol):
    """Makes constraints; whatever cannot be compiled is a RequestError that says why."""

    def begin_round(self, seconds: float) -> None:
        """From now on the masks of all sequences may take so long together; further ones are deferred."""

    def json_object(self) -> Grammar:
        """Any JSON object."""

    def json_schema(self, schema: dict[str, object]) -> Grammar:
        """JSON that follows a schema."""

    def gbnf(self, text: str) -> Grammar:
        """Text that follows a grammar in llama.cpp's notation."""


# What a token is spelled with, at most, on average over a whole text; tokenising takes more than linear time.
_BYTES_PER_TOKEN = 8
# Bytes of JSON that a token's log-probability takes, about: what is too large by this is refused before it is begun.
_SCORE_BYTES = 80


@dataclass(frozen=True)
class Prompt:
    """What an answer follows, as tokens and as the text that `echo` shows."""

    tokens: list[int]
    text: str


class Tokenizer:
    """Texts of requests as tokens; those that cannot fit are refused before they are tokenised to the end."""

    def __init__(self, vocabulary: Vocabulary, config: HandlerConfig) -> None:
        self._vocabulary = vocabulary
        self._most = config.context_length
        longest = max(len(vocabulary.name(token)) for token in range(vocabulary.size))
        # 512 KiB at 4,096 tokens of up to 128 bytes.
        self._most_bytes = self._most * longest

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of v1/completions; with a suffix, those that ask for what stands between.

        Raises:
            RequestError: 400; a prompt is too long, a token id is out of range, or the model cannot do what is asked.
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
        """The prompt that a chat template wrote.

        Raises:
            RequestError: 400; it is too long, or empty, and the model needs at least one token.
        """
        return Prompt(self._not_empty(self._tokens(text, "messages", special=True), "messages"), text)

    def _tokens(self, text: str, param: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """The tokens of a text; one that cannot fit whatever it says is not tokenised, and a long one in part first."""
        if len(text.encode()) > self._most_bytes:
            raise _too_long(param, self._most, f"more than {self._most}")
        beginning = text[: _BYTES_PER_TOKEN * self._most]
        if len(beginning) < len(text):
            least = len(self._vocabulary.encode(beginning, special=special, begin=begin))
            # Twice as much, since a text's beginning may be cut in the middle of a word.
            if least > 2 * self._most:
                raise _too_long(param, self._most, f"more than {self._most}")
        return self._vocabulary.encode(text, special=special, begin=begin)

    def _not_empty(self, tokens: list[int], param: str) -> list[int]:
        """The tokens; in place of none, the one that begins a text."""
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
    identity: str = "",
    held_back: bool = False,
) -> list[list[Generation]]:
    """The candidates for an answer to each prompt.

    Args:
        request: as validated.
        prompts: its prompts.
        vocabulary: of the target.
        grammars: what makes constraints.
        config: of the server.
        identity: of the request.
        held_back: whether it is for the control group, if it does not ask for drafts of its own.

    Raises:
        RequestError: 400; a prompt, a grammar or `speculation` does not fit.
    """
    _check_caps(request, prompts, config)
    sampling = _sampling(request, vocabulary)
    group = _group(request, config, held_back=held_back)
    family = plain_family((request.metadata or {}).get("prompt_family", ""))
    speculation = _speculation(request, sampling, config, group)
    drawn = _takes_part(request, config)
    grammar = _grammar(request, grammars)
    guess = "" if request.prediction is None else text_of(request.prediction.content)
    prediction = _predicted(guess, vocabulary, config.context_length)
    several = request.candidates > request.choices
    result: list[list[Generation]] = []
    stops = list(request.stop or [])
    size = ResponseSize(
        vocabulary, chat=isinstance(request, ChatRequest), choices=request.choices, begun=_echoes(request, prompts)
    )
    for prompt in prompts:
        wanted = _answer_length(request, prompt, config)
        sequences = [
            Sequence(
                prompt.tokens,
                sampling,
                speculation,
                max_tokens=wanted,
                choice=choice,
                # The best of several are those whose tokens score best.
                top_logprobs=0 if request.scored is None and several else request.scored,
                scores_prompt=request.scores_prompt and choice == 0,
                constraint=None if grammar is None else grammar.fork(),
                prediction=prediction,
            )
            for choice in range(request.candidates)
        ]
        first = len(result) * request.candidates
        origins = [Origin(identity, first + number, family, group, drawn) for number in range(request.candidates)]
        result.append([Generation(s, vocabulary, stops, o, size) for s, o in zip(sequences, origins, strict=True)])
    _check_response(request, prompts, result)
    return result


def _predicted(guess: str, vocabulary: Vocabulary, most: int) -> list[int]:
    """The tokens of the client's guess of an answer, as far as an answer can reach."""
    return vocabulary.encode(guess[: _BYTES_PER_TOKEN * most], begin=False)[:most] if guess else []


def _answer_length(request: GenerationRequest, prompt: Prompt, config: HandlerConfig) -> int:
    """How long an answer may be, in the room that the context has behind a prompt."""
    # A prompt that is only scored may fill it.
    room = config.context_length - len(prompt.tokens)
    if room < (request.most_tokens != 0):
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise _too_long(param, config.context_length, str(len(prompt.tokens)))
    most = room if config.max_tokens is None else min(room, config.max_tokens)
    return most if request.most_tokens is None else min(request.most_tokens, most)


def _check_caps(request: GenerationRequest, prompts: list[Prompt], config: HandlerConfig) -> None:
    """Refuse what is beyond the operator's caps."""
    asked, cap = request.most_tokens, config.max_tokens
    if asked is not None and cap is not None and asked > cap:
        chat = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        raise _invalid("max_completion_tokens" if chat else "max_tokens", f"An answer has at most {cap} tokens here.")
    if len(prompts) * request.candidates > config.max_answers:
        raise _invalid(
            "n" if request.candidates == request.choices else "best_of",
            f"A request may ask for at most {config.max_answers} answers in all on this server.",
        )


def _echoes(request: GenerationRequest, prompts: list[Prompt]) -> int:
    """Bytes of JSON that the prompts take which all answers of a response repeat."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return 0
    return request.choices * sum(len(json.dumps(prompt.text)) for prompt in prompts)


def _check_response(request: GenerationRequest, prompts: list[Prompt], groups: list[list[Generation]]) -> None:
    """Refuse what would make a response of many megabytes, which TorchServe would not carry."""
    places = sum(group[0].sequence.max_tokens for group in groups)
    if request.scores_prompt:
        places += sum(group[0].sequence.prompt_length for group in groups)
    scores = 0 if request.scored is None else places * (1 + request.scored) * _SCORE_BYTES
    # Scores name the tokens once more.
    echoes = (1 + request.scores_prompt) * _echoes(request, prompts)
    size = request.choices * scores + echoes
    if size > MAX_RESPONSE_BYTES:
        chat = isinstance(request, ChatRequest)
        raise _invalid(
            "top_logprobs" if chat else "logprobs" if scores > echoes else "echo",
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


def _group(request: GenerationRequest, config: HandlerConfig, *, held_back: bool) -> Group:
    """Who decides on the drafts of a request; one that asks for nothing of its own may be held back."""
    if request.speculation is not None and request.speculation.mode != "auto":
        return request.speculation.mode
    return "holdback" if held_back and _takes_part(request, config) else config.speculation.mode


def _takes_part(request: GenerationRequest, config: HandlerConfig) -> bool:
    """Whether a request leaves it to the server, and the server to the controller, so that chance may hold it back."""
    return request.speculation is None and config.speculation.mode == "auto"


def _speculation(
    request: GenerationRequest, sampling: SamplingParams, config: HandlerConfig, group: Group
) -> SpeculationParams:
    options = request.speculation or SpeculationOptions()
    drafter = None if options.drafter == "auto" else options.drafter
    if config.draft is None and drafter == "model":
        raise _invalid("speculation.drafter", "This server has no draft model.")
    return SpeculationParams(
        gamma=_gamma(options, group, config),
        verification=options.verification or _verification(sampling),
        drafter=drafter,
        adaptive=group == "auto",
    )


def _gamma(options: SpeculationOptions, group: Group, config: HandlerConfig) -> int:
    """How many drafts a round may have."""
    limits = config.speculation
    if group != "fixed":
        return limits.max_gamma if group == "auto" else 0
    if options.gamma is None:
        return limits.gamma
    if options.gamma > limits.max_gamma:
        raise _invalid("speculation.gamma", f"'speculation.gamma' may be at most {limits.max_gamma} on this server.")
    return options.gamma


def _verification(sampling: SamplingParams) -> Verification:
    """Coupled where a seed asks for one text, else the rule that accepts most; on greedy text all are the same."""
    if sampling.temperature == 0:
        return "token"  # the plainest name for what `verify_greedy` does
    return "block" if sampling.seed is None else "coupled"


def _too_long(param: str, most: int, length: str) -> RequestError:
    return RequestError(
        f"This model's context holds {most} tokens, prompt and answer together; the prompt alone has {length}.",
        param=param,
        code="context_length_exceeded",
    )


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
