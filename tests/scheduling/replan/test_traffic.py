"""Traffic shifts are detected, and false alarms are rare."""

import random
from math import exp

import pytest

from twofold.bench.real_data import find_data
from twofold.scheduling.replan.traffic import BATCH, Quantity, TrafficMonitor
from twofold.workload.trace import open_trace

HOUR_S = 3600.0


def traffic(seed, *, rate, burstiness=1.0, prompt=1000, output=150, end_s=HOUR_S, begin_s=0.0):
    """Yield the arrival time in s, prompt length and output length of random requests."""
    draw, now = random.Random(f"{seed} {rate} {begin_s}"), begin_s
    while (now := now + draw.gammavariate(burstiness, 1 / (rate * burstiness))) < end_s:
        yield (now, round(prompt * exp(draw.gauss(0.0, 1.0))) + 1, round(output * exp(draw.gauss(0.0, 1.0))) + 1)


def made(number):
    """Callback that must not be called."""
    raise AssertionError


def feed(watch, events):
    for now, prompt, output in events:
        watch.ended(watch.arrived(prompt, now), output)


def tell(watch, events):
    """Return the number of requests after which the monitor raises an alarm, or None."""
    for count, (now, prompt, output) in enumerate(events, 1):
        watch.ended(watch.arrived(prompt, now), output)
        if watch.alarmed:
            return count
    return None


@pytest.mark.parametrize(("rate", "burstiness"), [(2.0, 1.0), (20.0, 1.0), (20.0, 0.25), (10.0, 0.1)])
def test_no_alarm_in_an_hour_without_a_change(rate, burstiness):
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
def test_detects_a_step_within_256_requests(name):
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


def test_ignores_changes_below_tolerance():
    watch = TrafficMonitor()
    assert tell(watch, traffic(0, rate=20.0)) is None
    assert tell(watch, traffic(0, rate=22.0, begin_s=HOUR_S, end_s=2 * HOUR_S)) is None


def test_forgets_a_shift_that_passed():
    watch = TrafficMonitor()
    tell(watch, traffic(0, rate=10.0, end_s=600.0))
    assert tell(watch, traffic(0, rate=40.0, begin_s=600.0, end_s=660.0)) is not None
    feed(watch, traffic(1, rate=10.0, begin_s=660.0, end_s=900.0))
    assert watch.alarmed
    assert all(shift.ratio < 1.0 for shift in watch.shifts()), "if anything it is quieter now than it was lately"


def test_accept_sets_a_new_baseline():
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


def test_traffic_has_burstiness():
    watch = TrafficMonitor()
    watch.ended(watch.arrived(10, 0.0), 1)
    assert watch.traffic([], made) is None
    tell(watch, traffic(0, rate=10.0, burstiness=0.25, end_s=200.0))
    assert watch.traffic([], made).burstiness == pytest.approx(0.25, rel=0.4)


def test_outputs_count_in_order_of_arrival():
    watch = TrafficMonitor()
    numbers = [watch.arrived(100, float(at)) for at in range(4)]
    for number, output in ((3, 5), (1, 7), (2, None)):
        watch.ended(numbers[number], output)
    assert list(watch._outputs) == []
    watch.ended(numbers[0], 900)
    assert list(watch._outputs) == [(0, 900), (1, 7), (3, 5)]


def test_an_endless_request_does_not_block_outputs():
    watch = TrafficMonitor()
    stuck = watch.arrived(100, 0.0)
    for at in range(1, 9000):
        watch.ended(watch.arrived(100, float(at)), 10)
    assert len(watch._outputs) > 1000
    watch.ended(stuck, 10)
    assert len(watch._ended) == 0


def test_a_rate_increase_does_not_shorten_outputs():
    watch, ends = TrafficMonitor(), []
    events = [*traffic(0, rate=10.0, end_s=600.0), *traffic(0, rate=20.0, begin_s=600.0, end_s=700.0)]
    for now, prompt, output in events:
        ends.sort()
        while ends and ends[0][0] < now:
            watch.ended(*ends.pop(0)[1:])
        ends.append((now + 0.05 * output, watch.arrived(prompt, now), output))
    assert [shift.quantity for shift in watch.shifts()] == [Quantity.RATE]


def test_handles_simultaneous_arrivals():
    watch = TrafficMonitor()
    for _ in range(1000):
        watch.ended(watch.arrived(100, 1.0), 10)
    assert watch.traffic([], made) is None
    tell(watch, traffic(0, rate=1.0, begin_s=1.0, end_s=300.0))
    watch.shifts()


@pytest.mark.parametrize("name", ["azure-2023-code", "azure-2023-conv"])
def test_no_alarm_on_a_shuffled_trace(name):
    trace = find_data(f"traces/{name}.csv")
    if trace is None:
        pytest.skip(f"needs traces/{name}.csv, see `make data`")
    requests = list(open_trace(trace))
    random.Random(0).shuffle(requests)
    events = ((i / 5.0, request.prompt_tokens, request.output_tokens) for i, request in enumerate(requests))
    assert tell(TrafficMonitor(), events) is None


def test_running_outputs_are_censored():
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
