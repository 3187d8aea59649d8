"""vLLM's scheduler as a `WorkerScheduler`. Calls of other threads are queued for the thread that runs vLLM."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from twofold.engine.vllm.bridge import SettledTransfers, VllmBlockCounts
from twofold.handoff import Lease, LeaseWatcher
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator, LeaseTable
from twofold.request import Request
from twofold.scheduling.instance.status import InstanceStatus


class LeasedVllmBlocks(BlockAllocator):
    """KV cache blocks of vLLM that are leased to peers, which write the KV of prompts to the blocks.

    The callback `returned` is called with the id of a request whose blocks are released and no longer leased.
    """

    def __init__(self, num_blocks: int, block_size: int, returned: Callable[[str], None]) -> None:
        super().__init__(num_blocks, block_size)
        self._returned = returned
        self._lent: dict[str, Sequence[int]] = {}

    def lend(self, request_id: str, blocks: Sequence[int]) -> BlockAllocation:
        self._lent[request_id] = tuple(blocks)
        return self.allocate(request_id, len(blocks) * self.block_size)

    def blocks_of(self, grant: BlockAllocation) -> Sequence[int]:
        return self._lent[grant.owner]

    def _free(self, allocation: BlockAllocation) -> None:
        super()._free(allocation)
        del self._lent[allocation.owner]
        self._returned(allocation.owner)


class VllmRequestState(Enum):
    """State of a request on a vLLM worker."""

    WAITING = auto()  # waits for the start of its prefill
    LEASE_QUEUE = auto()  # waits for blocks for a peer's KV
    ARRIVING = auto()  # waits for its KV
    RUNNING = auto()


class VllmOrder(Enum):
    """Queued action on a request, executed before vLLM's next iteration."""

    ADD = auto()
    RESUME = auto()  # its KV and first token have been received
    ABORT = auto()


@dataclass(slots=True, eq=False)
class VllmRequest:
    """Request on a vLLM worker.

    If a prefill worker computes the prompt's KV, `source` is the name of the prefill worker, and `grant` contains
    the local blocks for the KV. `grant` is None until vLLM has allocated the blocks.
    """

    request: Request
    decodes_here: bool
    source: str = ""
    stage: VllmRequestState = VllmRequestState.WAITING
    grant: BlockAllocation | None = None
    received: bool = False  # vLLM has all of its KV


class VllmScheduler:
    """`WorkerScheduler` that forwards requests to vLLM's scheduler."""

    def __init__(
        self,
        count_blocks: Callable[[], VllmBlockCounts],
        block_size: int,
        *,
        instance: str,
        epoch: int,
        lease_s: float,
        watcher: LeaseWatcher,
    ) -> None:
        self._count_blocks = count_blocks
        self._lent = LeasedVllmBlocks(count_blocks().total, block_size, self._returned)
        self.leases = LeaseTable(self._lent, instance, epoch, lease_s, watcher)
        self._here: dict[str, VllmRequest] = {}
        self._stages: Counter[VllmRequestState] = Counter()
        self._orders: list[tuple[VllmOrder, str]] = []
        self._reads: dict[str, BlockAllocation] = {}
        self._granted: list[Lease] = []
        self._handing_off: set[str] = set()
        self._sending: set[str] = set()  # requests that vLLM has finished and that still send blocks
        self._sent: set[str] = set()
        self._received: set[str] = set()

    # -- for the threads of the worker ------------------------------------------------------------------------------

    def submit(self, request: Request, *, decodes_here: bool) -> None:
        if not decodes_here:
            self._handing_off.add(request.id)
        self._enter(VllmRequest(request, decodes_here), VllmRequestState.WAITING)

    def reserve(self, request: Request, source: str) -> None:
        self._enter(VllmRequest(request, decodes_here=True, source=source), VllmRequestState.LEASE_QUEUE)

    def grant(self, now: float) -> list[Lease]:
        granted, self._granted = self._granted, []
        return granted

    def kv_received(self, request_id: str, epoch: int) -> bool:
        self.leases.end(request_id, epoch)
        return self._arrived(request_id)

    def end_lease(self, request_id: str, epoch: int) -> None:
        self.leases.end(request_id, epoch)

    def read_started(self, request_id: str, epoch: int) -> bool:
        held = self._here.get(request_id)
        arrives = held is not None and held.stage is VllmRequestState.ARRIVING
        if held is not None and held.grant is not None and arrives:
            self._reads[request_id] = held.grant
            self._lent.begin_transfer(held.grant)
        self.leases.end(request_id, epoch)
        return arrives

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        self._lent.end_transfer(self._reads.pop(request_id))
        return complete and self._arrived(request_id)

    def peer_lost(self, source: str) -> list[str]:
        queued = [
            request_id
            for request_id, held in self._here.items()
            if held.source == source and held.stage is VllmRequestState.LEASE_QUEUE
        ]
        leased = [lease.request_id for lease in self.leases.held_by(source)]
        for request_id in leased:
            self.leases.end(request_id, self.leases.epoch)
        return queued + leased

    def handed_off(self, request_id: str) -> None:
        self._handing_off.discard(request_id)
        if request_id in self._sending:
            self._sending.remove(request_id)
            self._sent.add(request_id)

    def abort(self, request_id: str) -> None:
        held = self.ended(request_id)
        if held is None:
            return
        self._orders.append((VllmOrder.ABORT, request_id))
        if held.grant is not None and not held.received:
            self._lent.release(held.grant)

    def status(self) -> InstanceStatus:
        blocks, stages = self._count_blocks(), self._stages
        return InstanceStatus(
            waiting=stages[VllmRequestState.WAITING],
            running=stages[VllmRequestState.RUNNING],
            arriving=stages[VllmRequestState.ARRIVING],
            handing_off=len(self._sending),
            lease_queue=stages[VllmRequestState.LEASE_QUEUE],
            blocks_total=blocks.total,
            blocks_free=blocks.free,
            blocks_in_flight=self._lent.num_in_flight,
        )

    # -- for the thread that runs vLLM ------------------------------------------------------------------------------

    def take_orders(self) -> list[tuple[VllmOrder, str]]:
        orders, self._orders = self._orders, []
        return orders

    @property
    def unsettled(self) -> bool:
        """Whether some completed KV transfers must still be reported to vLLM."""
        return bool(self._sent or self._received)

    def settle(self) -> SettledTransfers:
        settled = SettledTransfers(self._sent, self._received)
        self._sent, self._received = set(), set()
        return settled

    def find(self, request_id: str) -> VllmRequest | None:
        """Return a request, or None if it is aborted or unknown."""
        return self._here.get(request_id)

    def is_remote(self, request_id: str) -> bool:
        """Return whether a request waits for vLLM to allocate blocks for the KV that a prefill worker will send."""
        # False after a preemption: vLLM computes the KV itself.
        held = self._here.get(request_id)
        return held is not None and held.stage is VllmRequestState.LEASE_QUEUE

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Lease a request's blocks, which vLLM has just allocated, to the request's prefill worker."""
        held = self._here.get(request_id)
        if held is None:  # aborted since vLLM called `is_remote`
            self._received.add(request_id)
            return
        held.grant = self._lent.lend(request_id, blocks)
        self._move(held, VllmRequestState.ARRIVING)
        self._granted.append(self.leases.grant(held.grant, held.source, time.monotonic()))

    def starts(self, held: VllmRequest) -> None:
        self._move(held, VllmRequestState.RUNNING)

    def resume(self, held: VllmRequest) -> None:
        """Let vLLM run a request whose KV and first token have arrived."""
        if held.grant is not None:
            held.received = True
            self._lent.release(held.grant)

    def ended(self, request_id: str) -> VllmRequest | None:
        """Remove and return a request that has ended; return None if it is unknown."""
        held = self._here.pop(request_id, None)
        if held is not None:
            self._stages[held.stage] -= 1
        return held

    def holds(self, request_id: str) -> bool:
        holds = request_id in self._handing_off
        if holds:
            self._sending.add(request_id)
        return holds

    @property
    def sending(self) -> bool:
        return bool(self._sending)

    def _enter(self, held: VllmRequest, stage: VllmRequestState) -> None:
        request_id = held.request.id
        if self._here.setdefault(request_id, held) is not held:
            raise ValueError(f"request {request_id} is already on this worker")
        held.stage = stage
        self._stages[stage] += 1
        self._orders.append((VllmOrder.ADD, request_id))

    def _move(self, held: VllmRequest, stage: VllmRequestState) -> None:
        self._stages[held.stage] -= 1
        self._stages[stage] += 1
        held.stage = stage

    def _arrived(self, request_id: str) -> bool:
        held = self._here.get(request_id)
        if held is None or held.stage is not VllmRequestState.ARRIVING:
            return False
        self._move(held, VllmRequestState.RUNNING)
        self._orders.append((VllmOrder.RESUME, request_id))
        return True

    def _returned(self, request_id: str) -> None:
        self._received.add(request_id)
