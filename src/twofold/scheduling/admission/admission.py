"""Admission control in front of the cluster: a bounded priority queue, request deadlines, and limits per API key."""

from bisect import bisect_left, bisect_right, insort
from math import ceil, floor
from operator import attrgetter

from twofold.events import RequestSubscriber
from twofold.request import Request
from twofold.scheduling.admission.limits import (
    AdmissionLimits,
    CompletionRate,
    KeyAccount,
    KeyLimits,
    Refusal,
    RefusalReason,
)
from twofold.timeline import Timeline


class QueuedRequest:
    """A request offered to admission control, with its API key, priority and deadline."""

    __slots__ = ("arrival_s", "deadline_s", "key", "number", "priority", "request")

    def __init__(self, request: Request, key: str = "", priority: int = 0, deadline_s: float | None = None) -> None:
        self.request = request
        self.key = key
        self.priority = priority  # lower values are served first, as in vLLM
        self.deadline_s = deadline_s  # on the clock of `arrival_s`; None selects the default timeout
        self.arrival_s = request.arrival_s
        self.number = 0  # place in the order of admission, from 1

    @property
    def id(self) -> str:
        return self.request.id


_priority, _turn, _deadline = attrgetter("priority"), attrgetter("priority", "number"), attrgetter("deadline_s")


class AdmissionQueue:
    """Priority queue of requests, from which any request can be removed."""

    def __init__(self) -> None:
        self._requests: dict[str, QueuedRequest] = {}
        self._turns: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def ahead_of(self, priority: int) -> int:
        """Return the number of queued requests ahead of a new request with priority `priority`."""
        return bisect_right(self._turns, priority, key=_priority)

    def join(self, queued: QueuedRequest) -> None:
        """Insert a request behind those with the same priority that arrived before it."""
        self._requests[queued.id] = queued
        insort(self._turns, queued, key=_turn)

    def leave(self, request_id: str) -> QueuedRequest | None:
        """Remove and return the request with this id; None if it is not queued."""
        queued = self._requests.pop(request_id, None)
        if queued is not None:
            del self._turns[bisect_left(self._turns, _turn(queued), key=_turn)]
        return queued

    def pop(self, now: float) -> QueuedRequest | None:
        """Remove and return the first queued request whose deadline has not passed, or None."""
        timely = (each for each in self._turns if each.deadline_s is None or each.deadline_s > now)
        queued = next(timely, None)
        return None if queued is None else self.leave(queued.id)

    def expired(self, now: float) -> list[QueuedRequest]:
        """Remove and return all requests past their deadline, earliest deadline first."""
        late = [each for each in self._requests.values() if each.deadline_s is not None and each.deadline_s <= now]
        late.sort(key=_deadline)
        for queued in late:
            self.leave(queued.id)
        return late


class Admission(RequestSubscriber):
    """Admission control: queues requests within limits, refuses other requests, and selects the next request to run.

    Call `offer` for each arrival, then `next` until it returns None. Call `next` again after a request has ended or the
    cluster has gained capacity. The times `now` must not decrease.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        # No request is dropped in favor of a later one, but more urgent requests may delay it until its deadline.
        self._queue = AdmissionQueue()
        self._running: dict[str, QueuedRequest] = {}
        self._keys: dict[str, KeyAccount] = {}
        self._completions = CompletionRate()
        self._admitted = 0

    def offer(self, queued: QueuedRequest, now: float) -> Refusal | None:
        """Queue a request, or return a refusal. Raises ValueError if the request is already queued or running."""
        if queued.id in self._queue or queued.id in self._running:
            raise ValueError(f"request {queued.id} was admitted already")
        if queued.deadline_s is None:
            queued.deadline_s = queued.arrival_s + self.limits.timeout_s
        refusal = self._refusal(queued, now)
        if refusal is None:
            self._admitted += 1
            queued.number = self._admitted
            self._account(queued.key, now).take(queued.id, now)
            self._queue.join(queued)
            self._changed(now)
        return refusal

    def next(self, now: float) -> QueuedRequest | None:
        """Take the next request to run from the queue; None if no request can run now."""
        if len(self._running) >= self.limits.max_running:
            return None
        queued = self._queue.pop(now)
        if queued is not None:
            self._running[queued.id] = queued
            self._keys[queued.key].waiting -= 1
            self._changed(now)
        return queued

    def put_back(self, queued: QueuedRequest, now: float) -> None:
        """Requeue a request after a failed placement or after the loss of the instance that ran the request."""
        del self._running[queued.id]
        self._keys[queued.key].waiting += 1
        self._queue.join(queued)  # at its former position
        self._changed(now)

    def ended(self, timeline: Timeline, now: float) -> None:
        self.release(timeline.request.id, now)

    def release(self, request_id: str, now: float) -> None:
        """Remove a running or queued request that has left the service. Unknown requests are ignored."""
        queued = self._running.pop(request_id, None)
        if queued is not None:
            self._completions.add(now)
            self._keys[queued.key].release(request_id, now, completed=True)
            self._changed(now)
        elif (waiting := self._queue.leave(request_id)) is not None:
            self._drop(waiting, now)

    def expired(self, now: float) -> list[QueuedRequest]:
        """Remove and return all queued requests past their deadline."""
        expired = self._queue.expired(now)
        for queued in expired:
            self._drop(queued, now)
        return expired

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def by_key(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of waiting and running requests for each API key seen so far."""
        return {name: (account.waiting, account.running) for name, account in self._keys.items()}

    def judge(self, queued: QueuedRequest, now: float) -> Refusal | None:
        """Return None, to accept the request. Subclasses override this method to refuse requests."""
        return None

    def _refusal(self, queued: QueuedRequest, now: float) -> Refusal | None:
        """Return the refusal of the failed checks with the longest time until a retry, or None if none fails."""
        refusals: list[Refusal | None] = []
        key_wait_s = self._account(queued.key, now).wait_s(now)
        if key_wait_s > 0.0:
            refusals.append(_refusal(RefusalReason.KEY_LIMIT, key_wait_s))
        if len(self._queue) >= self.limits.max_waiting and not self._starts_at_once():
            ends = self._queue.ahead_of(queued.priority) + 1
            refusals.append(_refusal(RefusalReason.QUEUE_FULL, self._completions.time_for(ends, now)))
        refusals += self._deadline_refusal(queued, now), self.judge(queued, now)
        return max((each for each in refusals if each is not None), key=attrgetter("retry_after_s"), default=None)

    def _deadline_refusal(self, queued: QueuedRequest, now: float) -> Refusal | None:
        """Return a refusal if the request will probably miss its deadline."""
        left_s = (queued.deadline_s or 0.0) - now
        ends = 0 if self._starts_at_once() else self._queue.ahead_of(queued.priority) + 1
        if left_s <= 0.0:
            return _refusal(RefusalReason.DEADLINE, self._completions.time_for(ends, now))
        gap_s = self._completions.mean_gap_s(now)
        if not self._completions.known or gap_s * ends <= left_s:
            return None
        too_many = ends - min(floor(left_s / gap_s), ends - 1)
        return _refusal(RefusalReason.DEADLINE, self._completions.time_for(too_many, now))

    def _starts_at_once(self) -> bool:
        return not self._queue and len(self._running) < self.limits.max_running

    def _account(self, key: str, now: float) -> KeyAccount:
        account = self._keys.get(key)
        if account is None:
            account = self._keys[key] = KeyAccount(self.limits.keys.get(key, KeyLimits()), now)
        return account

    def _drop(self, queued: QueuedRequest, now: float) -> None:
        account = self._keys[queued.key]
        account.waiting -= 1
        account.release(queued.id, now, completed=False)
        self._changed(now)

    def _changed(self, now: float) -> None:
        self._completions.set_saturated(not self._starts_at_once(), now)


def _refusal(reason: RefusalReason, wait_s: float) -> Refusal:
    return Refusal(reason, max(1, ceil(wait_s)))
