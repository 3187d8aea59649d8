"""The queue of admitted requests: by priority, and first come, first served within a priority."""

from heapq import heapify, heappop, heappush

from twofold.request import Request


class QueuedRequest:
    """A request with its API key, priority and deadline.

    A lower `priority` is served first, as in vLLM. `deadline_s` is on the clock of `arrival_s`; None selects the
    default of the service. `number` is the admission order, counted from 1.
    """

    __slots__ = ("arrival_s", "deadline_s", "key", "number", "priority", "request")

    def __init__(self, request: Request, key: str = "", priority: int = 0, deadline_s: float | None = None) -> None:
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
    """A priority queue with removal from any position.

    It keeps two heaps, by turn and by deadline. Entries of requests that left stay in the heaps until they reach the
    top or outnumber the others.
    """

    def __init__(self) -> None:
        self._requests: dict[str, QueuedRequest] = {}
        self._turns: list[tuple[int, int, QueuedRequest]] = []
        self._deadlines: list[tuple[float, int, QueuedRequest]] = []
        self._by_priority: dict[int, int] = {}
        self._joins = 0  # breaks ties between equal deadlines, also of a request that joined twice

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def ahead_of(self, priority: int) -> int:
        """The number of requests served before a new one of this priority."""
        return sum(count for each, count in self._by_priority.items() if each <= priority)

    def join(self, queued: QueuedRequest) -> None:
        """Add a request at the position given by its priority and number."""
        self._requests[queued.id] = queued
        self._by_priority[queued.priority] = self._by_priority.get(queued.priority, 0) + 1
        heappush(self._turns, (queued.priority, queued.number, queued))
        if queued.deadline_s is not None:
            self._joins += 1
            heappush(self._deadlines, (queued.deadline_s, self._joins, queued))
        self._sweep()

    def leave(self, request_id: str) -> QueuedRequest | None:
        """Remove a request; None if it is not queued."""
        queued = self._requests.pop(request_id, None)
        if queued is not None:
            left = self._by_priority[queued.priority] - 1
            if left:
                self._by_priority[queued.priority] = left
            else:
                del self._by_priority[queued.priority]
        return queued

    def pop(self, now: float) -> QueuedRequest | None:
        """Remove the next request before its deadline; `expired` returns the others."""
        while self._turns:
            queued = heappop(self._turns)[2]
            if self._requests.get(queued.id) is not queued:
                continue
            if queued.deadline_s is None or queued.deadline_s > now:
                return self.leave(queued.id)
        return None

    def expired(self, now: float) -> list[QueuedRequest]:
        """Remove the requests past their deadline, earliest deadline first."""
        expired: list[QueuedRequest] = []
        deadline_s = self.next_deadline()
        while deadline_s is not None and deadline_s <= now:
            queued = heappop(self._deadlines)[2]
            self.leave(queued.id)
            expired.append(queued)
            deadline_s = self.next_deadline()
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline in the queue."""
        deadlines = self._deadlines
        while deadlines:
            deadline_s, _, queued = deadlines[0]
            if self._requests.get(queued.id) is queued:
                return deadline_s
            heappop(deadlines)
        return None

    def _sweep(self) -> None:
        many = 2 * len(self._requests) + 16
        if len(self._turns) > many:
            self._turns = [(each.priority, each.number, each) for each in self._requests.values()]
            heapify(self._turns)
        if len(self._deadlines) > many:
            self._deadlines = [
                (each.deadline_s, each.number, each) for each in self._requests.values() if each.deadline_s is not None
            ]
            heapify(self._deadlines)
