"""Known fields of OpenAI's, vLLM's and llama.cpp's APIs, taken with the values that leave the answer as it is.

Any other value of theirs is a 400. A field with a plain type has no effect here whatever its value is: it is about
accounts, scheduling or caches, or tunes a sampler that its own field, which only takes the value for "off", would
turn on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specserve.serving.openai.body import Body


def _is_boolean(value: Any) -> Any:
    """Refuse 0 and 1, which pydantic takes for the literals false and true."""
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "input should be a valid boolean")
    return value


Off = Annotated[Literal[False], BeforeValidator(_is_boolean)]
_Off = Off | None
_On = Annotated[Literal[True], BeforeValidator(_is_boolean)] | None
_ZeroInt = Annotated[int, Field(ge=0, le=0)] | None
_Zero = Annotated[float, Field(ge=0, le=0)] | None
_One = Annotated[float, Field(ge=1, le=1)] | None
_Empty = Annotated[list[Any], Field(max_length=0)] | None
_Names = Annotated[list[str], Field(fail_fast=True)] | None
_Nothing = Annotated[dict[str, Any], Field(max_length=0)] | None


class NeutralFields(Body):
    """The fields without effect of both routes."""

    # OpenAI
    user: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # vLLM
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    stream_interval: int | None = None
    use_beam_search: _Off = None
    length_penalty: float | None = None
    stop_token_ids: _Empty = None
    include_stop_str_in_output: _Off = None
    min_tokens: _ZeroInt = None
    skip_special_tokens: _On = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: None = None
    truncation_side: str | None = None
    prompt_logprobs: None = None
    logprob_token_ids: None = None
    allowed_token_ids: None = None
    bad_words: _Empty = None
    structured_outputs: None = None
    return_token_ids: _Off = None
    return_tokens_as_token_ids: _Off = None
    thinking_token_budget: None = None
    kv_transfer_params: None = None
    vllm_xargs: _Nothing = None
    cache_salt: None = None

    # llama.cpp
    cache_prompt: bool | None = None
    id_slot: int | None = None
    slot_id: int | None = None
    n_cache_reuse: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    n_indent: _ZeroInt = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    return_tokens: bool | None = None
    response_fields: _Names = None
    n_probs: _ZeroInt = None
    post_sampling_probs: _Off = None
    min_keep: _ZeroInt = None
    repeat_penalty: _One = None
    typical_p: _One = None
    top_n_sigma: Annotated[float, Field(le=0)] | None = None
    xtc_probability: _Zero = None
    xtc_threshold: float | None = None
    dynatemp_range: _Zero = None
    dynatemp_exponent: float | None = None
    dry_multiplier: _Zero = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: _Names = None
    mirostat: _ZeroInt = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class NeutralCompletionFields(Body):
    """The fields without effect of v1/completions only."""

    add_special_tokens: _On = None
    prompt_embeds: None = None


class NeutralChatFields(Body):
    """The fields without effect of v1/chat/completions only."""

    # OpenAI
    functions: _Empty = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    audio: None = None
    web_search_options: None = None
    verbosity: Literal["medium"] | None = None

    # vLLM
    echo: _Off = None
    add_generation_prompt: _On = None
    continue_final_message: _Off = None
    add_special_tokens: _Off = None
    include_reasoning: _On = None
    documents: _Empty = None
    chat_template: None = None

    # llama.cpp
    reasoning_format: Literal["none"] | None = None
    parse_tool_calls: bool | None = None
