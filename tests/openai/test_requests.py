"""Request fields: their effects and defaults, and the errors of invalid ones."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from constraints import AlternatingGrammars
from fake_engine import FakeVocabulary
from front_end import says
from specserve.api.parse import parse_body
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import ChatRequest, CompletionRequest
from specserve.api.resolve import resolve
from specserve.config import HandlerConfig, ModelConfig, SpeculationConfig
from specserve.core.text_sequence import TextSequence
from specserve.errors import RequestError

VOCABULARY = FakeVocabulary(200)
CONFIG = HandlerConfig(
    model_id="tiny",
    target=ModelConfig(path=Path("target.gguf")),
    draft=ModelConfig(path=Path("draft.gguf")),
    context_length=64,
    speculation=SpeculationConfig(gamma=3, max_gamma=8),
)


def resolved(
    request: CompletionRequest | ChatRequest, prompts: list[Prompt], config: HandlerConfig = CONFIG
) -> list[TextSequence]:
    grammars: Any = AlternatingGrammars(VOCABULARY.size)
    _, sequences = resolve(request, prompts, VOCABULARY, grammars, config)
    return sequences


def sequences_of(body: object, config: HandlerConfig = CONFIG) -> list[TextSequence]:
    request = parse_body(body, CompletionRequest)
    return resolved(request, Tokenizer(VOCABULARY, config).completion(request), config)


def refusal(body: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        sequences_of(body)
    return caught.value


def sequence_of(config: HandlerConfig = CONFIG, **fields: Any) -> Any:
    """The sequence of a valid body with one prompt and one choice."""
    [sequence] = sequences_of({"prompt": "hello", **fields}, config)
    return sequence


CHAT = says("hello")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TEXT = {"type": "text", "text": "a"}
NULLS = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})


def test_a_field_has_its_effect_and_its_default() -> None:
    # What fields do to the sequence of a completion: OpenAI's, then vLLM's and llama.cpp's.
    for fields, effects in (
        ({"prompt": "ab"}, {"tokens": [97, 98]}),
        ({"prompt": [1, 2, 3]}, {"tokens": [1, 2, 3]}),
        # 16, OpenAI's default, or the rest of the context.
        ({}, {"max_tokens": 16, "top_logprobs": None, "speculation.verification": "block"}),
        ({"prompt": [1] * 60, "max_tokens": 500}, {"max_tokens": 4}),
        ({"prompt": [1] * 64, "max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 0}),
        # Null means the default.
        (NULLS, {"sampling.temperature": 1, "sampling.top_p": 1, "max_tokens": 16}),
        ({"logit_bias": {"5": -100, "7": 2.5}}, {"sampling.logit_bias": ((5, -100), (7, 2.5))}),
        ({"ignore_eos": True, "logit_bias": {"5": 1}}, {"sampling.logit_bias": ((5, 1), (199, float("-inf")))}),
        ({"presence_penalty": 0.5}, {"sampling.presence_penalty": 0.5}),
        ({"frequency_penalty": -1}, {"sampling.frequency_penalty": -1}),
        ({"repetition_penalty": 1.1}, {"sampling.repetition_penalty": 1.1, "sampling.shapes_logits": True}),
        ({"logit_bias": {}, "presence_penalty": 0}, {"sampling.shapes_logits": False}),
        # The control group is drawn among requests that leave speculation to the server.
        ({"speculation": {"mode": "auto"}}, {"speculation.gamma": 8, "info.randomised": False}),
        ({"speculation": {"mode": "off"}}, {"speculation.gamma": 0, "info.randomised": False}),
        ({"speculation": {"mode": "fixed", "gamma": 8}}, {"speculation.gamma": 8}),
        ({"speculation": {"pool": None}}, {"speculation.pool": ("", "default")}),
        ({"speculation": {"pool": ""}}, {"speculation.pool": None}),
        ({"seed": 1}, {"speculation.verification": "coupled"}),
        ({"seed": 1, "temperature": 0}, {"speculation.verification": "token"}),
        ({"seed": 1, "speculation": {"verification": "token"}}, {"speculation.verification": "token"}),
        # -1 is any seed, as elsewhere; other negative numbers are seeds.
        ({"seed": -1}, {"sampling.seed": None, "speculation.verification": "block"}),
        ({"seed": -2}, {"sampling.seed": -2}),
        ({"top_k": -1}, {"sampling.top_k": 0}),
        ({"logprobs": 5}, {"top_logprobs": 5}),
        ({"echo": True}, {"scores_prompt": False}),
        ({"echo": True, "logprobs": 1}, {"scores_prompt": True}),
        ({"response_format": {"type": "text"}}, {"constraint": None}),
        ({"metadata": {"prompt_family": "code"}}, {"info.family": "code"}),
        ({"metadata": {"prompt_family": "My Secret!"}}, {"info.family": "other"}),
        ({"metadata": {"prompt_family": "x" * 33}}, {"info.family": "other"}),
        ({"metadata": {"prompt_family": ""}}, {"info.family": ""}),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": 59}),
        ({"max_tokens": -1}, {"max_tokens": 59}),
        ({"n_predict": None}, {"max_tokens": 16}),
        ({"n_predict": 5, "max_tokens": 7}, {"max_tokens": 7}),
        ({"repeat_penalty": 1.1}, {"sampling.repetition_penalty": 1.1}),
        ({"min_tokens": 3}, {"sampling.min_tokens": 3}),
        ({"min_tokens": 3, "stop_token_ids": [7]}, {"sampling.end_tokens": (199, 7)}),
        ({"min_tokens": 0}, {"sampling.forbids_tokens": False}),
        ({"allowed_token_ids": [5, 7]}, {"sampling.allowed_tokens": (5, 7)}),
        ({"cache_prompt": False}, {"reuses_prefix": False}),
        ({"cache_prompt": None}, {"reuses_prefix": True}),
    ):
        sequence = sequence_of(**fields)
        assert {name: attrgetter(name)(sequence) for name in effects} == effects, fields


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    for tokens, max_tokens in ((65, 0), (64, 1)):
        error = refusal({"prompt": [1] * tokens, "max_tokens": max_tokens})
        assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")
        sentence = f"This model's maximum context length is 64 tokens. However, your prompt resulted in {tokens}"
        assert error.message.startswith(sentence)


# By field: values that are refused.
INVALID: dict[str, list[Any]] = {
    "prompt": [
        *(None, 5, ["a", 1], ["a", ""], [[1], [200]], [[1], "a"], ["a"] * 129, [[[1]]], [1, "a"], [1.5], [True], [-1]),
        *([200], [10**30], "", [], "\ud800"),
    ],
    "max_tokens": [-2, "5", 1.5, True],
    "temperature": [-0.1, 2.1, float("nan"), float("inf"), "hot"],
    "top_p": [1.1],
    "top_k": [-2],
    "min_p": [2],
    "seed": [2**63, 0.5],
    "stop": [5, "a" * 1001, ["a", 5], ["a"] * 17],
    "stream": ["yes"],
    "stream_options": [[], {"include_usage": True}],
    "echo": [1],
    "n": [129, 0, True],
    "best_of": [2, 0],
    "suffix": ["end", "", 5],
    "logprobs": [6, -1, True],
    "ignore_eos": [1],
    "grammar": ["", 5],
    "response_format": ["json"],
    "response_format.type": ["xml"],
    "logit_bias": [
        *({"5": 101}, {"200": 1}, {"-1": 1}, {"five": 1}, {"9" * 5000: 1}, {"000000001999999": 1}, {"0" * 5000: 1}),
        *([5], [[5, 1]], {str(n): 0 for n in range(2000)}),
    ],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, 5e-324],
    "speculation": ["off"],
    "speculation.mode": ["fast"],
    "speculation.gamma": [2],
    "speculation.drafter": ["oracle", "prediction", "grammar"],
    "speculation.sources": ["yes"],
    "prediction": ["text"],
    "min_tokens": [-1],
    "stop_token_ids": [[200], ["a"], [1] * 1025],
    "allowed_token_ids": [[], [-1]],
    "structured_outputs": [[]],
    "structured_outputs.json": ["{"],
    "structured_outputs.choice": [[]],
    "structured_outputs.structural_tag": ["{}"],
}


def test_an_invalid_or_unsupported_value_is_refused_naming_its_field() -> None:
    for field, values in INVALID.items():
        for value in values:
            outer, _, inner = field.partition(".")
            error = refusal({"prompt": "hello", outer: {inner: value} if inner else value})
            assert (error.status, error.param) == (400, field), (field, value)
            assert field in error.message or field == "prompt"


JSON_OBJECT = {"type": "json_object"}
# What is over a limit, inside a field, or in conflict with another field, and the field that is named.
NAMED: list[tuple[dict[str, Any], str]] = [
    *(({"speculation": {"mode": "fixed", "gamma": gamma}}, "speculation.gamma") for gamma in (0, 9, 33)),
    ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ({"grammar": "root ::= x", "response_format": JSON_OBJECT}, "grammar"),
    ({"grammar": "root ::= x", "structured_outputs": {"json": {}}}, "grammar"),
    ({"grammar": "root ::= x", "ignore_eos": True}, "ignore_eos"),
    ({"response_format": JSON_OBJECT, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "response_format": JSON_OBJECT}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    *(({"structured_outputs": {"choice": ["a", bad]}}, "structured_outputs.choice[1]") for bad in (5, "")),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": None}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [TEXT, IMAGE]}}, "prediction.content[1]"),
]
# The same of chats, with what the error says.
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "role"),
    ({"messages": "hello"}, "messages", "role"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
    (says("a", role="robot"), "messages[0].role", "developer"),
    (says(5), "messages[0].content", "valid Unicode"),
    (says("\ud800"), "messages[0].content", "valid Unicode"),
    (says([IMAGE]), "messages[0].content[0]", "images, audio and files are not supported"),
    (says([{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0]", "not supported"),
    (says([TEXT, "b"]), "messages[0].content[1]", "must be an object"),
    (says([{"type": "text"}]), "messages[0].content[0].text", "is missing"),
    (says([{"type": "text", "text": 5}]), "messages[0].content[0].text", "valid string"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "b"}}]}, "messages[0].audio", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"max_completion_tokens": -2}, "max_completion_tokens", "-1"),
]


def test_what_is_wrong_inside_a_field_or_beside_another_is_refused_and_named() -> None:
    for fields, param in NAMED:
        error = refusal({"prompt": "a", **fields})
        assert (error.status, error.param) == (400, param), fields
    for fields, param, words in CHATS:
        with pytest.raises(RequestError, match=words) as caught:
            parse_body({**CHAT, **fields}, ChatRequest)
        assert (caught.value.status, caught.value.param) == (400, param), fields
        assert f"'{param}'" in caught.value.message


def test_the_default_speculation_mode_is_the_operators() -> None:
    for mode, gamma in {"auto": 8, "fixed": 3, "off": 0}.items():
        speculation = SpeculationConfig.model_validate({"mode": mode, "max_gamma": 8})
        sequence = sequence_of(CONFIG.model_copy(update={"speculation": speculation}))
        assert (sequence.speculation.gamma, sequence.speculation.mode) == (gamma, mode)
        assert sequence.info.randomised == (mode == "auto")


def test_without_a_draft_model_only_its_drafter_is_refused() -> None:
    plain = CONFIG.model_copy(update={"draft": None})
    with pytest.raises(RequestError, match="has no draft model"):
        sequence_of(plain, speculation={"drafter": "model"})
    for drafter in ("auto", "lookup"):
        assert sequence_of(plain, speculation={"mode": "fixed", "drafter": drafter}).speculation.gamma == 3
    prediction = {"type": "content", "content": [TEXT, {**TEXT, "text": "b"}]}
    assert [*sequence_of(plain, prediction=prediction).prediction] == [97, 98]


def test_an_answer_has_at_most_the_tokens_of_the_request_the_operator_and_the_context() -> None:
    capped = CONFIG.model_copy(update={"max_tokens": 20})

    def max_tokens_of(config: HandlerConfig, **fields: Any) -> int:
        request = parse_body({**CHAT, **fields}, ChatRequest)
        [sequence] = resolved(request, [Prompt([1] * 10, "")], config)
        return sequence.max_tokens

    assert (max_tokens_of(CONFIG), max_tokens_of(CONFIG, max_tokens=5)) == (54, 5)
    assert max_tokens_of(CONFIG, max_tokens=5, max_completion_tokens=7) == 7
    assert (max_tokens_of(capped), max_tokens_of(capped, max_tokens=20)) == (20, 20)
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(RequestError, match="at most 20 tokens") as caught:
            max_tokens_of(capped, **{field: 21})
        assert (caught.value.param, caught.value.status) == (field, 400)


def test_what_a_template_gets_of_a_message() -> None:
    """Of a response's message, which clients send back, nothing more."""
    answer: Any = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    developers = {"role": "developer", "content": [TEXT, {**TEXT, "text": "b"}]}
    request = parse_body({"messages": [developers, answer]}, ChatRequest)
    system, assistant = (message.for_template() for message in request.messages)
    assert (system, assistant) == ({"role": "system", "content": "ab"}, {"role": "assistant", "content": "hi"})
    assert request.ignored == []


def test_every_prompt_has_n_answers_of_which_the_first_scores_an_echoed_prompt() -> None:
    sequences = sequences_of({"prompt": ["a", "bc"], "n": 3, "echo": True, "logprobs": 1})
    assert [sequence.tokens for sequence in sequences] == [[97]] * 3 + [[98, 99]] * 3
    assert [(sequence.index, sequence.choice) for sequence in sequences] == [*enumerate([0, 1, 2, 0, 1, 2])]
    assert [sequence.scores_prompt for sequence in sequences] == [True, False, False] * 2


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    encode = VOCABULARY.encode

    def recorded(text: str, **options: bool) -> list[int]:
        found.append(text)
        return encode(text, **options)

    monkeypatch.setattr(VOCABULARY, "encode", recorded)
    return found


def test_what_cannot_fit_is_refused_before_it_is_read(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole: tokenizing a megabyte of spaces or dashes takes seconds."""
    for field, length, tokenized in (("prompt", 1_000_000, []), ("suffix", 1_000_000, []), ("prompt", 8_000, [512])):
        texts.clear()
        error = refusal({"prompt": "a", field: "b" * length})
        assert (error.param, error.code) == (field, "context_length_exceeded")
        assert [*map(len, texts)] == tokenized
    monkeypatch.setattr(VOCABULARY, "piece", lambda _token: pytest.fail("was decoded"))
    assert refusal({"prompt": [1] * 100_000}).code == "context_length_exceeded"


def test_a_prediction_is_truncated_to_the_context_length(texts: list[str]) -> None:
    prediction = {"type": "content", "content": "b" * 1_000_000}
    assert len(sequence_of(prediction=prediction).prediction) == CONFIG.context_length
    assert max(map(len, texts)) < 10_000


def test_a_suffix_is_tokenized_once_for_all_prompts(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VOCABULARY, "infill", lambda prefix, suffix: [*prefix, *suffix])
    sequences = sequences_of({"prompt": ["a", "b", "c"], "suffix": "end"})
    assert [sequence.tokens[1:] for sequence in sequences] == [[101, 110, 100]] * 3
    assert texts == ["end", "a", "b", "c"]


def test_one_of_many_invalid_fields_is_reported() -> None:
    """Collecting an error for each field of a megabyte took 0.7 s."""
    many = dict.fromkeys(map(str, range(5_000)), "x")
    for fields in ({"logit_bias": many}, {"metadata": dict.fromkeys(many, 1)}, {"messages": ["a"] * 200_000}):
        with pytest.raises(RequestError) as caught:
            parse_body({**CHAT, **fields}, ChatRequest)
        assert str(caught.value.param).partition("[")[0] in fields
        assert isinstance(caught.value.__cause__, ValidationError)
        assert caught.value.__cause__.error_count() <= 2
