"""How many bytes of JSON a response takes so far: TorchServe holds it whole, beside those of its neighbours."""

from __future__ import annotations

import json

from specserve.engine.base import Vocabulary
from specserve.errors import RequestError
from specserve.sequence import TokenScore
from specserve.serving.openai.logprobs import entry, spelling

# Of one response. Making 8 MiB of them takes up to 0.5 s in which no round begins (benchmarks/worst_cases.py), and
# TorchServe holds them with those of neighbours (max_response_size in config/config.properties).
MAX_RESPONSE_BYTES = 8 * 2**20
# As long as a float is written, and what stands around it, or an offset.
_NUMBER = -123.45678901234567
_AROUND = 4


class ResponseSize:
    """An upper bound of one response, counted as its tokens come, in all its answers.

    Args:
        vocabulary: of the target.
        chat: whether scores have the form of v1/chat/completions, where tokens are spelled as bytes too.
        choices: how many answers show the prompt's scores.
        begun: bytes that are known beforehand.
        most: bytes; beyond them the request is refused.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        chat: bool,
        choices: int = 1,
        begun: int = 0,
        most: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._choices = choices
        self._most = most
        self.bytes = begun
        self._known: dict[int, int] = {}

    def add_text(self, piece: bytes) -> None:
        """A token's text.

        Raises:
            RequestError: 400; the response has become too large.
        """
        self._add(len(json.dumps(piece.decode("utf-8", errors="replace"))) - 2)

    def add_score(self, score: TokenScore) -> None:
        """A token's log-probability and those beside it.

        Raises:
            RequestError: 400; the response has become too large.
        """
        self._add(self._scored(score))

    def add_prompt_score(self, score: TokenScore) -> None:
        """The same of a token of the prompt.

        Raises:
            RequestError: 400; the response has become too large.
        """
        self._add(self._choices * self._scored(score))

    def _scored(self, score: TokenScore) -> int:
        # On v1/completions the token stands beside the alternatives and among them.
        tokens = [score.token, score.token, *(token for token, _ in score.top)]
        return sum(map(self._entry, tokens))

    def _entry(self, token: int) -> int:
        known = self._known.get(token)
        if known is None:
            name = spelling(token, self._vocabulary)
            form = entry(token, _NUMBER, self._vocabulary) if self._chat else {name: _NUMBER}
            known = self._known[token] = len(json.dumps(form)) + _AROUND
        return known

    def _add(self, count: int) -> None:
        self.bytes += count
        if self.bytes > self._most:
            raise RequestError(
                f"The response takes more than {self._most // 2**20} MB: ask for fewer answers, tokens or "
                "log-probabilities.",
                code="response_too_large",
            )
