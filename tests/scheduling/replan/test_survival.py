"""Distribution of output lengths, estimated from finished and running requests."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.replan.traffic import estimate_output_lengths

tokens = st.lists(st.integers(0, 500), max_size=40)


def test_complete_outputs_keep_their_distribution():
    assert estimate_output_lengths([5, 1, 9], [], 6) == (1, 1, 5, 5, 9, 9)


def test_product_limit_by_hand():
    assert estimate_output_lengths([1, 2, 6], [7], 4)[:3] == (1, 2, 6)
    assert estimate_output_lengths([1, 2, 6], [3], 4) == (1, 2, 6, 6), "the output running at 3 tokens counts as longer"


def test_tail_ends_at_the_rate_of_the_second_half():
    found = estimate_output_lengths([100] * 50, [100] * 50, 1000)
    assert found[:500] == (100,) * 500
    assert fmean(found[500:]) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("seen", [120, 250, 1000])
def test_censored_outputs_correct_the_mean(seen):
    draw = Random(0)
    outputs = [round(draw.gammavariate(2, 100)) for _ in range(1000)]
    ended = [output for output in outputs if output <= seen]
    estimated = fmean(estimate_output_lengths(ended, [seen] * (len(outputs) - len(ended)), 512))
    assert estimated == pytest.approx(fmean(outputs), rel=0.35)
    if seen < 200:
        assert fmean(ended) < 0.5 * fmean(outputs)


@given(tokens.filter(bool), tokens, st.integers(1, 50))
def test_lengths_are_sorted_and_bounded(ended, running, count):
    found = estimate_output_lengths(ended, running, count)
    assert len(found) == count
    assert list(found) == sorted(found)
    assert found[0] >= min(ended)
    if not running:
        assert found[-1] <= max(ended)
