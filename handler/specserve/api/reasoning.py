"""Splits what a model writes into its reasoning and its answer, as the text comes."""

from __future__ import annotations

from typing import NamedTuple

from specserve.api.answer import AnswerReader, Part, Reasoning
from specserve.engine.base import Vocabulary

_WHITESPACE = " \t\r\n"


class ThinkingTags(NamedTuple):
    """What a model writes before and after its reasoning."""

    begin: str
    end: str

    def names(self, vocabulary: Vocabulary) -> dict[int, str]:
        """Return the tags that are control tokens, which have no text."""
        encoded = {tag: vocabulary.encode(tag, special=True, begin=False) for tag in self}
        single = {tokens[0]: tag for tag, tokens in encoded.items() if len(tokens) == 1}
        return {token: tag for token, tag in single.items() if not vocabulary.piece(token)}


# Of Qwen3, DeepSeek-R1 and many others; of Magistral, Command A and Seed-OSS.
_TAGS = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingTags("<seed:think>", "</seed:think>"),
)


def thinking_tags(template: str) -> ThinkingTags | None:
    """Return the tags that a chat template knows, if it knows any."""
    return next((tags for tags in _TAGS if tags.end in template), None)


class ReasoningReader:
    """Reads the reasoning at the beginning of an answer, and leaves what follows to an `AnswerReader`.

    White space at both ends of the reasoning belongs to the tags. Held back is only what may become a tag, or such
    white space: so the parts say the same, whatever pieces the text comes in.

    Args:
        tags: around the reasoning; None if there is none to read.
        begun: whether the prompt ends with the first one.
        answer: reads what follows.
    """

    def __init__(self, tags: ThinkingTags | None, answer: AnswerReader, *, begun: bool) -> None:
        self._tags = tags
        self._answer = answer
        self._begun = begun
        self._held = ""
        # Whether there was reasoning, and whether anything of it, or of the answer, was returned.
        self._thought = self._said = False
        # Characters of the text up to the end of the reasoning.
        self.length = 0

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._answer.calls

    @property
    def is_within_call(self) -> bool:
        """Whether the arguments of the last call are not complete by now."""
        return self._answer.is_within_call

    def read(self, text: str, *, done: bool) -> list[Part]:
        """Return what is new.

        Args:
            text: what was generated since the last call.
            done: whether it is the last of the answer, so that nothing may be held back.
        """
        if self._tags is None:
            return self._read_answer(text, done=done)
        self._held += text
        if not self._begun:
            stripped = self._held.lstrip(_WHITESPACE)
            if self._tags.begin.startswith(stripped) and not done and stripped != self._tags.begin:
                return []
            if not stripped.startswith(self._tags.begin):
                return self._read_rest(done=done)
            self.length += len(self._held) - len(stripped) + len(self._tags.begin)
            self._held, self._begun = stripped[len(self._tags.begin) :], True
        reasoning, found, rest = self._held.partition(self._tags.end)
        self.length += (len(reasoning) + len(found)) if found or done else 0
        if found:
            self._thought, self._held = True, rest
            return [*self._reasoning(reasoning.rstrip(_WHITESPACE)), *self._read_rest(done=done)]
        kept = len(reasoning) if done else self._certain(reasoning)
        self.length += 0 if done else kept
        self._held = reasoning[kept:]
        return self._reasoning(reasoning[:kept])

    def _certain(self, reasoning: str) -> int:
        """Return how many characters are reasoning whatever follows."""
        end = "" if self._tags is None else self._tags.end
        begun = next((n for n in range(min(len(end), len(reasoning)), 0, -1) if reasoning.endswith(end[:n])), 0)
        return len(reasoning[: len(reasoning) - begun].rstrip(_WHITESPACE))

    def _reasoning(self, text: str) -> list[Part]:
        text = text if self._said else text.lstrip(_WHITESPACE)
        self._said = self._said or bool(text)
        return [Reasoning(text)] if text else []

    def _read_rest(self, *, done: bool) -> list[Part]:
        """Read what is held as the answer, and from now on all."""
        held, self._held, self._tags, self._said = self._held, "", None, False
        return self._read_answer(held, done=done)

    def _read_answer(self, text: str, *, done: bool) -> list[Part]:
        if self._thought and not self._said:
            text = text.lstrip(_WHITESPACE)
            self._said = bool(text)
        return self._answer.read(text, done=done)
