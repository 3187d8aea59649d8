"""Admission of random requests: limits, order and retry times."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.admitted import admission, drain, offer, ticket
from twofold.scheduling.admission.limits import KeyLimits, RefusalReason

keys = st.sampled_from(["", "slots", "minute"])


class Door(RuleBasedStateMachine):
    """State machine that drives admission with random requests."""

    @initialize(running=st.integers(1, 4), waiting=st.integers(0, 5))
    def open(self, running, waiting):
        limits = {"slots": KeyLimits(max_concurrent=3), "minute": KeyLimits(requests_per_minute=5)}
        self.door = admission(max_running=running, max_waiting=waiting, timeout_s=30.0, keys=limits)
        self.now = 0.0
        self.fates = Counter()
        self.waiting, self.running = [], []

    @rule(key=keys, priority=st.integers(-1, 1), left_s=st.none() | st.floats(-1, 60))
    def come(self, key, priority, left_s):
        self.fates["offered"] += 1
        each = ticket(
            f"r{self.fates['offered']}",
            now=self.now,
            key=key,
            priority=priority,
            deadline_s=None if left_s is None else self.now + left_s,
        )
        refusal = self.door.offer(each, self.now)
        if refusal is None:
            self.waiting.append(each)
        else:
            self.fates["refused"] += 1
            assert refusal.retry_after_s >= 1

    @rule()
    def start(self):
        """Check that admission starts the most urgent request."""
        alive = [each for each in self.waiting if each.deadline_s > self.now]
        free = len(self.running) < self.door.limits.max_running
        expected = min(alive, key=lambda each: (each.priority, each.number)) if alive and free else None
        started = self.door.next(self.now)
        assert started is expected
        if started is not None:
            self.waiting.remove(started)
            self.running.append(started)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        each = data.draw(st.sampled_from(self.running))
        self.running.remove(each)
        self.door.release(each.id, self.now)
        self.fates["done"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def put_back(self, data):
        each = data.draw(st.sampled_from(self.running))
        self.running.remove(each)
        self.waiting.append(each)
        self.door.put_back(each, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        each = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(each)
        self.door.release(each.id, self.now)
        self.fates["done"] += 1

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        passed = self.door.expired(self.now)
        assert {each.id for each in passed} == {e.id for e in self.waiting if e.deadline_s <= self.now}
        self.waiting = [each for each in self.waiting if each not in passed]
        self.fates["expired"] += len(passed)

    @invariant()
    def nobody_is_lost(self):
        door, fates = self.door, self.fates
        assert (door.waiting, len(door._running)) == (len(self.waiting), len(self.running))
        over = fates["done"] + fates["refused"] + fates["expired"]
        assert door.waiting + len(door._running) + over == fates["offered"]

    @invariant()
    def within_bounds(self):
        limits, door = self.door.limits, self.door
        assert len(door._running) <= limits.max_running
        assert door.waiting + len(door._running) <= limits.max_running + limits.max_waiting
        assert sum(door.by_key().get("slots", (0, 0))) <= 3

    @invariant()
    def keys_add_up(self):
        counts = self.door.by_key().values()
        assert sum(waiting for waiting, _ in counts) == self.door.waiting
        assert sum(running for _, running in counts) == len(self.door._running)


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class Steady:
    """Admission queue that is always full, with a constant service time per request."""

    def __init__(self, servers, waiting, service_s, stagger_s, rounds):
        self.door = admission(max_running=servers, max_waiting=waiting, timeout_s=1e9)
        self.service_s, self.stagger_s = service_s, stagger_s
        self.ends = []
        self.came = 0
        self.now = 0.0
        for _ in range(rounds * servers + 1):
            self.fill()
            self.step()
        self.fill()

    def fill(self):
        """Offer requests until the slots and the queue are full."""
        limits = self.door.limits
        while self.door.waiting < limits.max_waiting or len(self.door._running) < limits.max_running:
            offer(self.door, f"r{self.came}", now=self.now, priority=self.came % 3)
            self.came += 1
            self.start()

    def start(self):
        for each in drain(self.door, self.now):
            late = self.stagger_s * len(self.ends) if self.now == 0.0 else 0.0
            self.ends.append((self.now + late + self.service_s, each.id))

    def step(self):
        """Advance the time until a request ends, then start waiting requests."""
        self.ends.sort()
        self.now, request_id = self.ends.pop(0)
        self.door.release(request_id, self.now)
        self.start()

    def run_until(self, time):
        while self.ends and min(self.ends)[0] <= time:
            self.step()
        self.now = time


steady = st.builds(
    Steady,
    servers=st.integers(1, 6),
    waiting=st.integers(1, 12),
    service_s=st.sampled_from([0.25, 1.0, 4.0, 32.0]),
    stagger_s=st.sampled_from([0.0, 0.125, 0.5]),
    rounds=st.integers(2, 4),
)


@given(steady, st.integers(0, 3), st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_a_retry_after_the_wait_is_admitted(service, priority, phase):
    service.now += phase * (min(service.ends)[0] - service.now)
    refusal = offer(service.door, "early", now=service.now, priority=priority)
    assert refusal.reason is RefusalReason.QUEUE_FULL
    service.run_until(service.now + refusal.retry_after_s)
    assert offer(service.door, "early", now=service.now, priority=priority) is None


@given(steady, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_retry_with_a_later_deadline_is_admitted(service, left_s):
    door, now = service.door, service.now
    door.release(next(iter(door._queue._requests)), now)  # so that the queue is not full
    refusal = offer(door, "early", now=now, priority=9, deadline_s=now + left_s)
    if refusal is not None:
        assert refusal.reason is RefusalReason.DEADLINE
        service.run_until(now + refusal.retry_after_s)
        now = service.now
        assert offer(door, "early", now=now, priority=9, deadline_s=now + left_s) is None


@given(st.integers(1, 4), st.sampled_from([0.5, 3.0, 10.0]), st.floats(0, 1), st.none() | st.integers(1, 600))
@settings(max_examples=80, deadline=None)
def test_a_retry_after_the_key_wait_is_admitted(slots, stay_s, phase, per_minute):
    door = admission(keys={"k": KeyLimits(max_concurrent=slots, requests_per_minute=per_minute)})
    offer(door, "first", key="k")
    drain(door, 0.0)
    door.release("first", stay_s)
    start = stay_s + 60.0
    taken = [f"r{n}" for n in range(slots) if offer(door, f"r{n}", now=start, key="k") is None]
    drain(door, start)
    now = start + phase * stay_s * 0.99
    refusal = offer(door, "early", now=now, key="k")
    if refusal is None:
        return
    assert refusal.reason is RefusalReason.KEY_LIMIT
    later = now + refusal.retry_after_s
    for name in taken if start + stay_s <= later else []:
        door.release(name, start + stay_s)
    assert offer(door, "early", now=later, key="k") is None


@given(
    st.lists(st.floats(0.01, 30), min_size=1, max_size=80), st.integers(0, 200), st.integers(0, 200), st.floats(0, 100)
)
@settings(max_examples=40, deadline=None)
def test_estimates_grow_with_the_queue(gaps, one, other, silence_s):

    def told(length):
        door = admission(max_running=1, max_waiting=length, timeout_s=1e9)
        now = 0.0
        for number, gap_s in enumerate(gaps):
            offer(door, f"ended{number}", now=now)
            door.next(now)
            now += gap_s
            door.release(f"ended{number}", now)
        for number in range(length + 1):
            offer(door, f"r{number}", now=now)
            door.next(now)
        return offer(door, "x", now=now + silence_s).retry_after_s

    shorter, longer = sorted((one, other))
    assert told(shorter) <= told(longer)
