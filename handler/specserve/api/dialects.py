"""Fields of OpenAI's, vLLM's and llama.cpp's APIs that have another name here, or no effect."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

from specserve.errors import RequestError

# About accounts, scheduling or caches, or tunes a sampler that is off by its own field.
_WITHOUT_EFFECT = """
user store service_tier safety_identifier prompt_cache_key prompt_cache_retention
priority request_id session_id stream_interval length_penalty spaces_between_special_tokens guided_decoding_backend
id_slot slot_id n_cache_reuse n_keep n_discard timings_per_token return_progress return_tokens response_fields
parse_tool_calls xtc_threshold dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
mirostat_tau mirostat_eta
"""
# Would change the answer, which cannot be done: only values that say "off" are taken, as are those of the second table.
# `echo` and `add_special_tokens` are those of chats.
_OFF = """
functions audio web_search_options
echo add_special_tokens use_beam_search prompt_embeds logprob_token_ids return_token_ids return_tokens_as_token_ids
kv_transfer_params vllm_xargs logits_processors documents chat_template mm_processor_kwargs
n_indent post_sampling_probs min_keep xtc_probability dynatemp_range dry_multiplier mirostat lora
"""
_NEUTRAL: dict[str, object] = {
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
_INSTEAD = {"functions": ": use 'tools'"}
_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# How the forms of structured output are named by vLLM, old and new, and by llama.cpp.
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = {**{f"guided_{form}": form for form in _STRUCTURES}, "json_schema": "json"}
KNOWN = frozenset(_WITHOUT_EFFECT.split() + _OFF.split()).union(
    _NEUTRAL, _NAMES, _GUIDED, ["structured_outputs", "n_probs"]
)


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
    for name in [*_OFF.split(), *_NEUTRAL, *([] if "logprobs" in fields else ["n_probs"])]:
        value = body.get(name)
        is_off = value is None or (value == _NEUTRAL[name] if name in _NEUTRAL else not value)
        if name not in fields and not is_off and (name != "repeat_last_n" or penalised):
            only = f": it can only be {json.dumps(_NEUTRAL[name])}" if name in _NEUTRAL else _INSTEAD.get(name, "")
            sentence = f"'{name}' is not supported by this server{only}."
            raise RequestError(sentence, param=name, code="unsupported_value")
    body = dict(body)
    for name, other in names_sent(body, fields).items():
        body[name] = body[other]
        if name == "top_logprobs":
            body.setdefault("logprobs", True)
    return _with_structure(body)


def names_sent(body: dict[str, Any], fields: Container[str]) -> dict[str, str]:
    """Return the other names under which a body has fields of its route, by the names that are used here."""
    names = {name: other for other, name in _NAMES.items()}
    if body.get("n_probs"):
        names["top_logprobs" if "messages" in fields else "logprobs"] = "n_probs"
    return {name: other for name, other in names.items() if other in body and body.get(name) is None}


def _with_structure(body: dict[str, Any]) -> dict[str, Any]:
    """Turn what vLLM and llama.cpp call the structure of the output into `response_format` or `grammar`."""
    outputs, form = body.get("structured_outputs"), body.get("response_format")
    outputs = {} if outputs is None else outputs
    if not isinstance(outputs, dict) or outputs.get("structural_tag") is not None:
        sentence = f"'structured_outputs' must be an object with one of {', '.join(_STRUCTURES)}."
        raise RequestError.invalid("structured_outputs", sentence)
    named = [(name, _GUIDED[name], body.get(name)) for name in _GUIDED]
    named += [(f"structured_outputs.{kind}", kind, outputs.get(kind)) for kind in _STRUCTURES]
    wanted = [(name, kind, value) for name, kind, value in named if value is not None and value is not False]
    if not wanted:
        # llama.cpp's form.
        if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema") and "schema" in form:
            body["response_format"] = {"json_schema": {"schema": form["schema"]}, **form, "type": "json_schema"}
        return body
    name, kind, value = wanted[0]
    is_formatted = form is not None and form != {"type": "text"}
    if len(wanted) > 1 or is_formatted or body.get("grammar") is not None:
        raise RequestError.invalid(name, f"Invalid request: '{name}' excludes other fields about the output's form.")
    if kind == "grammar":
        body["grammar"] = value
    elif kind == "choice":
        body["grammar"] = _one_of(value, name)
    elif kind == "regex":
        body["response_format"] = {"type": "regex", "regex": value}
    elif kind == "json_object":
        body["response_format"] = {"type": "json_object"}
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": _parsed(value, name)}}
    return body


def _parsed(schema: object, name: str) -> object:
    """Return a schema that may be spelled as JSON text."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise RequestError.invalid(name, f"Invalid value for '{name}': it is not valid JSON.") from error


def _one_of(choices: object, name: str) -> str:
    """Return the grammar of these texts, in GBNF."""
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise RequestError.invalid(name, f"Invalid value for '{name}': must be a list of strings, none of them empty.")
    escaped = (re.sub(r'["\\\n\r]', lambda found: f"\\x{ord(found[0]):02x}", text) for text in choices)
    return "root ::= " + " | ".join(f'"{text}"' for text in escaped)
