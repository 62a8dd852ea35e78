"""Tokenizes prompts, within limits."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from specserve.api.body import Json
from specserve.api.request_schema import ChatRequest, CompletionRequest, check_tokens
from specserve.config import HandlerConfig
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError

# Is applied to each message, tool and set of variables before the chat template gets it.
Prepare = Callable[[Json], Json]
# Private-use characters that stand in for names of control tokens that have to stay plain text.
_PLACES = range(0x100000, 0x10FFFE)
_HIDDEN = re.compile("[\U00100000-\U0010fffd]")

# Average bytes per token. If a text has more, its beginning is tokenized first; a text with more than the longest token
# has cannot fit and is not tokenized at all, since that takes more than linear time.
BYTES_PER_TOKEN, _LONGEST_TOKEN = 8, 128


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    text: str  # that `echo` returns


class PromptTooLong(RequestError):
    """The context cannot hold a prompt; agents recognise OpenAI's sentence and shorten the conversation."""

    def __init__(self, param: str, context_length: int, tokens: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. However, your {param} resulted in "
            f"{'at least ' * at_least}{tokens} tokens. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )
        # The prompt leaves room for one token of the answer.
        self.most = min(context_length, tokens - 1)
        self.tokens = tokens


class Tokenizer:
    """Tokenizes prompts; one that cannot fit is refused before it is tokenized as a whole."""

    def __init__(self, vocabulary: Vocabulary, config: HandlerConfig) -> None:
        self._vocabulary = vocabulary
        self.context_length = config.context_length  # the most tokens of prompt and answer
        self._control_tokens = config.control_tokens

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """Tokenize the prompts of v1/completions; with a suffix they get the model's fill-in-the-middle form.

        Raises:
            RequestError: 400; a prompt is too long, a token id is out of range, or the model cannot fill in the middle.
        """
        suffix = None if request.suffix is None else self._tokens(request.suffix, "suffix", begin=False)
        return [self._prompt(prompt, suffix, request) for prompt in request.prompts]

    def _prompt(self, prompt: str | list[int], suffix: list[int] | None, request: CompletionRequest) -> Prompt:
        vocabulary = self._vocabulary
        if isinstance(prompt, str):
            begin = suffix is None and request.add_special_tokens
            text, tokens = prompt, self._tokens(prompt, "prompt", special=True, begin=begin)
        else:
            if len(prompt) > self.context_length:
                raise PromptTooLong("prompt", self.context_length, len(prompt))
            check_tokens("prompt", prompt, vocabulary)
            text, tokens = b"".join(map(vocabulary.piece, prompt)).decode("utf-8", errors="replace"), prompt
        if suffix is not None:
            if (between := vocabulary.infill(tokens, suffix)) is None:
                sentence = "This model has no tokens for filling in the middle, so it cannot use a 'suffix'."
                raise RequestError.invalid("suffix", sentence)
            tokens = between
        return Prompt(self._not_empty(tokens, "prompt"), text)

    def chat(self, request: ChatRequest, render: Callable[[ChatRequest, Prepare], str]) -> Prompt:
        """Tokenize the prompt that a chat template renders.

        Raises:
            RequestError: 400; it is too long, or it is empty and the model needs at least one token.
        """
        text = render(request, self._hide)
        shown = self._shown(text)
        tokens = self._tokens(shown, "messages", special=True)
        if shown != text:
            tokens = self._with_plain(text)
        return Prompt(self._not_empty(tokens, "messages"), shown)

    @cached_property
    def _places(self) -> dict[str, str]:
        """Names of control tokens, the longest first, and the characters that stand in for them."""
        vocabulary = self._vocabulary
        control = [token for token in range(vocabulary.size) if not vocabulary.piece(token)]
        names = {vocabulary.name(token).decode(errors="replace") for token in control} - {""}
        return dict(zip(sorted(names, key=lambda name: (-len(name), name)), map(chr, _PLACES), strict=False))

    def _hide(self, part: Json) -> Json:
        """Return a part of a chat with its plain-text names of control tokens replaced."""
        if self._control_tokens == "all" or (self._control_tokens == "messages" and part.get("role") != "tool"):
            return part
        written = json.dumps(part, ensure_ascii=False)
        for name, place in self._places.items():
            written = written.replace(json.dumps(name, ensure_ascii=False)[1:-1], place)
        hidden: Json = json.loads(written)
        return hidden

    def _shown(self, text: str) -> str:
        if not _HIDDEN.search(text):
            return text
        return text.translate({ord(place): name for name, place in self._places.items()})

    def _with_plain(self, text: str) -> list[int]:
        """Tokenize a text with replaced names, each stretch between two control tokens as a whole."""
        stretches = re.split(f"({'|'.join(map(re.escape, self._places))})", text)
        tokens: list[int] = []
        for is_plain, group in groupby(stretches, lambda stretch: bool(_HIDDEN.search(stretch))):
            stretch = self._shown("".join(group))
            tokens += self._vocabulary.encode(stretch, special=not is_plain, begin=not tokens)
        return tokens

    def part(self, text: str, most: int, *, keeps_end: bool) -> list[int]:
        """Tokenize the first or last `most` tokens of a part of a prompt, without control tokens."""
        characters = BYTES_PER_TOKEN * max(0, most)
        part = text[max(0, len(text) - characters) :] if keeps_end else text[:characters]
        tokens = self._vocabulary.encode(part, begin=False)
        return tokens[max(0, len(tokens) - most) :] if keeps_end else tokens[:most]

    def _tokens(self, text: str, param: str, *, special: bool = False, begin: bool = True) -> list[int]:
        try:
            n_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            # A chat template may print fields that are not validated as text, such as a call id.
            raise RequestError.invalid(param, f"Invalid value for '{param}': it is not valid Unicode.") from error
        if n_bytes > _LONGEST_TOKEN * self.context_length:
            raise PromptTooLong(param, self.context_length, self.context_length + 1, at_least=True)
        beginning = text[: BYTES_PER_TOKEN * self.context_length]
        if len(beginning) < len(text):
            least = len(self._vocabulary.encode(beginning, special=special, begin=begin))
            # Twice as many, since the beginning may be cut inside a word.
            if least > 2 * self.context_length:
                raise PromptTooLong(param, self.context_length, least // 2, at_least=True)
        return self._vocabulary.encode(text, special=special, begin=begin)

    def _not_empty(self, tokens: list[int], param: str) -> list[int]:
        if tokens:
            return tokens
        start = self._vocabulary.bos_token()
        if start is None:
            raise RequestError("The prompt is empty; this model needs at least one token.", param=param)
        return [start]
