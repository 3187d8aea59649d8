"""What comes to an instance: tokens per second, and tokens of a prompt."""

import pytest

from twofold.scheduling.admission.estimates import ArrivalRate


def test_the_rate_is_that_of_the_prompts_that_came_last():
    """Ten tokens every half second, and of what was long ago nothing."""
    influx = ArrivalRate()
    for number in range(100):
        influx.came(1000, float(number))
    for number in range(100):
        influx.came(10, 100.0 + number / 2)
    assert influx.tokens_per_s == pytest.approx(20.0)
    assert influx.tokens_each == pytest.approx(10.0)


def test_one_prompt_says_nothing_of_a_rate():
    """Nor do several of one moment."""
    influx = ArrivalRate()
    assert influx.tokens_each == 0.0
    for _ in range(3):
        assert influx.tokens_per_s == 0.0
        influx.came(10, 5.0)
