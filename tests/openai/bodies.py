"""Request bodies for fuzzing: valid ones, nearly valid ones, and any other JSON."""

from typing import Any

from hypothesis import strategies as st


def one(*values: Any) -> st.SearchStrategy[Any]:
    """One of these values."""
    return st.sampled_from(values)


# All characters, lone surrogates included: JSON can represent them.
texts = st.text(st.characters(categories=["L", "N", "P", "S", "Z", "C"]), max_size=40)
numbers = st.integers(-3, 300) | one(2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400) | st.floats()
scalars = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)


def nested(depth: int) -> dict[str, Any]:
    """A JSON schema with `depth` levels."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def obj(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of exactly these fields."""
    return st.fixed_dictionaries(fields)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


vast_schemas = one(
    *({"$ref": reference} for reference in ("#", "http://127.0.0.1:9/schema", "file:///etc/passwd")),
    *({"type": "string", "pattern": pattern} for pattern in ("(.*a){30}b", "((a{0,99}){0,99}){0,99}")),
    {"type": "array", "minItems": 10**9},
    {"enum": [str(n) for n in range(5000)]},
)
schemas = st.recursive(
    obj(type=one("string", "integer", "number", "boolean", "null", "object", "array", "colour"))
    | obj(enum=st.lists(scalars, max_size=4))
    | obj(type=one("string"), pattern=texts)
    | obj(type=one("integer"), minimum=numbers, maximum=numbers)
    | obj(type=one("string"), maxLength=numbers)
    | vast_schemas
    | st.integers(1, 400).map(nested)
    | anything,
    lambda inner: st.one_of(
        obj(type=one("array"), items=inner, maxItems=numbers),
        obj(type=one("object"), properties=st.dictionaries(texts, inner, max_size=3), required=st.lists(texts)),
        *(st.fixed_dictionaries({word: st.lists(inner, max_size=4)}) for word in ("anyOf", "oneOf", "allOf")),
    ),
    max_leaves=6,
)
grammars = texts | one(
    *('root ::= "a" | "b"', "root ::= [0-9]+ root | [a-z]", "root ::= root root | root", 'root ::= "a"{0,1000000}'),
    *('root ::= (("a"*)*)*', "root ::= missing", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, 'root ::= "\\xff"'),
)
formats = obj(type=one("text", "json_object", "json_schema", "xml"))
formats |= obj(type=one("json_schema"), json_schema=obj(name=texts, schema=schemas))
tool_names = one("a", "b", "c") | texts
tool = obj(type=one("function"), function=obj(name=tool_names, parameters=schemas, strict=st.booleans()))
named_tool = obj(type=one("function"), function=obj(name=tool_names))
tool_call = obj(id=texts, type=one("function"), function=obj(name=tool_names, arguments=texts))
contents = texts | st.lists(obj(type=one("text"), text=texts), max_size=3)
tokens = st.lists(st.integers(-1, 205), max_size=30)
bools = one(None, False, True)
counts = one(None, -1, 0, 1, 2, 5, 500, 10**6)
factors = one(None, -1, 0, 0.1, 0.7, 1, 2, 7)
structures = obj(regex=texts | one("(a|aa)*", "((a{0,99}){0,99}){0,99}", "[^a]+$", "("))
structures |= obj(choice=st.lists(texts, max_size=3))
structures |= st.dictionaries(
    one("json", "regex", "choice", "grammar", "json_object"), schemas | texts | anything, max_size=2
)
COMMON = {
    **dict.fromkeys(("stream", "ignore_eos", "cache_prompt"), bools),
    **dict.fromkeys(("skip_special_tokens", "include_stop_str_in_output"), bools),
    **dict.fromkeys(("top_k", "n", "min_tokens", "n_predict"), counts),
    **dict.fromkeys(("temperature", "top_p", "min_p"), factors),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), factors),
    "model": one(None, "tiny", "qwen", "gpt-4"),
    "seed": st.none() | st.integers(-(2**64), 2**64),
    "logit_bias": st.none() | st.dictionaries(st.integers(-1, 210).map(str) | texts, numbers, max_size=4),
    "stop": st.none() | texts | st.lists(texts, max_size=5),
    "stream_options": st.none() | obj(include_usage=st.booleans(), continuous_usage_stats=st.booleans()),
    "response_format": formats,
    "grammar": grammars,
    "prediction": obj(type=one("content"), content=contents),
    "speculation": some(
        mode=one("auto", "off", "fixed"),
        gamma=st.integers(0, 33),
        drafter=one("auto", "model", "lookup", "prediction", "grammar"),
        verification=one("token", "block", "coupled"),
        sources=st.booleans(),
    ),
    "stop_token_ids": st.lists(st.integers(-1, 201), max_size=3),
    "allowed_token_ids": st.lists(st.integers(-1, 201), min_size=1, max_size=5),
    "t_max_predict_ms": numbers,
    "structured_outputs": structures,
    "user": texts,
    "metadata": st.dictionaries(texts, texts, max_size=3),
}
prompts = texts | tokens | st.lists(texts, max_size=4) | st.lists(tokens, max_size=4)
COMPLETION = {"prompt": prompts, "echo": bools, "suffix": texts, "logprobs": counts}
said = obj(role=one("system", "user", "assistant", "tool", "robot"), content=contents)
called = obj(role=one("assistant"), tool_calls=st.lists(tool_call, max_size=2))
CHAT = {
    "messages": st.lists(said | called, min_size=1, max_size=4),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "continue_final_message", "add_generation_prompt"), bools),
    "top_logprobs": counts,
    "tools": one([]) | st.lists(tool, max_size=3) | anything,
    "tool_choice": one("none", "auto", "required") | named_tool | anything,
    "chat_template_kwargs": st.dictionaries(texts | one("messages", "self"), anything, max_size=2),
    "reasoning_effort": texts,
}

block_types = one("text", "text", "tool_use", "tool_result", "thinking", "input_text", "image")
block = some(text=texts, id=texts, name=texts, input=anything, content=texts, thinking=texts, type=block_types)
block_contents = texts | st.lists(block, max_size=3)
call_types = ["function_call", "shell_call", "local_shell_call", "apply_patch_call"]
item = some(
    type=one("message", "reasoning", *call_types, *(f"{call}_output" for call in call_types), "item"),
    role=one("system", "developer", "user", "assistant", "robot"),
    **dict.fromkeys(("content", "output", "summary"), block_contents),
    **dict.fromkeys(("call_id", "id", "name", "namespace", "arguments"), texts),
    **dict.fromkeys(("action", "operation"), anything),
)
tool_types = one("function", "custom", "mcp", "namespace", "shell", "apply_patch", "computer")
response_tool = obj(type=tool_types, name=texts)
RESPONSES = {
    "input": texts | st.lists(item, max_size=4),
    "instructions": texts,
    "tools": st.lists(response_tool | some(type=tool_types, parameters=schemas, tools=st.lists(response_tool))),
    "tool_choice": one("none", "auto", "required")
    | obj(type=texts, name=texts)
    | obj(type=one("allowed_tools"), tools=anything | st.lists(obj(type=one("function"), name=anything)))
    | anything,
    "text": obj(format=formats) | anything,
    "reasoning": obj(effort=texts) | anything,
    "max_output_tokens": st.integers(-1, 6),
    "previous_response_id": texts,
}
message = obj(role=one("user", "assistant", "system", "robot"), content=block_contents)
client_tools = one("custom", "bash_20250124", "memory_20250818", "web_search_1", "computer_1")
MESSAGES = {
    "messages": st.lists(message, min_size=1, max_size=3),
    "system": block_contents,
    "tools": st.lists(obj(name=texts, input_schema=schemas) | obj(name=texts, type=client_tools)),
    "tool_choice": obj(type=one("auto", "any", "tool", "none"), name=texts) | anything,
    "stop_sequences": st.lists(texts, max_size=3),
    "thinking": obj(type=one("enabled", "disabled", "adaptive")),
    "output_config": obj(format=obj(type=one("json_schema"), schema=schemas)),
}
INFILL = {
    **dict.fromkeys(("input_prefix", "input_suffix"), texts),
    "input_extra": st.lists(obj(text=texts, filename=texts), max_size=3) | anything,
    "n_indent": counts,
    "response_fields": st.lists(texts | one("content", "timings/prompt_n", "content/a"), max_size=3),
    "samplers": anything,
}


@st.composite
def bodies(draw: st.DrawFn, route_fields: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    """A few fields with plausible values, and in one of five bodies a field with any value."""
    fields = {**COMMON, **route_fields}
    [first, *_] = route_fields
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True))
    body = {name: draw(fields[name]) for name in [first, *chosen]}
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(sorted(fields)) | texts)] = draw(anything)
    # Short answers: the faults that are looked for are not in decoding.
    body["max_tokens"] = draw(st.integers(0, 6))
    return body


completions, chats, responses, messages, infills = map(bodies, (COMPLETION, CHAT, RESPONSES, MESSAGES, INFILL))
