"""The room that predictions turned out to need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.admission.estimates import PredictionMargin


def test_few_predictions_need_no_room():
    """Nine of them say nothing of the worst tenth."""
    margin = PredictionMargin()
    for _ in range(9):
        margin.turned_out(1.0, 2.0)
    assert margin.factor == 1.0
    margin.turned_out(1.0, 2.0)
    assert margin.factor == 2.0


def test_what_comes_sooner_than_predicted_makes_no_room():
    """A bound is not stretched."""
    margin = PredictionMargin()
    for _ in range(50):
        margin.turned_out(1.0, 0.5)
    assert margin.factor == 1.0


def test_what_is_long_ago_is_forgotten():
    """A service that was slow for a while is not careful for ever."""
    margin = PredictionMargin()
    for _ in range(100):
        margin.turned_out(1.0, 2.5)
    for _ in range(100):
        margin.turned_out(1.0, 1.0)
    assert margin.factor == 1.0


@given(st.lists(st.floats(0.1, 2.9), min_size=10, max_size=100))
def test_nine_in_ten_lie_within_the_margin(ratios):
    """Of those that it was made of."""
    margin = PredictionMargin()
    for ratio in ratios:
        margin.turned_out(1.0, ratio)
    within = sum(ratio <= margin.factor for ratio in ratios)
    assert within >= 0.9 * len(ratios)


def test_a_prediction_of_nothing_is_not_compared():
    """Nothing is a multiple of it."""
    margin = PredictionMargin()
    for _ in range(20):
        margin.turned_out(0.0, 1.0)
    assert margin.factor == pytest.approx(1.0)
