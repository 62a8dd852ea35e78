"""Turns valid requests into sequences, within the defaults and limits of this server."""

import json
from dataclasses import dataclass

from specserve.api.answer import AnswerReader
from specserve.api.logprobs import MAX_RESPONSE_BYTES
from specserve.api.prompt import Prompt, PromptTooLong, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest, GenerationRequest, text_of
from specserve.config import HandlerConfig
from specserve.core.text_sequence import TextParams, TextSequence
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.grammar.call_form import CallForm, ThinkingTags
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.grammar.tool_calls import CallConstraint, CallSyntax, control_tokens
from specserve.observability.records import family_label
from specserve.sequence import Group, RequestInfo

# Expected bytes of JSON for a token's text, its source, and each log-probability.
_TEXT_BYTES, _SOURCE_BYTES, _SCORE_BYTES = 8, 24, 80


@dataclass(frozen=True)
class ResponseForm:
    """What a response consists of, whatever its protocol."""

    request: CompletionRequest | ChatRequest
    prompts: list[Prompt]
    call_forms: tuple[CallForm, ...]  # of tool calls; none without tools
    thinking: ThinkingTags | None  # around the model's reasoning; None if it is returned as text
    thinks_at_once: bool  # whether the prompt ends with the tag that begins the reasoning
    relaxed: tuple[str, ...]  # keywords of tools' schemas that calls may break

    def reader(self) -> AnswerReader:
        tools = self.request.callable_tools
        return AnswerReader(self.call_forms, tools, self.thinking, thinks_at_once=self.thinks_at_once)


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
) -> tuple[ResponseForm, list[TextSequence]]:
    """Resolve a valid request into the form of its response, and the answers to generate for that, ordered by prompt.

    A request that is `held_back` was drawn for the control group, which it joins unless it sets `speculation`; `calls`
    is how the model writes tool calls, `thinking` how it marks its reasoning.

    Raises:
        RequestError: 400; a prompt, a grammar or `speculation` does not fit, or the operator's caps are exceeded.
    """
    syntax = calls if calls and request.callable_tools else CallSyntax(())
    if request.forbids_reasoning:
        thinking = None
    thinks_at_once = thinking is not None and prompts[0].text.rstrip().endswith(thinking.begin)
    # A grammar that holds from the first token on has only the model's own form.
    forms = syntax.forms if request.structure is None else syntax.forms[:1]
    most_tokens = _most_tokens(request, prompts, config)
    sampling = request.sampling_params(vocabulary)
    info = _info(request, config, request_id, client, held_back=held_back)
    speculation = request.speculation.params(
        config, info.group, client, greedy=sampling.temperature == 0, seeded=sampling.seed is not None
    )
    constraint: Constraint | CallConstraint | None
    if isinstance(request, ChatRequest) and syntax.forms:
        constraint = grammars.calls(
            request.callable_tools,
            syntax,
            required=request.requires_call,
            parallel=request.parallel_tool_calls,
            strict=request.strict_tools,
            otherwise=request.answer_schema,
            thinking=thinking,
            thinks_at_once=thinks_at_once,
        )
    else:
        constraint = request.constraint(grammars)
    prediction: list[int] = []
    if request.prediction is not None:
        predicted = text_of(request.prediction.content)
        prediction = Tokenizer(vocabulary, config).part(predicted, config.context_length, keeps_end=False)
    text = TextParams(
        request.stops,
        stop_tokens=dict.fromkeys(request.stop_token_ids or (), "") | _named_tokens(request.stops, vocabulary),
        includes_stop=request.include_stop_str_in_output,
        spells_control=not request.skip_special_tokens,
        tags=syntax.tags(vocabulary) | control_tokens(thinking.texts if thinking else (), vocabulary),
        max_seconds=request.t_max_predict_ms / 1000,
    )
    sequences = [
        TextSequence(
            prompt.tokens,
            sampling,
            speculation,
            vocabulary,
            text,
            reuses_prefix=request.cache_prompt,
            info=info,
            index=number * request.answers + choice,
            choice=choice,
            max_tokens=min(most_tokens, config.context_length - len(prompt.tokens)),
            top_logprobs=request.scores,
            scores_prompt=request.echo and request.scores is not None and choice == 0,
            constraint=None if constraint is None else constraint.fork(),
            prediction=prediction,
            keeps_sources=request.speculation.sources,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(request.answers)
    ]
    relaxed = () if constraint is None else constraint.relaxed
    return ResponseForm(request, prompts, forms, thinking, thinks_at_once, relaxed), sequences


def _named_tokens(stops: list[str], vocabulary: Vocabulary) -> dict[int, str]:
    """Return the control tokens whose names are stop strings; as text their names end an answer, too."""
    encoded = [(stop, vocabulary.encode(stop, special=True, begin=False)) for stop in stops]
    return {tokens[0]: stop for stop, tokens in encoded if len(tokens) == 1 and not vocabulary.piece(tokens[0])}


def _info(
    request: GenerationRequest, config: HandlerConfig, request_id: str, client: str, *, held_back: bool
) -> RequestInfo:
    """Return the labels of a request; it is randomised if it leaves speculation to the controller."""
    asked, default = request.speculation.mode, config.speculation.mode
    randomised = "speculation" not in request.model_fields_set and default == "auto"
    group: Group = "holdback" if randomised and held_back else default if asked == "auto" else asked
    family = family_label((request.metadata or {}).get("prompt_family", ""))
    return RequestInfo(request_id, family, group, randomised, client, request.cache_salt)


def _most_tokens(request: CompletionRequest | ChatRequest, prompts: list[Prompt], config: HandlerConfig) -> int:
    """Return the most tokens of an answer by the request, the operator, and the room in context and response.

    Raises:
        RequestError: 400; there is no room for the prompts, or for what the request asks for.
    """
    limit = request.limit
    if limit is not None and config.max_tokens is not None and limit > config.max_tokens:
        raise RequestError.invalid(request.limit_field, f"An answer has at most {config.max_tokens} tokens here.")
    for prompt in prompts:
        # A prompt may fill the context if no output is wanted.
        if config.context_length - len(prompt.tokens) < (limit != 0):
            raise PromptTooLong(request.prompt_field, config.context_length, len(prompt.tokens))
    sources = request.speculation.sources
    scored = 0 if request.scores is None else (1 + request.scores) * _SCORE_BYTES
    room = MAX_RESPONSE_BYTES // request.answers
    if request.echo:
        # Log-probabilities spell the tokens again.
        repeated = 1 + sources + (scored > 0)
        room -= sum(repeated * len(json.dumps(prompt.text)) + scored * len(prompt.tokens) for prompt in prompts)
    fitting = room // (len(prompts) * (_TEXT_BYTES + sources * _SOURCE_BYTES + scored))
    rest = config.context_length - min(len(prompt.tokens) for prompt in prompts)
    if fitting < min(rest, 1 if limit is None else limit):
        raise RequestError.invalid(
            "logprobs" if scored else "echo" if request.echo else request.limit_field,
            f"The response to this request may take more than {MAX_RESPONSE_BYTES // 2**20} MB: ask for fewer answers, "
            "tokens or log-probabilities.",
        )
    return min(tokens for tokens in (rest, fitting, limit, config.max_tokens) if tokens is not None)
