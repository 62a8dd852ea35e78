"""Chat templates are rendered as by transformers, in a sandbox, and one that cannot be used turns chats off."""

import logging
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from front_end import CHATS, FrontEnd, says
from pairs import Pair, TinyFiles
from specserve.api import chat_template
from specserve.api.chat_template import ChatTemplate
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.errors import RequestError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>"}]
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <b><|im_end|>\n"
# The parts of SmolLM3's template that are beyond Jinja.
SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = false -%}{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}
{%- for message in messages -%}
    {%- if message.role != "assistant" -%}
        {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- else -%}
        {% generation %}
        {%- set content = message.content.lstrip("\n") -%}
        {{ "<|im_start|>assistant\n" + content + "<|im_end|>\n" }}
        {%- endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


def rendered(source: str) -> str:

    return template(source).render(MESSAGES)


def prompt_of(source: str, **fields: Any) -> str:

    return template(source).prompt(parse_body({"messages": MESSAGES, **fields}, ChatRequest))


RENDERED = {
    """{{ bos_token }}{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}""": "<s><|system|>Be brief.</s><|user|>Hello <b></s><|assistant|>",
    # Functions that templates use beyond Jinja.
    "{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}": "1",
    "{{ strftime_now('%Y') | length }}": "4",
    "{{ messages[1] | tojson }}": '{"role": "user", "content": "Hello <b>"}',
    # Mistral's template would list tools that are undefined.
    "{% if tools is not none or documents is not none %}[AVAILABLE_TOOLS]{% endif %}": "",
    # As in llama.cpp.
    "chatml": f"{CHATML}<|im_start|>assistant\n",
}


def test_messages_are_rendered_as_transformers_does() -> None:
    for source, expected in RENDERED.items():
        assert rendered(source) == expected


def test_generation_blocks_are_rendered_as_what_they_contain() -> None:
    """transformers masks them for training; names that are set in one are not set after it."""
    dialogue = [*MESSAGES, {"role": "assistant", "content": "\nHi!"}, MESSAGES[1]]
    more = "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nHello <b><|im_end|>\n<|im_start|>assistant\n"
    assert template(SMOLLM3).render(dialogue) == CHATML + more
    assert rendered("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"


def test_an_exception_raised_by_a_template_is_a_400_with_its_message() -> None:
    with pytest.raises(RequestError, match=r"roles must alternate\.$") as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    # It is asked again without a system message; what it said first counts.
    with pytest.raises(RequestError, match="first!"):
        called("{{ raise_exception('first!' if messages[0].role == 'system' else 'second!') }}")


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.clear() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[99].content }}",
        "{{ range(10 ** 9) | list }}",
    ):
        with pytest.raises(RequestError):
            rendered(source)


def test_templates_may_iterate_over_no_tools_fill_lists_and_want_thinking_by_another_name() -> None:
    """As those of Hermes 2 and 3, Kimi K2 and gpt-oss do."""
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered("{% for tool in tools %}{{ tool }}{% endfor %}" + turns) == "Be brief.Hello <b>"
    assert rendered("{% set found = [] %}{% set _ = found.append(7) %}{{ found.pop() }}" + turns)[0] == "7"
    thinking = "{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}"
    answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert prompt_of(thinking, messages=[answer]) == "hm"
    # gpt-oss's refuses both beside calls.
    both = {**answer, "content": "Hi", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    assert "hm" not in prompt_of(thinking, messages=[both])


def test_an_unusable_template_is_a_problem_that_every_chat_gets_as_a_400(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that would run for years: loops in loops, or a macro that calls itself twice."""
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 1000)
    for source, reason in {
        "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}": "it takes more than 1,000 steps",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}": "1,000 steps",
        "{% for %}": "does not compile",
        "{{ messages[0].content | base64 }}": "No filter named 'base64'",
        "{{ messages[0].content.nothing.at_all }}": "it fails",
        "{{ messages[0].content | dictsort }}": "it fails: 'str' object has no attribute 'items'",
        "{{ 'a' * 10**15 }}": "it fails: MemoryError",
        "{{ cycler() }}": "it fails: at least one item has to be provided",
        "vicuna": "it leaves out the text of a message",
    }.items():
        problem = template(source).problem or ""
        assert reason in problem
        assert "\n" not in problem
        with pytest.raises(RequestError) as caught:
            prompt_of(source)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_value")
        assert problem in caught.value.message
        assert "use v1/completions" in caught.value.message


def test_with_an_unusable_template_completions_are_served() -> None:
    for source in ("{% for %}", "{{ messages | base64 }}", "{{ messages[0].content.nothing.at_all }}"):
        front_end = FrontEnd(chat_template=source)
        assert front_end.ask({"prompt": "a", "max_tokens": 2})["object"] == "text_completion"
        assert front_end.refusal(says("a"), CHATS)[0] == 400


def test_a_template_that_renders_or_refuses_a_question_is_usable() -> None:
    for source in (
        # Gemma refuses system messages, other templates a chat without one.
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[1].content }}",
        # Only chats that reach the unknown filter fail.
        "{% if tools %}{{ tools | base64 }}{% endif %}{{ messages[0].content }}{{ messages[-1].content }}",
    ):
        assert template(source).problem is None


def test_chat_template_kwargs_are_the_templates_variables() -> None:
    source = "{{ messages[0].content }}{{ colour }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    assert prompt_of(source) == "Be brief."
    kwargs = {"colour": "red", "enable_thinking": False, "messages": [], "bos_token": "x", "self": 1}
    assert prompt_of(source, chat_template_kwargs=kwargs) == "Be brief.redFalse"
    plain, without = tiny_models.CHATML, {"add_generation_prompt": False}
    assert prompt_of(plain, chat_template_kwargs={"colour": "red"}) == prompt_of(plain)
    assert prompt_of(plain, chat_template_kwargs=without) == prompt_of(plain, **without)
    assert prompt_of(plain) == prompt_of(plain, **without) + "<|im_start|>assistant\n"


def test_reasoning_effort_is_a_variable_and_switches_thinking() -> None:
    source = "{{ messages[0].content }}{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
    for effort, thinks in (("none", "False"), ("low", "True"), ("high", "True")):
        assert prompt_of(source, reasoning_effort=effort) == f"Be brief.{effort} {thinks} {thinks}"
        assert "maybe" in prompt_of(source, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": "maybe"})


def test_the_final_message_is_continued_as_it_is() -> None:
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    for content in ("Hi", "Hi, I ", "Hello <b>", "\n x\n\n", "", "<", "[end]", "assistant"):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        begun: dict[str, Any] = {"messages": messages, "continue_final_message": True}
        for source in (plain, plain.replace("m.content", "m.content | trim")):
            assert prompt_of(source, **begun) == f"[system]Be brief.[end][user]Hello <b>[end][assistant]{content}"
        assert prompt_of(tiny_models.CHATML, **begun) == prompt_of(tiny_models.CHATML) + content


CALLS = [{"id": f"call_{letter}", "function": {"name": letter, "arguments": "{}"}} for letter in "ab"]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    *({"role": "tool", "tool_call_id": call["id"], "content": f"answer {call['id']}"} for call in CALLS),
    {"role": "user", "content": "Well?"},
]


def called(source: str) -> str:
    """The prompt of a chat in which two tools were called at once."""
    return prompt_of(source, messages=CALLED, tools=[{"type": "function", "function": {"name": "a"}}])


def test_calls_have_short_ids_where_a_template_demands_them() -> None:
    """As Mistral's do."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}({{ c.id }}){% endfor %}"
        "{% if m.tool_call_id %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
        "[{{ m.tool_call_id }}]{% endif %}{% endfor %}{{ tools }}[TOOL_CALLS]"
    )
    text = called(source)
    ids = [text.partition(f"answer call_{letter}[")[2][:9] for letter in "ab"]
    assert all(len(short) == 9 and short.isalnum() for short in ids)
    assert text.startswith(f"Go({ids[0]})({ids[1]})")


def test_calls_at_once_are_rendered_one_by_one_where_a_template_takes_one() -> None:
    """As Llama 3's does."""
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one!') }}{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if tools %}<tool_call>{% endif %}"
    )
    answers = ["<assistant>a<tool>answer call_a", "<assistant>b<tool>answer call_b"]
    assert called(source) == "<user>Go" + "".join(answers) + "<user>Well?<tool_call>"


def test_a_template_without_tools_has_roles_that_alternate_and_may_take_no_system_message() -> None:
    """As Gemma's do."""
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate!') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    text = called(alternating)
    assert text.index("<user>") < text.index("These functions") < text.index("Go") < text.index("<assistant>")
    assert text.index("answer call_a") < text.index("answer call_b") < text.index("Well?")
    assert text.count("<user>") == 2
    with_system = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert called(with_system).startswith("<system>These functions")


def test_a_final_message_that_the_template_changes_cannot_be_continued() -> None:
    messages = [MESSAGES[1], {"role": "assistant", "content": "Changed"}]
    for source in ("{{ messages[0].content }}{{ messages[-1].content | upper }}", "{{ messages[0].content }}"):
        with pytest.raises(RequestError) as caught:
            prompt_of(source, messages=messages, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_a_model_with_an_unusable_template_loads_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiny_models, "CHATML", "{{ messages | base64 }}")
    with caplog.at_level(logging.INFO):
        pair = Pair(TinyFiles(tmp_path).config("qwen2"))
    [line] = [record.message for record in caplog.records if "chat" in record.message]
    reason = "it does not compile: No filter named 'base64'"
    assert line == f"specserve: chats are off, since the chat template cannot be used: {reason}"
    assert pair.complete("The quick", max_tokens=4, temperature=0).finish_reason == "length"
