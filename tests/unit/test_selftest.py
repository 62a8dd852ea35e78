"""The doctor's trial of the rules finds a wrong one, and does not find a right one wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specserve.sampling.distribution import FloatArray, draw
from specserve.sampling.noise import Purpose
from specserve.speculation.rejection import RULES, Distributions, NoiseSource, Rule, Verdict, sample_alone
from specserve.tools import selftest
from specserve.tools.selftest import chance, deviation, is_wrong, lumped

TRIALS = 4000
Verify = Callable[[Distributions, Distributions, Sequence[int], NoiseSource], Verdict]


def pair(seed: int, tokens: int = 60) -> tuple[list[FloatArray], list[FloatArray]]:
    """Two rows of a target and one of a draft that resembles it."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 2, (2, tokens))
    near = logits[0] + generator.normal(0, 1, tokens)
    p, behind, q = (np.exp(row) / np.exp(row).sum() for row in (*logits, near))
    return [p, behind], [q]


@pytest.mark.parametrize("name", RULES)
def test_a_right_rule_is_found_right(name: str) -> None:
    """Each trial is called wrong by chance once in three million."""
    assert not any(is_wrong(deviation(name, *pair(seed), TRIALS)) for seed in range(3))


def keeps_every_draft(_p: Distributions, _q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """The draft's text, not the target's."""
    return Verdict(len(drafts), draw(_p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def recovers_from_the_target(p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource) -> Verdict:
    """A rejection draws from p as it is, and so favours what the draft likes."""
    for place, x in enumerate(drafts):
        if noise.uniform(Purpose.ACCEPT, place) * float(q[place][x]) >= float(p[place][x]):
            return Verdict(place, draw(p[place], noise.uniform(Purpose.RECOVER, place)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


def accepts_with_the_noise_that_drew(
    p: Distributions, q: Distributions, drafts: Sequence[int], noise: NoiseSource
) -> Verdict:
    """One stream of noise for two purposes."""
    for place, x in enumerate(drafts):
        if noise.uniform(Purpose.DRAFT, place) * float(q[place][x]) >= float(p[place][x]):
            rest = np.maximum(p[place] - q[place], 0)
            return Verdict(place, draw(rest, noise.uniform(Purpose.RECOVER, place)))
    return Verdict(len(drafts), draw(p[len(drafts)], noise.uniform(Purpose.BONUS, len(drafts))))


@pytest.mark.parametrize("verify", [keeps_every_draft, recovers_from_the_target, accepts_with_the_noise_that_drew])
def test_a_wrong_rule_is_found_wrong(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "RULES", {"wrong": Rule(sample_alone, verify)})
    assert all(is_wrong(deviation("wrong", *pair(seed), TRIALS)) for seed in range(3))


def test_chance_is_a_standard_normal_number_where_nothing_is_wrong() -> None:
    """Of 2,000 samples the mean lies within 5 / sqrt(2000) of 0 but once in a million runs, skewness aside."""
    generator = np.random.default_rng(5)
    p, _ = pair(7)
    numbers = [chance(generator.multinomial(3000, p[0]).astype(float), 3000 * p[0]) for _ in range(2000)]
    assert abs(float(np.mean(numbers))) < 0.11
    assert 0.9 < float(np.std(numbers)) < 1.1


def test_a_token_that_cannot_come_is_wrong_at_once() -> None:
    assert is_wrong(chance(np.array([90.0, 0.0, 10.0]), np.array([100.0, 0.0, 0.0])))


def test_lumping_keeps_the_mass_and_every_token_that_matters() -> None:
    generator = np.random.default_rng(2)
    p, q = generator.dirichlet(np.full(5000, 0.01), 2)
    lumped_p, lumped_q = lumped(p, q)
    assert lumped_p.sum() == pytest.approx(1)
    assert lumped_q.sum() == pytest.approx(1)
    assert lumped_p.size == lumped_q.size <= 1001
    assert lumped_p.max() == pytest.approx(p.max())
    assert lumped_q.max() == pytest.approx(q.max())
