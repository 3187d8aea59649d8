"""The length from which prompts keep an instance busy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.hardware.catalog import load_catalog
from twofold.performance.queueing import SHARE, saturating_tokens
from twofold.performance.registry import performance_model

coefficients = st.tuples(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))


def quadratic(fixed, each, square):
    return lambda tokens: fixed + each * tokens + square * tokens * tokens


@given(coefficients, st.integers(1, 4000), st.floats(0.1, 1.0))
def test_it_is_the_shortest_of_all(of, most, share):
    """Every length is tried here, and only some there: times as models have them have one best rate."""
    prefill_s = quadratic(*of)
    rates = [tokens / prefill_s(tokens) for tokens in range(1, most + 1)]
    enough = share * max(rates)
    found = saturating_tokens(prefill_s, most, share)
    # The best of the lengths that are tried may be a little short of the best of all.
    assert rates[found - 1] >= enough * 0.999
    assert all(rate < enough * (1 + 1e-12) for rate in rates[: found - 1])


def test_without_a_fixed_cost_a_token_is_as_good_as_many():
    """Nothing is gained by batching then."""
    assert saturating_tokens(quadratic(0.0, 1e-3, 0.0), 2048) == 1


def test_with_a_line_it_follows_from_its_two_numbers():
    """n / (f + s·n) ≥ share / s · m·s / (f + m·s), the rate of the longest prompt m."""
    fixed, each, most = 0.02, 1e-4, 10_000
    best = most / (fixed + each * most)
    found = saturating_tokens(quadratic(fixed, each, 0.0), most)
    assert found == pytest.approx(SHARE * best * fixed / (1 - SHARE * best * each), abs=1)


def test_opt_13b_on_an_a100_is_busy_with_what_the_paper_says():
    """DistServe, section 3.1: a prompt of 512 tokens is enough for a model of 13B parameters on an A100."""
    catalog = load_catalog()
    model = performance_model("distserve-published", catalog.model("opt-13b"), catalog.machine("dgx-a100"), 1)
    found = saturating_tokens(lambda tokens: model.prefill_s(tokens, tokens * tokens), 2048)
    assert 400 <= found <= 700


@pytest.mark.parametrize(("most", "share"), [(0, 0.9), (10, 0.0), (10, 1.1)])
def test_what_cannot_be_is_refused(most, share):
    """A fault of the caller."""
    with pytest.raises(ValueError, match="there is no length"):
        saturating_tokens(lambda _: 1.0, most, share)
