"""The router `load`, which chooses the shortest predicted queue."""

from support.predicted import forecast
from support.routed import load, pools, predicted, request
from twofold.scheduling.routers.forecasting import ShortestPredictedQueue


def known():
    made = pools(load("p0"), load("p1"), load("d0", reserved_tokens=5), load("d1"))
    made.forecast = forecast("p0", "p1")
    return made


def test_prefers_the_shortest_queue_over_a_cached_prompt():
    made = known()
    made.forecast.prefixes.stored("p0", (1, 2))
    made.forecast.prefixes.stored("p1", (1,))
    made.forecast.placed("x", "p0", 50, 0, 0.0)
    route = ShortestPredictedQueue().route(request(prompt=300, blocks=(1, 2, 3)), 300, made, 0.0)
    assert route == predicted("p1", "d1", 100)
    assert route.ttft_s == 2.0


def test_ties_go_to_the_least_assigned():
    made = known()
    made.forecast.placed("x", "p0", 50, 0, 0.0)
    made.forecast.prefill_ended("x", 1.0)
    assert ShortestPredictedQueue().route(request(), 109, made, 2.0) == predicted("p1", "d1")
