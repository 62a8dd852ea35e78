"""What ends an answer: stop strings, stop tokens, and a time limit."""

from time import monotonic
from typing import Any

from constraints import BYTES, Pieces
from specserve.core.text_sequence import TextParams, TextSequence
from specserve.sequence import SamplingParams, SpeculationParams, TokenScore

VOCABULARY = Pieces(BYTES, ["<|a|>", "<|bb|>", "<s>"])
# How many tokens a round may decide: each alone, some, and all at once.
ROUNDS = (1, 3, 100)


def spelled(text: str) -> list[int]:
    """The tokens of a text, control tokens by their names."""
    return VOCABULARY.encode(text, special=True)


def written(
    stops: list[str], tokens: list[int], *, rounds: int = 1, min_tokens: int = 0, clock: Any = monotonic, **more: Any
) -> tuple[TextSequence, list[str]]:
    """A sequence that has been given these tokens, some in each round, and the texts it released."""
    params = SamplingParams(min_tokens=min_tokens), SpeculationParams(), VOCABULARY, TextParams(stops, **more)
    sequence = TextSequence([0], *params, max_tokens=len(tokens), top_logprobs=0, clock=clock)
    texts = []
    for begin in range(0, len(tokens), rounds):
        if sequence.done:
            break
        new = tokens[begin : begin + rounds]
        sequence.tokens += new
        sequence.scores += [TokenScore(token, -1.0, []) for token in new]
        sequence.sources += ["target"] * len(new)
        sequence.read_new_tokens()
        texts.append(sequence.take_text())
    return sequence, texts


def test_text_ends_before_the_stop_string_which_the_generation_knows() -> None:
    # By stop strings and output: its text, the stop string that ended it, and the tokens of the answer.
    for stops, output, text, stop, length in (
        (["two", "never"], "one two three", "one ", "two", 7),
        (["wo", "two"], "one two three", "one ", "two", 7),
        (["tw", "thr"], "one t", "one t", "", None),
        (["aab"], "aaab", "a", "aab", 4),
        # A control token is no text.
        (["onetwo"], "one<|bb|>two", "", "onetwo", 7),
        # Of several the first to end, and of these the longest.
        (["two", "ne"], "one two", "o", "ne", 3),
        (["e", "ne"], "one two", "o", "ne", 3),
    ):
        for rounds in ROUNDS:
            tokens = spelled(output)
            sequence, texts = written(stops, tokens, rounds=rounds)
            assert ("".join(texts), sequence.stop) == (text, stop), (stops, output, rounds)
            assert sequence.finish_reason == ("length" if length is None else "stop")
            assert sequence.answer == tokens[:length]


def test_text_is_withheld_only_while_it_may_begin_a_stop_string() -> None:
    assert written(["nde"], spelled("ondd"))[1] == ["o", "", "", "ndd"]
    assert written(["nd<"], spelled("ond<|a|>"))[1] == ["o", "", "", "nd"]


def test_a_stop_token_has_no_log_probability_in_the_answer() -> None:
    """As a stop string of text; a control token that does not stop has."""
    sequence, _ = written([], spelled("o<|bb|>n<|a|>"), rounds=100, stop_tokens=dict.fromkeys(spelled("<|a|>"), ""))
    assert [score.token for score, _ in sequence.take_tokens()] == spelled("o<|bb|>n")


def test_no_stop_string_ends_an_answer_before_its_least_number_of_tokens() -> None:
    """One that ends after them ends the answer, and what they have said stays."""
    for stop, output, min_tokens, text in (
        ("b", "abcab", 0, "a"),
        ("b", "abcab", 2, "abca"),
        ("b", "abcab", 5, "abcab"),
        ("bca", "abcab", 3, "abc"),
        ("bca", "abcab", 2, "ab"),
        ("é", "aéé", 3, "aé"),
    ):
        for rounds in ROUNDS:
            sequence, texts = written([stop], spelled(output), rounds=rounds, min_tokens=min_tokens)
            assert "".join(texts) == text, (stop, output, min_tokens, rounds)
            assert sequence.generated >= min_tokens
            control: Any = {"min_tokens": 2, "stop_tokens": dict.fromkeys(spelled("<|a|>"), "<|a|>")}
            assert "".join(written([], spelled("x<|a|>y<|a|>z"), rounds=rounds, **control)[1]) == "xy"


def test_a_stop_string_or_token_is_part_of_the_text_if_the_request_wants_it() -> None:
    [token], [control] = spelled("b"), spelled("<|a|>")
    for rounds in ROUNDS:
        for stops, output, text in ((["bc"], "abcd", "abc"), (["b", "bc"], "abcd", "ab")):
            sequence, texts = written(stops, spelled(output), rounds=rounds, includes_stop=True)
            assert ("".join(texts), sequence.finish_reason) == (text, "stop")
        for included, text in ((False, "a"), (True, "ab")):
            ends: Any = {"stop_tokens": {token: "", control: "<|a|>"}, "includes_stop": included}
            sequence, texts = written([], spelled("abc"), rounds=rounds, **ends)
            assert ("".join(texts), sequence.finish_reason) == (text, "stop")
            assert sequence.ended_by_eos is not included
            assert "".join(written([], spelled("a<|a|>bc"), rounds=rounds, **ends)[1]) == "a"


def test_control_tokens_are_spelled_if_the_request_wants_them() -> None:
    for spells_control, text in ((False, "onetwo"), (True, "one<|bb|>two")):
        assert "".join(written([], spelled("one<|bb|>two"), spells_control=spells_control)[1]) == text


def test_after_its_time_an_answer_ends_with_its_line() -> None:
    """The time begins with the first token, and is read at each line break."""
    ended = {"a\nbcd\ne\nf": "a\nbcd\n", "a\n<|a|>\nf": "a\n\n", "abcdefgh": "abcdefgh", "a\nb": "a\nb"}
    for output, text in ended.items():
        times = iter([10.0, 12.9, 13.1])
        sequence, texts = written([], spelled(output), max_seconds=3.0, clock=lambda times=times: next(times))
        assert ("".join(texts), sequence.finish_reason) == (text, "length")
