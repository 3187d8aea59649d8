"""Load balance: the least predicted queue, whatever is in the caches."""

from support.predicted import forecast
from support.routed import load, pools, request
from twofold.placement import Route
from twofold.scheduling.routers.forecasting import ShortestPredictedQueue


def known():
    made = pools(load("p0"), load("p1"), load("d0", reserved_tokens=5), load("d1"))
    made.forecast = forecast("p0", "p1")
    return made


def test_it_takes_the_shortest_queue_though_another_has_the_prompt():
    """The blocks elsewhere play no part; those that are here do, in what is expected."""
    made = known()
    made.forecast.prefixes.stored("p0", (1, 2))
    made.forecast.prefixes.stored("p1", (1,))
    made.forecast.placed("x", "p0", 50, 0, 0.0)
    route = ShortestPredictedQueue().route(request(prompt=300, blocks=(1, 2, 3)), 300, made, 0.0)
    assert route == Route("p1", "d1", (), 100)
    assert route.ttft_s == 2.0


def test_among_equals_it_takes_who_was_given_least():
    """Otherwise an idle cluster would give everything to its first instance."""
    made = known()
    made.forecast.placed("x", "p0", 50, 0, 0.0)
    made.forecast.prefill_ended("x", 1.0)
    assert ShortestPredictedQueue().route(request(), 109, made, 2.0) == Route("p1", "d1")
