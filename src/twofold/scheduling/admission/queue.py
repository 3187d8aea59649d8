"""The requests that wait in front of the cluster: by priority, and first come first served within one."""

from heapq import heapify, heappop, heappush

from twofold.request import Request


class Ticket:
    """A request on its way into the cluster, and whom it is for.

    `key` names the API key, `priority` is vLLM's: the lower, the sooner. `deadline_s` is when it has to be answered
    by (None: the service's own limit); both times are seconds on the clock of its world. `number` is the line's:
    the place of the request in the order in which requests were taken.
    """

    __slots__ = ("arrival_s", "deadline_s", "key", "number", "priority", "request")

    def __init__(
        self, request: Request, key: str = "", priority: int = 0, deadline_s: float | None = None
    ) -> None:
        self.request = request
        self.key = key
        self.priority = priority
        self.deadline_s = deadline_s
        self.arrival_s = request.arrival_s
        self.number = 0

    @property
    def id(self) -> str:
        return self.request.id


class AdmissionQueue:
    """A priority queue whose members may leave from anywhere.

    Two heaps, by turn and by deadline. Who has left stays in them until met at the top or, when there are too many
    such entries, swept out.
    """

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._turns: list[tuple[int, int, Ticket]] = []
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._by_priority: dict[int, int] = {}
        self._joins = 0  # tells entries for one deadline apart, even two of one ticket that joined again

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def ahead_of(self, priority: int) -> int:
        """How many would have their turn before a newcomer of `priority`."""
        return sum(count for each, count in self._by_priority.items() if each <= priority)

    def join(self, ticket: Ticket) -> None:
        """Wait for the turn that the ticket's priority and number give it."""
        self._tickets[ticket.id] = ticket
        self._by_priority[ticket.priority] = self._by_priority.get(ticket.priority, 0) + 1
        heappush(self._turns, (ticket.priority, ticket.number, ticket))
        if ticket.deadline_s is not None:
            self._joins += 1
            heappush(self._deadlines, (ticket.deadline_s, self._joins, ticket))
        self._sweep()

    def leave(self, request_id: str) -> Ticket | None:
        """The ticket of a request that waits no longer; None if it did not."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            left = self._by_priority[ticket.priority] - 1
            if left:
                self._by_priority[ticket.priority] = left
            else:
                del self._by_priority[ticket.priority]
        return ticket

    def pop(self, now: float) -> Ticket | None:
        """Whose turn it is; those whose deadline has passed have none, and are left to `overdue`."""
        while self._turns:
            ticket = heappop(self._turns)[2]
            if self._tickets.get(ticket.id) is not ticket:
                continue
            if ticket.deadline_s is None or ticket.deadline_s > now:
                return self.leave(ticket.id)
        return None

    def overdue(self, now: float) -> list[Ticket]:
        """Those whose deadline has passed leave, earliest first."""
        passed: list[Ticket] = []
        deadline_s = self.next_deadline()
        while deadline_s is not None and deadline_s <= now:
            ticket = heappop(self._deadlines)[2]
            self.leave(ticket.id)
            passed.append(ticket)
            deadline_s = self.next_deadline()
        return passed

    def next_deadline(self) -> float | None:
        """The earliest deadline of those who wait."""
        deadlines = self._deadlines
        while deadlines:
            deadline_s, _, ticket = deadlines[0]
            if self._tickets.get(ticket.id) is ticket:
                return deadline_s
            heappop(deadlines)
        return None

    def _sweep(self) -> None:
        many = 2 * len(self._tickets) + 16
        if len(self._turns) > many:
            self._turns = [(t.priority, t.number, t) for t in self._tickets.values()]
            heapify(self._turns)
        if len(self._deadlines) > many:
            self._deadlines = [
                (t.deadline_s, t.number, t) for t in self._tickets.values() if t.deadline_s is not None
            ]
            heapify(self._deadlines)
