"""A response has a limit in bytes: by what is expected of it when it is asked for, and by what it comes to."""

import json
from typing import Any

import pytest

from constraints import Pieces
from fake_engine import FakeVocabulary
from front_end import CHATS, FrontEnd, says
from specserve.api import logprobs
from specserve.api.logprobs import Position, chat_logprobs, completion_logprobs, most_bytes
from specserve.api.parse import parse_body
from specserve.api.prompt import Tokenizer
from specserve.api.request_schema import ChatRequest
from specserve.errors import RequestError
from specserve.sequence import TokenScore
from test_requests import CONFIG, VOCABULARY, resolved, sequences_of

# Tokens that differ in JSON: 128 spaces, a four-byte character, half of one, a letter, and characters to escape.
PIECES = [b" " * 128, "🙂".encode(), b"\xf0\x9f", b"a", b'"\\\n' * 20, bytes(range(1, 30))]
LONG = Pieces([PIECES[token % len(PIECES)] for token in range(199)])


def test_no_log_probabilities_take_more_bytes_than_are_counted() -> None:
    for top in (0, 5, 20):
        positions = []
        for token in range(60):
            score = TokenScore(token, -12.345678901234567 * token, [(token + i, -1.0 / 3 - i) for i in range(top)])
            positions.append(Position(token, score, 128 * token))
        for written in (chat_logprobs(positions, LONG), completion_logprobs(positions, LONG, top=top)):
            assert len(json.dumps(written)) <= most_bytes(positions, LONG) + 100


def test_a_response_that_comes_to_more_than_the_limit_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeVocabulary, "piece", LONG.piece)
    monkeypatch.setattr(FakeVocabulary, "name", LONG.name)
    monkeypatch.setattr(logprobs, "MAX_RESPONSE_BYTES", 2**19)
    spaces = [token for token in range(199) if not token % len(PIECES)]
    body = {**says("hi"), "n": 4, "max_tokens": 60, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    for stream in (False, True):
        front_end = FrontEnd()
        large = front_end.post({**body, "stream": stream, "allowed_token_ids": spaces}, CHATS)
        assert front_end.ask({**body, "n": 1, "max_tokens": 4}, CHATS)["choices"]
        answer = front_end.events(large)[-1] if stream else front_end.answer(large)
        assert answer["error"]["code"] == "response_too_large"
        assert len(front_end.text(large)) < 2**20


def test_a_response_that_is_expected_to_be_too_large_is_refused_at_once() -> None:
    wide, vast = (CONFIG.model_copy(update={"context_length": length}) for length in (4096, 200_000))
    scored: dict[str, Any] = {"max_tokens": 4000, "logprobs": 5}
    echo: dict[str, Any] = {"echo": True, "max_tokens": 0}
    for fields, config, param in (
        ({**scored, "prompt": ["a"] * 128}, wide, "logprobs"),
        ({**echo, "prompt": "\N{GRINNING FACE}" * 6_000, "n": 128}, vast, "echo"),
        ({**echo, "prompt": " " * 30_000, "logprobs": 0, "n": 4}, vast, "logprobs"),
        ({"prompt": "a", "n": 128, "max_tokens": 10_000}, vast, "max_tokens"),
    ):
        with pytest.raises(RequestError, match="may take more than 8 MB") as caught:
            sequences_of(fields, config)
        assert caught.value.param == param
    assert len(sequences_of({**scored, "prompt": ["a"] * 4}, wide)) == 4
    assert len(sequences_of({**echo, "prompt": " " * 100_000, "n": 8}, vast)) == 8
    assert len(sequences_of({**echo, "prompt": " " * 30_000, "logprobs": 0, "n": 3}, vast)) == 3


def test_an_answer_without_a_limit_is_as_long_as_its_response_has_room() -> None:
    config = CONFIG.model_copy(update={"context_length": 32768})

    def most(**fields: Any) -> int:
        request = parse_body({**says("a"), **fields}, ChatRequest)
        prompt = Tokenizer(VOCABULARY, config).chat(request, lambda *_: "a")
        [sequence, *_] = resolved(request, [prompt], config)
        return sequence.max_tokens

    assert most() == most(logprobs=True) == 32767
    assert 10_000 < most(logprobs=True, top_logprobs=5) < 32767
    assert 4_000 < most(logprobs=True, top_logprobs=20) < 6_000
    assert 400 < most(logprobs=True, top_logprobs=20, n=10) < 600
