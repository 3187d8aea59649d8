"""A tiny simulation: the schedulers of the live service under a virtual clock, with given durations.

It stands in for nothing: these are the very objects that run live. Batches, hand-offs and messages take as
long as the callables say; everything that happens is checked as it happens.
"""

import heapq
import itertools
from collections.abc import Callable

from twofold.batch import Batch
from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.leases import LeaseBook
from twofold.request import FinishReason, Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.handoffs import FixedHandoff
from twofold.scheduling.instance import InstanceScheduler
from twofold.scheduling.routers import ROUTERS

EPOCH = 1


class VirtualCluster:
    """Runs requests to their end; `tokens` and `ended` say what came of each."""

    def __init__(
        self,
        instances: list[tuple[str, Role, str]],
        *,
        num_blocks: int,
        block_size: int = 4,
        budget: int = 64,
        max_seqs: int = 8,
        router: str = "jsq",
        batch_s: Callable[[Batch], float],
        transfer_s: Callable[[Request], float],
    ) -> None:
        self.cluster = ClusterScheduler(ROUTERS[router](), FixedHandoff(HandoffMode.LAYER_WISE))
        self.instances: dict[str, InstanceScheduler] = {}
        for name, role, batcher in instances:
            blocks = BlockManager(num_blocks, block_size)
            leases = LeaseBook(blocks, name, EPOCH, lease_s=1e9)
            made = BATCHERS[batcher](budget, max_seqs)
            self.instances[name] = InstanceScheduler(made, blocks, leases, max_seqs)
            self.cluster.add_instance(name, role)
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self._batch_s, self._transfer_s = batch_s, transfer_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._busy: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._leases: dict[str, Lease] = {}
        self._prefilled: set[str] = set()
        self._sending: set[str] = set()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), action))

    def run(self, requests: list[Request], aborts: dict[str, float] | None = None) -> None:
        for request in requests:
            self.at(request.arrival_s, lambda request=request: self._arrive(request))
        for request_id, when in (aborts or {}).items():
            self.at(when, lambda request_id=request_id: self._abort(request_id))
        while self._events:
            when, _, action = heapq.heappop(self._events)
            assert when >= self.now, "time ran backwards"
            self.now = when
            action()
            self._start_batches()

    def _arrive(self, request: Request) -> None:
        self._requests[request.id] = request
        self.tokens[request.id] = []
        placement = self.cluster.arrive(request, self.now)
        assert placement is not None
        route = placement.route
        self.instances[route.prefill].submit(request, decodes_here=not route.splits)
        if route.splits:
            self.instances[route.decode].reserve(request, route.prefill)
            self._keep(self.instances[route.decode].grant(self.now))

    def _keep(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._leases[lease.request_id] = lease
            self._maybe_send(lease.request_id)

    def _maybe_send(self, request_id: str) -> None:
        ready = request_id in self._prefilled and request_id in self._leases
        if ready and request_id not in self._sending:
            self._sending.add(request_id)
            duration = self._transfer_s(self._requests[request_id])
            self.at(self.now + duration, lambda: self._landed(request_id))

    def _landed(self, request_id: str) -> None:
        lease = self._leases[request_id]
        self.instances[lease.source].handed_off(request_id)
        decode = self.instances[lease.instance]
        decodes = decode.landed(request_id, EPOCH)
        assert decodes == (request_id not in self.ended)
        self._keep(decode.grant(self.now))

    def _abort(self, request_id: str) -> None:
        if request_id in self.ended or request_id not in self._requests:
            return
        self._end(request_id, FinishReason.ABORT)
        for instance in self.instances.values():
            instance.abort(request_id)
            self._keep(instance.grant(self.now))
        if request_id not in self._sending:  # nothing is being written: both sides are told so
            for instance in self.instances.values():
                instance.handed_off(request_id)
                instance.end_lease(request_id, EPOCH)
                self._keep(instance.grant(self.now))

    def _start_batches(self) -> None:
        for name, instance in self.instances.items():
            if name not in self._busy:
                batch = instance.next_batch(self.now)
                if batch is not None:
                    self._busy.add(name)
                    done = self.now + self._batch_s(batch)
                    self.at(done, lambda name=name, batch=batch: self._complete(name, batch))

    def _complete(self, name: str, batch: Batch) -> None:
        self._busy.remove(name)
        instance = self.instances[name]
        for outcome in instance.complete(batch):
            self.tokens[outcome.request_id].append(outcome.index)
            if outcome.index == 0:
                self.cluster.prefilled(outcome.request_id)
            if outcome.hands_off:
                self._prefilled.add(outcome.request_id)
                self._maybe_send(outcome.request_id)
            elif outcome.finish_reason is not None:
                self._finish(outcome.request_id, outcome.finish_reason)
        self._keep(instance.grant(self.now))

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        self._end(request_id, reason)
        for instance in self.instances.values():  # one that ended with its first token leaves a lease behind
            if request_id not in self._sending:
                instance.abort(request_id)
                instance.handed_off(request_id)
                instance.end_lease(request_id, EPOCH)
                self._keep(instance.grant(self.now))

    def _end(self, request_id: str, reason: FinishReason) -> None:
        assert request_id not in self.ended, "a request ended twice"
        self.ended[request_id] = reason
        self.cluster.ended(request_id)
