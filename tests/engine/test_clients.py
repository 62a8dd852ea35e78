"""Hostile clients side by side: who may see, slow or push out whom. Every row of the target takes a second."""

import math
from collections.abc import Callable
from functools import partialmethod
from itertools import product
from pkgutil import resolve_name
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_pair import ENDLESS, SLOTS, FakePair, plain_greedy
from specserve.core import admission, prefix_cache
from specserve.core.prefix_cache import PrefixCache
from specserve.core.prefix_store import PrefixStore
from specserve.core.text_sequence import TextSequence
from specserve.observability.records import EndRecord, Observer
from specserve.speculation.step import SequenceStep

CHUNK = 64
LENGTH = 2000
TEXT = [n * n % 23 for n in range(300)]


class Clients(FakePair):
    """A scheduler on a simulated clock, which each row of the target advances by a second."""

    def __init__(self, *, has_store: bool = False, **options: Any) -> None:
        self.now = 0.0
        store = PrefixStore(24, 10**6) if has_store else None
        super().__init__(prefill_rows=CHUNK, clock=lambda: self.now, store=store, **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            before = len(self.target.decoded)
            super().step()
            self.now += len(self.target.decoded) - before or 1

    def send(self, client: str, prompt: list[int], *, max_tokens: int = 1, salt: str = "") -> TextSequence:
        """A request without drafts."""
        request = f"{client} {self.now} {len(self.target.decoded)}"
        options: dict[str, Any] = {"client": client, "salt": salt, "request": request}
        return self.submit(prompt, gamma=0, sampling=ENDLESS, max_tokens=max_tokens, **options)

    def served(self, client: str, *prompts: list[int]) -> None:
        """Answer these requests, one after the other."""
        for prompt in prompts:
            self.send(client, prompt)
            self.run()

    def seconds_until(self, condition: Callable[[], bool]) -> float:
        """How long it takes until the condition holds."""
        begun = self.now
        self.run_until(condition)
        return self.now - begun


def long_prompt(number: int) -> list[int]:
    random = Random(number)
    return [number, *(random.randrange(23) for _ in range(LENGTH - 1))]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 256), n_long=st.integers(1, 2 * SLOTS), rounds=st.integers(1, 20))
def test_a_short_prompt_waits_three_times_as_long_as_alone_beside_any_number_of_long_prefills(
    length: int, n_long: int, rounds: int
) -> None:
    """It may also wait for the chunk that is being computed when it comes; the longest prefill takes a third more."""
    alone = Clients()
    short = alone.send("editor", TEXT[:length])
    seconds_alone = alone.seconds_until(lambda: short.generated > 0)
    pair = Clients()
    long = [pair.send("agent", long_prompt(number)) for number in range(n_long)]
    pair.step(rounds)
    short = pair.send("editor", TEXT[:length])
    assert pair.seconds_until(lambda: short.generated > 0) <= 3 * seconds_alone
    pair.run_until(lambda: any(sequence.done for sequence in long))
    assert pair.now <= 1.3 * LENGTH


def test_short_prompts_without_end_take_half_of_the_time_of_a_long_one_and_each_gets_on() -> None:
    pair = Clients()
    long = pair.send("agent", long_prompt(0))
    pair.step()
    shorts: list[TextSequence] = []
    while not long.done:
        if not shorts or shorts[-1].done:
            shorts.append(pair.send("editor", long_prompt(len(shorts) + 1)[:100]))
        pair.step()
    assert pair.now <= 2 * LENGTH + CHUNK
    waits = [(short.timestamps.first_token or pair.now) - short.timestamps.arrival for short in shorts]
    assert len(shorts) > 5
    assert max(waits) <= 3 * 100


@pytest.mark.parametrize(("length", "running"), [(3, 2), (admission.LONG_PREFILL + 1, 2), (LENGTH, 1)])
def test_a_prompt_that_is_shorter_than_all_long_ones_finds_a_slot_beside_them(length: int, running: int) -> None:
    pair = Clients()
    for number in range(2 * SLOTS):
        pair.send("agent", long_prompt(number))
    pair.step()
    assert pair.scheduler.running == 1
    other = pair.send("editor", long_prompt(2 * SLOTS)[:length], max_tokens=5)
    pair.step()
    assert pair.scheduler.running == running
    pair.run()
    assert other.generated == 5


def test_a_server_with_few_sequences_takes_long_prompts() -> None:
    """A share of the slots that rounds to none would let them wait for ever."""
    for slots in (1, 2):
        pair = Clients(slots=slots)
        sent = [pair.send("agent", long_prompt(number), max_tokens=3) for number in range(3)]
        pair.run()
        assert [sequence.generated for sequence in sent] == [3, 3, 3]


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is eight tokens, an answer is promised four tokens at a time, and 100 rows make a sequence age."""
    monkeypatch.setattr(admission, "_ANSWER", 4)
    monkeypatch.setattr(admission, "_TURN_TOKENS", 8)
    monkeypatch.setattr(admission, "_AGED_SECONDS", 100.0)


@pytest.fixture
def slow_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round brings back at most 64 tokens from host memory."""
    monkeypatch.setattr(prefix_cache, "_TOKENS_A_ROUND", 64)


@pytest.mark.usefixtures("short_turns")
def test_small_requests_pass_one_that_waits_for_room_until_it_has_aged() -> None:
    pair = Clients(n_cells=60)
    pair.send("a", [8] * 20, max_tokens=20)
    pair.step()
    large = pair.send("a", [9] * 40, max_tokens=4)
    passed: list[TextSequence] = []
    while not large.generated:
        passed.append(pair.send("a", [len(passed) % 20, 4], max_tokens=12))
        pair.step(3)
        assert pair.now < 300, "the large one starves"
    assert sum(sequence.done for sequence in passed) > 3
    assert sum(sequence.preemptions for sequence in passed) > 0
    assert 100 <= (large.timestamps.start or 0) - large.timestamps.arrival < 110
    pair.run()


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("store", [False, True])
def test_a_client_with_endless_requests_has_its_share_and_neither_starves(*, store: bool) -> None:
    """One client sends answers that fill the cache, as fast as it can, and so many that they fill all slots."""
    pair = Clients(n_cells=100, has_store=store)
    hog = [pair.send("hog", [number, 3], max_tokens=90) for number in range(2 * SLOTS)]
    pair.step(5)
    waits = []
    for number in range(8):
        other = pair.send("other", [number, *[7] * 40], max_tokens=5)
        hog.append(pair.send("hog", [number, 4], max_tokens=90))
        waits.append(pair.seconds_until(lambda other=other: other.done))  # type: ignore[misc]
    # It ages, the hog ends its turn, its own tokens are read, and what fits beside it may pass.
    assert max(waits) < 100 + 2 * SLOTS * 8 + 100
    pair.run()
    assert all(sequence.error is None for sequence in hog)
    for sequence in hog:
        assert sequence.answer == plain_greedy(sequence.prompt, 90, endless=True)


def test_a_clients_requests_that_have_aged_do_not_come_before_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the hog's waits for nine others, 360 rows."""
    monkeypatch.setattr(admission, "_AGED_SECONDS", 300.0)
    pair = Clients()
    hog: list[TextSequence] = []

    def step() -> bool:
        while sum(not sequence.done for sequence in hog) < 4 * SLOTS:
            hog.append(pair.send("hog", [len(hog) % 23, len(hog) // 23, 3], max_tokens=40))
        pair.step()
        return True

    for _ in range(200):
        step()
    waits = []
    for number in range(8):
        victim = pair.send("victim", [number, 5, 6], max_tokens=3)
        while step() and not victim.done:
            pass
        waits.append((victim.timestamps.start or math.inf) - victim.timestamps.arrival)
    # Until one or two of the hog's end: each of their 40 tokens takes a row of every slot.
    assert max(waits) < 2 * 40 * SLOTS


@pytest.mark.usefixtures("short_turns")
def test_a_client_within_its_share_is_not_preempted_by_one_above_it() -> None:
    pair = Clients()
    for number in range(4 * SLOTS):
        pair.send("hog", [number, 3], max_tokens=300)
    pair.step(5)
    victim = pair.send("victim", [1, 2], max_tokens=150)
    pair.run(victim)
    assert victim.preemptions == 0


@pytest.mark.usefixtures("slow_loads")
def test_a_short_prefix_that_comes_back_waits_for_no_long_one() -> None:
    pair = Clients(has_store=True)
    long, short = long_prompt(0), long_prompt(1)[:101]
    pair.served("a", long, short, *(long_prompt(number) for number in range(2, 2 + SLOTS)))
    slow, quick = pair.send("a", [*long, 1]), pair.send("a", [*short, 1])
    pair.step(5)
    assert quick.done
    assert not slow.generated


@pytest.mark.usefixtures("slow_loads")
def test_a_long_prefix_comes_back_however_many_short_ones_another_client_brings_back() -> None:
    """Alone it takes 32 rounds; half of each is its own."""
    pair = Clients(has_store=True)
    long, *short = (long_prompt(number) for number in range(61))
    pair.served("victim", long)
    pair.served("hog", *(prompt[:300] for prompt in short))
    victim = pair.send("victim", [*long, 1])
    waiting = iter(short)
    while not victim.generated:
        pair.send("hog", [*next(waiting)[:300], 1])
        pair.step(2)
    assert 20 < len(short) - len(list(waiting)) < 40


@pytest.mark.usefixtures("short_turns")
def test_no_round_fails_where_prefixes_come_back_into_a_cache_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_TOKENS_A_ROUND", 16)
    for seed in range(8):
        random, pair = Random(seed), Clients(n_cells=120, has_store=True)
        prompts = [[number, *long_prompt(number)[:64]] for number in range(4)]
        sent = []
        for _ in range(25):
            prompt = [*random.choice(prompts)[: random.randrange(1, 65)], random.randrange(23)]
            sent.append(pair.send(random.choice("ab"), prompt, max_tokens=random.randrange(1, 50)))
            pair.step(random.randrange(6))
        pair.run()
        assert [sequence.error for sequence in sent] == [None] * len(sent), seed


@pytest.mark.parametrize("alike", [False, True])
def test_however_many_wait_for_room_none_of_them_counts_as_about_to_be_prefilled(*, alike: bool) -> None:
    """Also those that a round does not look at; time slices would not go on while TorchServe replies."""
    pair = Clients(n_cells=2500)
    running = pair.send("a", long_prompt(0), max_tokens=400)
    pair.run_until(lambda: running.generated > 0)
    for number in range(12):
        pair.send("a", long_prompt(1 if alike else number + 1)[:600])
    pair.step()
    assert pair.scheduler.queued == 12
    assert pair.scheduler.awaiting_first_token == 0


def test_what_fails_when_a_sequence_is_forgotten_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = FakePair()
    monkeypatch.setattr(pair.drafters, "forget", lambda _: 1 / 0)
    for number in range(2 * SLOTS):
        pair.answer([number, 2])
    assert pair.scheduler.running == 0


@pytest.mark.parametrize("where", ["running", "finished", "stored"])
def test_prefixes_are_reused_within_a_key_and_a_salt_alone(where: str) -> None:
    """In both models' caches, and in host memory; nor is there any waiting for the prefill of another client."""
    a, a_salted, b, b_salted = product("ab", ("", "salt"))
    for first, second in [(a, a), (a, b), (a_salted, a), (a_salted, a_salted), (a_salted, b_salted)]:
        pair = Clients(has_store=True)
        pair.send(first[0], TEXT, max_tokens=40, salt=first[1])
        pair.step(6 if where == "running" else 60)
        if where == "stored":
            pair.served("others", *(long_prompt(number) for number in range(SLOTS)))
        fed = len(pair.target.decoded)
        again = pair.send(second[0], TEXT, salt=second[1])
        pair.run(again)
        reused = first == second
        assert again.cached_tokens > 250 if reused else again.cached_tokens == 0
        assert (len(pair.target.decoded) - fed > 250) != reused
        assert again.answer == plain_greedy(TEXT, 1, endless=True)


@pytest.mark.usefixtures("slow_loads")
def test_a_long_prefix_comes_back_in_parts_between_which_others_get_on() -> None:
    pair = Clients(has_store=True)
    prompt = long_prompt(0)[:1000]
    pair.served("a", prompt, *(long_prompt(number + 1) for number in range(SLOTS)))
    stream = pair.send("b", [1, 2], max_tokens=500)
    pair.run_until(lambda: stream.generated > 0)
    back, twin = pair.send("a", [*prompt, 7]), pair.send("a", [*prompt, 8])
    while not back.generated:
        before = stream.generated, back.cached_tokens
        pair.step()
        assert stream.generated == before[0] + 1
        assert back.cached_tokens - before[1] <= 64
    assert back.cached_tokens == 1000 // 32 * 32
    pair.run(twin)
    assert twin.cached_tokens >= back.cached_tokens


class Panic(BaseException):
    """As pyo3's PanicException, which llguidance raises: no `Exception`."""


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("specserve.core.text_sequence.TextSequence.read_new_tokens", ValueError("a fault")),
        ("specserve.speculation.step.SequenceStep.compute_mask", KeyError("x")),
        ("specserve.speculation.step.SequenceStep.compute_mask", Panic("in Rust")),
        ("specserve.speculation.round._verify", RecursionError()),
        ("specserve.speculation.ngram.PredictionProposer.propose", Panic("in Rust")),
    ],
)
def test_what_is_raised_for_one_sequence_in_a_round_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    pair = FakePair()
    others = [pair.submit([n, 2], sampling=ENDLESS, request=f"other {n}") for n in range(2)]
    faulty = pair.submit([9, 2], sampling=ENDLESS, request="faulty")
    pair.step()
    owner, _, name = where.rpartition(".")
    function = resolve_name(where)

    def raising(*arguments: object) -> object:
        of = [getattr(argument, "sequence", argument) for argument in arguments]
        if any(argument is faulty for argument in of):
            raise error
        return function(*arguments)

    monkeypatch.setattr(resolve_name(owner), name, raising)
    pair.run()
    assert faulty.error is not None
    assert faulty.error.status == 500
    assert "faulty" in caplog.text
    for other in others:
        assert other.error is None
        assert other.answer == plain_greedy(other.prompt, 20, endless=True)
    monkeypatch.undo()
    assert pair.submit([9, 2], sampling=ENDLESS).error is None
    pair.run()


def test_a_metric_that_fails_costs_no_answer_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Observer):
        def round(self, step: SequenceStep) -> None:
            raise ZeroDivisionError(step.rows)

        def end(self, record: EndRecord) -> None:
            raise ZeroDivisionError(record.tokens)

    pair = FakePair(observers=[Failing()])
    assert pair.answer([1, 2], sampling=ENDLESS).answer == plain_greedy([1, 2], 20, endless=True)
    assert pair.records.rounds
    assert pair.records.ends
    assert caplog.text.count("ZeroDivisionError:") == 1


def test_thousands_of_answers_that_wait_are_not_all_looked_at_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for 128 answers each, also when all have waited for so long that others make way."""
    now = [0.0]
    pair = FakePair(n_cells=400, proposers=[], clock=lambda: now[0])
    spies = []
    for owner, name in ((PrefixCache, "find"), (admission.Waiting, "_make_way")):
        spies.append(mock.Mock(side_effect=getattr(owner, name)))
        monkeypatch.setattr(owner, name, partialmethod(spies[-1]))
    for request in range(10):
        for choice in range(128):
            pair.submit([5] * 60, mode="off", sampling=ENDLESS, max_tokens=300, request=f"{request}", choice=choice)
    for aged in (False, True):
        now[0] += 11.0 * aged
        for spy in spies:
            spy.reset_mock()
        pair.scheduler.run_round()
        assert spies[0].call_count <= 100, aged
        assert spies[1].call_count <= 2


def test_of_many_long_prompts_that_wait_a_round_looks_at_eight_and_a_short_one_passes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each from a client of its own: a look takes milliseconds, in which all others wait."""
    pair = Clients()
    spy = mock.Mock(side_effect=PrefixCache.find)
    monkeypatch.setattr(PrefixCache, "find", partialmethod(spy))
    for number in range(30):
        pair.send(f"agent {number}", long_prompt(number))
    short = pair.send("editor", [5])
    pair.step()
    assert short.generated == 1
    assert pair.scheduler.running == 1
    # The one that is admitted, eight that are not, and the short one.
    assert spy.call_count == 10
