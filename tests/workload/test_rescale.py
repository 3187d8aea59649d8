"""Rescaling of a trace to a request rate, a time window or a maximum context length."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.traces import ask, request_lists
from twofold.errors import ConfigurationError
from twofold.workload.rescale import (
    fit_lengths,
    fit_to_context,
    mean_rate,
    scale_lengths,
    scale_rate,
    take,
    to_rate,
    window,
)
from twofold.workload.source import Replay

BLOCKS = st.lists(st.integers(0, 9), max_size=5)
TEN = [ask(index, float(index), 100, 10) for index in range(10)]


@given(request_lists(min_size=2), st.floats(1e-3, 1e4))
def test_rescaled_rate_is_exact(requests, rate):
    """Rescaling changes only arrival times."""
    assume(requests[-1].arrival_s > 1e-3)
    scaled = list(to_rate(lambda: iter(requests), rate))
    assert mean_rate(scaled) == pytest.approx(rate, rel=1e-9)
    assert [(r.id, r.prompt_tokens) for r in scaled] == [(r.id, r.prompt_tokens) for r in requests]
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(scaled))


def test_rescaling_one_request_or_simultaneous_arrivals():
    """A trace whose requests all arrive at once cannot be rescaled."""
    assert mean_rate([]) is None
    assert list(to_rate(lambda: iter([ask()]), 5.0)) == [ask()]
    with pytest.raises(ConfigurationError, match="all requests arrive at the same time"):
        to_rate(lambda: iter([ask(0), ask(1)]), 5.0)


@given(request_lists(blocks=BLOCKS), st.integers(2, 2**20))
def test_fit_to_context_always_fits(requests, limit):
    fitted = list(fit_to_context(requests, limit))
    for before, after in zip(requests, fitted, strict=True):
        assert after.prompt_tokens + after.output_tokens <= limit
        assert min(after.prompt_tokens, after.output_tokens) >= 1
        if after.prompt_tokens != before.prompt_tokens:
            assert len(after.prefix_blocks) <= after.prompt_tokens // 512
        if before.prompt_tokens + before.output_tokens <= limit:
            assert after == before


def test_clipping_keeps_the_proportion_of_prompt_to_output():
    (clipped,) = fit_to_context([ask(prompt_tokens=3000, output_tokens=1000)], 100)
    assert (clipped.prompt_tokens, clipped.output_tokens) == (75, 25)


@given(request_lists(blocks=BLOCKS), st.floats(1e-6, 2.0))
def test_scaled_lengths_are_proportional_and_at_least_one(requests, factor):
    for before, after in zip(requests, scale_lengths(requests, factor), strict=True):
        assert after.prompt_tokens == max(1, round(before.prompt_tokens * factor))
        assert after.output_tokens == max(1, round(before.output_tokens * factor))


def test_resizing_a_prompt_keeps_its_whole_prefix_blocks():
    """A resized prompt keeps the ids of blocks that stay full."""
    request = ask(prompt_tokens=1300, prefix_blocks=(7, 8, 9))
    half, same, double = (next(scale_lengths([request], factor)) for factor in (0.5, 1.0, 2.0))
    assert half.prefix_blocks == (7,)
    assert same == request
    assert double.prefix_blocks == (7, 8), "the last block was not full, so its id says nothing of a longer prompt"


def test_lengths_are_scaled_before_they_are_clipped():
    (fitted,) = fit_lengths([ask(prompt_tokens=1000, output_tokens=200)], 0.1, 120)
    assert (fitted.prompt_tokens, fitted.output_tokens) == (100, 20)


def test_window_is_half_open_and_begins_at_zero():
    """A window includes its start but not its end, and arrival times become relative to its start."""
    part = list(window(TEN, 3.0, 2.0))
    assert [(r.id, r.arrival_s) for r in part] == [("3", 0.0), ("4", 1.0)]


def test_window_and_first_stop_reading():
    """`take` and `window` stop reading a trace once no later request can be selected."""
    endless = (ask(index, float(index)) for index in iter(int, None))
    assert len(list(take(endless, 3))) == 3
    source = iter(TEN)
    list(window(source, 0.0, 2.0))
    assert next(source).id == "3"


def test_replay_with_rate_and_duration_takes_as_many_as_fit():
    """A replay of ten seconds at 0.5 requests/s has five requests."""
    part = list(Replay(rate=0.5, duration_s=10.0).requests(lambda: iter(TEN)))
    assert [r.id for r in part] == list("01234")
    assert mean_rate(part) == pytest.approx(0.5)
    assert part[-1].arrival_s < 10.0


def test_replay_rate_is_measured_over_the_selected_part():
    uneven = [*TEN, *(ask(10 + index, 10 + index / 100) for index in range(10))]
    part = list(Replay(start_s=5.0, num_requests=5, rate=7.0).requests(lambda: iter(uneven)))
    assert [r.id for r in part] == list("56789")
    assert mean_rate(part) == pytest.approx(7.0)


def test_replay_duration_is_measured_after_scaling():
    """At twice the rate of a trace, a replay of four seconds covers eight seconds of the trace."""
    part = list(Replay(rate_scale=2.0, duration_s=4.0).requests(lambda: iter(TEN)))
    assert [r.id for r in part] == list("01234567")
    assert part[-1].arrival_s == 3.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0, "rate_scale": 1.0}, "either a rate or a rate scale"),
        ({"rate": 0.0}, "the rate must be a positive number, not 0"),
        ({"rate_scale": -1.0}, "the rate scale must be a positive number, not -1"),
        ({"start_s": -1.0}, "the start must be at least 0 s, not -1"),
        ({"start_s": float("nan")}, "the start must be at least 0 s, not nan"),
        ({"duration_s": 0.0}, "the duration must be a positive number, not 0"),
        ({"num_requests": 0}, "the number of requests must be at least 1"),
    ],
)
def test_rejects_invalid_windows(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Replay(**options)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rejects_invalid_factors(factor):
    for scale in (scale_rate, scale_lengths):
        with pytest.raises(ConfigurationError, match="must be a positive number"):
            scale(TEN, factor)
    with pytest.raises(ConfigurationError, match="the context must be at least 2 tokens, not 1"):
        fit_to_context(TEN, 1)
