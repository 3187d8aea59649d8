"""One-pass summaries of traces equal numpy's results."""

import numpy as np
import pytest
from hypothesis import given

from support.traces import ask, request_lists
from twofold.workload.summary import summarise


@given(request_lists())
def test_length_quantiles_equal_numpys(requests):
    lengths = [request.prompt_tokens for request in requests]
    summary = summarise(requests).prompt_tokens
    assert [summary.p50, summary.p90, summary.p99] == pytest.approx(np.quantile(lengths, [0.5, 0.9, 0.99]))
    assert summary.mean == pytest.approx(np.mean(lengths))
    assert (summary.min, summary.max, summary.total) == (min(lengths), max(lengths), sum(lengths))


def test_gap_variation():
    """Gaps of 1 and 3 s between arrivals have a coefficient of variation of 0.5."""
    summary = summarise([ask(0, 0.0), ask(1, 1.0), ask(2, 4.0)])
    assert (summary.duration_s, summary.requests_per_s, summary.gap_cv) == (4.0, 0.5, 0.5)


def test_undefined_values_are_none():
    for requests in ([ask()], [ask(0), ask(1)]):
        summary = summarise(requests)
        assert (summary.requests_per_s, summary.gap_cv, summary.highest_reuse) == (None, None, None)


def test_highest_reuse_is_the_hit_rate_of_an_infinite_cache():
    """Two of the five prefix blocks repeat an earlier block, so the highest reuse is 40%."""
    summary = summarise([ask(0, prefix_blocks=(0, 1)), ask(1, prefix_blocks=(0, 1, 2))])
    assert (summary.prefix_blocks, summary.distinct_prefix_blocks) == (5, 3)
    assert summary.highest_reuse == pytest.approx(0.4)


def test_rejects_an_empty_stream():
    with pytest.raises(ValueError, match="no request"):
        summarise([])
