"""Admission of requests: queue order, refusals and retry times."""

import pytest

from support.admitted import admission, drain, offer, ticket
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.limits import KeyLimits, Refusal, RefusalReason


def busy(*, waiting, gap_s=1.0, **limits):
    """Return an admission queue with one running request and some waiting requests.

    The second value returned is the current time in seconds.
    """
    door = admission(**{"max_running": 1, "max_waiting": waiting, **limits})
    for number in range(5):
        offer(door, f"ended{number}", now=number * gap_s)
        door.next(number * gap_s)
        door.release(f"ended{number}", (number + 1) * gap_s)
    now = 5 * gap_s
    offer(door, "runs", now=now)
    assert door.next(now).id == "runs"
    for number in range(waiting):
        assert offer(door, f"waits{number}", now=now) is None
    return door, now


def test_first_come_first_served_within_a_priority():
    door = admission()
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -5), ("e", 0)):
        offer(door, name, priority=priority)
    assert [each.id for each in drain(door, 0.0)] == ["d", "b", "e", "a", "c"]


def test_max_running_bounds_the_running_requests():
    door = admission(max_running=2)
    for name in "abc":
        offer(door, name)
    assert [each.id for each in drain(door, 0.0)] == ["a", "b"]
    door.release("a", 1.0)
    assert door.next(1.0).id == "c"
    assert (door.waiting, len(door._running)) == (0, 2)


def test_requests_put_back_keep_their_order():
    door = admission()
    for name in "abcd":
        offer(door, name)
    first, second = door.next(0.0), door.next(0.0)
    door.put_back(second, 0.0)
    door.put_back(first, 0.0)
    offer(door, "urgent", priority=-1)
    assert [each.id for each in drain(door, 0.0)] == ["urgent", "a", "b", "c", "d"]


def test_put_back_into_a_full_queue():
    door = admission(max_running=1, max_waiting=1)
    offer(door, "a")
    running = door.next(0.0)
    offer(door, "b")
    door.put_back(running, 0.0)
    assert door.waiting == 2
    assert offer(door, "c").reason is RefusalReason.QUEUE_FULL
    assert [door.next(0.0).id, door.next(0.0)] == ["a", None]


def test_an_idle_service_admits_without_a_queue():
    door = admission(max_running=1, max_waiting=0)
    assert offer(door, "a") is None
    assert door.next(0.0).id == "a"
    assert offer(door, "b").reason is RefusalReason.QUEUE_FULL


def test_full_queue_before_the_first_end():
    door = admission(max_running=1, max_waiting=1)
    for name in "ab":
        offer(door, name)
        door.next(0.0)
    assert offer(door, "c", now=0.1) == Refusal(RefusalReason.QUEUE_FULL, 1)
    assert offer(door, "d", now=7.5) == Refusal(RefusalReason.QUEUE_FULL, 8)


@pytest.mark.parametrize(("gap_s", "retry_after_s"), [(1.0, 11), (0.25, 3), (3.0, 33)])
def test_full_queue_at_a_known_rate(gap_s, retry_after_s):
    door, now = busy(waiting=10, gap_s=gap_s)
    assert offer(door, "late", now=now) == Refusal(RefusalReason.QUEUE_FULL, retry_after_s)


def test_retry_after_counts_only_requests_ahead():
    door = admission(max_running=1, max_waiting=11)
    for number in range(12):
        offer(door, f"r{number}", priority=0 if number < 3 else 7)
        door.next(0.0)
    door.release("r0", 2.0)
    door.next(2.0)
    offer(door, "fills the line", priority=7, now=2.0)
    assert offer(door, "x", priority=0, now=2.0).retry_after_s == 2 * 2
    assert offer(door, "y", priority=7, now=2.0).retry_after_s == 12 * 2


def test_idle_time_does_not_count_as_slowness():
    door, now = busy(waiting=0, gap_s=0.5, max_waiting=9)
    door.release("runs", now + 0.5)
    for number in range(10):
        assert offer(door, f"later{number}", now=now + 9000) is None
        door.next(now + 9000)
    assert offer(door, "x", now=now + 9000).retry_after_s == 5


def test_a_stall_lengthens_the_estimate():
    door, now = busy(waiting=5)
    assert offer(door, "x", now=now + 60).retry_after_s >= 60


def test_estimates_use_the_slowest_stretch():
    door = admission(max_running=4, max_waiting=4)
    for start in (0.0, 8.0, 16.0):
        for number in range(4):
            offer(door, f"{start}-{number}", now=start)
            door.next(start)
            door.release(f"{start - 8}-{number}", start)
            door.next(start)
        drain(door, start)
    for number in range(4):
        offer(door, f"w{number}", now=16.5)
    assert offer(door, "x", now=17.0).retry_after_s >= 7


def test_max_concurrent_limits_a_key():
    door = admission(max_running=1, keys={"small": KeyLimits(max_concurrent=2)})
    for name in "ab":
        assert offer(door, name, key="small") is None
    door.next(0.0)
    assert door.by_key() == {"small": (1, 1)}
    assert offer(door, "c", key="small").reason is RefusalReason.KEY_LIMIT
    assert offer(door, "d", key="large") is None
    door.release("b", 0.0)
    assert offer(door, "e", key="small") is None


def test_retry_after_of_a_key_follows_its_oldest_request():
    door = admission(keys={"one": KeyLimits(max_concurrent=1)})
    offer(door, "a", key="one")
    drain(door, 0.0)
    door.release("a", 10.0)
    offer(door, "b", key="one", now=20.0)
    assert offer(door, "c", key="one", now=23.0) == Refusal(RefusalReason.KEY_LIMIT, 7)


def test_requests_per_minute_is_a_token_bucket():
    door = admission(keys={"k": KeyLimits(requests_per_minute=6)})
    assert [offer(door, f"r{n}", key="k") for n in range(6)] == [None] * 6
    assert offer(door, "x", key="k", now=3.0) == Refusal(RefusalReason.KEY_LIMIT, 7)
    assert offer(door, "x", key="k", now=10.0) is None
    assert offer(door, "y", key="k", now=10.0) == Refusal(RefusalReason.KEY_LIMIT, 10)


def test_refusals_do_not_take_bucket_tokens():
    door = admission(max_running=1, max_waiting=0, keys={"k": KeyLimits(requests_per_minute=2)})
    assert offer(door, "a", key="k") is None
    door.next(0.0)
    for number in range(9):
        assert offer(door, f"r{number}", key="k").reason is RefusalReason.QUEUE_FULL
    door.release("a", 1.0)
    assert offer(door, "b", key="k", now=1.0) is None


def test_the_refusal_with_the_longest_wait_wins():
    door, now = busy(waiting=59, keys={"k": KeyLimits(requests_per_minute=60)})
    for number in range(60):
        offer(door, f"k{number}", key="k", now=now)
    assert offer(door, "x", key="k", now=now) == Refusal(RefusalReason.QUEUE_FULL, 60)


def test_rejects_a_passed_deadline():
    assert offer(admission(), "a", now=5.0, deadline_s=5.0) == Refusal(RefusalReason.DEADLINE, 1)


def test_rejects_a_deadline_within_the_queueing_time():
    door, now = busy(waiting=10, max_waiting=99)
    assert offer(door, "x", now=now, deadline_s=now + 4.0) == Refusal(RefusalReason.DEADLINE, 7)
    assert offer(door, "y", now=now, deadline_s=now + 11.0) is None


def test_an_idle_service_accepts_short_deadlines():
    door, now = busy(waiting=0, gap_s=100.0)
    door.release("runs", now)
    assert offer(door, "x", now=now, deadline_s=now + 0.1) is None


def test_queued_requests_expire():
    door = admission()
    for name, deadline_s in (("late", 9.0), ("soon", 3.0), ("sooner", 2.0)):
        offer(door, name, deadline_s=deadline_s)
    assert door.next(4.0).id == "late"
    assert [each.id for each in door.expired(4.0)] == ["sooner", "soon"]
    assert (door.expired(4.0), door.waiting, len(door._running)) == ([], 0, 1)


def test_requests_without_deadline_get_the_timeout():
    door = admission(max_running=1, timeout_s=50.0)
    offer(door, "patient", priority=9)
    for second in range(50):
        offer(door, f"urgent{second}", now=float(second))
        assert door.next(float(second)).id == f"urgent{second}"
        door.release(f"urgent{second}", second + 0.9)
    assert [each.id for each in door.expired(50.0)] == ["patient"]


def test_release_accepts_queued_and_unknown_requests():
    door = admission()
    offer(door, "a")
    door.release("stranger", 0.0)
    door.release("a", 0.0)
    assert door.waiting == 0


def test_rejects_a_duplicate_id():
    door = admission()
    offer(door, "a")
    with pytest.raises(ValueError, match="a was admitted"):
        offer(door, "a")


def test_policies_add_refusals():

    class NoLongPrompts(Admission):
        def judge(self, ticket, now):
            long = ticket.request.prompt_tokens > 100
            return Refusal(RefusalReason.DEADLINE, 5) if long else None

    door = NoLongPrompts(admission().limits)
    assert door.offer(ticket("a", prompt_tokens=101), 0.0).retry_after_s == 5
    assert door.offer(ticket("b", prompt_tokens=100), 0.0) is None
