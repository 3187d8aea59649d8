"""What a shift of traffic is, how soon it is seen, and that there is none where nothing changes."""

import os
import random
from math import exp
from pathlib import Path

import pytest

from twofold.scheduling.replan.traffic import BATCH, Quantity, TrafficMonitor
from twofold.workload.trace import open_trace

HOUR_S = 3600.0


def traffic(seed, *, rate, burstiness=1.0, prompt=1000, output=150, end_s=HOUR_S, begin_s=0.0):
    """Gamma arrivals and lognormal lengths that spread by a factor of e: (time, prompt, output)."""
    draw, now = random.Random(f"{seed} {rate} {begin_s}"), begin_s
    while (now := now + draw.gammavariate(burstiness, 1 / (rate * burstiness))) < end_s:
        yield (
            now,
            round(prompt * exp(draw.gauss(0.0, 1.0))) + 1,
            round(output * exp(draw.gauss(0.0, 1.0))) + 1,
        )


def made(number):
    """Nothing runs: every output here ends at once."""
    raise AssertionError


def feed(watch, events):
    for now, prompt, output in events:
        watch.ended(watch.arrived(prompt, now), output)


def tell(watch, events):
    """Until an alarm; returns how many requests that took, or None."""
    for count, (now, prompt, output) in enumerate(events, 1):
        watch.ended(watch.arrived(prompt, now), output)
        if watch.alarmed:
            return count
    return None


@pytest.mark.parametrize(("rate", "burstiness"), [(2.0, 1.0), (20.0, 1.0), (20.0, 0.25), (10.0, 0.1)])
def test_no_alarm_in_an_hour_without_a_change(rate, burstiness):
    """Poisson arrivals and bursty ones, whose gaps vary by CV = 2 and 3.2; `bench/distserve` watches for longer."""
    for seed in range(3):
        assert tell(TrafficMonitor(), traffic(seed, rate=rate, burstiness=burstiness)) is None, seed


STEPS = {
    "twice the rate": (Quantity.RATE, {"rate": 20.0}),
    "half the rate": (Quantity.RATE, {"rate": 5.0}),
    "prompts twice as long": (Quantity.PROMPT, {"rate": 10.0, "prompt": 2000}),
    "outputs twice as long": (Quantity.OUTPUT, {"rate": 10.0, "output": 300}),
    "outputs half as long": (Quantity.OUTPUT, {"rate": 10.0, "output": 75}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_found_within_256_requests(name):
    """Which quantity it was, its size, and when it began, to within some batches."""
    quantity, after = STEPS[name]
    factor = {"twice": 2.0, "half": 0.5}[next(word for word in name.split() if word in ("twice", "half"))]
    for seed in range(10):
        watch = TrafficMonitor()
        assert tell(watch, traffic(seed, rate=10.0, end_s=600.0)) is None
        count = tell(watch, traffic(seed, begin_s=600.0, end_s=1200.0, **after))
        assert count is not None, seed
        assert count <= 256, seed
        (shift,) = watch.shifts()
        assert shift.quantity is quantity
        assert shift.ratio == pytest.approx(factor, rel=0.5)
        assert abs(shift.requests - count) <= 6 * BATCH


def test_a_change_that_is_too_small_to_matter_is_none():
    """However sure it is: a tenth more for an hour."""
    watch = TrafficMonitor()
    assert tell(watch, traffic(0, rate=20.0)) is None
    assert tell(watch, traffic(0, rate=22.0, begin_s=HOUR_S, end_s=2 * HOUR_S)) is None


def test_a_shift_that_has_passed_is_forgotten():
    """A burst of a minute, looked at when it is long over."""
    watch = TrafficMonitor()
    tell(watch, traffic(0, rate=10.0, end_s=600.0))
    assert tell(watch, traffic(0, rate=40.0, begin_s=600.0, end_s=660.0)) is not None
    feed(watch, traffic(1, rate=10.0, begin_s=660.0, end_s=900.0))
    assert watch.alarmed
    assert all(shift.ratio < 1.0 for shift in watch.shifts()), (
        "if anything it is quieter now than it was lately"
    )


def test_what_is_accepted_is_the_new_normal():
    """The traffic since the shift is what it was described as, and raises no alarm any more."""
    watch = TrafficMonitor()
    tell(watch, traffic(0, rate=10.0, end_s=600.0))
    feed(watch, traffic(0, rate=25.0, prompt=300, begin_s=600.0, end_s=660.0))
    shifts = watch.shifts()
    assert {shift.quantity for shift in shifts} == {Quantity.RATE, Quantity.PROMPT}
    assert watch.settled(shifts)
    now = watch.traffic(shifts, made)
    assert now.rate == pytest.approx(25.0, rel=0.25)
    assert sum(now.prompt_tokens) / len(now.prompt_tokens) == pytest.approx(300 * exp(0.5), rel=0.25)
    watch.accept(shifts)
    assert not watch.alarmed
    assert tell(watch, traffic(2, rate=25.0, prompt=300, begin_s=660.0, end_s=2000.0)) is None


def test_traffic_says_how_bursty_it_is():
    """The shape of gamma arrivals; what one request says is no traffic."""
    watch = TrafficMonitor()
    watch.ended(watch.arrived(10, 0.0), 1)
    assert watch.traffic([], made) is None
    tell(watch, traffic(0, rate=10.0, burstiness=0.25, end_s=200.0))
    assert watch.traffic([], made).burstiness == pytest.approx(0.25, rel=0.4)


def test_outputs_count_in_the_order_of_arrival():
    """Short ones, which end first, wait for the long ones before them; what did not end by itself is left out."""
    watch = TrafficMonitor()
    numbers = [watch.arrived(100, float(at)) for at in range(4)]
    for number, output in ((3, 5), (1, 7), (2, None)):
        watch.ended(numbers[number], output)
    assert list(watch._outputs) == []
    watch.ended(numbers[0], 900)
    assert list(watch._outputs) == [(0, 900), (1, 7), (3, 5)]


def test_a_request_that_never_ends_is_not_waited_for_for_ever():
    """Nor does it harm if it ends after all."""
    watch = TrafficMonitor()
    stuck = watch.arrived(100, 0.0)
    for at in range(1, 9000):
        watch.ended(watch.arrived(100, float(at)), 10)
    assert len(watch._outputs) > 1000
    watch.ended(stuck, 10)
    assert len(watch._ended) == 0


def test_more_requests_with_outputs_that_take_their_time_are_no_shorter_outputs():
    """A token takes 50 ms: after the step short outputs are the first to end, but only the rate has shifted."""
    watch, ends = TrafficMonitor(), []
    events = [*traffic(0, rate=10.0, end_s=600.0), *traffic(0, rate=20.0, begin_s=600.0, end_s=700.0)]
    for now, prompt, output in events:
        ends.sort()
        while ends and ends[0][0] < now:
            watch.ended(*ends.pop(0)[1:])
        ends.append((now + 0.05 * output, watch.arrived(prompt, now), output))
    assert [shift.quantity for shift in watch.shifts()] == [Quantity.RATE]


def test_requests_that_come_all_at_once():
    """A thousand at the same instant are no reason to fail."""
    watch = TrafficMonitor()
    for _ in range(1000):
        watch.ended(watch.arrived(100, 1.0), 10)
    assert watch.traffic([], made) is None
    tell(watch, traffic(0, rate=1.0, begin_s=1.0, end_s=300.0))
    watch.shifts()


@pytest.mark.skipif("TWOFOLD_DATA" not in os.environ, reason="needs the traces that TWOFOLD_DATA has")
@pytest.mark.parametrize("name", ["azure-2023-code", "azure-2023-conv"])
def test_a_recorded_hour_is_quiet_in_shuffled_order(name):
    """Real lengths, all of which could have come in any order: prompts and outputs raise no alarm."""
    requests = list(open_trace(Path(os.environ["TWOFOLD_DATA"]) / "traces" / f"{name}.csv"))
    random.Random(0).shuffle(requests)
    events = ((i / 5.0, request.prompt_tokens, request.output_tokens) for i, request in enumerate(requests))
    assert tell(TrafficMonitor(), events) is None


def test_outputs_that_go_on_count_as_longer_than_they_are():
    """After a step to outputs four times as long, those that have ended are the shortest of them."""
    watch, running = TrafficMonitor(), {}
    tell(watch, traffic(0, rate=10.0, end_s=300.0))
    for now, prompt, output in traffic(0, rate=30.0, output=600, begin_s=300.0, end_s=315.0):
        number = watch.arrived(prompt, now)
        seen = round((315.0 - now) / 0.02)
        if output <= seen:
            watch.ended(number, output)
        else:
            running[number] = seen
    shifts = watch.shifts()
    assert watch.settled(shifts)
    outputs = watch.traffic(shifts, running.__getitem__).output_tokens
    assert sorted(outputs)[len(outputs) // 2] == pytest.approx(600, rel=0.4)
