"""Search for the best placement, compared with brute force."""

import asyncio
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.analytic_placement import AnalyticPlacement, kind
from twofold.errors import ConfigurationError
from twofold.planning.placement.search import (
    best_of,
    fewest_accelerators,
    for_rate,
    most_goodput,
    most_per_accelerator,
    promised,
    whole_stock,
)
from twofold.planning.promise import Draws

KINDS = [kind(1), kind(2), kind(4), kind(1, 2), kind(2, 2)]
SPEEDS = st.lists(st.floats(0.5, 20.0), min_size=len(KINDS), max_size=len(KINDS))
TOLERANCE = 0.01


def table(speeds):
    known = dict(zip(KINDS, speeds, strict=True))
    return known.__getitem__


@settings(max_examples=30)
@given(SPEEDS, SPEEDS, st.integers(3, 16))
def test_finds_the_best_pair_and_counts(prefill, decode, most):
    cluster = AnalyticPlacement(table(prefill), table(decode))
    found = best_of(asyncio.run(most_goodput(cluster.search(TOLERANCE), KINDS, most)))
    best = max(
        min(count * cluster.prefill(one), more * cluster.decode(other))
        / (count * one.accelerators + more * other.accelerators)
        for one in KINDS
        for other in KINDS
        for count in range(1, most)
        for more in range(1, most)
        if count * one.accelerators + more * other.accelerators <= most
    )
    assert found.per_accelerator >= best / (1 + TOLERANCE) ** 2
    assert found.per_accelerator <= best


@settings(max_examples=30)
@given(SPEEDS, SPEEDS)
def test_algorithm_1_is_never_worse_than_algorithm_2(prefill, decode):
    cluster = AnalyticPlacement(table(prefill), table(decode))
    search = cluster.search(TOLERANCE)
    high = best_of(asyncio.run(most_goodput(search, KINDS, 16)))
    low = best_of(asyncio.run(most_goodput(search, KINDS, 16, node=4)))
    assert high.per_accelerator >= low.per_accelerator / (1 + TOLERANCE)
    one_node = best_of(asyncio.run(most_goodput(search, KINDS, 16, node=16)))
    assert one_node.per_accelerator == high.per_accelerator


@settings(max_examples=30)
@given(SPEEDS, SPEEDS, st.floats(5.0, 60.0))
def test_uses_the_fewest_accelerators_for_a_rate(prefill, decode, rate):
    cluster = AnalyticPlacement(table(prefill), table(decode))
    found = best_of(asyncio.run(for_rate(cluster.search(TOLERANCE), KINDS, rate, 10_000)))
    assert cluster.capacity(found.design) >= rate
    fewest = min(
        math.ceil(rate / cluster.prefill(one)) * one.accelerators
        + math.ceil(rate / cluster.decode(other)) * other.accelerators
        for one in KINDS
        for other in KINDS
    )
    # Goodput is rounded down to a step of the rate grid, which may require one more instance.
    assert fewest <= found.accelerators <= fewest + max(each.accelerators for each in KINDS)


@pytest.mark.parametrize(("factor", "batcher"), [(1.5, "chunked-prefill"), (1.0, None), (0.5, None)])
@pytest.mark.parametrize(
    "place",
    [
        lambda search: most_goodput(search, KINDS, 8),
        lambda search: for_rate(search, KINDS, 10.0, 100),
        lambda search: whole_stock(search, KINDS, {"dgx-node": 8}),
    ],
    ids=["most-goodput", "for-rate", "whole-stock"],
)
def test_the_better_batcher_of_prefill_is_used(place, factor, batcher):
    """Among equal batchers, the default is used."""
    cluster = AnalyticPlacement(lambda one: 3.0 * one.accelerators, lambda _: 2.0, {"chunked-prefill": factor})
    found = asyncio.run(place(cluster.search(TOLERANCE)))
    assert {each.design.family.batcher for each in found.split} == {batcher}
    assert {each.batcher for each in found.prefills} == {batcher}
    assert sorted(each.kind.short for each in found.prefills) == sorted(each.short for each in KINDS)


@pytest.mark.parametrize(("prefill", "decode", "words"), [(0.0, 1.0, "TTFT"), (1.0, 0.0, "TPOT")])
def test_names_the_phase_that_misses_its_bound(prefill, decode, words):

    class Hopeless(AnalyticPlacement):
        async def __call__(self, trial):
            told = await super().__call__(trial)
            judged = trial.design.family.judged
            able = {"prefill": prefill, "decode": decode, None: 1.0}[judged and judged.value]
            return told if able else type(told)(met=False, checks=told.checks)

    search = Hopeless(lambda _: 2.0, lambda _: 2.0).search()
    with pytest.raises(ConfigurationError, match=words):
        best_of(asyncio.run(most_goodput(search, KINDS, 8)))


def test_searches_the_colocated_batchers_of_the_query():
    cluster = AnalyticPlacement(table([1.0] * len(KINDS)), table([1.0] * len(KINDS)))
    search = msgspec.structs.replace(cluster.search(TOLERANCE), colocated_batching=(("inlined", None),))
    asyncio.run(most_goodput(search, KINDS, 8))
    assert {trial.design.family.batcher for trial in cluster.asked if not trial.design.family.split} == {"inlined"}


class UnevenPlacement(AnalyticPlacement):
    """A cluster in which draw n of the workload has a load 10% · n above that of the search."""

    async def __call__(self, trial):
        return await super().__call__(replace(trial, rate=trial.rate * (1.0 + 0.1 * trial.draw)))


DRAWS = Draws(confidence=0.75, numbers=(1, 2, 3), whole=False)


def test_the_rate_of_the_best_placements_is_that_of_the_worst_draw():
    search = UnevenPlacement(lambda _: 6.0, lambda _: 3.0).search(TOLERANCE)
    found = asyncio.run(most_goodput(search, [kind(1)], 6))
    held = asyncio.run(promised(search, found, most_per_accelerator, DRAWS))
    for before, after in ((found.split[0], held.split[0]), (found.colocated[0], held.colocated[0])):
        assert before.per_accelerator / after.per_accelerator == pytest.approx(1.3, rel=2 * TOLERANCE)
        assert after.promise.holds
        assert after.promise.margin == pytest.approx(1.3, rel=2 * TOLERANCE)


def test_a_rate_needs_more_accelerators_for_the_worst_draw():
    search = UnevenPlacement(lambda _: 6.0, lambda _: 3.0).search(TOLERANCE)
    found = asyncio.run(for_rate(search, [kind(1)], 12.0, 60))
    held = asyncio.run(promised(search, found, fewest_accelerators, DRAWS, most_accelerators=60))
    assert (found.split[0].accelerators, held.split[0].accelerators) == (6, 9)
    assert held.split[0].rate == 12.0
    assert held.split[0].promise.margin == pytest.approx(9 / 6)


def test_too_few_accelerators_for_the_worst_draw_are_reported():
    search = UnevenPlacement(lambda _: 6.0, lambda _: 3.0).search(TOLERANCE)
    found = asyncio.run(for_rate(search, [kind(1)], 11.5, 7))
    held = asyncio.run(promised(search, found, fewest_accelerators, DRAWS, most_accelerators=7))
    assert held.split[0].accelerators == 6
    assert not held.split[0].promise.holds
