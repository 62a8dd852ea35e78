"""Known fields of OpenAI's, vLLM's and llama.cpp's: values without effect are accepted, all others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.errors import RequestError
from specserve.serving.openai.neutral_fields import NeutralChatFields, NeutralCompletionFields, NeutralFields
from specserve.serving.openai.parse import parse_body
from specserve.serving.openai.prompt import Prompt
from specserve.serving.openai.request_schema import ChatRequest, CompletionRequest
from test_requests import generations_of

COMPLETION: dict[str, Any] = {"prompt": "hello"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
# By field: values that leave the answer as it is, and values that would not.
BOTH: dict[str, tuple[list[Any], list[Any]]] = {
    # OpenAI
    "user": (["u"], [5]),
    "store": ([True, False], [1]),
    "service_tier": (["auto", "flex"], [1]),
    "safety_identifier": (["s"], [1]),
    "prompt_cache_key": (["k"], [1]),
    "prompt_cache_retention": (["24h", "in_memory"], [24]),
    "parallel_tool_calls": ([True, False], ["no"]),
    # vLLM
    "priority": ([0, -3], ["high"]),
    "request_id": (["r"], [1]),
    "session_id": (["s"], [1]),
    "stream_interval": ([10], ["10"]),
    "use_beam_search": ([False], [True, 0]),
    "length_penalty": ([1.0, 0.6], ["1"]),
    "stop_token_ids": ([[]], [[5]]),
    "include_stop_str_in_output": ([False], [True]),
    "min_tokens": ([0], [1, False, 0.0]),
    "skip_special_tokens": ([True], [False, 1]),
    "spaces_between_special_tokens": ([True, False], [1]),
    "truncate_prompt_tokens": ([], [10, -1]),
    "truncation_side": (["left"], [1]),
    "prompt_logprobs": ([], [0, 1]),
    "logprob_token_ids": ([], [[1]]),
    "allowed_token_ids": ([], [[1]]),
    "bad_words": ([[]], [["a"]]),
    "structured_outputs": ([], [{"regex": "a"}]),
    "return_token_ids": ([False], [True]),
    "return_tokens_as_token_ids": ([False], [True]),
    "thinking_token_budget": ([], [5]),
    "kv_transfer_params": ([], [{}]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "cache_salt": ([], ["s"]),
    # llama.cpp
    "cache_prompt": ([True, False], [1]),
    "id_slot": ([-1, 2], ["2"]),
    "slot_id": ([-1, 2], ["2"]),
    "n_cache_reuse": ([0, 256], ["a"]),
    "n_keep": ([0, -1], ["a"]),
    "n_discard": ([0], ["a"]),
    "n_indent": ([0], [4, False]),
    "timings_per_token": ([True, False], [1]),
    "return_progress": ([True, False], [1]),
    "return_tokens": ([True, False], [1]),
    "response_fields": ([["content"], []], ["content", [1] * 100_000]),
    "n_probs": ([0], [5]),
    "post_sampling_probs": ([False], [True]),
    "min_keep": ([0], [2]),
    "repeat_penalty": ([1, 1.0], [1.1]),
    "typical_p": ([1, 1.0], [0.9, True]),
    "top_n_sigma": ([-1.0, 0], [1.0]),
    "xtc_probability": ([0, 0.0], [0.5]),
    "xtc_threshold": ([0.1], ["a"]),
    "dynatemp_range": ([0], [0.5]),
    "dynatemp_exponent": ([1.0], ["a"]),
    "dry_multiplier": ([0], [0.8, False]),
    "dry_base": ([1.75], ["a"]),
    "dry_allowed_length": ([2], ["a"]),
    "dry_penalty_last_n": ([-1], ["a"]),
    "dry_sequence_breakers": ([["\n"]], ["a"]),
    "mirostat": ([0], [1, 2]),
    "mirostat_tau": ([5.0], ["a"]),
    "mirostat_eta": ([0.1], ["a"]),
}
COMPLETIONS_ONLY: dict[str, tuple[list[Any], list[Any]]] = {
    "add_special_tokens": ([True], [False]),
    "prompt_embeds": ([], ["a"]),
}
CHATS_ONLY: dict[str, tuple[list[Any], list[Any]]] = {
    # OpenAI
    "tools": ([[]], [[{"type": "function"}]]),
    "tool_choice": (["none"], ["auto", "required"]),
    "functions": ([[]], [[{}]]),
    "function_call": (["none"], ["auto"]),
    "modalities": ([["text"]], [["audio"], ["text", "audio"]]),
    "audio": ([], [{}]),
    "web_search_options": ([], [{}]),
    "verbosity": (["medium"], ["low", "high"]),
    # Whether the chat template reads these is tested in test_chat.py.
    "reasoning_effort": (["low", "none"], [1]),
    "chat_template_kwargs": ([{}, {"enable_thinking": False}], ["a"]),
    # vLLM
    "echo": ([False], [True]),
    "add_generation_prompt": ([True], [False]),
    "continue_final_message": ([False], [True]),
    "add_special_tokens": ([False], [True]),
    "include_reasoning": ([True], [False]),
    "documents": ([[]], [[{"text": "a"}]]),
    "chat_template": ([], ["{{ messages }}"]),
    # llama.cpp
    "reasoning_format": (["none"], ["deepseek"]),
    "parse_tool_calls": ([True, False], [1]),
}
ROUTES: list[tuple[type[Any], dict[str, Any], dict[str, tuple[list[Any], list[Any]]]]] = [
    (CompletionRequest, COMPLETION, BOTH | COMPLETIONS_ONLY),
    (ChatRequest, CHAT, BOTH | CHATS_ONLY),
]
NEUTRAL = [
    (kind, body, name, value)
    for kind, body, fields in ROUTES
    for name, (neutral, _) in fields.items()
    for value in [None, *neutral]
]
EFFECTIVE = [
    (kind, body, name, value)
    for kind, body, fields in ROUTES
    for name, (_, effective) in fields.items()
    for value in effective
]


def description(kind: type[Any], body: dict[str, Any]) -> list[Any]:
    """What a request's generation is made of."""
    [[generation]] = generations_of(parse_body(body, kind), [Prompt([1, 2], "")])
    return [generation.sampling, generation.speculation, generation.max_tokens, generation.top_logprobs]


@pytest.mark.parametrize(("kind", "body", "name", "value"), NEUTRAL)
def test_a_value_without_effect_is_accepted(kind: type[Any], body: dict[str, Any], name: str, value: object) -> None:
    assert description(kind, {**body, "seed": 1, name: value}) == description(kind, {**body, "seed": 1})


@pytest.mark.parametrize(("kind", "body", "name", "value"), EFFECTIVE)
def test_a_value_with_an_effect_is_a_400_that_names_the_field(
    kind: type[Any], body: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body({**body, name: value}, kind)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert f"'{name}'" in caught.value.message


def test_every_neutral_field_is_tested() -> None:
    declared = (NeutralFields, NeutralCompletionFields, NeutralChatFields)
    names = {name for kind in declared for name in kind.model_fields}
    assert names == (BOTH | COMPLETIONS_ONLY | CHATS_ONLY).keys() - {"reasoning_effort", "chat_template_kwargs"}


def test_only_the_other_field_of_a_route_is_unknown() -> None:
    for kind, body, name in ((CompletionRequest, COMPLETION, "chat_template"), (ChatRequest, CHAT, "prompt_embeds")):
        with pytest.raises(RequestError) as caught:
            parse_body({**body, name: None}, kind)
        assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_stream_options_without_effect_are_accepted() -> None:
    neutral = {"include_obfuscation": False, "continuous_usage_stats": False}
    assert parse_body({**COMPLETION, "stream": True, "stream_options": neutral}, CompletionRequest).stream
    body = {**COMPLETION, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    with pytest.raises(RequestError) as caught:
        parse_body(body, CompletionRequest)
    assert caught.value.param == "stream_options.continuous_usage_stats"
