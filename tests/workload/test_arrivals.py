"""Reproducibility, order and distribution of generated arrival times."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.workload.distributions import ARRIVALS, arrival_times, constant, gamma, poisson

RATES = st.floats(1e-3, 1e6)


@given(name=st.sampled_from(list(ARRIVALS)), rate=RATES, seed=st.integers(0, 2**64))
def test_times_never_decrease_and_repeat_with_their_seed(name, rate, seed):
    times = list(islice(arrival_times(name, rate, seed), 1500))
    assert times == list(islice(arrival_times(name, rate, seed), 1500))
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))


@given(shape=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_gamma_times_never_decrease_at_extreme_burstiness(shape, seed):
    times = list(islice(gamma(2.0, shape, seed), 100))
    assert all(before <= after for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("times", "spread"),
    [
        (constant(4.0), 0.0),
        (poisson(4.0, 1), 1.0),
        (gamma(4.0, 1.0, 1), 1.0),
        (gamma(4.0, 0.25, 1), 2.0),
        (gamma(4.0, 4.0, 1), 0.5),
    ],
)
def test_gaps_have_the_expected_mean_and_variation(times, spread):
    """The mean gap is 1/rate, and the gaps' coefficient of variation is 1/sqrt(burstiness)."""
    gaps = np.diff([*islice(times, 40_000)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.03, abs=1e-6)


def test_constant_arrivals_begin_at_zero_and_do_not_drift():
    """The first arrival is at 0 s, and the millionth arrival time is exact."""
    assert next(islice(constant(10.0), 1_000_000, None)) == 100_000.0
    assert next(constant(10.0)) == 0.0


def test_different_seeds_give_different_times():
    assert next(poisson(1.0, 1)) != next(poisson(1.0, 2))


@pytest.mark.parametrize(
    ("name", "rate", "burstiness", "message"),
    [
        ("uniform", 1.0, 1.0, "'uniform' is not one of poisson, gamma, constant"),
        ("poisson", 0.0, 1.0, "positive number of requests per second, not 0"),
        ("poisson", -1.0, 1.0, "positive number of requests per second, not -1"),
        ("poisson", float("nan"), 1.0, "positive number of requests per second, not nan"),
        ("constant", float("inf"), 1.0, "positive number of requests per second, not inf"),
        ("gamma", 1.0, 0.0, "the burstiness must be a positive number, not 0"),
        ("gamma", 1.0, float("inf"), "the burstiness must be a positive number, not inf"),
        ("poisson", 1.0, 0.5, "a burstiness of 0.5 needs gamma arrivals, not poisson"),
    ],
)
def test_rejects_invalid_process_parameters(name, rate, burstiness, message):
    with pytest.raises(ConfigurationError, match=message):
        arrival_times(name, rate, 0, burstiness)


def test_rejects_a_negative_seed_immediately():
    with pytest.raises(ConfigurationError, match="the seed must be at least 0, not -1"):
        poisson(1.0, -1)
