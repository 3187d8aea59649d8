"""Estimates of the arrival rate and of a safety margin for predictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.scheduling.admission.prefill_queue import ArrivalRate, PredictionMargin


def test_rate_covers_the_latest_prompts():
    rate = ArrivalRate()
    for number in range(100):
        rate.add(1000, float(number))
    for number in range(100):
        rate.add(10, 100.0 + number / 2)
    assert rate.tokens_per_s == pytest.approx(20.0)
    assert rate.tokens_per_prompt == pytest.approx(10.0)


def test_rate_is_zero_without_two_arrival_times():
    rate = ArrivalRate()
    assert rate.tokens_per_prompt == 0.0
    for _ in range(3):
        assert rate.tokens_per_s == 0.0
        rate.add(10, 5.0)


def test_margin_is_one_before_ten_predictions():
    margin = PredictionMargin()
    for _ in range(9):
        margin.observe(1.0, 2.0)
    assert margin.factor == 1.0
    margin.observe(1.0, 2.0)
    assert margin.factor == 2.0


def test_margin_is_never_below_one():
    margin = PredictionMargin()
    for _ in range(50):
        margin.observe(1.0, 0.5)
    assert margin.factor == 1.0


def test_margin_forgets_old_predictions():
    margin = PredictionMargin()
    for _ in range(100):
        margin.observe(1.0, 2.5)
    for _ in range(100):
        margin.observe(1.0, 1.0)
    assert margin.factor == 1.0


@given(st.lists(st.floats(0.1, 2.9), min_size=10, max_size=100))
def test_margin_covers_ninety_percent(ratios):
    margin = PredictionMargin()
    for ratio in ratios:
        margin.observe(1.0, ratio)
    within = sum(ratio <= margin.factor for ratio in ratios)
    assert within >= 0.9 * len(ratios)


def test_predictions_of_zero_are_ignored():
    margin = PredictionMargin()
    for _ in range(20):
        margin.observe(0.0, 1.0)
    assert margin.factor == pytest.approx(1.0)
