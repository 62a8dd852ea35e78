"""`sources` gives the drafter or target of every piece of the output, and the pieces join to the output."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from constraints import Pieces
from front_end import ASCII_ONLY, CHATS, COMPLETIONS, FrontEnd, body_of, text_of
from specserve.core.text_sequence import TextParams, TextSequence
from specserve.sequence import SamplingParams, Source, SpeculationParams
from test_detokenizer import split

WITH_SOURCES = {"sources": True}
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
BODY, CHAT = body_of(COMPLETIONS, **GREEDY), body_of(CHATS, **GREEDY)


def generation_of(pieces: list[bytes], stops: list[str]) -> TextSequence:
    """A sequence of at most these tokens that keeps their sources."""
    options: Any = {"max_tokens": len(pieces) + 1, "keeps_sources": True}
    return TextSequence([0], SamplingParams(), SpeculationParams(), Pieces(pieces), TextParams(stops), **options)


def joined(choices: list[Any]) -> str:
    """The pieces of choices, or of chunks of one."""
    return "".join(piece for choice in choices for piece, _ in choice["sources"])


STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3)
ROUNDS = st.lists(st.integers(1, 4), min_size=60, max_size=60)


@given(st.text(alphabet="ab🙂é世", max_size=20), st.lists(st.integers(0, 100)), STOPS, ROUNDS)
def test_the_source_of_a_character(text: str, cuts: list[int], stops: list[str], rounds: list[int]) -> None:
    """It is that of the token with the character's last byte."""
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


def answered(front_end: FrontEnd, body: dict[str, Any], route: str) -> tuple[list[Any], Any]:
    stream, whole = (front_end.post({**body, "stream": stream}, route) for stream in (True, False))
    front_end.run()
    [choice] = front_end.answer(whole)["choices"]
    return [chunk for event in front_end.events(stream) for chunk in event["choices"]], choice


@pytest.mark.parametrize(("route", "echo"), [(COMPLETIONS, False), (COMPLETIONS, True), (CHATS, False)])
def test_the_pieces_of_a_chunk_join_to_its_text(route: str, *, echo: bool) -> None:
    """Half of the fake model's tokens are bytes of multi-byte characters, most of them in invalid sequences."""
    front_end = FrontEnd()
    body = CHAT if route == CHATS else {**BODY, "echo": echo}
    text = "".join(map(text_of, answered(front_end, body, route)[0]))
    for stops in ([], [text[3:6]], [text[20:22], text[20:25] + "\0"]):
        chunks, whole = answered(front_end, {**body, "stop": stops, "speculation": WITH_SOURCES}, route)
        assert [joined([chunk]) for chunk in chunks] == [*map(text_of, chunks)]
        assert text.startswith(joined(chunks))
        assert joined([whole]) == joined(chunks)
        assert (whole["sources"][0] == ["hello", "prompt"]) is echo


def test_no_piece_is_lost_where_text_is_held_back_since_a_call_may_follow() -> None:
    tools = [{"type": "function", "function": {"name": "read"}}]
    # Whitespace and the beginning of a tag are held back, in most rounds all that is new.
    held = list(map(ord, " \n<a"))
    body = {**CHAT, "tools": tools, "allowed_token_ids": held, "speculation": WITH_SOURCES}
    chunks, whole = answered(FrontEnd(context_length=1024), body, CHATS)
    text = "".join(map(text_of, chunks))
    assert len(text) == 40
    assert any(joined([chunk]) != text_of(chunk) for chunk in chunks), "nothing was held back"
    assert joined(chunks) == joined([whole]) == text == text_of(whole)


def test_accepted_prediction_tokens_and_the_targets_have_different_sources() -> None:
    front_end = FrontEnd()
    body = {**BODY, "logit_bias": ASCII_ONLY, "max_tokens": 13}
    text = front_end.ask(body)["choices"][0]["text"]
    options = {"mode": "fixed", "gamma": 3, "drafter": "prediction", **WITH_SOURCES}
    wrong = text[:6] + ("?" if text[6] != "?" else "!") + text[7:]
    found = []
    for content in (text, wrong):
        prediction = {"type": "content", "content": content}
        choices = front_end.ask({**body, "prediction": prediction, "speculation": options})["choices"]
        assert joined(choices) == text
        found.append([source for _, source in choices[0]["sources"]])
    # The prefill gives the first token; then every round gives three accepted ones and a bonus token.
    assert found[0] == ["prediction" if position % 4 else "target" for position in range(13)]
    assert found[1][5:7] == ["prediction", "target"]


def test_sources_agree_with_the_counts_of_the_speculation_object() -> None:
    for drafter in ("auto", "model", "lookup"):
        front_end = FrontEnd()
        options = {"mode": "fixed", "gamma": 3, "drafter": drafter, **WITH_SOURCES}
        answer = front_end.ask({**BODY, "logit_bias": ASCII_ONLY, "max_tokens": 120, "speculation": options})
        counts = Counter(name for _, name in answer["choices"][0]["sources"])
        accepted = Counter({name: tally["accepted"] for name, tally in answer["speculation"]["drafters"].items()})
        assert counts.total() == 120
        assert accepted == Counter({**counts, "target": 0})
        assert drafter == "lookup" or counts["model"] > 0
