"""The fields of requests that say how tokens are sampled, and what they mean."""

import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from specserve.api.body import Body, Items, Text, at_most
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import SamplingParams

_MAX_TOKENS = 1024  # in lists of tokens (SECURITY.md)
_INT64 = 2**63
# vLLM and llama.cpp take this seed for "choose one".
_ANY_SEED = -1

TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], at_most(_MAX_TOKENS)]
StopString = Annotated[Text, Field(max_length=1000)]
Tokens = Annotated[Items[int], Field(max_length=_MAX_TOKENS)]


class SamplingFields(Body):
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=_INT64 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1)
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: Tokens | None = None
    ignore_eos: bool = False

    def sampling_params(self, vocabulary: Vocabulary) -> SamplingParams:
        """Return how tokens are sampled; end tokens that are ignored never are.

        Raises:
            RequestError: 400; a field names something that is no token.
        """
        ends, stop_tokens = vocabulary.end_tokens(), self.stop_token_ids or []
        biases = [(int(token), bias) for token, bias in (self.logit_bias or {}).items()]
        check_tokens("stop_token_ids", stop_tokens, vocabulary)
        check_tokens("allowed_token_ids", self.allowed_token_ids or [], vocabulary)
        check_tokens("logit_bias", (token for token, _ in biases), vocabulary)
        return SamplingParams(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == _ANY_SEED else self.seed,
            logit_bias=(*biases, *((token, -math.inf) for token in ends if self.ignore_eos)),
            allowed_tokens=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            end_tokens=(*ends, *stop_tokens) if self.min_tokens else (),
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
        )


def check_tokens(param: str, tokens: Iterable[int], vocabulary: Vocabulary) -> None:
    """Refuse ids that are no tokens by a 400 that names their field."""
    if any(not 0 <= token < vocabulary.size for token in tokens):
        sentence = f"Token ids of '{param}' must lie between 0 and {vocabulary.size - 1}."
        raise RequestError.invalid(param, sentence)
