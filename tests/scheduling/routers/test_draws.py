"""Random draws of instances, and the power of two choices."""

from collections import Counter

import pytest

from support.routed import load, pools, request
from twofold.events import Route
from twofold.scheduling.routers.draws import TwoChoices, drawn, scrambled, two_of


def test_draws_depend_on_the_request_only():
    assert drawn(request("a")) == drawn(request("a", prompt=5))
    assert len({drawn(request(str(number))) for number in range(1000)}) == 1000


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_draws_two_distinct_members_evenly(size):
    pool = pools(*(load(f"p{number}") for number in range(size))).prefill
    pairs = [two_of(pool, scrambled(turn)) for turn in range(1, 2001)]
    assert all(len({first.id, second.id}) == min(size, 2) for first, second in pairs)
    for place in (0, 1):
        counts = Counter(pair[place].id for pair in pairs)
        assert len(counts) == size
        assert min(counts.values()) > 0.7 * 2000 / size


def test_draws_nothing_from_an_empty_pool():
    assert two_of(pools().prefill, 7) is None


def test_picks_the_less_loaded_of_two():
    known = pools(
        load("p0", pending_prefill_tokens=50),
        load("p1", pending_prefill_tokens=20),
        load("d0", reserved_tokens=10),
        load("d1", reserved_tokens=30),
    )
    routes = {TwoChoices().route(request(str(number)), 109, known, 0.0) for number in range(50)}
    assert routes == {Route("p1", "d0")}


def test_never_picks_the_most_loaded():
    known = pools(load("m0", pending_prefill_tokens=1), load("m1", pending_prefill_tokens=9), load("m2", decodes=2))
    routes = {TwoChoices().route(request(str(number)), 109, known, 0.0) for number in range(200)}
    assert routes == {Route("m0", "m0"), Route("m2", "m2")}


def test_phases_are_drawn_independently():
    known = pools(*(load(f"{phase}{number}") for phase in "pd" for number in range(4)))
    routes = {TwoChoices().route(request(str(number)), 109, known, 0.0) for number in range(400)}
    assert len(routes) == 16
