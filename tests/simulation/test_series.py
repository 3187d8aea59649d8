"""Time series that store the mean, maximum and integral of a step function in bounded memory."""

import math
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.simulation.series import Series

PS = 1e12

gaps = st.one_of(st.just(0), st.integers(0, 3_000_000), st.integers(0, 10**10), st.integers(0, 10**17))
levels = st.one_of(st.integers(-100, 100), st.floats(-1e4, 1e4))
steps = st.lists(st.tuples(gaps, levels), min_size=1, max_size=40)


def segments_of(start, changes, end_gap):
    """Return the end time of a step function, and its steps as (start, end, value)."""
    at, spans, value = start, [], None
    for gap, level in [*changes, (end_gap, None)]:
        if value is not None and gap:
            spans.append((at, at + gap, value))
        at, value = at + gap, level
    return at, spans


def series_of(start, changes, end_gap):
    series, at = Series(), start
    for gap, level in changes:
        at += gap
        series.set(at, level)
    series.finish(at + end_gap)
    return series


def integral_s(series):
    """Return the integral of the series, in value × seconds."""
    return sum(series.areas) / PS


def close(expected, scale):
    return pytest.approx(expected, rel=1e-9, abs=1e-9 * (1 + scale))


@given(st.integers(0, 10**15), steps, gaps)
def test_integral_mean_and_maximum_agree_with_the_plain_way(start, changes, end_gap):
    """The integral, mean and maximum of a series equal the values computed directly from the recorded changes."""
    series = series_of(start, changes, end_gap)
    end, spans = segments_of(start, changes, end_gap)
    area = math.fsum((b - a) / PS * value for a, b, value in spans)
    scale = math.fsum((b - a) / PS * abs(value) for a, b, value in spans)
    assert integral_s(series) == close(area, scale)
    if spans:
        length = (end - spans[0][0]) / PS
        assert series.mean() == close(area / length, scale / length)
        assert series.maximum() == max(value for _, _, value in spans)
    else:
        assert series.mean() == series.maximum() == changes[-1][1]


@given(st.integers(0, 10**15), steps, gaps)
def test_every_bin_agrees_with_the_plain_way(start, changes, end_gap):
    series = series_of(start, changes, end_gap)
    end, spans = segments_of(start, changes, end_gap)
    points = series.points()
    assert len(points) <= 1024
    begin = series.start_ps
    for t_s, mean, peak in points:
        stop = min(begin + series.width_ps, end)
        inside = [(max(a, begin), min(b, stop), value) for a, b, value in spans if a < stop and b > begin]
        assert t_s == begin / PS
        assert sum(b - a for a, b, _ in inside) == stop - begin > 0
        assert peak == max(value for _, _, value in inside)
        scale = max(abs(value) for _, _, value in inside)
        assert mean == close(math.fsum((b - a) * v for a, b, v in inside) / (stop - begin), scale)
        begin = stop
    assert begin == end  # the bins have no gaps


def test_a_long_run_keeps_few_bins():
    """A series never has more than 1,024 bins."""
    series = Series()
    for i in range(20_000):
        series.set(i * 10**9, i % 2)
    series.finish(20_000 * 10**9)
    assert series.mean() == pytest.approx(0.5)
    assert 512 <= len(series.points()) <= 1024
    series.finish(365 * 86_400 * 10**12)
    assert len(series.points()) <= 1024
    assert integral_s(series) == pytest.approx(10 + 365 * 86_400 - 20)


def test_energy_is_the_integral_of_watts():
    """10 s at 400 W and 5 s at 50 W integrate to 4,250 J."""
    power = Series()
    power.set(0, 400)
    power.set(10 * 10**12, 50)
    power.finish(15 * 10**12)
    assert integral_s(power) == pytest.approx(4_250)
    assert power.maximum() == 400


def test_values_without_duration_are_ignored():
    series = Series()
    series.set(0, 1)
    series.set(5, 99)
    series.set(5, 2)
    series.finish(10)
    assert series.maximum() == 2


def test_finishing_twice_changes_nothing():
    series = series_of(0, [(0, 3), (10**9, 4)], 10**8)
    points = series.points()
    series.finish(series.at_ps)
    assert series.points() == points


def test_time_never_runs_backwards():
    """`set` and `finish` reject a time earlier than that of the previous call."""
    series = series_of(0, [(100, 1)], 100)
    for call in (lambda: series.set(199, 1), lambda: series.finish(199)):
        with pytest.raises(ValueError, match="time runs backwards"):
            call()
    assert series.at_ps == 200


@given(steps, gaps)
def test_round_trips_through_json_and_pickle(changes, end_gap):
    series = series_of(0, changes, end_gap)
    assert msgspec.json.decode(msgspec.json.encode(series), type=Series) == series
    assert pickle.loads(pickle.dumps(series)) == series  # noqa: S301  (our own bytes)


def test_without_a_call_it_is_empty():
    assert Series().points() == []
    assert integral_s(Series()) == 0
