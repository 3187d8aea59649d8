"""Append-prefill: prompts go to decode instances that cache most of them."""

import pytest

from support.predicted import forecast
from support.routed import load, pools, predicted, request
from twofold.scheduling.routers.appending import AppendPrefill

KEYS = tuple(range(10))
TOKENS = 1009


def known():
    made = pools(load("p0"), load("d0"), load("d1"))
    made.forecast = forecast("p0", "d0", "d1")
    return made


def route(made, blocks=KEYS):
    return AppendPrefill().route(request(prompt=1000, blocks=blocks), TOKENS, made, 0.0)


def test_prompts_without_a_cached_prefix_are_handed_off():
    made = known()
    made.forecast.memories.stored("d0", KEYS[:4])
    assert route(made).prefill == "p0"
    assert route(made).splits


def test_the_decode_instance_with_most_of_the_prompt_computes_the_rest():
    made = known()
    made.forecast.memories.stored("d1", KEYS[:9])
    found = route(made)
    assert found == predicted("d1", "d1", 900)
    assert found.ttft_s == pytest.approx(1.0)


def test_of_equal_times_a_decode_instance_saves_the_hand_off():
    made = known()
    for name in ("p0", "d0", "d1"):
        made.forecast.memories.stored(name, KEYS[:8])
    made.get("d0").reserved_tokens = 50
    assert route(made) == predicted("d1", "d1", 800), "the one with less reserved memory"


def test_a_prefill_instance_that_is_faster_computes_the_prompt():
    made = known()
    made.forecast.memories.stored("d0", KEYS[:9])
    made.forecast.placed("x", "d0", 900, 0, 0.0)
    made.forecast.memories.stored("p0", KEYS[:6])
    found = route(made)
    assert (found.prefill, found.reused_tokens) == ("p0", 600)
    assert found.ttft_s == pytest.approx(4.0)


def test_a_prompt_that_delays_many_decodes_is_handed_off():
    made = known()
    made.forecast.memories.stored("d0", KEYS[:9])
    made.forecast.memories.stored("p0", KEYS[:6])
    made.get("d0").decoding = 3
    found = route(made)
    assert (found.prefill, found.ttft_s) == ("d0", pytest.approx(1.0)), "1 s, and 1 s for each decode: as on p0"
    made.get("d0").decoding = 4
    assert route(made).prefill == "p0"


def test_a_full_decode_instance_takes_no_prompt():
    made = known()
    made.forecast.memories.stored("d0", KEYS[:9])
    made.get("d0").capacity_tokens = TOKENS + 99
    made.get("d0").reserved_tokens = 100
    assert route(made).prefill == "p0"
    made.get("d0").reserved_tokens = 99
    assert route(made).prefill == "d0"
