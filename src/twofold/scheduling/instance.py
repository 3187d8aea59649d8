"""The instance scheduler: a state machine over the queue, the running set and the block accounts.

            submit                                 next_batch            complete
    prefill ──────▶ waiting ───────────────────────▶ running ──┬── ends ──▶ done
                                                               └── hands off ▶ handing off ── handed_off ─▶ done
            reserve              grant              landed                complete
    decode  ──────▶ lease queue ─────▶ arriving ────────────▶ running ──── ends ──▶ done

A driver calls `next_batch(now)`, has the batch run (by an engine, or by a virtual clock) and calls
`complete(batch, …, now)`. Nothing here reads a clock, does I/O or knows in which world it runs.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from twofold.batch import Batch, BatchItem
from twofold.handoff import Lease
from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.leases import LeaseBook
from twofold.request import FinishReason, Request
from twofold.scheduling.batcher import Batcher, Room
from twofold.scheduling.sequence import ScheduledSequence


class Outcome(msgspec.Struct, frozen=True):
    """What an iteration did for one sequence that sampled a token: output token `index`, and what follows."""

    request_id: str
    index: int
    finish_reason: FinishReason | None
    hands_off: bool


class InstanceStatus(msgspec.Struct, frozen=True):
    """The accounts of an instance at one moment, for routers, metrics and health."""

    waiting: int
    running: int
    arriving: int
    handing_off: int
    lease_queue: int
    blocks_total: int
    blocks_free: int
    blocks_in_flight: int

    @property
    def idle(self) -> bool:
        """Nothing is here and nothing is held."""
        queued = self.waiting + self.running + self.arriving + self.handing_off + self.lease_queue
        return queued == 0 and self.blocks_free == self.blocks_total


@dataclass(slots=True)
class _Reservation:
    """A request that wants blocks here for KV which `source` will write."""

    sequence: ScheduledSequence
    source: str


class InstanceScheduler:
    """Queue, running set and block accounts of one instance."""

    def __init__(self, batcher: Batcher, blocks: BlockManager, leases: LeaseBook, max_seqs: int) -> None:
        self.blocks = blocks
        self.leases = leases
        self._batcher = batcher
        self._max_seqs = max_seqs
        self._waiting: dict[str, ScheduledSequence] = {}
        self._running: dict[str, ScheduledSequence] = {}
        self._arriving: dict[str, ScheduledSequence] = {}
        self._handing_off: set[str] = set()
        self._lease_queue: dict[str, _Reservation] = {}
        self._batch: Batch | None = None
        self._batches = 0
        self._aborted_in_batch: set[str] = set()

    # -- commands ---------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, decodes_here: bool) -> None:
        """Queue a request for prefill here, and for decode too unless it is to be handed off."""
        self._refuse_known(request.id)
        self._waiting[request.id] = ScheduledSequence(request, decodes_here)

    def reserve(self, request: Request, source: str) -> None:
        """Queue a request, whose prefill runs on `source`, for a lease on blocks; `grant` will say when it has one."""
        self._refuse_known(request.id)
        sequence = ScheduledSequence(request, decodes_here=True, computed=request.prompt_tokens, generated=1)
        self._lease_queue[request.id] = _Reservation(sequence, source)

    def grant(self, now: float) -> list[Lease]:
        """Grant leases, first come first, as far as there are blocks.

        To be called after each command and each completed batch: any of them may have queued a request or
        freed blocks.
        """
        granted: list[Lease] = []
        while self._lease_queue:
            reservation = next(iter(self._lease_queue.values()))
            sequence = reservation.sequence
            if not self.blocks.fits(sequence.cache_tokens):
                break
            del self._lease_queue[sequence.id]
            self.blocks.allocate(sequence.id, sequence.cache_tokens)
            self._arriving[sequence.id] = sequence
            granted.append(self.leases.grant(sequence.id, reservation.source, now))
        return granted

    def landed(self, request_id: str, epoch: int) -> bool:
        """The KV cache of a leased request is complete here; True if the request now decodes."""
        self.leases.end(request_id, epoch)
        sequence = self._arriving.pop(request_id, None)
        if sequence is None:
            return False
        self._running[request_id] = sequence
        return True

    def end_lease(self, request_id: str, epoch: int) -> None:
        """The source of a lease gave up, or is gone: it writes no more, and the KV cache is not complete."""
        self.leases.end(request_id, epoch)

    def lose_source(self, source: str) -> list[str]:
        """A source is dead and writes no more: end its leases and forget its reservations.

        Returns the requests concerned; those that own blocks still do, until they are aborted.
        """
        queued = [request_id for request_id, r in self._lease_queue.items() if r.source == source]
        for request_id in queued:
            del self._lease_queue[request_id]
        leased = [lease.request_id for lease in self.leases.held_by(source)]
        for request_id in leased:
            self.leases.end(request_id, self.leases.epoch)
        return queued + leased

    def handed_off(self, request_id: str) -> None:
        """Nothing will read this request's blocks here any more: its hand-off is over, done or given up."""
        if request_id in self._handing_off:
            self._handing_off.remove(request_id)
            self.blocks.end_transfer(_handoff_name(request_id))

    def abort(self, request_id: str) -> None:
        """Forget a request. Blocks that a transfer or the running batch may still touch stay held until it ends."""
        self._lease_queue.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if self._arriving.pop(request_id, None) is not None:
            self.blocks.release(request_id)
        if self._running.pop(request_id, None) is not None:
            if self._batch is not None and any(item.request_id == request_id for item in self._batch.items):
                self.blocks.begin_transfer(_batch_name(request_id), self.blocks.blocks_of(request_id))
                self._aborted_in_batch.add(request_id)
            self.blocks.release(request_id)

    # -- iterations -------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> Batch | None:
        """Start an iteration; None when there is nothing to run."""
        if self._batch is not None:
            raise RuntimeError("the previous batch has not completed")
        room = Room(self.blocks, self.blocks.num_free, self._max_seqs - len(self._running))
        items = self._batcher.select(self._waiting.values(), self._running.values(), room)
        if not items:
            return None
        for item in items:
            if item.request_id in self._waiting:
                self._start(self._waiting.pop(item.request_id))
        self._batch = Batch(self._batches, tuple(items))
        self._batches += 1
        return self._batch

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[Outcome]:
        """Account for a finished iteration. `stopped` names requests whose sampled token ends their output."""
        if batch is not self._batch:
            raise RuntimeError("only the batch that was started last can complete")
        self._batch = None
        for request_id in self._aborted_in_batch:
            self.blocks.end_transfer(_batch_name(request_id))
        outcomes = [
            outcome
            for item in batch.items
            if item.request_id not in self._aborted_in_batch
            and (outcome := self._advance(item, item.request_id in stopped)) is not None
        ]
        self._aborted_in_batch.clear()
        return outcomes

    def _start(self, sequence: ScheduledSequence) -> None:
        blocks = self.blocks.allocate(sequence.id, sequence.cache_tokens)
        if not sequence.decodes_here:
            self.blocks.begin_transfer(_handoff_name(sequence.id), blocks)
            self._handing_off.add(sequence.id)
        self._running[sequence.id] = sequence

    def _advance(self, item: BatchItem, stopped: bool) -> Outcome | None:
        sequence = self._running[item.request_id]
        sequence.computed += item.num_tokens
        if not item.samples:
            return None
        index = sequence.generated
        sequence.generated += 1
        reason = self._finish_reason(sequence, stopped)
        hands_off = reason is None and not sequence.decodes_here
        if reason is not None or hands_off:
            del self._running[sequence.id]
            self.blocks.release(sequence.id)
        return Outcome(sequence.id, index, reason, hands_off)

    @staticmethod
    def _finish_reason(sequence: ScheduledSequence, stopped: bool) -> FinishReason | None:
        if stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.generated >= sequence.request.output_tokens else None

    # -- accounts ---------------------------------------------------------------------------------------------

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            waiting=len(self._waiting),
            running=len(self._running),
            arriving=len(self._arriving),
            handing_off=len(self._handing_off),
            lease_queue=len(self._lease_queue),
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.num_free,
            blocks_in_flight=self.blocks.num_in_flight,
        )

    def _refuse_known(self, request_id: str) -> None:
        stages = (self._waiting, self._running, self._arriving, self._lease_queue, self._handing_off)
        if any(request_id in stage for stage in stages):
            raise ValueError(f"request {request_id} is already here")


def _handoff_name(request_id: str) -> str:
    return f"handoff:{request_id}"


def _batch_name(request_id: str) -> str:
    return f"batch:{request_id}"
