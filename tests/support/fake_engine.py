"""An engine for tests: a fixed random model over a small vocabulary, and a KV cache that detects misuse."""

from collections.abc import Iterable
from functools import cache
from itertools import chain, count, islice

import numpy as np
from numpy.typing import NDArray

from specserve.engine.base import FloatArray, Row
from specserve.errors import EngineError


class FakeEngine:
    """A model whose next-token logits are a pure function of the last two tokens.

    `blend` 0 gives the target, 1 an unrelated model, and values in between a draft that often agrees with the target.
    A row whose position is not the cached length of its slot, or whose token is none, is an `EngineError`, and so is a
    pass whose tokens do not fit into their slot, or into `n_cells` beside those of all slots; copies share cells,
    alternatives take none. Every forward pass overwrites the logits that the one before has returned. After
    `fail_after` more forward passes one raises an `EngineError`, after `poison_after` more one returns NaN logits; None
    is never.

    The "keys and values" of a token are the token, its position, and a hash of the tokens before it. So `load` notices
    those of another position or of another text.
    """

    def __init__(self, *, vocabulary: int, n_slots: int, n_cells: int | None = None, blend: float = 0.0) -> None:
        self.n_slots = n_slots
        self.slot_length = 4096
        self.n_cells = n_slots * self.slot_length if n_cells is None else n_cells
        self.max_rows = 256
        self.max_logits = 64
        self.max_alternatives = 8
        self.cache: list[list[int]] = [[] for _ in range(n_slots)]
        # By slot and position, the number of the token's cell.
        self._cells: list[list[int]] = [[] for _ in range(n_slots)]
        self._numbers = count()
        self.alternatives: dict[int, list[list[int]]] = {}
        self.decoded: list[Row] = []
        self.loaded_tokens = 0
        self.fail_after: int | None = None
        self.poison_after: int | None = None
        self.width = vocabulary
        self.token_bytes: int | None = 24
        self.rollback: int | None = None
        self._blend = blend
        self._returned = np.empty((0, vocabulary), np.float32)

    def cached_len(self, slot: int) -> int:
        return len(self.cache[slot])

    def kv_len(self, slots: Iterable[int]) -> int:
        return max(map(self.cached_len, slots), default=0)

    def logits(self, context: list[int]) -> FloatArray:
        """Return the logits after `context`, shape (vocabulary,)."""
        return _logits(tuple(context[-2:]), self.width, self._blend)

    def forward(self, rows: list[Row]) -> FloatArray:
        if self._is_due("fail_after"):
            raise EngineError("The fake engine was told to fail.")
        self._check(rows)
        self.alternatives.clear()
        self._returned.fill(np.nan)
        result = []
        for row in rows:
            self.decoded.append(row)
            context = self.cache[row.slot]
            if row.alternative:
                context = [*context[: row.position], row.token]
                self.alternatives.setdefault(row.slot, []).append(context)
            else:
                context.append(row.token)
                self._cells[row.slot].append(next(self._numbers))
            if row.wants_logits:
                result.append(self.logits(context))
        logits = np.stack(result) if result else np.empty((0, self.width), np.float32)
        if result and self._is_due("poison_after"):
            logits[:, 0] = np.nan
        self._returned = logits
        return logits

    def _check(self, rows: list[Row]) -> None:
        """Refuse rows that no engine can compute."""
        if not 0 < len(rows) <= self.max_rows:
            raise EngineError(f"A forward pass takes 1 to {self.max_rows} rows, not {len(rows)}.")
        if sum(row.wants_logits for row in rows) > self.max_logits:
            raise EngineError(f"A forward pass gives at most {self.max_logits} rows of logits.")
        if sum(row.alternative for row in rows) > self.max_alternatives:
            raise EngineError(f"A forward pass takes at most {self.max_alternatives} alternatives.")
        lengths = [len(tokens) for tokens in self.cache]
        for row in rows:
            if row.alternative and len(self.cache[row.slot]) <= row.position < lengths[row.slot]:
                continue
            if row.alternative or row.position != lengths[row.slot] or not 0 <= row.token < self.width:
                raise EngineError(f"Slot {row.slot} holds {lengths[row.slot]} tokens: {row} is none that can follow.")
            lengths[row.slot] += 1
        if max(lengths) > self.slot_length:
            raise EngineError(f"A slot holds at most {self.slot_length} tokens.")
        added = sum(not row.alternative for row in rows)
        if sum(map(len, self._cells)) + added <= self.n_cells:
            return
        if len(set(chain.from_iterable(self._cells))) + added > self.n_cells:
            raise EngineError(f"{added} tokens do not fit into the cache.")

    def _is_due(self, fault: str) -> bool:
        """Count down the forward passes before a fault, which happens once."""
        remaining = getattr(self, fault)
        setattr(self, fault, None if remaining in {None, 0} else remaining - 1)
        return bool(remaining == 0)

    def truncate(self, slot: int, length: int) -> None:
        del self.cache[slot][length:], self._cells[slot][length:]
        self.alternatives.pop(slot, None)

    def adopt(self, slot: int, number: int) -> None:
        self.cache[slot] = self.alternatives.pop(slot)[number]
        del self._cells[slot][len(self.cache[slot]) - 1 :]
        self._cells[slot].append(next(self._numbers))

    def copy(self, source: int, destination: int, length: int) -> None:
        if length > len(self.cache[source]):
            raise EngineError(f"Slot {source} holds {len(self.cache[source])} tokens, {length} asked for.")
        self.cache[destination] = self.cache[source][:length]
        self._cells[destination] = self._cells[source][:length]

    def save(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return the tokens, positions and hashes, shape (end - start, 24)."""
        tokens = self.cache[slot]
        if self.token_bytes is None or not 0 <= start <= end <= len(tokens):
            raise EngineError(f"Slot {slot} holds {len(tokens)} tokens; {start} to {end} cannot be saved.")
        rows = [(tokens[n], n, hash(tuple(tokens[:n]))) for n in range(start, end)]
        return np.array(rows, np.int64).reshape(-1, 3).view(np.uint8)

    def load(self, slot: int, saved: NDArray[np.uint8]) -> None:
        if saved.shape[1:] != (self.token_bytes,):
            raise EngineError("These keys and values are not of this engine.")
        tokens = list(self.cache[slot])
        if len(tokens) + len(saved) > self.slot_length:
            raise EngineError(f"Slot {slot} has no room for {len(saved)} more tokens.")
        if len(set(chain.from_iterable(self._cells))) + len(saved) > self.n_cells:
            raise EngineError(f"{len(saved)} tokens do not fit into the cache.")
        for token, position, before in np.ascontiguousarray(saved).view(np.int64).tolist():
            assert position == len(tokens), f"keys of position {position} at {len(tokens)}"
            assert before == hash(tuple(tokens)), f"keys of another text at {position}"
            tokens.append(token)
        self.cache[slot] = tokens
        self.loaded_tokens += len(saved)
        self._cells[slot] += islice(self._numbers, len(saved))
        self.alternatives.pop(slot, None)

    def close(self) -> None:
        pass


@cache
def _logits(context: tuple[int, ...], width: int, blend: float) -> FloatArray:
    own, other = (np.random.default_rng([i, width, *context]).normal(size=width) for i in (0, 1))
    return (2 * ((1 - blend) * own + blend * other)).astype(np.float32)


class FakeVocabulary:
    """Tokens are the bytes 0 to size - 2; the last token is the end token."""

    template: str | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def chat_template(self) -> str | None:
        return self.template

    def bos_text(self) -> str:
        return ""

    eos_text = bos_text

    def encode(self, text: str, *, special: bool = False, begin: bool = True) -> list[int]:
        del special, begin
        return [byte % (self.size - 1) for byte in text.encode("utf-8")]

    def piece(self, token: int) -> bytes:
        if self.is_end_token(token):
            return b""
        return bytes([token if self.size > 128 else 97 + token])

    def name(self, token: int) -> bytes:
        return self.piece(token) or b"<end>"

    def end_tokens(self) -> list[int]:
        return [token for token in range(self.size) if self.is_end_token(token)]

    def infill(self, prefix: list[int], suffix: list[int]) -> list[int] | None:
        del prefix, suffix
        return None

    def file_separators(self) -> tuple[int | None, int | None]:
        return None, None

    def is_end_token(self, token: int) -> bool:
        return token == self.size - 1

    def bos_token(self) -> int | None:
        return None


class NoEndToken(FakeVocabulary):
    """A vocabulary in which no token ends an answer."""

    def is_end_token(self, token: int) -> bool:
        del token
        return False
