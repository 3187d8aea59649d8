"""Latency histograms: counts and sums are exact, and values have a relative error of at most 1/2,000."""

import math
import pickle
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.simulation.histogram import Histogram
from twofold.simulation.statistics import Tally, width_of

PRECISION = 2**-11

values = st.one_of(st.integers(0, 5_000), st.integers(0, 10**15), st.integers(0, 2**63 - 2))
weights = st.integers(1, 1_000)
samples = st.lists(values, min_size=1, max_size=60)


def histogram_of(numbers, unit=1.0):
    tally = Tally()
    for number in numbers:
        tally.add(number)
    return Histogram.of(tally, unit)


@given(st.lists(st.tuples(values, weights)))
def test_count_sum_and_extremes_are_exact(pairs):
    tally = Tally()
    for value, weight in pairs:
        tally.add(value, weight)
    histogram = Histogram.of(tally, 1.0)
    assert histogram.count == sum(weight for _, weight in pairs)
    assert histogram.total == sum(value * weight for value, weight in pairs)
    if pairs:
        assert histogram.low == min(value for value, _ in pairs)
        assert histogram.high == max(value for value, _ in pairs)


@given(samples)
def test_every_value_is_counted_in_the_bucket_that_holds_it(numbers):
    tally = Tally()
    for number in numbers:
        tally.add(number)
    counts = tally.counts
    assert list(counts) == sorted(counts)
    for bucket, count in counts.items():
        assert count == sum(bucket <= number < bucket + width_of(bucket) for number in numbers)
    assert sum(counts.values()) == len(numbers)


@given(st.integers(0, 10**13), st.integers(0, 10**7), st.integers(0, 400), weights)
def test_a_ramp_equals_its_terms(first, step, count, weight):
    """Adding an arithmetic sequence at once equals adding its terms one by one."""
    ramp, single = Tally(), Tally()
    ramp.add_ramp(first, step, count, weight)
    for i in range(count):
        single.add(first + i * step, weight)
    assert Histogram.of(ramp, 1.0) == Histogram.of(single, 1.0)


def test_a_ramp_costs_by_bucket_not_by_term():
    """Adding an arithmetic sequence of a billion terms is fast."""
    tally = Tally()
    tally.add_ramp(30_000_000, 0, 10**9)
    tally.add_ramp(30_000_000, 1, 10**9)
    histogram = Histogram.of(tally, 1e-9)
    assert histogram.count == 2 * 10**9
    assert len(histogram.counts) < 8_000


@given(samples, st.floats(0, 100))
def test_percentiles_agree_with_numpy(numbers, p):
    """Percentiles differ from numpy's by at most half the width of a bucket."""
    expected = float(np.percentile(np.array(numbers, dtype=float), p))
    assert histogram_of(numbers).percentile(p) == pytest.approx(expected, rel=PRECISION * 1.001, abs=1e-9)


@given(st.lists(st.integers(0, 2_047), min_size=1), st.floats(0, 100))
def test_small_values_have_exact_percentiles(numbers, p):
    """Percentiles of values below 2,048 are exact."""
    assert histogram_of(numbers).percentile(p) == pytest.approx(float(np.percentile(numbers, p)), rel=1e-12)


@given(samples)
def test_the_ends_are_exact(numbers):
    """The 0th and the 100th percentile are the exact minimum and maximum."""
    histogram = histogram_of(numbers, unit=1e-9)
    assert histogram.percentile(0) == pytest.approx(histogram.minimum, rel=1e-15)
    assert histogram.percentile(100) == pytest.approx(histogram.maximum, rel=1e-15)


@given(st.lists(st.integers(0, 2_047), min_size=1), st.integers(0, 2_100))
def test_the_fraction_at_most_is_exact_for_small_values(numbers, bound):
    expected = sum(number <= bound for number in numbers) / len(numbers)
    assert histogram_of(numbers).fraction_at_most(bound) == pytest.approx(expected)


@given(samples, values)
def test_the_fraction_at_most_is_bounded_by_whole_buckets(numbers, bound):
    """`fraction_at_most` is accurate to within one bucket."""
    wide = (bound + 1) * (1 + 2**-10)
    narrow = bound * (1 - 2**-10) - 1
    fraction = histogram_of(numbers).fraction_at_most(bound)
    assert sum(number <= narrow for number in numbers) <= fraction * len(numbers) + 1e-6
    assert fraction * len(numbers) <= sum(number <= wide for number in numbers) + 1e-6


@given(st.integers(1, 10**6))
def test_a_bound_in_units_includes_the_value_it_names(milliseconds):
    """The share of values up to n milliseconds includes n itself, despite floating-point rounding."""
    bound_s = milliseconds / 1_000
    assert histogram_of([milliseconds * 1_000_000], unit=1e-9).fraction_at_most(bound_s) == 1.0
    assert histogram_of([milliseconds], unit=1e-3).fraction_at_most(bound_s) == 1.0


@given(samples, st.integers(2, 50))
def test_the_distribution_rises_from_the_least_to_the_greatest(numbers, points):
    """The points of the CDF have equally spaced fractions and run from the minimum to the maximum."""
    curve = histogram_of(numbers).cdf(points)
    assert len(curve) == points
    assert [fraction for _, fraction in curve] == [i / (points - 1) for i in range(points)]
    assert all(a <= b * (1 + 1e-12) for (a, _), (b, _) in pairwise(curve))
    assert (curve[0][0], curve[-1][0]) == (float(min(numbers)), float(max(numbers)))


@given(st.lists(values))
def test_round_trips_through_json_and_pickle(numbers):
    histogram = histogram_of(numbers, unit=1e-9)
    assert msgspec.json.decode(msgspec.json.encode(histogram), type=Histogram) == histogram
    assert pickle.loads(pickle.dumps(histogram)) == histogram  # noqa: S301  (our own bytes)


def test_units_scale_what_is_reported():
    """A histogram with the unit 1e-9 counts nanoseconds and reports seconds."""
    histogram = histogram_of([1_000_000_000, 3_000_000_000], unit=1e-9)
    assert histogram.mean == pytest.approx(2.0)
    assert histogram.minimum == pytest.approx(1.0)
    assert histogram.maximum == pytest.approx(3.0)
    assert histogram.percentile(50) == pytest.approx(2.0, rel=PRECISION)


def test_empty_histogram_has_no_statistics():
    empty = Histogram(1e-9)
    reports = (empty.mean, empty.minimum, empty.maximum, empty.percentile(50), empty.fraction_at_most(1))
    assert reports == (None,) * 5
    assert empty.cdf(10) == []
    assert empty.count == 0


@pytest.mark.parametrize("value", [-1, 2**63 - 1])
def test_values_out_of_range_are_refused_and_leave_no_trace(value):
    tally = Tally()
    tally.add(5)
    with pytest.raises(ValueError, match="integers from 0"):
        tally.add(value)
    with pytest.raises(ValueError, match="integers from 0"):
        tally.add_ramp(value, 1, 2)
    assert Histogram.of(tally, 1.0) == histogram_of([5])


def test_rejects_arguments_out_of_range():
    histogram = histogram_of([5])
    with pytest.raises(ValueError, match="step of a ramp"):
        Tally().add_ramp(5, -1, 2)
    for p in (-0.1, 100.1, math.nan):
        with pytest.raises(ValueError, match="from 0 to 100"):
            histogram.percentile(p)
    with pytest.raises(ValueError, match="at least 2 points"):
        histogram.cdf(1)
