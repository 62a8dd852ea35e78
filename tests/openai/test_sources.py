"""`sources` gives the drafter or target of every piece of the output, and the pieces join to the output."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from constraints import Pieces
from front_end import ASCII_ONLY, FrontEnd
from specserve.core.text_sequence import TextParams, TextSequence
from specserve.sequence import SamplingParams, Source, SpeculationParams
from test_detokenizer import split

WITH_SOURCES = {"sources": True}
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {key: value for key, value in BODY.items() if key != "prompt"}
CHAT["messages"] = [{"role": "user", "content": "hello"}]


def generation_of(pieces: list[bytes], stops: list[str]) -> TextSequence:
    """A sequence of at most these tokens that keeps their sources."""
    options: Any = {"max_tokens": len(pieces) + 1, "keeps_sources": True}
    return TextSequence([0], SamplingParams(), SpeculationParams(), Pieces(pieces), TextParams(stops), **options)


def text_of(event: Any) -> str:
    """The text of a chunk, on either route."""
    choice = event["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def joined(sources: list[list[str]]) -> str:
    return "".join(piece for piece, _ in sources)


@given(
    st.text(alphabet="ab🙂é世", max_size=20),
    st.lists(st.integers(0, 100)),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_the_source_of_a_character_is_that_of_the_token_with_its_last_byte(
    text: str, cuts: list[int], stops: list[str], rounds: list[int]
) -> None:
    pieces = [piece for piece in split(text.encode(), cuts) if piece]
    names: list[Source] = [("model", "lookup", "target")[index % 3] for index in range(len(pieces))]
    by_byte = [name for piece, name in zip(pieces, names, strict=True) for _ in piece]
    ends = [len(text[: index + 1].encode()) - 1 for index in range(len(text))]
    sequence = generation_of(pieces, stops)
    found: list[tuple[str, Source]] = []
    output = ""
    while sequence.generated < len(pieces) and not sequence.done:
        new = slice(sequence.generated, sequence.generated + rounds.pop())
        sequence.tokens += list(range(len(pieces)))[new]
        sequence.sources += names[new]
        sequence.read_new_tokens()
        released = sequence.take_text()
        by_source = sequence.by_source()
        assert "".join(piece for piece, _ in by_source) == released
        assert all(piece for piece, _ in by_source)
        output += released
        found += by_source
    assert text.startswith(output)
    assert [name for piece, name in found for _ in piece] == [by_byte[end] for end in ends[: len(output)]]
    assert len(sequence.sources) == sequence.generated


def test_an_incomplete_last_character_has_the_source_of_the_last_token() -> None:
    sequence = generation_of([b"a", b"\xf0\x9f"], [])
    sequence.max_tokens = 2
    sequence.tokens += [0, 1]
    sequence.sources += ["model", "target"]
    sequence.read_new_tokens()
    assert sequence.take_text() == "a\ufffd"
    assert sequence.by_source() == [("a", "model"), ("\ufffd", "target")]


@pytest.mark.parametrize(
    ("route", "echo"), [("v1/completions", False), ("v1/completions", True), ("v1/chat/completions", False)]
)
def test_the_pieces_of_a_chunk_join_to_its_text(route: str, *, echo: bool) -> None:
    """Half of the fake model's tokens are bytes of multi-byte characters, most of them in invalid sequences."""
    front_end = FrontEnd()
    body = CHAT if "chat" in route else {**BODY, "echo": echo}
    plain = front_end.answered({**body, "stream": True}, route)
    text = "".join(map(text_of, front_end.events(plain)))
    for stops in ([], [text[3:6]], [text[20:22], text[20:25] + "\0"]):
        fields = {**body, "stop": stops, "speculation": WITH_SOURCES}
        stream, whole = (front_end.post({**fields, "stream": stream}, route) for stream in (True, False))
        front_end.run()
        events = front_end.events(stream)
        assert [joined(event["choices"][0]["sources"]) for event in events] == [*map(text_of, events)]
        streamed = "".join(map(text_of, events))
        assert text.startswith(streamed)
        sources = front_end.answer(whole)["choices"][0]["sources"]
        assert joined(sources) == streamed
        assert (sources[0] == ["hello", "prompt"]) is echo


def test_no_piece_is_lost_where_text_is_held_back_since_a_call_may_follow() -> None:
    front_end = FrontEnd(context_length=1024)
    tools = [{"type": "function", "function": {"name": "read"}}]
    # Whitespace and the beginning of a tag are held back, in most rounds all that is new.
    held = list(map(ord, " \n<a"))
    body = {**CHAT, "tools": tools, "allowed_token_ids": held, "speculation": WITH_SOURCES}
    stream = front_end.post({**body, "stream": True}, "v1/chat/completions")
    whole = front_end.answered(body, "v1/chat/completions")
    events = front_end.events(stream)
    text = "".join(map(text_of, events))
    assert len(text) == 40
    assert any(joined(event["choices"][0]["sources"]) != text_of(event) for event in events), "nothing was held back"
    assert "".join(joined(event["choices"][0]["sources"]) for event in events) == text
    choice = front_end.answer(whole)["choices"][0]
    assert joined(choice["sources"]) == text == choice["message"]["content"]


def test_accepted_prediction_tokens_and_the_targets_have_different_sources() -> None:
    front_end = FrontEnd()
    body = {**BODY, "logit_bias": ASCII_ONLY, "max_tokens": 13}
    text = front_end.ask(body)["choices"][0]["text"]
    options = {"mode": "fixed", "gamma": 3, "drafter": "prediction", **WITH_SOURCES}
    wrong = text[:6] + ("?" if text[6] != "?" else "!") + text[7:]
    found = []
    for content in (text, wrong):
        prediction = {"type": "content", "content": content}
        answer = front_end.ask({**body, "prediction": prediction, "speculation": options})
        found.append(answer["choices"][0]["sources"])
        assert joined(found[-1]) == text
    # The prefill gives the first token; then every round gives three accepted ones and a bonus token.
    assert [source for _, source in found[0]] == ["prediction" if position % 4 else "target" for position in range(13)]
    assert [source for _, source in found[1][5:7]] == ["prediction", "target"]


def test_sources_agree_with_the_counts_of_the_speculation_object() -> None:
    for drafter in ("auto", "model", "lookup"):
        front_end = FrontEnd()
        options = {"mode": "fixed", "gamma": 3, "drafter": drafter, **WITH_SOURCES}
        answer = front_end.ask({**BODY, "logit_bias": ASCII_ONLY, "max_tokens": 120, "speculation": options})
        counts = Counter(name for _, name in answer["choices"][0]["sources"])
        accepted = {name: tally["accepted"] for name, tally in answer["speculation"]["drafters"].items()}
        assert counts.total() == 120
        assert {name: count for name, count in accepted.items() if count} == {
            name: count for name, count in counts.items() if name != "target"
        }
        assert drafter == "lookup" or counts["model"] > 0
