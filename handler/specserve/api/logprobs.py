"""Log-probabilities in OpenAI's forms: tokens as text, with their offsets; and how many bytes they take at most."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import TokenScore

# Bytes of one response that are expected at most when it is asked for. It may take twice as many: to write 16 MiB of
# JSON takes up to a second without a round (benchmarks/worst_cases.py), and TorchServe keeps it with those of other
# requests in memory (max_response_size in config/config.properties).
MAX_RESPONSE_BYTES = 8 * 2**20
# Bytes of JSON at most for a token with its log-probability, beside its name, and for each byte of the name: twelve are
# two escapes, or one and a number in a list.
_ENTRY_BYTES, _NAME_BYTES = 90, 12


class Position(NamedTuple):
    token: int
    score: TokenScore | None  # which only the first token of a prompt lacks
    offset: int  # in the choice's text, in characters


def most_bytes(positions: Sequence[Position], vocabulary: Vocabulary) -> int:
    """Return how many bytes of JSON these tokens and their alternatives take at most."""
    alternatives = [token for position in positions if position.score for token, _ in position.score.top]
    names = (vocabulary.name(token) for token in [*(position.token for position in positions), *alternatives])
    return sum(_ENTRY_BYTES + _NAME_BYTES * len(name) for name in names)


def check_size(n_bytes: int) -> None:
    """Raise a 400 instead of writing a response that takes many more bytes than were expected."""
    if n_bytes > 2 * MAX_RESPONSE_BYTES:
        raise RequestError(
            "The response becomes too large: ask for fewer answers, tokens or log-probabilities.",
            code="response_too_large",
        )


def completion_logprobs(positions: Sequence[Position], vocabulary: Vocabulary, *, top: int) -> dict[str, Any]:
    """Return the form of v1/completions; with `top` 0 it has no alternatives."""
    scores = [position.score for position in positions]
    return {
        "tokens": [_spelling(position.token, vocabulary) for position in positions],
        "token_logprobs": [score and score.logprob for score in scores],
        "top_logprobs": [score and _best(score, vocabulary) for score in scores] if top else None,
        "text_offset": [position.offset for position in positions],
    }


def chat_logprobs(positions: Sequence[Position], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the form of v1/chat/completions, with all alternatives that were kept."""
    content = [
        _entry(score.token, score.logprob, vocabulary)
        | {"top_logprobs": [_entry(token, logprob, vocabulary) for token, logprob in score.top]}
        for _, score, _ in positions
        if score is not None
    ]
    return {"content": content, "refusal": None}


def _best(score: TokenScore, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the most probable tokens and the output token; of two with the same text, the more probable one."""
    best: dict[str, float] = {}
    for token, logprob in [*score.top, (score.token, score.logprob)]:
        best.setdefault(_spelling(token, vocabulary), logprob)
    return best


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.name(token)
    return {"token": name.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(name)}


def _spelling(token: int, vocabulary: Vocabulary) -> str:
    """Spell a token as text, and a part of a character in bytes, as OpenAI does."""
    name = vocabulary.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def offsets_in(text: str, tokens: list[int], vocabulary: Vocabulary) -> list[int]:
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
