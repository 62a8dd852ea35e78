"""Reasoning is told apart from the answer, whatever pieces the text comes in, and can be switched off."""

import re
from typing import Any

import pytest

import tiny_models
from constraints import Pieces
from fake_engine import FakeVocabulary
from front_end import CHATS, FrontEnd, says, text_of
from specserve.api.answer import AnswerReader, Reasoning, Text
from specserve.api.call_formats import thinking_tags
from specserve.api.chat_template import ChatTemplate
from specserve.api.parse import parse_body
from specserve.api.request_schema import ChatRequest
from specserve.grammar.call_form import ThinkingTags
from specserve.grammar.tool_calls import control_tokens

TAGS = ThinkingTags("<think>", "</think>")
HELLO = says("Hello")
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
    reader, said = AnswerReader(thinking=TAGS, thinks_at_once=begun), {Reasoning: "", Text: ""}
    for index, piece in enumerate(pieces):
        for part in reader.read(piece, done=index == len(pieces) - 1):
            assert isinstance(part, Text) or (isinstance(part, Reasoning) and not said[Text])
            assert part.text
            said[type(part)] += part.text
    return said[Reasoning], said[Text], reader.reasoned


def test_reasoning_is_what_stands_between_its_tags_at_the_beginning() -> None:
    for text, begun, reasoning, answer in (
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
    ):
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


def prompt_of(**fields: Any) -> str:
    return ChatTemplate(QWEN, bos="", eos="").prompt(parse_body({**HELLO, **fields}, ChatRequest))


def test_thinking_is_off_by_its_switches_and_where_a_grammar_holds_from_the_first_token() -> None:
    fields: dict[str, Any]
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"response_format": {"type": "json_object"}},
        {"grammar": 'root ::= "a"'},
        {"structured_outputs": {"regex": "a"}},
    ):
        assert prompt_of(**fields) == prompt_of() + "<think>\n\n</think>\n\n"


def test_the_reasoning_of_earlier_turns_is_given_to_the_template() -> None:
    earlier = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert "<|assistant|><think>\nHm.\n</think>\n\nYes.\n" in prompt_of(messages=[earlier, *HELLO["messages"]])


PIECES = [b"<think>", b"</think>", b"a", b" ", b"\n", b"<", b"b", b"c"]


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    """A server whose prompts open the reasoning, and whose tokens are tags and letters."""
    monkeypatch.setattr(FakeVocabulary, "piece", lambda _self, token: PIECES[token % len(PIECES)])
    return FrontEnd(chat_template=ALWAYS)


def test_a_chat_has_reasoning_content_beside_its_content_streamed_or_not(thinking: FrontEnd) -> None:
    for seed in range(3):
        fields = {**HELLO, "max_tokens": 40, "seed": seed, "ignore_eos": True}
        stream = thinking.post({**fields, "stream": True, "stream_options": {"include_usage": True}}, CHATS)
        [plain] = thinking.ask({**fields, "reasoning_format": "none"}, CHATS)["choices"]
        whole = thinking.ask(fields, CHATS)
        message = whole["choices"][0]["message"]
        before, found, after = text_of(plain).partition("</think>")
        assert found
        assert message.get("reasoning_content", "") == before.strip()
        assert message["content"] == after.lstrip()
        events = thinking.events(stream)
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "")
        tokens = len(re.findall("|".join(piece.decode() for piece in PIECES), before + found))
        for usage in (whole["usage"], events[-1]["usage"]):
            assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens


def test_an_answer_that_follows_a_grammar_has_no_reasoning_even_if_the_prompt_opens_one(thinking: FrontEnd) -> None:
    fields = {**HELLO, "max_tokens": 20, "response_format": {"type": "json_object"}, "ignore_eos": None}
    message = thinking.ask(fields, CHATS)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"]


@pytest.mark.usefixtures("thinking")
def test_a_model_whose_template_has_no_tags_has_no_reasoning() -> None:
    answer = FrontEnd().ask({**HELLO, "max_tokens": 40, "ignore_eos": True}, CHATS)
    assert "reasoning_tokens" not in answer["usage"]["completion_tokens_details"]
    assert len(re.findall("<think>|</think>|.", text_of(answer["choices"][0]), re.DOTALL)) == 40


def test_tags_that_are_control_tokens_are_read_by_their_names() -> None:
    assert control_tokens(TAGS.texts, Pieces([b"a"], ["<think>"])) == {1: "<think>"}
