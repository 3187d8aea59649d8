"""Mooncake's main claims in a short simulation. bench/mooncake/paper_claims.py runs the full simulation."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.planning.rates import RateGrid

BENCH = Path(__file__).parents[2] / "bench" / "mooncake"


@pytest.fixture(scope="module")
def bench():
    """Return the modules `paper_claims` and `rate_search` of bench/mooncake in a dict."""
    sys.path.insert(0, str(BENCH))
    try:
        return {name: importlib.import_module(name) for name in ("paper_claims", "rate_search")}
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def claims(bench):
    return bench["paper_claims"]


@pytest.fixture(scope="module")
def rates(bench):
    return bench["rate_search"]


def test_split_meets_the_ttft_slo_that_colocated_misses(claims, rates):
    setting = next(one for one in claims.SETTINGS if one.name == "16k")
    slo, systems = claims.bounds(setting), claims.generated_systems(setting)
    arriving = claims.requests(setting, 0.5, 150)
    results = {name: rates.run(systems[name], arriving) for name in (claims.SPLIT, claims.VLLM)}
    assert not rates.missed(results[claims.SPLIT], slo)
    assert rates.missed(results[claims.VLLM], slo) == "TTFT"


def test_prefix_hit_rate_matches_the_setting(claims, rates):
    """Between 45% and 50% of all prompt tokens are reused from the cache."""
    setting = next(one for one in claims.SETTINGS if one.name == "16k")
    result = rates.run(claims.generated_systems(setting)[claims.SPLIT], claims.requests(setting, 0.5, 150))
    assert 0.45 < result.reuse.reused_tokens / result.reuse.prompt_tokens <= 0.5


@given(limit=st.floats(0.001, 1000.0), start=st.floats(0.01, 100.0))
def test_rate_search_finds_the_highest_feasible_rate(rates, limit, start):
    grid = RateGrid(0.05)
    rate, bound = rates.highest(lambda rate: "TBT" if rate > limit else "", start, grid)
    assert bound == "TBT"
    if rate is None:
        assert limit < 0.02 * start
    else:
        assert rate <= limit < grid.rate(grid.step(rate) + 1)
