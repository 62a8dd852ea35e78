"""benchmarks/load.py: the waits of short prompts beside a long one are held against a bound."""

from load import LENGTHS, LONG, Seconds, mixed_rows


def test_bounds_are_three_times_alone_and_a_chunk_and_for_long_prompts_a_factor() -> None:
    seconds: Seconds = {(prompt, "alone"): [0.1] for prompt in LENGTHS} | {(LONG, "alone"): [LENGTHS[LONG] / 1000]}
    # A chunk of 64 tokens takes 0.064 s.
    seconds |= {(prompt, "beside"): [0.2, 0.36, 0.37] for prompt in LENGTHS} | {(LONG, "beside"): [5.0, 5.1]}
    chat, completion, long = mixed_rows("fake", seconds, chunk=64)
    assert (chat["bound_s"], chat["within_bound"], chat["requests"], chat["ratio"]) == (0.364, 2, 3, 3.6)
    assert completion["bound_s"] == 0.364
    assert (long["bound_s"], long["within_bound"], long["requests"]) == (5.07, 1, 2)
