"""Fields of OpenAI's, vLLM's and llama.cpp's APIs that have another name here, no effect, or only one value."""

import json
from collections.abc import Container
from typing import Any

from specserve.errors import RequestError

# OpenAI's fields about accounts, caches and what is kept, which never change an answer.
_WITHOUT_EFFECT = "user store service_tier safety_identifier prompt_cache_key prompt_cache_retention truncation"
# Fields that would change the answer and are not implemented: "off" is accepted, or the value in the table.
# `echo` and `add_special_tokens` are those of chats.
_OFF = """
functions audio web_search_options background conversation
echo add_special_tokens use_beam_search prompt_embeds logprob_token_ids return_token_ids return_tokens_as_token_ids
kv_transfer_params vllm_xargs logits_processors documents chat_template mm_processor_kwargs bad_words guided_json_object
n_indent n_probs post_sampling_probs min_keep xtc_probability dynatemp_range dry_multiplier mirostat lora
"""
# vLLM's former names.
_GUIDED = "guided_json guided_regex guided_choice guided_grammar"
_ONLY: dict[str, object] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_GUIDED.split()),
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "best_of": 1,
    "prompt_logprobs": None,
    "thinking_token_budget": None,
    "truncate_prompt_tokens": None,
    "truncation_side": "left",
    "include_reasoning": True,
    "typical_p": 1,
    "top_n_sigma": -1,
    "repeat_last_n": -1,
    "reasoning_budget": -1,
}
_INSTEAD = {"functions": "tools", **dict.fromkeys([*_GUIDED.split(), "guided_json_object"], "structured_outputs")}
_PENALTIES = {"repeat_penalty": 1, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
KNOWN = {*_WITHOUT_EFFECT.split(), *_ONLY, *_NAMES}


def translated(body: dict[str, Any], fields: Container[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a body with our names for its fields and without others that are known, and the client's names by ours.

    `fields` are those of the route.

    Raises:
        RequestError: 400; a field would change the answer and cannot be done.
    """
    body = {name: value for name, value in body.items() if value is not None}
    # llama.cpp's window of the penalties has no effect without a penalty.
    penalised = any(body.get(name, neutral) != neutral for name, neutral in _PENALTIES.items())
    for name, only in _ONLY.items():
        value = body.get(name)
        is_off = value is None or (not value if only is False else value == only)
        if name not in fields and not is_off and (name != "repeat_last_n" or penalised):
            instead = "" if only is False else f": it can only be {json.dumps(only)}"
            instead = f": use '{_INSTEAD[name]}'" if name in _INSTEAD else instead
            sentence = f"'{name}' is not supported by this server{instead}."
            raise RequestError(sentence, param=name, code="unsupported_value")
    sent = {ours: other for other, ours in _NAMES.items() if other in body and ours not in body}
    rest = {name: value for name, value in body.items() if name in fields or name not in KNOWN}
    return rest | {ours: body[other] for ours, other in sent.items()}, sent
