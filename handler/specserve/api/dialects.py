"""Fields of OpenAI's, vLLM's and llama.cpp's APIs that have another name here, no effect, or only one value."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from specserve.api.structured_output import OTHER_NAMES, with_structure
from specserve.errors import RequestError

# Of OpenAI's, about accounts and caches; others are ignored as unknown fields are.
_WITHOUT_EFFECT = "user store service_tier safety_identifier prompt_cache_key prompt_cache_retention"
# Would change the answer, which cannot be done: only null and what says "off" are taken, or the value below. `echo` and
# `add_special_tokens` are those of chats.
_OFF = """
functions audio web_search_options
echo add_special_tokens use_beam_search prompt_embeds logprob_token_ids return_token_ids return_tokens_as_token_ids
kv_transfer_params vllm_xargs logits_processors documents chat_template mm_processor_kwargs
n_indent post_sampling_probs min_keep xtc_probability dynatemp_range dry_multiplier mirostat lora
"""
_ONLY: dict[str, object] = {
    **dict.fromkeys(_OFF.split(), False),
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "prompt_logprobs": None,
    "thinking_token_budget": None,
    "truncation_side": "left",
    "include_reasoning": True,
    "typical_p": 1,
    "top_n_sigma": -1,
    "repeat_last_n": -1,
    "reasoning_budget": -1,
}
_PENALTIES = {"repeat_penalty": 1, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
KNOWN = OTHER_NAMES.union(_WITHOUT_EFFECT.split(), _ONLY, _NAMES, ["n_probs"])


def translated(body: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
    """Return a body whose fields have the names and forms that are used here.

    Args:
        body: of a request; not changed.
        fields: those that its route has.

    Raises:
        RequestError: 400; a field would change the answer and cannot be done, or several ask for a structure.
    """
    # Without a penalty, llama.cpp's window of it has no effect either.
    penalised = any(body.get(name) not in (None, neutral) for name, neutral in _PENALTIES.items())
    unsupported = _ONLY if "logprobs" in fields else {**_ONLY, "n_probs": False}
    for name, only in unsupported.items():
        value = body.get(name)
        is_off = value is None or (not value if only is False else value == only)
        if name not in fields and not is_off and (name != "repeat_last_n" or penalised):
            instead = "" if only is False else f": it can only be {json.dumps(only)}"
            instead = ": use 'tools'" if name == "functions" else instead
            sentence = f"'{name}' is not supported by this server{instead}."
            raise RequestError(sentence, param=name, code="unsupported_value")
    renamed = {name: body[other] for name, other in names_sent(body, fields).items()}
    if "top_logprobs" in renamed:
        renamed["logprobs"] = body.get("logprobs", True)
    return with_structure(body | renamed)


def names_sent(body: dict[str, Any], fields: Container[str]) -> dict[str, str]:
    """Return the other names under which a body has fields of its route, by the names that are used here."""
    names = {name: other for other, name in _NAMES.items()}
    if body.get("n_probs"):
        names["top_logprobs" if "messages" in fields else "logprobs"] = "n_probs"
    return {name: other for name, other in names.items() if other in body and body.get(name) is None}
