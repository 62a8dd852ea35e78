"""Log-probabilities in OpenAI's forms: tokens as text, with their offsets."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from specserve.engine.base import Vocabulary
from specserve.sequence import TokenScore
from specserve.serving.openai.response_schema import ChatLogprobs, CompletionLogprobs, TopLogprob


class OutputToken(NamedTuple):
    """A scored token, and the offset of its text in the output, in characters."""

    score: TokenScore
    offset: int


def completion_logprobs(
    tokens: Sequence[OutputToken], vocabulary: Vocabulary, *, top: int, shift: int = 0
) -> CompletionLogprobs:
    """The form of v1/completions; `shift` is added to the offsets, in characters."""
    return {
        "tokens": [spelling(score.token, vocabulary) for score, _ in tokens],
        "token_logprobs": [score.logprob for score, _ in tokens],
        "top_logprobs": [_best(score, vocabulary) for score, _ in tokens] if top else None,
        "text_offset": [shift + offset for _, offset in tokens],
    }


def prompt_logprobs(
    text: str, tokens: list[int], scores: Sequence[TokenScore], vocabulary: Vocabulary, *, top: int
) -> CompletionLogprobs:
    """The form of v1/completions for a prompt; its first token has no log-probability."""
    offsets = _offsets(text, tokens, vocabulary)
    rest = completion_logprobs(list(map(OutputToken, scores, offsets[1:])), vocabulary, top=top)
    return {
        "tokens": [spelling(tokens[0], vocabulary), *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": None if rest["top_logprobs"] is None else [None, *rest["top_logprobs"]],
        "text_offset": [offsets[0], *rest["text_offset"]],
    }


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both, concatenated."""
    tops = first["top_logprobs"], second["top_logprobs"]
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": None if tops[0] is None or tops[1] is None else tops[0] + tops[1],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def chat_logprobs(tokens: Sequence[OutputToken], vocabulary: Vocabulary) -> ChatLogprobs:
    """The form of v1/chat/completions."""
    return {
        "content": [
            {
                **entry(score.token, score.logprob, vocabulary),
                "top_logprobs": [entry(token, logprob, vocabulary) for token, logprob in score.top],
            }
            for score, _ in tokens
        ],
        "refusal": None,
    }


def _best(score: TokenScore, vocabulary: Vocabulary) -> dict[str, float]:
    """The most probable tokens and the output token; of two with the same text, the more probable one."""
    best: dict[str, float] = {}
    for token, logprob in [*score.top, (score.token, score.logprob)]:
        best.setdefault(spelling(token, vocabulary), logprob)
    return best


def entry(token: int, logprob: float, vocabulary: Vocabulary) -> TopLogprob:
    """A token with its log-probability, in the form of v1/chat/completions."""
    name = vocabulary.name(token)
    return {"token": name.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(name)}


def spelling(token: int, vocabulary: Vocabulary) -> str:
    """A token as text; a part of a character is spelled in bytes, as OpenAI does."""
    name = vocabulary.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _offsets(text: str, tokens: list[int], vocabulary: Vocabulary) -> list[int]:
    """The offset of each prompt token in the text; a token that the text does not show has length 0."""
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
