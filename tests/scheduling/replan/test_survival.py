"""How long outputs are when some of them have not ended yet."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.replan.traffic import estimate_output_lengths

tokens = st.lists(st.integers(0, 500), max_size=40)


def test_outputs_that_have_all_ended_are_what_they_are():
    """Each as often as the others."""
    assert estimate_output_lengths([5, 1, 9], [], 6) == (1, 1, 5, 5, 9, 9)


def test_the_product_limit_by_hand():
    """Half of four outlive 2; of the two that are left at 6 one does; the share that outlives 6 is a quarter."""
    assert estimate_output_lengths([1, 2, 6], [7], 4)[:3] == (1, 2, 6)
    assert estimate_output_lengths([1, 2, 6], [3], 4) == (1, 2, 6, 6), (
        "the one that went on at 3 is like those that did"
    )


def test_the_tail_goes_on_ending_as_the_second_half_did():
    """Half ended at 100 tokens, half go on there: one end in a hundred tokens since 50, so a mean of 100 more."""
    found = estimate_output_lengths([100] * 50, [100] * 50, 1000)
    assert found[:500] == (100,) * 500
    assert fmean(found[500:]) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("seen", [120, 250, 1000])
def test_what_has_been_seen_for_a_while_tells_of_the_rest(seen):
    """Gamma lengths with a mean of 200, of which only so many tokens have been seen: those that ended mislead."""
    draw = Random(0)
    outputs = [round(draw.gammavariate(2, 100)) for _ in range(1000)]
    ended = [output for output in outputs if output <= seen]
    estimated = fmean(estimate_output_lengths(ended, [seen] * (len(outputs) - len(ended)), 512))
    assert estimated == pytest.approx(fmean(outputs), rel=0.35)
    if seen < 200:
        assert fmean(ended) < 0.5 * fmean(outputs)


@given(tokens.filter(bool), tokens, st.integers(1, 50))
def test_lengths_rise_and_are_as_many_as_asked_for(ended, running, count):
    """None is below the shortest that ended; with nothing running none is above the longest."""
    found = estimate_output_lengths(ended, running, count)
    assert len(found) == count
    assert list(found) == sorted(found)
    assert found[0] >= min(ended)
    if not running:
        assert found[-1] <= max(ended)
