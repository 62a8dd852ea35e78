"""Log-probabilities in OpenAI's forms: tokens as text, with their offsets; and how many bytes a response takes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specserve.api.prompt import Prompt
from specserve.api.response_schema import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from specserve.core.generation import OutputToken
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import TokenScore

# Of one response, in bytes. Writing 8 MiB of JSON takes up to 0.5 s without a round (benchmarks/worst_cases.py), and
# TorchServe keeps it with those of other requests in memory (max_response_size in config/config.properties).
MAX_RESPONSE_BYTES = 8 * 2**20
# A float of the greatest length in JSON, and the bytes of separators or of an offset beside a token.
_NUMBER = -123.45678901234567
_SEPARATORS = 4
# What stands in JSON around a piece of text and its source.
_SOURCE_BYTES = len(', ["", "prediction"]')


class ResponseSize:
    """Keeps an upper bound of the bytes of one response's JSON, while the tokens of all its sequences come.

    Args:
        vocabulary: the target's.
        chat: whether scores have the form of v1/chat/completions, which spells tokens as bytes too.
        sources: whether the text is repeated beside its sources.
        choices: how many choices repeat the prompt's scores.
        initial: bytes that are known in advance.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, chat: bool, sources: bool = False, choices: int = 1, initial: int = 0
    ) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._sources = sources
        self._choices = choices
        self.bytes = initial
        self._entry_bytes: dict[int, int] = {}

    def add_token(self, piece: bytes, score: TokenScore | None) -> None:
        """Add a token of the output.

        Raises:
            RequestError: 400; the response has become too large.
        """
        text = len(json.dumps(piece.decode("utf-8", errors="replace"))) - 2
        source = text + _SOURCE_BYTES if self._sources else 0
        self._add(text + source + (self._score_bytes(score) if score else 0))

    def add_prompt_scores(self, scores: Iterable[TokenScore]) -> None:
        """Add log-probabilities of the prompt; raises like `add_token`."""
        self._add(self._choices * sum(map(self._score_bytes, scores)))

    def _score_bytes(self, score: TokenScore) -> int:
        # v1/completions lists the token both beside the alternatives and among them.
        return sum(map(self._bytes_of, [score.token, score.token, *(token for token, _ in score.top)]))

    def _bytes_of(self, token: int) -> int:
        known = self._entry_bytes.get(token)
        if known is None:
            name = _spelling(token, self._vocabulary)
            form = _entry(token, _NUMBER, self._vocabulary) if self._chat else {name: _NUMBER}
            known = self._entry_bytes[token] = len(json.dumps(form)) + _SEPARATORS
        return known

    def _add(self, count: int) -> None:
        self.bytes += count
        if self.bytes > MAX_RESPONSE_BYTES:
            raise RequestError(
                f"The response takes more than {MAX_RESPONSE_BYTES // 2**20} MB: ask for fewer answers, tokens or "
                "log-probabilities.",
                code="response_too_large",
            )


class Position(NamedTuple):
    """A token of a choice, its score, which only the first of a prompt lacks, and its offset in characters."""

    token: int
    score: TokenScore | None
    offset: int


def output_positions(tokens: Iterable[OutputToken], shift: int = 0) -> list[Position]:
    """Return the positions of an output that begins at the offset `shift`."""
    return [Position(score.token, score, shift + offset) for score, offset in tokens]


def prompt_positions(prompt: Prompt, scores: list[TokenScore], vocabulary: Vocabulary) -> list[Position]:
    """Return the positions of an echoed prompt, of which all tokens but the first have scores."""
    offsets = _offsets(prompt.text, prompt.tokens, vocabulary)
    return list(map(Position, prompt.tokens, [None, *scores], offsets))


def completion_logprobs(positions: Sequence[Position], vocabulary: Vocabulary, *, top: int) -> CompletionLogprobs:
    """Return the form of v1/completions; with `top` 0 it has no alternatives."""
    scores = [position.score for position in positions]
    return CompletionLogprobs(
        tokens=[_spelling(position.token, vocabulary) for position in positions],
        token_logprobs=[None if score is None else score.logprob for score in scores],
        top_logprobs=[None if score is None else _best(score, vocabulary) for score in scores] if top else None,
        text_offset=[position.offset for position in positions],
    )


def chat_logprobs(positions: Sequence[Position], vocabulary: Vocabulary) -> ChatLogprobs:
    """Return the form of v1/chat/completions, with all alternatives that were kept."""
    content: list[TokenLogprob] = [
        {
            **_entry(score.token, score.logprob, vocabulary),
            "top_logprobs": [_entry(token, logprob, vocabulary) for token, logprob in score.top],
        }
        for _, score, _ in positions
        if score is not None
    ]
    return ChatLogprobs(content=content, refusal=None)


def _best(score: TokenScore, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the most probable tokens and the output token; of two with the same text, the more probable one."""
    best: dict[str, float] = {}
    for token, logprob in [*score.top, (score.token, score.logprob)]:
        best.setdefault(_spelling(token, vocabulary), logprob)
    return best


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> TopLogprob:
    """Return a token with its log-probability, in the form of v1/chat/completions."""
    name = vocabulary.name(token)
    return {"token": name.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(name)}


def _spelling(token: int, vocabulary: Vocabulary) -> str:
    """Spell a token as text, and a part of a character in bytes, as OpenAI does."""
    name = vocabulary.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _offsets(text: str, tokens: list[int], vocabulary: Vocabulary) -> list[int]:
    """Return where each prompt token begins in the text; one that the text does not show has length 0."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    begins = []
    at = 0
    for token in tokens:
        begins.append(at)
        name = vocabulary.name(token)
        # A control token is shown only if the text spells its name; SentencePiece adds a space before the first word.
        for form in (name, vocabulary.piece(token), name.lstrip(b" ")):
            state = decoder.getstate()
            shown = decoder.decode(form)
            if text.startswith(shown, at):
                at += len(shown)
                break
            decoder.setstate(state)
    return begins
