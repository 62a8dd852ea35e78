"""The fields of requests that say how tokens are sampled, and what they mean."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from specserve.api.body import Body, Items, Text, at_most
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SamplingParams

# Entries of lists of tokens and of `bad_words` (SECURITY.md).
MAX_TOKENS = 1024
_MAX_WORDS = 64
_INT64 = 2**63
# vLLM and llama.cpp take this seed for "choose one".
_ANY_SEED = -1

Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_TOKENS)]
# llama.cpp's [token or text, bias]; false is "never".
BiasPair = Annotated[list[bool | float | Text], Field(min_length=2, max_length=2)]
BiasPairs = Annotated[Items[BiasPair], Field(max_length=MAX_TOKENS)]
StopString = Annotated[Text, Field(max_length=1000)]
Tokens = Annotated[Items[int], Field(max_length=MAX_TOKENS)]


class SamplingFields(Body):
    """The fields about sampling; null is the same as leaving one out."""

    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Biases | BiasPairs | None = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None
    bad_words: Annotated[Items[StopString], Field(max_length=_MAX_WORDS)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    min_tokens: int | None = Field(default=None, ge=0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = False

    def sampling_params(self, vocabulary: Vocabulary) -> SamplingParams:
        """Return how tokens are sampled; end tokens that are ignored never are.

        Raises:
            RequestError: 400; a field names something that is no token.
        """
        ends, stop_tokens = vocabulary.end_tokens(), self.stop_token_ids or []
        check_tokens("stop_token_ids", stop_tokens, vocabulary)
        check_tokens("allowed_token_ids", self.allowed_token_ids or [], vocabulary)
        never = [(token, -math.inf) for token in ends] if self.ignore_eos else []
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=None if self.seed == _ANY_SEED else self.seed,
            logit_bias=(*self._biases(vocabulary), *never),
            allowed_tokens=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens or 0,
            end_tokens=(*ends, *stop_tokens) if self.min_tokens else (),
            repetition_penalty=self.repetition_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
        )

    def _biases(self, vocabulary: Vocabulary) -> list[tuple[int, float]]:
        """Return the biases by token; in llama.cpp's pairs also of all tokens of a text, and false forbids a token."""
        given = self.logit_bias or {}
        result: list[tuple[int, float]] = []
        for name, bias in given.items() if isinstance(given, dict) else given:
            if isinstance(name, str) and isinstance(given, list):
                tokens = vocabulary.encode(name, begin=False)
            else:
                tokens = [_token_id(name, vocabulary)]
            is_bias = not isinstance(bias, str) and bias is not True and -100 <= bias <= 100
            if isinstance(bias, str) or not is_bias or len(result) + len(tokens) > MAX_TOKENS:
                sentence = (
                    f"Pairs of 'logit_bias' have a bias from -100 to 100 or false, and {MAX_TOKENS} tokens at most."
                )
                raise RequestError.invalid("logit_bias", sentence)
            result += [(token, -math.inf if bias is False else bias) for token in tokens]
        return result

    def _bad_words(self, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
        """Return the words as tokens, both at the beginning of a text and after a space, as vLLM forbids them."""
        spelled = [space + word.lstrip() for word in self.bad_words or () for space in ("", " ")]
        forms = dict.fromkeys(tuple(vocabulary.encode(form, begin=False)) for form in spelled)
        return tuple(filter(None, forms))


def _token_id(name: str | float, vocabulary: Vocabulary) -> int:
    """Return the token that a key of `logit_bias` names."""
    digits = str(name).removesuffix(".0")
    if digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) < vocabulary.size:
        return int(digits)
    sentence = f"'logit_bias' names tokens by their ids, 0 to {vocabulary.size - 1}; '{digits}' is none."
    raise RequestError.invalid("logit_bias", sentence)


def check_tokens(param: str, tokens: list[int], vocabulary: Vocabulary) -> None:
    """Refuse ids that are no tokens by a 400 that names their field."""
    if any(not 0 <= token < vocabulary.size for token in tokens):
        raise RequestError.invalid(param, f"Token ids must lie between 0 and {vocabulary.size - 1}.")
