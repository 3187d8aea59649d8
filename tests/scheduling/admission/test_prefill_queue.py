"""Predicted waiting and end times of the prompts in the queue of a prefill instance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ledgers import MODEL
from twofold.scheduling.admission.prefill_queue import PrefillQueue, QueuedPrompt, SpeedFactor


def line(*tokens, budget=100, now=0.0, speed=None):
    """Return a prefill queue with prompts of the given lengths."""
    made = PrefillQueue(MODEL, budget, speed or SpeedFactor())
    for name, count in zip("abcdef", tokens, strict=False):
        made.join(QueuedPrompt(name, count), now)
    return made


def test_a_single_prompt_takes_the_model_time():
    assert line().wait_s(QueuedPrompt("x", 80), 5.0) == pytest.approx(0.08)


def test_prompts_share_iterations_up_to_the_budget():
    ends = dict(line(50, 40, 60, 300).ends(0.02))
    assert ends == pytest.approx({"a": 0.05, "b": 0.15, "c": 0.15, "d": 0.45})


def test_wait_includes_the_rest_of_the_running_iteration():
    made = line(100, 100)
    assert made.wait_s(QueuedPrompt("x", 100), 0.06) == pytest.approx(0.04 + 0.1 + 0.1)
    assert made.wait_s(QueuedPrompt("x", 100), 9.0) == pytest.approx(0.1 + 0.1)


def test_the_next_iteration_starts_at_the_actual_end():
    made = line(100, 100)
    made.done("a", 0.1)
    assert dict(made.ends(0.15)) == pytest.approx({"b": 0.2})
    made.done("b", 0.2)
    assert not made._iteration_of
    assert made.busy_s(0.2) == 0.0


def test_expected_arrivals_lengthen_the_iteration():
    made, now = line(speed=SpeedFactor()), 0.0
    for number in range(40):
        made.join(QueuedPrompt(str(number), 10), now)
        made.done(str(number), now)
        now += 0.01
    made.join(QueuedPrompt("runs", 90), now)
    alone = QueuedPrompt("x", 40)
    others = made.wait_s(alone, now) - 0.09 - 0.04
    assert others == pytest.approx(0.06)
    assert made.wait_s(QueuedPrompt("x", 95), now) == pytest.approx(0.09 + 0.095)  # no room for another


def test_late_prompts_move_to_the_next_iteration():
    made = line(50, 20, 30, budget=100)
    made.done("a", 0.05)
    made.done("b", 0.07)
    made.join(QueuedPrompt("d", 60), 0.07)
    assert dict(made.ends(0.07)) == pytest.approx({"c": 0.1, "d": 0.16})
    assert dict(made.ends(0.08)) == pytest.approx({"c": 0.16, "d": 0.16})
    made.done("c", 0.16)
    made.done("d", 0.16)
    assert made.busy_s(0.16) == 0.0


def test_late_prompts_run_alone_without_room():
    made = line(50, 20, 30, 90, budget=100)
    made.done("a", 0.05)
    made.done("b", 0.07)
    assert dict(made.ends(0.08)) == pytest.approx({"c": 0.1, "d": 0.19})


def test_oldest_companion_of_an_iteration():
    made = line(50, 40, 10)
    assert made.oldest_companion(QueuedPrompt("x", 20), 0.0) == "b"
    assert made.oldest_companion(QueuedPrompt("x", 90), 0.0) is None
    assert line(50).oldest_companion(QueuedPrompt("x", 20), 0.0) is None


def test_dropped_prompts_take_no_time():
    made = line(100, 100, 100)
    made.drop("b", 0.05)
    assert dict(made.ends(0.05)) == pytest.approx({"a": 0.1, "c": 0.2})
    made.drop("a", 0.05)
    made.drop("a", 0.05)
    assert dict(made.ends(0.05)) == pytest.approx({"c": 0.15})


def test_speed_factor_follows_a_slow_instance():
    speed = SpeedFactor()
    made, now = line(speed=speed), 0.0
    for number in range(60):
        made.join(QueuedPrompt(str(number), 100), now)
        made.done(str(number), now := now + 0.2)
    assert made.wait_s(QueuedPrompt("x", 100), now) == pytest.approx(0.2, rel=0.01)


def test_simultaneous_ends_are_one_iteration():
    speed = SpeedFactor()
    made = line(60, 60, speed=speed)
    made.done("a", 0.06)
    made.done("b", 0.06)
    assert speed.factor == pytest.approx(1.0)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.floats(0, 2))
def test_ends_are_in_order(tokens, now):
    made = line(*tokens)
    ends = [end for _, end in made.ends(now)]
    assert ends == sorted(ends)
    assert now + made.wait_s(QueuedPrompt("x", 1), now) >= ends[-1]
