"""The route infill, as llama.cpp's plug-ins for editors use it: the prompt, its limits, and llama.cpp's response."""

import json
import re
from itertools import pairwise, product
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engine import FakeVocabulary
from front_end import FrontEnd
from specserve.api.infill import InfillRequest, indented, infill_prompt
from specserve.api.parse import parse_body
from specserve.api.prompt import Tokenizer
from specserve.errors import RequestError
from test_requests import CONFIG

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(200, 205)
NAMES = {PREFIX: "<PRE>", SUFFIX: "<SUF>", MIDDLE: "<MID>", REPOSITORY: "<REPO>", FILE: "<FILE>"}
# What llama.vim sends (autoload/llama.vim of ggml-org/llama.vim).
VIM: dict[str, Any] = {"input_prefix": "def f():\n", "input_suffix": "\nf()\n", "prompt": "    ret", "n_predict": 8}
VIM |= {"input_extra": [{"text": "a = 1\n", "time": [1, 2], "filename": "a.py"}], "n_indent": 0, "stream": False}
VIM |= {"top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True}
VIM |= {"t_max_prompt_ms": 500, "t_max_predict_ms": 1500}
FIELDS = ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"]
VIM["response_fields"] = [*FIELDS, "nothing"]
WARM = {**VIM, **dict.fromkeys(("input_prefix", "input_suffix", "prompt"), ""), "samplers": []}
WARM |= {"n_predict": 0, "temperature": 0.0, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]}


class Infilling(FakeVocabulary):
    """Bytes, with tokens to fill in the middle after the end token."""

    def __init__(self, *, separators: bool = True) -> None:
        super().__init__(200)
        self.separators = separators

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int]:
        return [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE]

    def file_separators(self) -> tuple[int | None, int | None]:
        return (REPOSITORY, FILE) if self.separators else (None, None)


def prompt_of(context_length: int = 4096, *, separators: bool = True, **fields: Any) -> str:
    vocabulary = Infilling(separators=separators)
    tokenizer = Tokenizer(vocabulary, CONFIG.model_copy(update={"context_length": context_length}))
    prompt = infill_prompt(parse_body({**VIM, **fields}, InfillRequest), tokenizer, vocabulary)
    return "".join(NAMES.get(token) or vocabulary.piece(token).decode() for token in prompt.tokens)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    """A server whose model can fill in the middle; its tokens are bytes."""
    monkeypatch.setattr(FakeVocabulary, "infill", lambda _self, prefix, suffix: [1, *prefix, 2, *suffix, 3])
    return FrontEnd()


def filled(front_end: FrontEnd, **fields: Any) -> Any:
    return front_end.ask({**VIM, "response_fields": None, "ignore_eos": True, **fields}, "infill")


def test_the_prompt_is_llama_cpps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `format_prompt_infill` of llama.cpp's server; nothing in the texts is read as a control token."""
    encode = Mock(side_effect=FakeVocabulary(200).encode)
    monkeypatch.setattr(FakeVocabulary, "encode", encode)
    gap = "<PRE>def f():\n    ret<SUF>\nf()\n<MID>"
    assert prompt_of() == f"<REPO>myproject\n<FILE>a.py\na = 1\n<FILE>filename\n{gap}"
    assert prompt_of(input_extra=None) == f"<REPO>myproject\n<FILE>filename\n{gap}"
    two = [{"text": "b"}, {"text": "c", "filename": "c.py"}]
    assert prompt_of(input_extra=two) == f"<REPO>myproject\n<FILE>tmp\nb<FILE>c.py\nc<FILE>filename\n{gap}"
    assert prompt_of(separators=False) == f"\n\n--- snippet ---\n\na = 1\n{gap}"
    assert {(call.kwargs.get("special", False), call.kwargs["begin"]) for call in encode.mock_calls} == {(False, False)}
    vocabulary = FakeVocabulary(200)
    with pytest.raises(RequestError, match="no tokens for filling in the middle"):
        infill_prompt(parse_body(VIM, InfillRequest), Tokenizer(vocabulary, CONFIG), vocabulary)


def test_what_is_too_long_is_cut_at_the_ends_that_are_far_from_the_gap() -> None:
    lines = "".join(f"{number:06}\n" for number in range(10_000))
    extra = [{"text": lines, "filename": f"{name}.py"} for name in "abc"]
    for context_length in (4096, 512, 64):
        prompt = prompt_of(context_length, input_prefix=lines, input_suffix=lines, input_extra=extra)
        others, before, after = re.split("<PRE>|<SUF>", prompt)
        assert f"{lines}    ret".endswith(before)
        assert before.endswith("    ret")
        assert after.endswith("<MID>")
        assert lines.startswith(after.removesuffix("<MID>"))
        local = min(2048, context_length * 3 // 4)
        assert len(before) == 3 * (local // 4)
        assert len(re.sub("<[A-Z]+>", "-", prompt)) <= context_length - min(16, context_length // 4)
        assert others.endswith("<FILE>filename\n") or context_length == 64
    # The last file is the nearest, so of the others the first ones are left out.
    prompt = prompt_of(input_extra=extra)
    assert "b.py" not in prompt
    assert prompt.count("0009999\n".removeprefix("0")) == 1


def test_the_response_is_llama_cpps(front_end: FrontEnd) -> None:
    answer, again = filled(front_end), filled(front_end)
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    timings = answer["timings"]
    assert answer["tokens_predicted"] == timings["predicted_n"] == len(answer["content"]) == 8
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 8, abs=0.001)
    assert (again["content"], again["timings"]["prompt_n"]) == (answer["content"], 1)
    assert filled(front_end, stop=answer["content"][3])["stop_type"] == "word"
    assert [*filled(front_end, response_fields=VIM["response_fields"])] == FIELDS


def streamed(front_end: FrontEnd, **fields: Any) -> list[Any]:
    request = front_end.answered({**VIM, "stream": True, "ignore_eos": True, **fields}, "infill")
    return [json.loads(line.removeprefix("data: ")) for line in front_end.text(request).strip().split("\n\n")]


def test_a_request_for_no_token_prefills_its_prompt_for_the_next(front_end: FrontEnd) -> None:
    assert front_end.ask(WARM, "infill") == {}
    beginning = len("\n\n--- snippet ---\n\na = 1\n")
    assert filled(front_end)["timings"]["cache_n"] >= beginning


def test_a_request_without_a_temperature_is_greedy_and_may_sample(front_end: FrontEnd) -> None:
    assert len({filled(front_end, temperature=None)["content"] for _ in range(3)}) == 1
    assert len({filled(front_end, temperature=2, samplers=None)["content"] for _ in range(5)}) > 1


def test_text_ends_before_a_line_of_less_indentation(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is cancelled then; whatever pieces a stream comes in."""
    monkeypatch.setattr(FakeVocabulary, "piece", lambda _self, token: b"\n   ab\n  "[token % 9 :][:1])
    ended = 0
    for prompt, indent in product("abcd", (1, 2)):
        fields = {"prompt": prompt, "n_predict": 60}
        whole = filled(front_end, **fields)["content"]
        expected = cut_by_indentation(whole, indent)
        ended += expected != whole
        cut = filled(front_end, **fields, n_indent=indent)
        assert cut["content"] == expected
        events = streamed(front_end, **fields, n_indent=indent)
        assert "".join(event["content"] for event in events) == expected
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["tokens_predicted"] == cut["tokens_predicted"]
        assert front_end.sequences() == (0, 0)
    assert ended


def cut_by_indentation(text: str, indent: int) -> str:
    """A text up to its first line after the first, which goes on where the cursor is, that is indented by less."""
    found = re.search(rf"(?<=\n)[ \t]{{0,{indent - 1}}}(?![ \t])(?=.|\n)", text, re.DOTALL)
    return text[: found.end()] if found else text


@given(st.text(" \t\nab", max_size=30), st.lists(st.integers(0, 30), max_size=6), st.integers(1, 4))
def test_where_a_text_is_cut_does_not_depend_on_its_pieces(text: str, cuts: list[int], indent: int) -> None:
    content = ""
    for begin, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        checked = len(content)
        content = indented(content + text[begin:end], indent, checked)
        if len(content) < end:
            break
    assert content == cut_by_indentation(text, indent)
    assert indented("a\n" + "\t" * 2000 + "b", 10**9, 0) == "a\n" + "\t" * 2000 + "b"


def test_no_field_of_the_plug_ins_is_named_as_ignored_and_others_are(front_end: FrontEnd) -> None:
    requests = [front_end.answered(body, "infill") for body in (VIM, WARM, {**VIM, "colour": "red"})]
    assert [front_end.headers[request].get("x-specserve-ignored") for request in requests] == [None, None, "colour"]


def test_an_invalid_field_is_a_400_that_names_it(front_end: FrontEnd) -> None:
    invalid = {"input_prefix": 5, "input_extra": {}, "prompt": [1], "n_predict": "a", "mirostat": 1, "n_probs": 3}
    for name, value in (*invalid.items(), ("n", 2), ("n", True)):
        status, error = front_end.refusal({**VIM, name: value}, "infill")
        assert (status, error["param"]) == (400, name)
    status, error = front_end.refusal({**VIM, "input_extra": [{"text": 5}]}, "infill")
    assert (status, error["param"]) == (400, "input_extra[0].text")
