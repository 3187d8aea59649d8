"""The power of two choices."""

from support.routed import load, pools, request
from twofold.events import Route
from twofold.scheduling.routers.two_choices import TwoChoices


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
