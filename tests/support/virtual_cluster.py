"""A small simulation that runs the real schedulers under a virtual clock and checks invariants after each event."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from support.kv_contents import KvContents
from twofold.batch import Batch
from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.kvcache.allocator import BlockAllocator, LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator, PrefixBlockAllocator
from twofold.request import BlockKey, FinishReason, Phase, Request
from twofold.scheduling.batchers import BATCHERS, can_swap
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.instance.queues import RunningBatch, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation
from twofold.scheduling.instance.swap_preemption import SwapPreemption

EPOCH = 1
# Order of simultaneous events; completions are ordered by instance number.
ARRIVAL, ABORT, LANDING, COMPLETION = range(4)


@dataclass
class Run:
    """Consecutive iterations of one batch on an instance, each of the same duration."""

    began: float
    each_s: float
    count: int
    iteration: RunningBatch | None = None
    batch: Batch | None = None
    version: int = 0


class VirtualCluster:
    """A simulated cluster with the real schedulers, which runs requests to completion."""

    def __init__(
        self,
        instances: list[tuple[str, Role, str]],
        *,
        num_blocks: int,
        router: Router,
        batch_s: Callable[[int, int], float],
        transfer_s: Callable[[Request], float],
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 8,
        accounts: Callable[[int, int], BlockAllocator] = PagedBlockAllocator,
        memory: KvReservation = FULL_RESERVATION,
        capacity_tokens: int | None = None,
        runs: bool = False,
        swap_blocks: int = 0,
        step_tokens: int = 3,
        mode: HandoffMode = HandoffMode.LAYER_WISE,
        output_keys: Callable[[str], Sequence[BlockKey]] = lambda _: (),
    ) -> None:
        self.cluster = ClusterScheduler(router, FixedHandoff(mode), memory)
        self.moves: list[tuple[str, Role]] = []
        self.cluster.on_role_change = lambda name, role: self.moves.append((name, role))
        self.instances: dict[str, InstanceScheduler] = {}
        self.contents: dict[str, KvContents] = {}
        self._output_keys = output_keys  # keys of the full blocks after those of a request's prompt
        for name, role, batcher in instances:
            blocks = accounts(num_blocks, block_size)
            leases = LeaseTable(blocks, name, EPOCH, lease_s=1e9)
            made = BATCHERS[batcher](budget, max_num_seqs)
            swap = None
            if swap_blocks and can_swap(batcher):
                host = BlockAllocator if accounts is BlockAllocator else PagedBlockAllocator
                swap = SwapPreemption(blocks, host(swap_blocks, block_size), step_tokens)
            self.instances[name] = InstanceScheduler(made, blocks, leases, max_num_seqs, memory, swap)
            self.contents[name] = KvContents(
                self.instances[name], self._keys_of, lambda request_id: len(self._requests[request_id].prefix_blocks)
            )
            self.cluster.add_instance(name, role, capacity_tokens)
            load = self.cluster.pools.get(name)
            assert load is not None
            load.queued = partial(getattr, self.instances[name], "queued")
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.first_token_s: dict[str, float] = {}
        self.end_s: dict[str, float] = {}
        self._numbers = {name: number for number, name in enumerate(self.instances)}
        # If `runs` is True, equal iterations are simulated in one step until the batch must change.
        self._batch_s, self._transfer_s, self._runs = batch_s, transfer_s, runs
        self._events: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._order = (ARRIVAL, 0)
        self._running: dict[str, Run] = {}
        self._requests: dict[str, Request] = {}
        self._reserves_at_arrival = router.fixed_roles and mode is not HandoffMode.PULL
        self._decode_of: dict[str, str] = {}  # requests without a reservation on their decode instance
        self._leases: dict[str, Lease] = {}
        self._prefilled: set[str] = set()
        self._sending: set[str] = set()

    def at(self, when: float, kind: int, number: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, kind, number, next(self._count), action))

    def check_ended(self, requests: list[Request], aborts: Collection[str]) -> None:
        """Check that every request ended once and that all instances are empty."""
        assert len(self.ended) == len(requests)
        for request in requests:
            made, reason = self.tokens[request.id], self.ended[request.id]
            assert made == list(range(len(made)))
            if request.id in aborts and reason is FinishReason.ABORT:
                assert len(made) < request.output_tokens
            else:
                assert reason is FinishReason.LENGTH
                assert len(made) == request.output_tokens
        assert all(instance.status().idle and instance.empty for instance in self.instances.values())

    def run(self, requests: list[Request], aborts: dict[str, float] | None = None) -> None:
        for place, request in enumerate(requests):
            self.at(request.arrival_s, ARRIVAL, place, lambda request=request: self._arrive(request))
        for place, (request_id, when) in enumerate((aborts or {}).items()):
            self.at(when, ABORT, place, lambda request_id=request_id: self._abort(request_id))
        while self._events:
            when, kind, number, _, action = heapq.heappop(self._events)
            assert when >= self.now, "time ran backwards"
            self.now, self._order = when, (kind, number)
            action()
            self._settle()

    # -- requests -------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        self._requests[request.id] = request
        self.tokens[request.id] = []
        placement = self.cluster.place(request, self.now)
        assert placement is not None
        route = placement.route
        self.instances[route.prefill].submit(request, decodes_here=not route.splits)
        if route.splits:
            self._decode_of[request.id] = route.decode
            if self._reserves_at_arrival:
                self._reserve(request.id, route.prefill)

    def _keys_of(self, request_id: str) -> Sequence[BlockKey]:
        return [*self._requests[request_id].prefix_blocks, *self._output_keys(request_id)]

    def _reserve(self, request_id: str, source: str) -> None:  # see docs/decisions/0007
        decode = self._decode_of.pop(request_id, None)
        if decode is not None and request_id not in self.ended:
            self.instances[decode].reserve(self._requests[request_id], source)
            self._keep(self.instances[decode].grant(self.now))

    def _keep(self, leases: list[Lease]) -> None:
        for lease in leases:
            self.contents[lease.instance].leased(lease, torn=True)
            self._leases[lease.request_id] = lease
            self._maybe_send(lease.request_id)

    def _maybe_send(self, request_id: str) -> None:
        ready = request_id in self._prefilled and request_id in self._leases
        if ready and request_id not in self._sending:
            self._sending.add(request_id)
            request = self._requests[request_id]
            number = list(self._requests).index(request_id)
            self.at(self.now + self._transfer_s(request), LANDING, number, lambda: self._landed(request_id))

    def _landed(self, request_id: str) -> None:
        lease = self._leases[request_id]
        self.contents[lease.instance].leased(lease)  # the last write of the lease
        self.instances[lease.source].handed_off(request_id)
        self.cluster.handed_off(request_id, 0.0, 0.0)
        decode = self.instances[lease.instance]
        decodes = decode.kv_received(request_id, EPOCH)
        assert decodes == (request_id not in self.ended)
        for instance in (decode, self.instances[lease.source]):
            self._keep(instance.grant(self.now))

    def _abort(self, request_id: str) -> None:
        if request_id not in self.ended and request_id in self._requests:
            self._end(request_id, FinishReason.ABORT)
            for instance in self.instances.values():
                instance.abort(request_id)
                self._keep(instance.grant(self.now))
            self._give_up(request_id)

    def _give_up(self, request_id: str) -> None:
        """Cancel the hand-off of a request, unless KV is already being sent."""
        if request_id in self._sending:
            return
        for instance in self.instances.values():
            instance.abort(request_id)
            instance.handed_off(request_id)
            instance.end_lease(request_id, EPOCH)
            self._keep(instance.grant(self.now))

    def _end(self, request_id: str, reason: FinishReason) -> None:
        assert request_id not in self.ended, "a request ended twice"
        self.ended[request_id] = reason
        self.end_s[request_id] = self.now
        self.cluster.withdraw(request_id)

    # -- instances ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Update the batches of all instances after an event."""
        for name, instance in self.instances.items():
            if name not in self._running:
                self._begin(name, instance)
            elif instance.changed:
                self._cut_short(name, self._running[name])
            load = self.cluster.pools.get(name)
            assert load is not None
            if load.role is not load.home and instance.empty:
                self.cluster.idle(name)
            check_blocks(instance)

    def _begin(self, name: str, instance: InstanceScheduler) -> None:
        if self._runs:
            iteration = instance.start(self.now)
            if iteration is None:
                assert instance.swap is None or not instance.swap.copies, "copies without a batch"
                return
            if instance.swap is not None:
                copies = instance.swap.take_copies()
                assert iteration.limit == 1 or not copies
            each_s = self._batch_s(iteration.prefill_tokens, iteration.decode_sequences)
            prefills = [chunk.item() for chunk in iteration.prefills]
            run = Run(self.now, each_s, iteration.limit, iteration=iteration)
        else:
            batch = instance.next_batch(self.now)
            if batch is None:
                assert instance.swap is None or not instance.swap.copies, "copies without a batch"
                return
            assert batch.items, "an empty batch"
            if self.contents[name].known:
                copies = [] if instance.swap is None else instance.swap.take_copies()
                self.contents[name].begins(batch, copies)
            elif instance.swap is not None:
                instance.swap.take_copies()
            prefills = [item for item in batch.items if item.phase is Phase.PREFILL]
            each_s = self._batch_s(sum(item.num_tokens for item in prefills), len(batch.items) - len(prefills))
            run = Run(self.now, each_s, 1, batch=batch)
        self._running[name] = run
        self._expect(name, run)
        for item in prefills:
            self._reserve(item.request_id, name)
        if instance.swap is not None:
            self._keep(instance.grant(self.now))

    def _expect(self, name: str, run: Run) -> None:
        run.version += 1
        version, end = run.version, run.began + run.count * run.each_s
        self.at(end, COMPLETION, self._numbers[name], lambda: self._complete(name, run, version))

    def _cut_short(self, name: str, run: Run) -> None:
        passed, rest = divmod(self.now - run.began, run.each_s)
        due = rest == 0 and self._order < (COMPLETION, self._numbers[name])
        count = max(1, int(passed) + (0 if due else 1))
        if count < run.count:
            run.count = count
            self._expect(name, run)

    def _complete(self, name: str, run: Run, version: int) -> None:
        if version != run.version:
            return
        del self._running[name]
        instance = self.instances[name]
        if run.batch is not None and self.contents[name].known:
            self.contents[name].ends(run.batch, self.ended)
            self._fill(instance, run.batch)
        outcomes = instance.advance(run.count) if run.batch is None else instance.complete(run.batch)
        for outcome in outcomes:
            self._account(outcome)
        self._keep(instance.grant(self.now))

    def _fill(self, instance: InstanceScheduler, batch: Batch) -> None:
        for item in batch.items:
            keys, full = self._keys_of(item.request_id), (item.context_tokens + 1) // instance.blocks.block_size
            fills = (item.context_tokens + 1) % instance.blocks.block_size == 0
            if item.phase is Phase.DECODE and fills and full <= len(keys):
                instance.filled(item.request_id, full - 1, keys[full - 1])

    def _account(self, outcome: StepResult) -> None:
        request_id = outcome.request_id
        assert request_id not in self.ended, "a token for a request that has ended"
        made = self.tokens[request_id]
        made.extend(range(len(made), outcome.index + 1) if self._runs else [outcome.index])
        if outcome.index == 0:
            self.first_token_s[request_id] = self.now
            self.cluster.first_token(request_id, 0.0)
        if outcome.hands_off:
            self._prefilled.add(request_id)
            self._maybe_send(request_id)
        elif outcome.finish_reason is not None:
            self._end(request_id, outcome.finish_reason)
            self._give_up(request_id)  # a request that ends with its first token leaves a lease


def check_blocks(instance: InstanceScheduler) -> None:
    """Check that no block is lost or owned twice."""
    blocks = instance.blocks
    if isinstance(blocks, PrefixBlockAllocator):
        check_shared(blocks)
        return
    assert 0 <= blocks.num_in_flight <= blocks.num_blocks - blocks.num_free <= blocks.num_blocks
    if isinstance(blocks, PagedBlockAllocator):
        grants = [sequence.allocation for sequence in instance.sequences.values() if sequence.allocation is not None]
        owned = [block for grant in grants if grant.owned for block in blocks.blocks_of(grant)]
        assert len(owned) == len(set(owned)), "a block has two owners"
        held = blocks.num_blocks - blocks.num_free
        assert max(len(owned), blocks.num_in_flight) <= held <= len(owned) + blocks.num_in_flight


def check_shared(blocks: PrefixBlockAllocator) -> None:
    """Assert that the allocator's reference counts and block keys match the blocks that sequences hold."""
    held = Counter(block for each in blocks._tables.values() for block in each) + Counter(blocks._copies.values())
    assert blocks._owners == [held[block] for block in range(blocks.num_blocks)]
    assert blocks.num_free == blocks._owners.count(0)
    assert all(len(set(each)) == len(each) for each in blocks._tables.values())
    assert all(block in blocks._keys for block, owners in held.items() if owners > 1)
    assert {block: key for key, block in blocks._cached.items()} == blocks._keys
    idle = {block for block in range(blocks.num_blocks) if not held[block]}
    assert idle == set(blocks._free_ids) | (idle & set(blocks._keys))
    assert not set(blocks._free_ids) & set(blocks._keys)
