"""Predicted prefill queues of instances, on which routers base decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.predicted import Proportional, forecast


def test_queue_is_the_sum_of_placed_prefills():
    made = forecast("p0", "p1")
    made.placed("a", "p0", 300, 0, 0.0)
    made.placed("b", "p0", 300, 200, 0.0)
    assert made.queue_s("p0", 0.0) == pytest.approx(4.0)
    assert made.queue_s("p1", 0.0) == 0.0
    made.prefill_ended("a", 3.0)
    assert made.queue_s("p0", 3.0) == pytest.approx(1.0)
    made.prefill_ended("b", 4.0)
    assert made.queue_s("p0", 4.0) == 0.0
    assert made.assigned_s("p0") == pytest.approx(4.0), "what was ever given stays counted"


def test_running_prefill_shortens_the_queue():
    made = forecast("p0")
    made.placed("a", "p0", 300, 0, 10.0)
    made.placed("b", "p0", 200, 0, 11.0)
    assert made.queue_s("p0", 12.0) == pytest.approx(3.0)
    assert made.queue_s("p0", 99.0) == pytest.approx(2.0), "it takes longer than was predicted"
    made.prefill_ended("a", 13.5)
    assert made.queue_s("p0", 14.0) == pytest.approx(1.5)


def test_an_end_without_time_uses_the_latest_known_time():
    made = forecast("p0")
    made.placed("a", "p0", 300, 0, 1.0)
    made.placed("b", "p0", 300, 0, 2.0)
    made.prefill_ended("a")
    assert made.queue_s("p0", 2.0) == pytest.approx(3.0)
    made.prefill_ended("a")  # a second end is ignored
    assert made.queue_s("p0", 2.5) == pytest.approx(2.5)


def test_an_abort_out_of_turn_keeps_the_first_running():
    made = forecast("p0")
    made.placed("a", "p0", 300, 0, 0.0)
    made.placed("b", "p0", 100, 0, 0.0)
    made.prefill_ended("b", 1.0)
    assert made.queue_s("p0", 2.0) == pytest.approx(1.0)


def test_a_lost_instance_rejoins_with_an_empty_queue():
    made = forecast("p0")
    made.placed("a", "p0", 300, 0, 0.0)
    made.leave("p0")
    made.prefill_ended("a", 1.0)
    assert made.queue_s("p0", 1.0) == 0.0
    assert made.prediction("p0").prefill_s(100) == 1.0
    made.leave("nobody")
    made.placed("b", "nobody", 100, 0, 1.0)
    made.prefill_ended("b", 2.0)
    with pytest.raises(KeyError):
        made.prediction("nobody")


def test_the_last_prompt_token_is_always_computed():
    made = forecast("p0")
    assert [made.reused_tokens(blocks, 250) for blocks in (0, 1, 2, 3)] == [0, 100, 200, 249]
    assert made.reused_tokens(1, 1) == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9)), max_size=40), st.data())
def test_queue_is_bounded_by_zero_and_its_sum(prompts, data):
    made, now, left = forecast("p0", prediction=Proportional(0.01)), 0.0, {}
    for number, (tokens, wait) in enumerate(prompts):
        now += wait
        made.placed(str(number), "p0", tokens, 0, now)
        left[str(number)] = tokens * 1e-4
        while left and data.draw(st.booleans()):
            request_id = data.draw(st.sampled_from(sorted(left)))
            made.prefill_ended(request_id, now)
            del left[request_id]
        assert -1e-9 <= made.queue_s("p0", now) <= sum(left.values()) + 1e-9
    for request_id in left:
        made.prefill_ended(request_id, now)
    assert made.queue_s("p0", now) == 0.0
