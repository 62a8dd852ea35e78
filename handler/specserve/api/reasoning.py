"""Splits what a model writes into its reasoning and its answer, as the text comes."""

from __future__ import annotations

from specserve.api.answer import AnswerReader, Part, Reasoning
from specserve.grammar.call_form import WHITESPACE, ThinkingTags

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
        answer: reads what follows.
        begun: whether the prompt ends with the first tag.
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
        self._held += text
        if self._tags is None:
            return self._read_answer(done=done)
        if not self._begun:
            begin = self._tags.opening(self._held)
            if begin is None and not done:
                return []
            if begin is None or begin < 0:
                return self._read_answer(done=done)
            self._begun, self.length, self._held = True, begin, self._held[begin:]
        reasoning, found, rest = self._held.partition(self._tags.end)
        if found:
            self.length += len(reasoning) + len(found)
            parts = self._reasoning(reasoning.rstrip(WHITESPACE))
            self._thought, self._said, self._held = True, False, rest
            return [*parts, *self._read_answer(done=done)]
        kept = len(reasoning) if done else self._certain(reasoning, self._tags.end)
        self.length += kept
        self._held = reasoning[kept:]
        return self._reasoning(reasoning[:kept])

    @staticmethod
    def _certain(reasoning: str, end: str) -> int:
        """Return how many characters are reasoning whatever follows."""
        begun = next((n for n in range(min(len(end), len(reasoning)), 0, -1) if reasoning.endswith(end[:n])), 0)
        return len(reasoning[: len(reasoning) - begun].rstrip(WHITESPACE))

    def _reasoning(self, text: str) -> list[Part]:
        text = text if self._said else text.lstrip(WHITESPACE)
        self._said = self._said or bool(text)
        return [Reasoning(text)] if text else []

    def _read_answer(self, *, done: bool) -> list[Part]:
        """Read what is held as the answer, and from now on all."""
        text, self._held, self._tags = self._held, "", None
        if self._thought and not self._said:
            text = text.lstrip(WHITESPACE)
            self._said = bool(text)
        return self._answer.read(text, done=done)
