"""Prompts as tokens: the tokenizer, with the limits of what it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from specserve.api.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from specserve.api.sampling_fields import check_tokens
from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError

# A message, a tool or variables, as the chat template gets them, and what is done to each before.
Part = dict[str, Any]
Prepare = Callable[[Part], Part]
# Characters of private use: a text that has some of them leaves others.
_PRIVATE_USE = range(0xF0000, 0x110000)

# Bytes per token, on average over a whole text: a text with more is tokenized in part first, and one with more than the
# longest tokens have is not tokenized, which takes more than linear time.
BYTES_PER_TOKEN, _LONGEST_TOKEN = 8, 128


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and as the text that `echo` returns."""

    tokens: list[int]
    text: str


class PromptTooLong(RequestError):
    """The context cannot hold a prompt; agents know OpenAI's sentence, and shorten the conversation.

    Args:
        param: the field of the prompt.
        most: tokens of prompt and answer.
        tokens: of the prompt, or `at_least` so many.
    """

    def __init__(self, param: str, most: int, tokens: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your {param} resulted in "
            f"{'at least ' * at_least}{tokens} tokens. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )
        # The prompt leaves room for one token of the answer.
        self.most = min(most, tokens - 1)
        self.tokens = tokens


class Tokenizer:
    """Tokenizes prompts; one that cannot fit is refused before it is tokenized as a whole."""

    def __init__(self, vocabulary: Vocabulary, config: HandlerConfig) -> None:
        self._vocabulary = vocabulary
        self._most = config.context_length
        self._control_tokens = config.control_tokens

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """Tokenize the prompts of v1/completions; with a suffix they get the model's fill-in-the-middle form.

        Raises:
            RequestError: 400; a prompt is too long, a token id is out of range, or the model cannot fill in the middle.
        """
        suffix = None if request.suffix is None else self._tokens(request.suffix, "suffix", begin=False)
        return [self._prompt(prompt, suffix, request) for prompt in request.prompts]

    def _prompt(self, prompt: str | list[int], suffix: list[int] | None, request: CompletionRequest) -> Prompt:
        vocabulary, text = self._vocabulary, prompt
        begin = suffix is None and request.add_special_tokens is not False
        whole = self._tokens(prompt, "prompt", special=True, begin=begin) if isinstance(prompt, str) else prompt
        tokens = self._cut(whole, request)
        if not isinstance(text, str) or len(tokens) < len(whole):
            if len(tokens) > self._most:
                raise PromptTooLong("prompt", self._most, len(tokens))
            check_tokens("prompt", tokens, vocabulary)
            text = b"".join(map(vocabulary.piece, tokens)).decode("utf-8", errors="replace")
        if suffix is not None:
            between = vocabulary.infill(tokens, suffix)
            if between is None:
                raise RequestError.invalid(
                    "suffix", "This model has no tokens for filling in the middle, so it cannot use a 'suffix'."
                )
            tokens = between
        return Prompt(self._not_empty(tokens, "prompt"), text)

    def _cut(self, tokens: list[int], request: GenerationRequest) -> list[int]:
        """Return the last tokens of a prompt, as many as the request keeps; with -1 those that leave room to answer."""
        kept = request.truncate_prompt_tokens
        if kept is None:
            return tokens
        kept = max(1, self._most - max(1, request.limit or 1)) if kept == -1 else kept
        return tokens[max(0, len(tokens) - kept) :]

    def chat(self, request: ChatRequest, render: Callable[[ChatRequest, Prepare], str]) -> Prompt:
        """Tokenize the prompt that a chat template renders.

        Raises:
            RequestError: 400; it is too long, or it is empty and the model needs at least one token.
        """
        parts: list[Part] = []

        def kept(part: Part) -> Part:
            parts.append(part)
            return part

        text = render(request, kept)
        tokens = self._tokens(text, "messages", special=True)
        names = self._control_names(tokens)
        plain = json.dumps([part for part in parts if self._is_plain(part)], ensure_ascii=False)
        if spelled := [name for name in names if _in_json(name) in plain]:
            taken = frozenset(text)
            free = (character for character in map(chr, _PRIVATE_USE) if character not in taken)
            places = dict(zip(spelled, free, strict=False))

            def replaced(part: Part) -> Part:
                return _replaced(part, places) if self._is_plain(part) else part

            tokens = self._with_plain(render(request, replaced), names, places)
        return Prompt(self._not_empty(self._cut(tokens, request), "messages"), text)

    def _is_plain(self, part: Part) -> bool:
        """Whether names of control tokens are plain text in a part of a chat."""
        return self._control_tokens == "none" or (self._control_tokens == "messages" and part.get("role") == "tool")

    def _control_names(self, tokens: Iterable[int]) -> list[str]:
        """Return the names of the control tokens among these, the longest first."""
        vocabulary = self._vocabulary
        names = [vocabulary.name(token).decode(errors="replace") for token in {*tokens} if not vocabulary.piece(token)]
        return sorted(filter(None, names), key=len, reverse=True)

    def _with_plain(self, text: str, names: Iterable[str], places: Mapping[str, str]) -> list[int]:
        """Tokenize a text with characters in the places of names that are plain text.

        The text between two control tokens is tokenized by itself, with these names or without.
        """
        spelled = str.maketrans({place: name for name, place in places.items()})
        stretches = re.split(f"({'|'.join(map(re.escape, names))})", text)
        tokens: list[int] = []
        for is_plain, group in groupby(stretches, lambda stretch: stretch != stretch.translate(spelled)):
            joined = "".join(group).translate(spelled)
            tokens += self._vocabulary.encode(joined, special=not is_plain, begin=not tokens)
        return tokens

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and answer."""
        return self._most

    def part(self, text: str, most: int, *, keeps_end: bool) -> list[int]:
        """Tokenize the end or the beginning of a part of a prompt, at most so many tokens; without control tokens."""
        characters = BYTES_PER_TOKEN * max(0, most)
        part = text[max(0, len(text) - characters) :] if keeps_end else text[:characters]
        tokens = self._vocabulary.encode(part, begin=False)
        return tokens[max(0, len(tokens) - most) :] if keeps_end else tokens[:most]

    def _tokens(self, text: str, param: str, *, special: bool = False, begin: bool = True) -> list[int]:
        """Tokenize a text; one with too many bytes is refused, and of a long one the beginning is tried first."""
        try:
            n_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            # A chat template may print what is no field of text, such as the id of a call.
            raise RequestError.invalid(param, f"Invalid value for '{param}': it is not valid Unicode.") from error
        if n_bytes > _LONGEST_TOKEN * self._most:
            raise PromptTooLong(param, self._most, self._most + 1, at_least=True)
        beginning = text[: BYTES_PER_TOKEN * self._most]
        if len(beginning) < len(text):
            least = len(self._vocabulary.encode(beginning, special=special, begin=begin))
            # Twice as many, since the beginning may be cut inside a word.
            if least > 2 * self._most:
                raise PromptTooLong(param, self._most, least // 2, at_least=True)
        return self._vocabulary.encode(text, special=special, begin=begin)

    def _not_empty(self, tokens: list[int], param: str) -> list[int]:
        """Return the tokens; instead of none, the model's start token."""
        if tokens:
            return tokens
        start = self._vocabulary.bos_token()
        if start is None:
            raise RequestError("The prompt is empty; this model needs at least one token.", param=param)
        return [start]


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _replaced(part: Part, places: Mapping[str, str]) -> Part:
    """Return a part with the names in all its texts replaced."""
    written = json.dumps(part, ensure_ascii=False)
    for name, place in places.items():
        written = written.replace(_in_json(name), place)
    result: Part = json.loads(written)
    return result
