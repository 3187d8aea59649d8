"""Admission: a bounded priority queue in front of the cluster, which says no at the door rather than too late."""

from math import ceil, floor

from mypy_extensions import mypyc_attr

from twofold.scheduling.admission.limits import (
    AdmissionLimits,
    CompletionRate,
    KeyAccount,
    KeyLimits,
    Refusal,
    RefusalReason,
)
from twofold.scheduling.admission.queue import AdmissionQueue, Ticket

__all__ = ["Admission", "AdmissionLimits", "KeyLimits", "Refusal", "RefusalReason", "Ticket"]


@mypyc_attr(allow_interpreted_subclasses=True)
class Admission:
    """Who may wait, whose turn it is and who is in.

    A driver calls `offer` when a request comes, then `next` until it returns None, here and whenever something
    `ended` or the cluster has room again; `put_back` when the cluster could not take what `next` gave. Times never
    run backwards. A policy with further grounds to refuse overrides `judge`.

    Everybody waits by priority, and by arrival within one; nobody who was taken is turned away for one who comes
    later. A steady stream of urgent requests can keep others waiting up to their deadline, and not longer.

    `refusals` counts those refused by reason, `expirations` those whose deadline passed while they waited.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.refusals: dict[RefusalReason, int] = {}
        self.expirations = 0
        self._line = AdmissionQueue()
        self._running: dict[str, Ticket] = {}
        self._keys: dict[str, KeyAccount] = {}
        self._pace = CompletionRate()
        self._taken = 0

    # -- requests come and go -------------------------------------------------------------------------------------

    def offer(self, ticket: Ticket, now: float) -> Refusal | None:
        """Take a request, which then waits for `next`; otherwise say why not, and when to try again.

        Raises ValueError for a request that is in already.
        """
        if ticket.id in self._line or ticket.id in self._running:
            raise ValueError(f"request {ticket.id} was taken already")
        if ticket.deadline_s is None:
            ticket.deadline_s = ticket.arrival_s + self.limits.timeout_s
        refusal = self._refusal(ticket, now)
        if refusal is None:
            self._taken += 1
            ticket.number = self._taken
            self._account(ticket.key, now).take(ticket.id, now)
            self._line.join(ticket)
            self._changed(now)
        else:
            self.refusals[refusal.reason] = self.refusals.get(refusal.reason, 0) + 1
        return refusal

    def next(self, now: float) -> Ticket | None:
        """The request whose turn it is, which then counts as running; None when none waits or no more may run."""
        if len(self._running) >= self.limits.max_running:
            return None
        ticket = self._line.pop(now)
        if ticket is not None:
            self._running[ticket.id] = ticket
            self._keys[ticket.key].waiting -= 1
            self._changed(now)
        return ticket

    def put_back(self, ticket: Ticket, now: float) -> None:
        """No instance could take it, or lost it: it waits again, before all of its priority that came later.

        It was taken once, so it keeps its place even where the line has filled up behind it.
        """
        del self._running[ticket.id]
        self._keys[ticket.key].waiting += 1
        self._line.join(ticket)
        self._changed(now)

    def ended(self, request_id: str, now: float) -> None:
        """A request has left the service, whatever the reason. One that is not in is none of our business."""
        ticket = self._running.pop(request_id, None)
        if ticket is None:
            self.cancel(request_id, now)
            return
        self._pace.ended(now)
        self._keys[ticket.key].release(request_id, now, completed=True)
        self._changed(now)

    def cancel(self, request_id: str, now: float) -> bool:
        """The client of a waiting request has left; False if it does not wait (any more)."""
        ticket = self._line.leave(request_id)
        if ticket is None:
            return False
        self._gone(ticket, now)
        return True

    def expired(self, now: float) -> list[Ticket]:
        """The requests whose deadline passed while they waited; they are out."""
        passed = self._line.overdue(now)
        for ticket in passed:
            self._gone(ticket, now)
        self.expirations += len(passed)
        return passed

    def next_deadline(self) -> float | None:
        """When to call `expired` next; None while nothing waits."""
        return self._line.next_deadline()

    # -- counts ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def running(self) -> int:
        return len(self._running)

    def by_key(self) -> dict[str, tuple[int, int]]:
        """The requests of each key that has ever asked: (waiting, running)."""
        return {name: (account.waiting, account.running) for name, account in self._keys.items()}

    # -- grounds to refuse ----------------------------------------------------------------------------------------

    def judge(self, ticket: Ticket, now: float) -> Refusal | None:
        """What a policy refuses although the bounds allow it: here nothing."""
        return None

    def _refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        """Of several grounds the one that lasts longest: only then is it true that the next try succeeds."""
        worst: Refusal | None = None
        for refusal in (
            self._key_refusal(ticket, now),
            self._queue_refusal(ticket, now),
            self._deadline_refusal(ticket, now),
            self.judge(ticket, now),
        ):
            if refusal is not None and (worst is None or refusal.retry_after_s > worst.retry_after_s):
                worst = refusal
        return worst

    def _key_refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        wait_s = self._account(ticket.key, now).wait_s(now)
        return _refusal(RefusalReason.KEY_LIMIT, wait_s) if wait_s > 0.0 else None

    def _queue_refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        if len(self._line) < self.limits.max_waiting or self._starts_at_once():
            return None
        ends = self._line.ahead_of(ticket.priority) + 1
        return _refusal(RefusalReason.QUEUE_FULL, self._pace.time_for(ends, now))

    def _deadline_refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        """Its deadline has passed, or will before its turn comes, as far as can be told."""
        left_s = (ticket.deadline_s or 0.0) - now
        ends = 0 if self._starts_at_once() else self._line.ahead_of(ticket.priority) + 1
        if left_s <= 0.0:
            return _refusal(RefusalReason.DEADLINE, self._pace.time_for(ends, now))
        gap_s = self._pace.mean_gap_s(now)
        if not self._pace.known or gap_s * ends <= left_s:
            return None
        too_many = ends - min(floor(left_s / gap_s), ends - 1)
        return _refusal(RefusalReason.DEADLINE, self._pace.time_for(too_many, now))

    def _starts_at_once(self) -> bool:
        return not self._line and len(self._running) < self.limits.max_running

    # -- accounts -------------------------------------------------------------------------------------------------

    def _account(self, key: str, now: float) -> KeyAccount:
        account = self._keys.get(key)
        if account is None:
            account = self._keys[key] = KeyAccount(self.limits.keys.get(key, KeyLimits()), now)
        return account

    def _gone(self, ticket: Ticket, now: float) -> None:
        account = self._keys[ticket.key]
        account.waiting -= 1
        account.release(ticket.id, now, completed=False)
        self._changed(now)

    def _changed(self, now: float) -> None:
        self._pace.saturated(not self._starts_at_once(), now)


def _refusal(reason: RefusalReason, wait_s: float) -> Refusal:
    return Refusal(reason, max(1, ceil(wait_s)))
