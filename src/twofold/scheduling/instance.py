"""The instance scheduler: a state machine over the queues, the running set and the block accounts.

            submit                    start                          advance
    prefill ──────▶ waiting ────────▶ prefilling ──┬── decodes here ──▶ ready
                                                   ├── ends ──────────▶ done
                                                   └── hands off ─────▶ handing off ── handed_off ─▶ done
            reserve              grant              landed        start             advance
    decode  ──────▶ lease queue ─────▶ arriving ────────▶ ready ───────▶ decoding ─── ends ──▶ done
                                                                   start │    ▲ start
                                                                         └▶ paused

A driver starts an iteration, has it run (by an engine, or by a virtual clock) and accounts for it. A live
worker asks for each iteration as a batch of items (`next_batch`, `complete`); a simulation repeats an iteration
of decodes as often as nothing changes (`start`, `advance`). Nothing here reads a clock, does I/O or knows in
which world it runs.
"""

from collections.abc import Collection
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.batch import Batch
from twofold.handoff import Lease
from twofold.kvcache.accounts import BlockAccounts
from twofold.kvcache.leases import LeaseBook
from twofold.request import FinishReason, Phase, Request
from twofold.scheduling.batcher import Batcher, Queues, Room, Selection
from twofold.scheduling.iteration import StartedIteration, Step
from twofold.scheduling.memory import WHOLE, MemoryRule
from twofold.scheduling.outcome import InstanceStatus, Outcome
from twofold.scheduling.sequence import ScheduledSequence

__all__ = ["InstanceScheduler", "InstanceStatus", "Outcome", "StartedIteration"]

_LENGTH: Final = FinishReason.LENGTH
_STOP: Final = FinishReason.STOP
_DECODE: Final = Phase.DECODE


class _Reservation:
    """A request that wants blocks here for KV which `source` will write."""

    __slots__ = ("sequence", "source")

    def __init__(self, sequence: ScheduledSequence, source: str) -> None:
        self.sequence = sequence
        self.source = source


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceScheduler:
    """Queues, running set and block accounts of one instance.

    `lease_queue` holds the requests that wait for a lease, in their order. `changed` says that something happened
    after which another selection of work is due at the next boundary between iterations; a driver that runs
    several at a time cuts them short there.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAccounts,
        leases: LeaseBook,
        max_seqs: int,
        memory: MemoryRule = WHOLE,
    ) -> None:
        self.blocks = blocks
        self.leases = leases
        self.changed = False
        self.preemptions = 0
        self._batcher = batcher
        self._max_seqs = max_seqs
        self._memory = memory
        self._queues = Queues()
        self._arriving: dict[str, ScheduledSequence] = {}
        self._handing_off: set[str] = set()
        self.lease_queue: dict[str, _Reservation] = {}
        self._iteration: StartedIteration | None = None
        self._standing = 0  # iterations for which the last selection holds
        self._batch: Batch | None = None
        self._batches = 0
        self._aborted_in_batch: set[str] = set()

    # -- commands ---------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, decodes_here: bool) -> None:
        """Queue a request for prefill here, and for decode too unless it is to be handed off."""
        self._refuse_known(request.id)
        memory = self._memory
        sequence = ScheduledSequence(
            request,
            decodes_here,
            memory.at_start(request, decodes_here),
            memory.at_decode_start(request) if decodes_here else 0,
        )
        self._queue(sequence, self._queues.waiting)

    def reserve(self, request: Request, source: str) -> None:
        """Queue a request, whose prefill runs on `source`, for a lease on blocks; `grant` will say when it has one."""
        self._refuse_known(request.id)
        self.lease_queue[request.id] = _Reservation(self._arrival(request), source)

    def grant(self, now: float) -> list[Lease]:
        """Grant leases, first come first, as far as there are blocks.

        To be called after each command and each completed batch: any of them may have queued a request or
        freed blocks.
        """
        granted: list[Lease] = []
        while self.lease_queue:
            reservation = next(iter(self.lease_queue.values()))
            if not self.blocks.fits(reservation.sequence.start_tokens):
                break
            del self.lease_queue[reservation.sequence.id]
            granted.append(self._lease(reservation.sequence, reservation.source, now))
            if not self.lease_queue:
                self._room_made()
        return granted

    def lease_now(self, request: Request, source: str, now: float) -> Lease | None:
        """A lease at once, past any queue for one; None, and nothing changed, when there are not enough blocks."""
        self._refuse_known(request.id)
        sequence = self._arrival(request)
        return self._lease(sequence, source, now) if self.blocks.fits(sequence.start_tokens) else None

    def landed(self, request_id: str, epoch: int) -> bool:
        """The KV cache of a leased request is complete here; True if the request now decodes."""
        self.leases.end(request_id, epoch)
        sequence = self._arriving.pop(request_id, None)
        if sequence is None:
            self._room_made()
            return False
        self._queue(sequence, self._queues.ready)
        return True

    def end_lease(self, request_id: str, epoch: int) -> None:
        """The source of a lease gave up, or is gone: it writes no more, and the KV cache is not complete."""
        if self.leases.end(request_id, epoch):
            self._room_made()

    def read_started(self, request_id: str, epoch: int) -> bool:
        """The source of a lease lets this instance read the KV cache, and writes nothing itself: the lease ends.

        Until `read_ended` the blocks stay held, whatever happens to the request. False, and nothing is to be read,
        when the request is not here any more.
        """
        reads = request_id in self._arriving
        if reads:
            self.blocks.begin_transfer(_read_name(request_id), request_id)
        self.end_lease(request_id, epoch)
        return reads

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        """Nothing of it is read any more; True if the request now decodes: it is here, and so is its KV cache."""
        self.blocks.end_transfer(_read_name(request_id))
        sequence = self._arriving.pop(request_id, None) if complete else None
        if sequence is None:
            self._room_made()
            return False
        self._queue(sequence, self._queues.ready)
        return True

    def lose_source(self, source: str) -> list[str]:
        """A source is dead and writes no more: end its leases and forget its reservations.

        Returns the requests concerned; those that own blocks still do, until they are aborted.
        """
        queued = [request_id for request_id, r in self.lease_queue.items() if r.source == source]
        for request_id in queued:
            del self.lease_queue[request_id]
        leased = [lease.request_id for lease in self.leases.held_by(source)]
        for request_id in leased:
            self.leases.end(request_id, self.leases.epoch)
        self._room_made()
        return queued + leased

    def handed_off(self, request_id: str) -> None:
        """Nothing will read this request's blocks here any more: its hand-off is over, done or given up."""
        if request_id in self._handing_off:
            self._handing_off.remove(request_id)
            self.blocks.end_transfer(_handoff_name(request_id))
            self._room_made()

    def abort(self, request_id: str) -> None:
        """Forget a request. Blocks that a transfer or the running batch may still touch stay held until it ends."""
        queues = self._queues
        if self.lease_queue.pop(request_id, None) is not None:
            self._room_made()
        if self._arriving.pop(request_id, None) is not None:
            self.blocks.release(request_id)
            self._room_made()
        sequence = queues.find(request_id)
        if sequence is None:
            return
        self._batcher.gone(sequence)
        self.changed = True
        if queues.waiting.pop(request_id, None) is not None:
            return
        if self._is_running(request_id):
            self.blocks.begin_transfer(_batch_name(request_id), request_id)
            self._aborted_in_batch.add(request_id)
        if request_id in queues.decoding:
            queues.decoding.leave(sequence)
        for stage in (queues.prefilling, queues.ready, queues.paused):
            stage.pop(request_id, None)
        self.blocks.release(request_id)

    # -- iterations -------------------------------------------------------------------------------------------

    def start(self, now: float) -> StartedIteration | None:
        """Start an iteration, or a run of equal ones; None when there is nothing to run."""
        if self._iteration is not None:
            raise RuntimeError("the previous iteration has not been accounted for")
        queues, selection = self._queues, None
        if self.changed or not self._standing:
            self.changed = False
            self._standing = 0
            if not queues.settled:
                seats = self._max_seqs - queues.started
                room = Room(self.blocks, self.blocks.num_free, seats, bool(self.lease_queue))
                selection = self._batcher.select(queues, room)
                self._apply(selection)
        iteration = self._iterate(selection)
        if iteration is not None:
            self._iteration = iteration
            self._standing = iteration.limit
        return iteration

    def advance(self, iterations: int = 1) -> list[Step]:
        """Account for `iterations` runs of what was started.

        Returns the steps of sequences for which something else comes next: first tokens and ends.
        """
        iteration = self._end_iteration(iterations)
        steps = self._advance_prefills(iteration, ())
        if iteration.decode_sequences:
            for sequence in self._queues.decoding.advance(iterations):
                self._batcher.gone(sequence)
                self.blocks.release(sequence.id)
                steps.append(Step(sequence, sequence.generated - 1, _LENGTH, hands_off=False))
        return steps

    def next_batch(self, now: float) -> Batch | None:
        """Start one iteration and name its items; None when there is nothing to run."""
        iteration = self.start(now)
        if iteration is None:
            return None
        items = [part.item() for part in iteration.prefills] + self._queues.decoding.items()
        self._batch = Batch(self._batches, tuple(items))
        self._batches += 1
        return self._batch

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[Outcome]:
        """Account for a batch, token by token. `stopped` names requests whose sampled token ends their output."""
        if batch is not self._batch:
            raise RuntimeError("only the batch that was started last can complete")
        self._batch = None
        decoding = self._queues.decoding
        iteration = self._end_iteration(1)
        made = [
            (item.request_id, decoding.generated(sequence))
            for item in batch.items
            if item.phase is _DECODE and (sequence := decoding.get(item.request_id)) is not None
        ]
        outcomes = [
            Outcome(step.sequence.id, step.index, step.finish_reason, step.hands_off)
            for step in self._advance_prefills(iteration, stopped)
        ]
        ended = {sequence.request.id: sequence for sequence in decoding.advance(1)} if made else {}
        for request_id in stopped:
            if (sequence := decoding.get(request_id)) is not None:
                decoding.leave(sequence)
                ended[request_id] = sequence
                self._standing = 0
        for request_id, index in made:
            reason = None
            if request_id in ended:
                self._batcher.gone(ended[request_id])
                self.blocks.release(request_id)
                reason = _STOP if request_id in stopped else _LENGTH
            outcomes.append(Outcome(request_id, index, reason, hands_off=False))
        return outcomes

    def _apply(self, selection: Selection) -> None:
        queues = self._queues
        for sequence in selection.pause:
            queues.decoding.leave(sequence)
            queues.paused[sequence.id] = sequence
        self.preemptions += len(selection.pause)
        for sequence in selection.resume:
            request_id = sequence.id
            if request_id in queues.paused:
                del queues.paused[request_id]
            else:
                del queues.ready[request_id]
                if sequence.decode_tokens:
                    self.blocks.extend(request_id, sequence.decode_tokens)
            queues.decoding.join(sequence)
        for part in selection.prefills:
            if part.sequence.id in queues.waiting:
                del queues.waiting[part.sequence.id]
                self._start_prefill(part.sequence)

    def _start_prefill(self, sequence: ScheduledSequence) -> None:
        request_id = sequence.id
        self.blocks.allocate(request_id, sequence.start_tokens)
        if not sequence.decodes_here:
            self.blocks.begin_transfer(_handoff_name(request_id), request_id)
            self._handing_off.add(request_id)
        self._queues.prefilling[request_id] = sequence

    def _iterate(self, selection: Selection | None) -> StartedIteration | None:
        """What runs now: what was selected, or (None) every decode that there is, as often as may be."""
        decoding = self._queues.decoding
        decodes = decoding.size
        if selection is None or not selection.prefills:
            if not decodes:
                return None
            limit = self._standing or decoding.iterations_to_end()
            context = decoding.context_tokens
            if selection is None:
                return StartedIteration((), 0, 0, decodes, context, limit)
            if not selection.stands:
                limit = 1
            return StartedIteration((), 0, 0, decodes, context, limit, selection.resume, selection.pause)
        prefills, tokens = selection.prefills, 0
        for part in prefills:
            tokens += part.num_tokens
        return StartedIteration(
            prefills,
            tokens,
            len(prefills),
            decodes,
            decoding.context_tokens,
            1,
            selection.resume,
            selection.pause,
        )

    def _end_iteration(self, iterations: int) -> StartedIteration:
        iteration = self._iteration
        if iteration is None or iterations > iteration.limit:
            raise RuntimeError("only what was started can be accounted for")
        self._iteration = None
        self._standing -= iterations
        if self._aborted_in_batch:
            for request_id in self._aborted_in_batch:
                self.blocks.end_transfer(_batch_name(request_id))
            self._aborted_in_batch.clear()
        return iteration

    def _advance_prefills(self, iteration: StartedIteration, stopped: Collection[str]) -> list[Step]:
        steps: list[Step] = []
        prefilling = self._queues.prefilling
        for part in iteration.prefills:
            sequence = part.sequence
            if sequence.id not in prefilling:
                continue  # aborted meanwhile
            sequence.computed += part.num_tokens
            if part.samples:
                del prefilling[sequence.id]
                sequence.generated += 1
                steps.append(self._first_token(sequence, sequence.id in stopped))
        return steps

    def _first_token(self, sequence: ScheduledSequence, stopped: bool) -> Step:
        reason = None
        if stopped:
            reason = _STOP
        elif sequence.generated >= sequence.output_tokens:
            reason = _LENGTH
        hands_off = reason is None and not sequence.decodes_here
        if reason is not None or hands_off:
            self._batcher.gone(sequence)
            self.blocks.release(sequence.id)
        else:
            self._queues.ready[sequence.id] = sequence
            self._batcher.queued(sequence)
        return Step(sequence, sequence.generated - 1, reason, hands_off)

    # -- accounts ---------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Sequences that are here and not in the iteration that runs."""
        return self._batcher.waiting(self._queues)

    @property
    def empty(self) -> bool:
        """No sequence is here to prefill or decode."""
        queues = self._queues
        return queues.settled and not queues.decoding.size

    def status(self) -> InstanceStatus:
        return InstanceStatus(
            waiting=len(self._queues.waiting),
            running=self._queues.started,
            arriving=len(self._arriving),
            handing_off=len(self._handing_off),
            lease_queue=len(self.lease_queue),
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.num_free,
            blocks_in_flight=self.blocks.num_in_flight,
        )

    def _arrival(self, request: Request) -> ScheduledSequence:
        return ScheduledSequence(
            request,
            decodes_here=True,
            start_tokens=self._memory.at_start(request, decodes_here=True),
            decode_tokens=self._memory.at_decode_start(request),
            computed=request.prompt_tokens,
            generated=1,
        )

    def _lease(self, sequence: ScheduledSequence, source: str, now: float) -> Lease:
        self.blocks.allocate(sequence.id, sequence.start_tokens)
        self._arriving[sequence.id] = sequence
        return self.leases.grant(sequence.id, source, now)

    def _queue(self, sequence: ScheduledSequence, stage: dict[str, ScheduledSequence]) -> None:
        stage[sequence.id] = sequence
        self._batcher.queued(sequence)
        if not self.changed:
            self.changed = self._batcher.reselects(sequence, self._iteration, self.blocks)

    def _room_made(self) -> None:
        """Blocks became free, or the last lease that was waited for is granted: something may start."""
        if not (self.changed or self._queues.settled):
            self.changed = self._batcher.reselects(None, self._iteration, self.blocks)

    def _is_running(self, request_id: str) -> bool:
        """Whether the iteration under way computes something for this request."""
        if self._iteration is None:
            return False
        prefilled = any(part.sequence.id == request_id for part in self._iteration.prefills)
        return prefilled or request_id in self._queues.decoding

    def _refuse_known(self, request_id: str) -> None:
        if (
            request_id in self._queues.waiting
            or request_id in self.lease_queue
            or request_id in self._handing_off
            or self.blocks.owns(request_id)
        ):
            raise ValueError(f"request {request_id} is already here")


def _handoff_name(request_id: str) -> str:
    return f"handoff:{request_id}"


def _read_name(request_id: str) -> str:
    return f"read:{request_id}"


def _batch_name(request_id: str) -> str:
    return f"batch:{request_id}"
