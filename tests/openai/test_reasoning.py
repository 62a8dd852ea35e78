"""Reasoning is told apart from the answer, whatever pieces the text comes in, and can be switched off."""

import re
from typing import Any

import pytest

import tiny_models
from constraints import Pieces
from fake_engine import FakeVocabulary
from front_end import FrontEnd
from specserve.api.answer import AnswerReader, Reasoning, Text
from specserve.api.call_formats import thinking_tags
from specserve.api.chat_template import ChatTemplate
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.grammar.call_form import ThinkingTags
from specserve.grammar.tool_calls import control_tokens

TAGS = ThinkingTags("<think>", "</think>")
MESSAGES = [{"role": "user", "content": "Hello"}]
# As Qwen3's: thinking is on by default; off, the prompt has empty reasoning.
QWEN = """{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
# As those of models that always reason: the prompt opens it.
ALWAYS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}<think>\n"


def read(pieces: list[str], *, begun: bool) -> tuple[str, str, int]:
    """The reasoning and the text that are read from these pieces, and how many characters the reasoning took."""
    reader = AnswerReader(thinking=TAGS, begun=begun)
    parts = [part for index, piece in enumerate(pieces) for part in reader.read(piece, done=index == len(pieces) - 1)]
    said = [(isinstance(part, Text), part.text) for part in parts if isinstance(part, Reasoning | Text)]
    assert len(said) == len(parts)
    assert [is_text for is_text, _ in said] == sorted(is_text for is_text, _ in said)
    assert all(text for _, text in said)
    reasoning, answer = ("".join(text for is_text, text in said if is_text == wanted) for wanted in (False, True))
    return reasoning, answer, reader.reasoned


SPLIT: list[Any] = [
    ("<think>\nHm.\n</think>\n\nYes. ", False, "Hm.", "Yes. "),
    ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
    ("\n <think>Hm.</think>Yes.", False, "Hm.", "Yes."),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
    (" Yes.", False, "", " Yes."),
    ("<thin", False, "", "<thin"),
    ("<thinking", False, "", "<thinking"),
    ("<think>a < b </thin", False, "a < b </thin", ""),
    ("<think>a </think", False, "a </think", ""),
    ("<think>a</think>b</think>c", False, "a", "b</think>c"),
    ("", False, "", ""),
    (" ", False, "", " "),
    ("", True, "", ""),
]


def test_reasoning_is_what_stands_between_its_tags_at_the_beginning() -> None:
    for text, begun, reasoning, answer in SPLIT:
        length = text.find("</think>") + len("</think>") if "</think>" in text else len(text)
        for size in (1, 2, 3, 5, 100):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            for pieces_and_end in (pieces or [""], [*pieces, ""]):
                assert read(pieces_and_end, begun=begun) == (reasoning, answer, 0 if answer == text else length)


def test_only_what_may_become_a_tag_or_white_space_at_an_end_is_held_back() -> None:
    reader = AnswerReader(thinking=TAGS)
    returned = [
        [part.text for part in reader.read(piece, done=False) if isinstance(part, Reasoning | Text)]
        for piece in ["<think>", "\n", "Hm", ".\n", "a <", "b", "</th", "ink>", "\n", "Yes", "\n"]
    ]
    assert returned == [[], [], ["Hm"], ["."], ["\na"], [" <b"], [], [], [], ["Yes"], ["\n"]]


def test_the_tags_are_those_of_the_chat_template() -> None:
    for template, tags in (
        (QWEN, TAGS),
        (ALWAYS, TAGS),
        (tiny_models.CHATML, None),
        ("[THINK]{{ x }}[/THINK]", ThinkingTags("[THINK]", "[/THINK]")),
        ("{{ '<|START_THINKING|><|END_THINKING|>' }}", ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>")),
    ):
        assert thinking_tags(template) == tags


def prompt_of(template: str, **fields: Any) -> str:
    """The prompt that a template renders."""
    request = parse_body({"messages": MESSAGES, **fields}, ChatRequest)
    return ChatTemplate(template, bos="", eos="").prompt(request)


def test_thinking_is_off_by_its_switches_and_where_a_grammar_holds_from_the_first_token() -> None:
    switches: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"response_format": {"type": "json_object"}},
        {"grammar": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}},
    ]
    for fields in switches:
        assert prompt_of(QWEN, **fields) == prompt_of(QWEN) + "<think>\n\n</think>\n\n"


def test_the_reasoning_of_earlier_turns_is_given_to_the_template() -> None:
    earlier = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert "<|assistant|><think>\nHm.\n</think>\n\nYes.\n" in prompt_of(QWEN, messages=[earlier, *MESSAGES])


PIECES = [b"<think>", b"</think>", b"a", b" ", b"\n", b"<", b"b", b"c"]


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    """A server whose prompts open the reasoning, and whose tokens are tags and letters."""
    monkeypatch.setattr(FakeVocabulary, "piece", lambda _self, token: PIECES[token % len(PIECES)])
    return FrontEnd(chat_template=ALWAYS)


def test_a_chat_has_reasoning_content_beside_its_content_streamed_or_not(thinking: FrontEnd) -> None:
    for seed in range(3):
        fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 40, "seed": seed, "ignore_eos": True}
        plain = thinking.post({**fields, "reasoning_format": "none"}, "v1/chat/completions")
        whole = thinking.post(fields, "v1/chat/completions")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = thinking.answered({**fields, **options}, "v1/chat/completions")
        text = thinking.answer(plain)["choices"][0]["message"]["content"]
        message, usage = thinking.answer(whole)["choices"][0]["message"], thinking.answer(whole)["usage"]
        before, found, after = text.partition("</think>")
        assert found
        assert message.get("reasoning_content", "") == before.strip()
        assert message["content"] == after.lstrip()
        tokens = len(re.findall("|".join(piece.decode() for piece in PIECES), before + found))
        assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens
        events = thinking.events(stream)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "")
        assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == tokens


def test_an_answer_that_follows_a_grammar_has_no_reasoning_even_if_the_prompt_opens_one(thinking: FrontEnd) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 20, "response_format": {"type": "json_object"}, "ignore_eos": None}
    message = thinking.ask(fields, "v1/chat/completions")["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"]


def test_a_model_whose_template_has_no_tags_has_no_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeVocabulary, "piece", lambda _self, token: PIECES[token % len(PIECES)])
    answer = FrontEnd().ask({"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True}, "v1/chat/completions")
    assert "reasoning_tokens" not in answer["usage"]["completion_tokens_details"]
    assert len(re.findall("<think>|</think>|.", answer["choices"][0]["message"]["content"], re.DOTALL)) == 40


def test_tags_that_are_control_tokens_are_read_by_their_names() -> None:
    assert control_tokens(TAGS, Pieces([b"a"], ["<think>"])) == {1: "<think>"}
