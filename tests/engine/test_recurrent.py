"""A model with a recurrent layer: the same texts with drafts and without, alone, side by side and after others."""

import json
import random
from typing import Any
from unittest.mock import patch

import llama_cpp
import numpy as np
import pytest

from pairs import KERNELS, PLAIN, Pair, TinyFiles, fixed_gamma
from specserve.core.memory import cache_bytes
from specserve.engine import recurrent
from specserve.engine.base import FloatArray, Row
from specserve.engine.llama_model import LlamaModel
from specserve.engine.recurrent import RecurrentEngine
from specserve.errors import ModelLoadError
from test_cache_walk import EngineWalk
from tiny_models import HYBRID, WIDTH

PROMPT = "The quick brown fox"
SLOTS, LENGTH, STATES, TOKENS = 5, 64, 3, 200


class Walk(EngineWalk):
    def __init__(self, model: LlamaModel, random: random.Random, *, shares_passes: bool = True) -> None:
        options = {"context_length": LENGTH, "threads": 1, "max_rows": LENGTH, "max_logits": LENGTH, "states": STATES}
        engine = RecurrentEngine(model, n_slots=SLOTS, **options)
        super().__init__(engine, RecurrentEngine(model, n_slots=1, **options), random)
        self._shares_passes = shares_passes

    def step(self) -> None:
        """A pass, after which some slots go back; or one goes back later, or leaves; or a copy."""
        random, slot = self._random, self._random.randrange(SLOTS)
        action = random.choice(["pass", "pass", "pass", "back", "leave", "copy"])
        if action == "pass":
            self._pass()
        elif action == "copy":
            source = random.choice([other for other in range(SLOTS) if other != slot])
            self._engine.copy(source, slot, len(self._tokens[source]))
            self._tokens[slot] = list(self._tokens[source])
        else:
            del self._tokens[slot][random.randint(-STATES, -1) if action == "back" else 0 :]
            self._engine.truncate(slot, len(self._tokens[slot]))
        # Where that is not possible, it is emptied.
        assert self._engine.cached_len(slot) in {0, len(self._tokens[slot])} or action == "pass"
        del self._tokens[slot][self._engine.cached_len(slot) :]

    def _pass(self) -> None:
        """Of equal or different numbers of rows, in the order of slots or another."""
        random = self._random
        slots, count = random.sample(range(SLOTS), random.randint(1, SLOTS)), random.randint(1, STATES + 2)
        counts = {slot: random.choice([count, count, 1, random.randint(1, STATES + 2)]) for slot in slots}
        rows: list[Row] = []
        for slot in slots:
            if len(self._tokens[slot]) + counts[slot] > LENGTH:
                self._tokens[slot] = []
                self._engine.truncate(slot, 0)
            start = len(self._tokens[slot])
            self._tokens[slot] += [random.randrange(TOKENS) for _ in range(counts[slot])]
            rows += [Row(token, slot, n, random.random() < 0.8) for n, token in enumerate(self._tokens[slot])][start:]
        if random.random() < 0.3:
            # As several sequences are interleaved.
            rows.sort(key=lambda row: row.position)
        expected = {slot: self._anew(self._tokens[slot]) for slot in slots}
        wanted = [row for row in rows if row.wants_logits]
        with patch.object(llama_cpp, "llama_decode", wraps=llama_cpp.llama_decode) as decode:
            found = self._engine.forward(rows)
        single = list(counts.values()).count(1)
        assert decode.call_count == len(counts) - max(0, single - 1) * self._shares_passes, counts
        for row, logits in zip(wanted, found, strict=True):
            assert np.array_equal(logits, expected[row.slot][row.position]), (counts, row)
            self.compared += 1
        for slot in slots:
            back = random.choice([0, 0, 1, random.randint(0, counts[slot])])
            is_possible = back <= min(self._engine.rollback or 0, counts[slot] - 1)
            del self._tokens[slot][len(self._tokens[slot]) - back if is_possible else 0 :]
            self._engine.truncate(slot, self._engine.cached_len(slot) - back)
            assert self._engine.cached_len(slot) == len(self._tokens[slot]), (counts, slot, back)

    def _anew(self, tokens: list[int]) -> FloatArray:
        """Logits after each token."""
        self._plain.truncate(0, 0)
        return self._plain.forward([Row(token, 0, n, wants_logits=True) for n, token in enumerate(tokens)])


@pytest.fixture(scope="module")
def pair(files: TinyFiles) -> Pair:
    return Pair(files.config(HYBRID, "qwen2"))


@pytest.mark.skipif(
    KERNELS == "off", reason="with llama.cpp's kernels logits depend on rows: unset SPECSERVE_TEST_KERNELS"
)
def test_several_sequences_in_a_pass_have_the_logits_of_each_alone(pair: Pair) -> None:
    """After any numbers of rows, rejected ones, copies and restarts."""
    target: Any = pair.vocabulary
    walk = Walk(target, random.Random(5))
    for _ in range(400):
        walk.step()
    assert walk.compared > 1000
    walk.close()


def test_sequences_share_each_pass_without_drafts_until_one_decodes_alone(pair: Pair) -> None:
    prediction = {"type": "content", "content": PROMPT}
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "prediction": prediction}
    for speculation in ({}, fixed_gamma(3)):
        scheduler, sequences = pair.scheduler(), []
        for max_tokens, prompt in ((30, PROMPT), (30, "def accept(p, q):"), (60, PROMPT + " jumps")):
            sequences.append(pair.sequence(prompt, max_tokens=max_tokens, **fields, speculation=speculation))
            scheduler.submit(sequences[-1])
        passes = []
        while scheduler.running != 1 or scheduler.queued:
            with patch.object(llama_cpp, "llama_decode", wraps=llama_cpp.llama_decode) as decode:
                scheduler.run_round()
            passes.append(decode.call_count)
        assert passes[-25:] == [1] * 25
        assert not any(sequence.stats.drafted for sequence in sequences)
        while scheduler.busy:
            scheduler.run_round()
        assert sequences[-1].stats.drafted > 0


@pytest.mark.parametrize("gamma", [1, 3, 7, 15])
def test_each_token_has_the_largest_logit_however_many_are_drafted(pair: Pair, gamma: int) -> None:
    fields = {"max_tokens": 90, "temperature": 0}
    text = pair.complete(PROMPT * 3, **fields, speculation=PLAIN).text
    prediction = {"type": "content", "content": text[:40] + PROMPT + text[40:]}
    answer = pair.complete(PROMPT * 3, **fields, prediction=prediction, speculation=fixed_gamma(gamma)).sequence
    assert 0 < answer.stats.accepted < answer.stats.drafted
    assert max(answer.stats.gammas) == min(gamma, 7)
    engine = pair.models.target.engine
    engine.truncate(0, 0)
    for position, token in enumerate(answer.tokens[:-1]):
        [logits] = engine.forward([Row(token, 0, position, wants_logits=True)])
        following = answer.tokens[position + 1]
        assert position + 1 < answer.prompt_length or logits[following] >= logits.max() - 0.05 * (KERNELS == "off")


def test_slots_that_share_a_state_do_not_go_back_and_nor_is_a_state_copied_after_that(pair: Pair) -> None:
    pair.scheduler()
    cache = pair.models.target
    for kept, copied, lengths in ((4, 4, [0, 4]), (3, 3, [3, 0])):
        cache.truncate(0, 0)
        cache.forward([Row(30 + position, 0, position, wants_logits=False) for position in range(4)])
        cache.truncate(0, kept)
        cache.copy(0, 2, copied)
        cache.truncate(0, 3)
        assert [cache.length(slot) for slot in (0, 2)] == lengths
        assert cache.check()


def test_a_client_that_leaves_changes_nobodys_text(files: TinyFiles) -> None:
    """Nor that of the request after it, which gets its slot."""
    pair = Pair(files.config(HYBRID).model_copy(update={"sequences": 2}))
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    prompts = [PROMPT, "def accept(p, q):", PROMPT + " jumps"]
    alone = [pair.complete(prompt, **fields).sequence.answer for prompt in prompts]
    for rounds in (1, 8, 12):
        scheduler = pair.scheduler()
        stays, leaves, follows = (pair.sequence(prompt, **fields) for prompt in prompts)
        scheduler.submit(stays)
        scheduler.submit(leaves)
        for _ in range(rounds):
            scheduler.run_round()
        scheduler.cancel(leaves)
        scheduler.submit(follows)
        while scheduler.busy:
            scheduler.run_round()
        assert 0 <= len(leaves.answer) < 60
        assert [stays.answer, leaves.answer, follows.answer] == [alone[0], alone[1][: len(leaves.answer)], alone[2]]


def test_only_a_whole_cached_text_is_a_prefix(pair: Pair) -> None:
    fields = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    scheduler, prompt, sequences = pair.scheduler(), pair.vocabulary.encode(PROMPT), []
    for kept in (0, -20, 0):  # of the text before, without its end
        sequences.append(pair.sequence(prompt, **fields))
        scheduler.submit(sequences[-1])
        while scheduler.busy:
            scheduler.run_round()
        prompt = [*sequences[-1].tokens[: kept or None], 50, 60]
    assert [sequence.cached_tokens for sequence in sequences] == [0, len(sequences[0].tokens) - 1, 0]
    for sequence in sequences:
        assert pair.complete(sequence.prompt, **fields).sequence.answer == sequence.answer


def test_a_context_that_only_measures_is_freed_if_a_pass_fails(
    files: TinyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_decode", lambda *_: -1)
    model = LlamaModel(files.path(HYBRID, "target"))
    with (
        patch.object(llama_cpp, "llama_free", wraps=llama_cpp.llama_free) as free,
        pytest.raises(ModelLoadError, match="its first forward pass failed"),
    ):
        recurrent.earlier_states(model, 3)
    assert free.call_count == 1
    model.close()


def test_as_many_states_are_kept_as_their_memory_allows_and_all_are_counted(
    files: TinyFiles, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = pair.models.target.engine
    target: Any = pair.vocabulary
    engine.truncate(0, 0)
    engine.forward([Row(1, 0, 0, wants_logits=False)])
    state = llama_cpp.llama_state_seq_get_size_ext(engine._context, 0, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
    assert state > 100
    # Keys and values of one layer, with half as many heads; llama.cpp adds each token's position.
    assert 0 <= recurrent.cell_values(target) - WIDTH <= 16
    assert cache_bytes(pair.config, target, None)[1] == 3 * (1 + 7) * state
    monkeypatch.setattr(recurrent, "_STATES", 3 * state * 5 // 2)
    fewer = Pair(files.config(HYBRID)).models
    assert fewer.target.engine.rollback == 2
    assert cache_bytes(pair.config, target, None)[1] == 3 * (1 + 2) * state


def test_a_grammar_holds(pair: Pair) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    found = pair.complete(PROMPT, max_tokens=60, temperature=0, structured_outputs={"json": schema})
    assert isinstance(json.loads(found.text)["n"], int)
