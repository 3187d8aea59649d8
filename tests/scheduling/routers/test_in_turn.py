"""Round robin and random routing, which ignore loads."""

from collections import Counter

import pytest

from support.routed import load, pools, request
from twofold.events import Route
from twofold.scheduling.routers.draws import at_random, round_robin


def routes(router, known, count):
    return [router.route(request(), 109, known, 0.0) for _ in range(count)]


def test_round_robin_takes_each_phase_in_turn():
    """The choice of a prefill instance does not affect the choice of a decode instance."""
    known = pools(load("p0"), load("p1"), load("d0"), load("d1"), load("d2"))
    expected = [Route(f"p{i % 2}", f"d{i % 3}") for i in range(7)]
    assert routes(round_robin(), known, 7) == expected


def test_round_robin_over_mixed_instances():
    """Each request prefills and decodes on the same instance."""
    assert routes(round_robin(), pools(load("m0"), load("m1")), 3) == [
        Route("m0", "m0"),
        Route("m1", "m1"),
        Route("m0", "m0"),
    ]


def test_a_new_instance_gets_its_turn():
    known, router = pools(load("m0"), load("m1")), round_robin()
    routes(router, known, 2)
    known.add(load("m2"))
    assert {route.prefill for route in routes(router, known, 3)} == {"m0", "m1", "m2"}
    known.remove("m1")
    assert {route.prefill for route in routes(router, known, 2)} == {"m0", "m2"}


def test_random_is_uniform_and_independent_per_phase():
    known = pools(*(load(name) for name in ("p0", "p1", "p2", "d0", "d1", "d2")))
    counts = Counter(routes(at_random(), known, 9000))
    assert len(counts) == 9
    assert all(850 < count < 1150 for count in counts.values())


def test_random_is_reproducible():
    known = pools(*(load(name) for name in ("p0", "p1", "p2", "d0", "d1", "d2")))
    assert routes(at_random(), known, 100) == routes(at_random(), known, 100)


@pytest.mark.parametrize("router", [round_robin, at_random])
def test_no_route_without_instances(router):
    assert routes(router(), pools(), 1) == [None]
    assert routes(router(), pools(load("p0")), 1) == [None]
    assert routes(router(), pools(load("d0")), 1) == [None]
