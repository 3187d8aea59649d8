"""The blocks of vLLM that peers may touch: leased to be written, or read into by ourselves.

vLLM's scheduler as the scheduler of a worker: what other threads want of it waits until its own thread takes it up.

        submit                     starts                completes its prompt
prefill ──────▶ WAITING ─────────▶ RUNNING ──┬── decodes here, on to its end
                                             └── hands off ── handed_off ─▶ vLLM may free its blocks
        reserve                    allocated             landed
decode  ──────▶ LEASE_QUEUE ─────▶ ARRIVING ───────────▶ RUNNING, from the first token on
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from twofold.engine.vllm.bridge import SettledTransfers, VllmBlockCounts
from twofold.handoff import Lease, LeaseWatcher
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.kvcache.leases import LeaseTable
from twofold.request import Request
from twofold.scheduling.instance.status import InstanceStatus


class LeasedVllmBlocks(BlockAllocator):
    """Blocks that vLLM has allocated to a request whose KV comes from a peer, until all of it is here, or given up.

    vLLM does not free them in that time, whatever happens to the request. When their owner (the request as it
    arrives) has let go of them and nothing touches them any more, `returned(request_id)` is called.
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

    def _give(self, grant: BlockAllocation, blocks: int) -> None:
        """Which ones they are was said by vLLM."""

    def _take_back(self, grant: BlockAllocation) -> None:
        del self._lent[grant.owner]
        self._returned(grant.owner)


class VllmRequestState(Enum):
    """Where a request is."""

    WAITING = auto()  # for its prompt to start
    LEASE_QUEUE = auto()  # for room for what a peer computes
    ARRIVING = auto()  # its KV is, or will be, on its way here
    RUNNING = auto()


class VllmOrder(Enum):
    """What vLLM's own thread is to do with a request before the next iteration."""

    ADD = auto()
    GO_ON = auto()  # its KV is here, and its first token known
    ABORT = auto()


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A request that is here. `source` prefills it, where that is not us; `grant` are the blocks that it writes."""

    request: Request
    decodes_here: bool
    source: str = ""
    stage: VllmRequestState = VllmRequestState.WAITING
    grant: BlockAllocation | None = None
    here: bool = False  # vLLM runs it, or has run it, with all of its KV


class VllmScheduler:
    """A `WorkerScheduler` over vLLM's. `account` is vLLM's own of its blocks.

    All but the account is guarded by the worker's lock. `orders` are for the thread that runs vLLM; `settle` is what
    vLLM is told in turn.
    """

    def __init__(
        self,
        account: Callable[[], VllmBlockCounts],
        block_size: int,
        *,
        instance: str,
        epoch: int,
        lease_s: float,
        watcher: LeaseWatcher,
    ) -> None:
        self._account = account
        self._lent = LeasedVllmBlocks(account().total, block_size, self._returned)
        self.leases = LeaseTable(self._lent, instance, epoch, lease_s, watcher)
        self._here: dict[str, VllmRequest] = {}
        self._stages: Counter[VllmRequestState] = Counter()
        self._orders: list[tuple[VllmOrder, str]] = []
        self._reads: dict[str, BlockAllocation] = {}
        self._granted: list[Lease] = []
        self._handing_off: set[str] = set()
        self._over: set[str] = set()  # those that vLLM has done with, but for their blocks, which are sent
        self._sent: set[str] = set()
        self._received: set[str] = set()

    # -- for the threads of the worker ------------------------------------------------------------------------------

    def submit(self, request: Request, *, decodes_here: bool) -> None:
        if not decodes_here:
            self._handing_off.add(request.id)
        self._enter(VllmRequest(request, decodes_here), VllmRequestState.WAITING)

    def reserve(self, request: Request, source: str) -> None:
        self._enter(VllmRequest(request, decodes_here=True, source=source), VllmRequestState.LEASE_QUEUE)

    def grant(self, now: float) -> list[Lease]:  # noqa: ARG002  (vLLM has granted them, when it had room)
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
        if request_id in self._over:
            self._over.remove(request_id)
            self._sent.add(request_id)

    def abort(self, request_id: str) -> None:
        held = self._leave(request_id)
        if held is None:
            return
        self._orders.append((VllmOrder.ABORT, request_id))
        if held.grant is not None and not held.here:
            self._lent.release(held.grant)

    def blocks_of(self, request_id: str) -> Sequence[int]:
        grant = self._here[request_id].grant
        return () if grant is None else self._lent.blocks_of(grant)

    def status(self) -> InstanceStatus:
        blocks, stages = self._account(), self._stages
        return InstanceStatus(
            waiting=stages[VllmRequestState.WAITING],
            running=stages[VllmRequestState.RUNNING],
            arriving=stages[VllmRequestState.ARRIVING],
            handing_off=len(self._over),
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
        """Whether vLLM is yet to be told what has become of a hand-off."""
        return bool(self._sent or self._received)

    def settle(self) -> SettledTransfers:
        settled = SettledTransfers(self._sent, self._received)
        self._sent, self._received = set(), set()
        return settled

    def find(self, request_id: str) -> VllmRequest | None:
        """None for a request that was aborted meanwhile, or never came."""
        return self._here.get(request_id)

    def comes(self, request_id: str) -> bool:
        """Its KV is computed by a peer. Whatever vLLM may ask again, when it has pre-empted it, is computed here."""
        held = self._here.get(request_id)
        return held is not None and held.stage is VllmRequestState.LEASE_QUEUE

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """vLLM has room for what a peer computes; it waits for it from now on."""
        held = self._here.get(request_id)
        if held is None:  # aborted since vLLM asked whether it `comes`: nothing will
            self._received.add(request_id)
            return
        held.grant = self._lent.lend(request_id, blocks)
        self._move(held, VllmRequestState.ARRIVING)
        self._granted.append(self.leases.grant(held.grant, held.source, time.monotonic()))

    def starts(self, held: VllmRequest) -> None:
        self._move(held, VllmRequestState.RUNNING)

    def go_on(self, held: VllmRequest) -> None:
        """vLLM knows the first token of a request whose KV is here: it may run."""
        if held.grant is not None:
            held.here = True
            self._lent.release(held.grant)

    def ended(self, request_id: str) -> None:
        """vLLM has made the last token of a request."""
        self._leave(request_id)

    def holds(self, request_id: str) -> bool:
        holds = request_id in self._handing_off
        if holds:
            self._over.add(request_id)
        return holds

    @property
    def sending(self) -> bool:
        return bool(self._over)

    # ---------------------------------------------------------------------------------------------------------------

    def _enter(self, held: VllmRequest, stage: VllmRequestState) -> None:
        request_id = held.request.id
        if self._here.setdefault(request_id, held) is not held:
            raise ValueError(f"request {request_id} is already here")
        held.stage = stage
        self._stages[stage] += 1
        self._orders.append((VllmOrder.ADD, request_id))

    def _move(self, held: VllmRequest, stage: VllmRequestState) -> None:
        self._stages[held.stage] -= 1
        self._stages[stage] += 1
        held.stage = stage

    def _leave(self, request_id: str) -> VllmRequest | None:
        held = self._here.pop(request_id, None)
        if held is not None:
            self._stages[held.stage] -= 1
        return held

    def _arrived(self, request_id: str) -> bool:
        held = self._here.get(request_id)
        if held is None or held.stage is not VllmRequestState.ARRIVING:
            return False
        self._move(held, VllmRequestState.RUNNING)
        self._orders.append((VllmOrder.GO_ON, request_id))
        return True

    def _returned(self, request_id: str) -> None:
        self._received.add(request_id)
