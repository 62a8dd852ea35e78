"""The size of a response is limited in bytes, for any tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fake_engine import FakeVocabulary
from front_end import FrontEnd
from specserve.api.logprobs import (
    MAX_RESPONSE_BYTES,
    ResponseSize,
    chat_logprobs,
    completion_logprobs,
    output_positions,
)
from specserve.api.response_schema import as_json
from specserve.core.generation import OutputToken
from specserve.sequence import TokenScore

# Tokens that differ in JSON: 128 spaces, a four-byte character, half of one, a letter, and characters to escape.
PIECES = [b" " * 128, "🙂".encode(), b"\xf0\x9f", b"a", b'"\\\n' * 20]


class LongTokens(FakeVocabulary):
    """A vocabulary whose tokens are long in JSON."""

    def piece(self, token: int) -> bytes:
        return b"" if self.is_end_token(token) else PIECES[0]

    def name(self, token: int) -> bytes:
        return self.piece(token)


class Pieces(FakeVocabulary):
    """A vocabulary whose tokens are PIECES in turn."""

    def piece(self, token: int) -> bytes:
        return PIECES[token % len(PIECES)]

    def name(self, token: int) -> bytes:
        return self.piece(token)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("top", [0, 5, 20])
def test_the_estimated_size_is_between_the_size_and_twice_the_size(top: int, *, chat: bool) -> None:
    vocabulary = Pieces(200)
    scores = [TokenScore(n, -12.345678901234567 * n, [(n + i, -1.0 / 3 - i) for i in range(top)]) for n in range(60)]
    tokens = [OutputToken(score, 128 * position) for position, score in enumerate(scores)]
    text = b"".join(vocabulary.piece(score.token) for score in scores).decode("utf-8", errors="replace")
    positions = output_positions(tokens)
    logprobs = chat_logprobs(positions, vocabulary) if chat else completion_logprobs(positions, vocabulary, top=top)
    size = ResponseSize(vocabulary, chat=chat)
    for score in scores:
        size.add_token(vocabulary.piece(score.token), score)
    actual = len(as_json({"text": text, "logprobs": logprobs}))
    assert actual - 100 <= size.bytes
    # On v1/completions alternatives with equal text are written once but counted each time.
    if chat or not top:
        assert size.bytes <= 2 * actual


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_exceeds_the_limit_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    front_end = FrontEnd()
    long_tokens: Any = LongTokens(200)
    monkeypatch.setattr(FakeVocabulary, "piece", long_tokens.piece)
    monkeypatch.setattr(FakeVocabulary, "name", long_tokens.name)
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "n": 8, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    large = front_end.post({**body, "stream": stream}, "v1/chat/completions")
    small = front_end.post({**body, "n": 1, "max_tokens": 4}, "v1/chat/completions")
    front_end.run()
    assert front_end.status[small] == 200
    if stream:
        assert front_end.events(large)[-1]["error"]["code"] == "response_too_large"
        assert len(front_end.text(large)) < 2 * MAX_RESPONSE_BYTES
    else:
        assert len(front_end.text(large)) <= MAX_RESPONSE_BYTES
        assert json.loads(front_end.text(large))["error"]["code"] == "response_too_large"


def test_prompt_scores_count_once_for_every_choice() -> None:
    score = TokenScore(0, -1.0, [])
    one, three = (ResponseSize(FakeVocabulary(200), chat=False, choices=n) for n in (1, 3))
    one.add_prompt_scores([score])
    three.add_prompt_scores([score])
    assert three.bytes == 3 * one.bytes > 0
