"""Request bodies for fuzzing: valid ones, nearly valid ones, and any other JSON."""

from typing import Any

from hypothesis import strategies as st

# All characters, lone surrogates included: JSON can represent them.
texts = st.text(st.characters(categories=["L", "N", "P", "S", "Z", "C"]), max_size=40)
numbers = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400]), st.floats()
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
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


schemas = st.recursive(
    st.one_of(
        obj(type=st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "colour"])),
        obj(enum=st.lists(scalars, max_size=4)),
        obj(type=st.just("string"), pattern=texts),
        obj(type=st.just("integer"), minimum=numbers, maximum=numbers),
        obj(type=st.just("string"), maxLength=numbers),
        st.sampled_from(
            [
                {"$ref": "#"},
                {"$ref": "http://127.0.0.1:9/schema"},
                {"$ref": "file:///etc/passwd"},
                {"type": "string", "pattern": "(.*a){30}b"},
                {"type": "string", "pattern": "((a{0,99}){0,99}){0,99}"},
                {"type": "array", "minItems": 10**9},
                {"enum": [str(n) for n in range(5000)]},
            ]
        ),
        st.integers(1, 400).map(nested),
        anything,
    ),
    lambda inner: st.one_of(
        obj(type=st.just("array"), items=inner, maxItems=numbers),
        obj(type=st.just("object"), properties=st.dictionaries(texts, inner, max_size=3), required=st.lists(texts)),
        *(st.fixed_dictionaries({word: st.lists(inner, max_size=4)}) for word in ("anyOf", "oneOf", "allOf")),
    ),
    max_leaves=6,
)
grammars = st.one_of(
    texts,
    st.sampled_from(
        [
            'root ::= "a" | "b"',
            "root ::= [0-9]+ root | [a-z]",
            "root ::= root root | root",
            'root ::= "a"{0,1000000}',
            'root ::= (("a"*)*)*',
            "root ::= missing",
            "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
            'root ::= "\\xff"',
        ]
    ),
)
json_schema = obj(name=texts, schema=schemas)
formats = st.one_of(
    obj(type=st.sampled_from(["text", "json_object", "json_schema", "xml"])),
    obj(type=st.just("json_schema"), json_schema=json_schema),
)
tool_names = st.sampled_from(["a", "b", "c"]) | texts
tool = obj(type=st.just("function"), function=obj(name=tool_names, parameters=schemas, strict=st.booleans()))
named_tool = obj(type=st.just("function"), function=obj(name=tool_names))
tool_call = obj(id=texts, type=st.just("function"), function=obj(name=tool_names, arguments=texts))
contents = texts | st.lists(obj(type=st.just("text"), text=texts), max_size=3)
tokens = st.lists(st.integers(-1, 205), max_size=30)
bools = st.sampled_from([None, False, True])
counts = st.sampled_from([None, -1, 0, 1, 2, 5, 500, 10**6])
factors = st.sampled_from([None, -1, 0, 0.1, 0.7, 1, 2, 7])
COMMON = {
    **dict.fromkeys(
        ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "cache_prompt"), bools
    ),
    **dict.fromkeys(("top_k", "n", "min_tokens", "n_predict"), counts),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), factors),
    "repetition_penalty": factors,
    "model": st.sampled_from([None, "tiny", "qwen", "gpt-4"]),
    "seed": st.none() | st.integers(-(2**64), 2**64),
    "logit_bias": st.none() | st.dictionaries(st.integers(-1, 210).map(str) | texts, numbers, max_size=4),
    "stop": st.none() | texts | st.lists(texts, max_size=5),
    "stream_options": st.none() | obj(include_usage=st.booleans(), continuous_usage_stats=st.booleans()),
    "response_format": formats,
    "grammar": grammars,
    "prediction": obj(type=st.just("content"), content=contents),
    "speculation": some(
        mode=st.sampled_from(["auto", "off", "fixed"]),
        gamma=st.integers(0, 33),
        drafter=st.sampled_from(["auto", "model", "lookup", "prediction", "grammar"]),
        verification=st.sampled_from(["token", "block", "coupled"]),
        sources=st.booleans(),
    ),
    "stop_token_ids": st.lists(st.integers(-1, 201), max_size=3),
    "allowed_token_ids": st.lists(st.integers(-1, 201), min_size=1, max_size=5),
    "t_max_predict_ms": numbers,
    "structured_outputs": obj(regex=texts | st.sampled_from(["(a|aa)*", "((a{0,99}){0,99}){0,99}", "[^a]+$", "("]))
    | obj(choice=st.lists(texts, max_size=3))
    | st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), schemas | texts | anything, max_size=2
    ),
    "user": texts,
    "metadata": st.dictionaries(texts, texts, max_size=3),
}
COMPLETION = {
    "prompt": texts | tokens | st.lists(texts, max_size=4) | st.lists(tokens, max_size=4),
    "echo": bools,
    "suffix": texts,
    "logprobs": counts,
}
CHAT = {
    "messages": st.lists(
        obj(role=st.sampled_from(["system", "user", "assistant", "tool", "robot"]), content=contents)
        | obj(role=st.just("assistant"), tool_calls=st.lists(tool_call, max_size=2)),
        min_size=1,
        max_size=4,
    ),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "continue_final_message", "add_generation_prompt"), bools),
    "top_logprobs": counts,
    "tools": st.just([]) | st.lists(tool, max_size=3) | anything,
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | named_tool | anything,
    "chat_template_kwargs": st.dictionaries(texts | st.sampled_from(["messages", "self"]), anything, max_size=2),
    "reasoning_effort": texts,
}

block_types = st.sampled_from(["text", "text", "tool_use", "tool_result", "thinking", "input_text", "image"])
block = some(text=texts, id=texts, name=texts, input=anything, content=texts, thinking=texts, type=block_types)
block_contents = texts | st.lists(block, max_size=3)
call_types = ["function_call", "shell_call", "local_shell_call", "apply_patch_call"]
item = some(
    type=st.sampled_from(["message", "reasoning", *call_types, *(f"{call}_output" for call in call_types), "item"]),
    role=st.sampled_from(["system", "developer", "user", "assistant", "robot"]),
    **dict.fromkeys(("content", "output", "summary"), block_contents),
    **dict.fromkeys(("call_id", "id", "name", "namespace", "arguments"), texts),
    **dict.fromkeys(("action", "operation"), anything),
)
tool_types = ["function", "custom", "mcp", "namespace", "shell", "apply_patch", "computer"]
response_tool = obj(type=st.sampled_from(tool_types), name=texts)
RESPONSES = {
    "input": texts | st.lists(item, max_size=4),
    "instructions": texts,
    "tools": st.lists(
        response_tool | some(type=st.sampled_from(tool_types), parameters=schemas, tools=st.lists(response_tool))
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | obj(type=texts, name=texts)
    | obj(type=st.just("allowed_tools"), tools=anything | st.lists(obj(type=st.just("function"), name=anything)))
    | anything,
    "text": obj(format=formats) | anything,
    "reasoning": obj(effort=texts) | anything,
    "max_output_tokens": st.integers(-1, 6),
    "previous_response_id": texts,
}
MESSAGES = {
    "messages": st.lists(
        obj(role=st.sampled_from(["user", "assistant", "system", "robot"]), content=block_contents),
        min_size=1,
        max_size=3,
    ),
    "system": block_contents,
    "tools": st.lists(
        obj(name=texts, input_schema=schemas)
        | obj(
            name=texts,
            type=st.sampled_from(["custom", "bash_20250124", "memory_20250818", "web_search_1", "computer_1"]),
        )
    ),
    "tool_choice": obj(type=st.sampled_from(["auto", "any", "tool", "none"]), name=texts) | anything,
    "stop_sequences": st.lists(texts, max_size=3),
    "thinking": obj(type=st.sampled_from(["enabled", "disabled", "adaptive"])),
    "output_config": obj(format=obj(type=st.just("json_schema"), schema=schemas)),
}
INFILL = {
    **dict.fromkeys(("input_prefix", "input_suffix"), texts),
    "input_extra": st.lists(obj(text=texts, filename=texts), max_size=3) | anything,
    "n_indent": counts,
    "response_fields": st.lists(texts | st.sampled_from(["content", "timings/prompt_n", "content/a"]), max_size=3),
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


completions = bodies(COMPLETION)
chats = bodies(CHAT)
responses = bodies(RESPONSES)
messages = bodies(MESSAGES)
infills = bodies(INFILL)
