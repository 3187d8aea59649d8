"""The instance scheduler: a state machine over the queues, the running set and the block accounts.

            submit                    start                          advance
    prefill ──────▶ waiting ────────▶ prefilling ──┬── decodes here ──▶ ready
       └▶ fetching ──▲ fetched                     ├── ends ──────────▶ done
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

from collections.abc import Collection, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.batch import Batch
from twofold.handoff import Lease
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.kvcache.cache import RemovalReason
from twofold.kvcache.leases import LeaseTable
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.request import FinishReason, Phase, Request
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.batcher import Batcher, SchedulerOutput, SchedulingBudget
from twofold.scheduling.instance.kv_reservation import FULL_RESERVATION, KvReservation
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import ScheduledSequence, SequenceQueue
from twofold.scheduling.instance.status import InstanceStatus, Outcome
from twofold.scheduling.instance.swap_preemption import SwapPreemption

__all__ = ["InstanceScheduler", "InstanceStatus", "Outcome", "RunningBatch"]

_LENGTH: Final = FinishReason.LENGTH
_STOP: Final = FinishReason.STOP
_DECODE: Final = Phase.DECODE


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceScheduler:
    """Queues, running set and block accounts of one instance.

    `lease_queue` holds the requests that wait for a lease, in their order. `changed` says that something happened
    after which another selection of work is due at the next boundary between iterations; a driver that runs
    several at a time cuts them short there. With `growth` decodes take memory as they go, and a driver asks it, after
    `start` or `next_batch`, what is to be copied first.

    Where the blocks are shared, a prompt is given those that hold its beginning when it starts, and not before: nothing
    that waits holds any (docs/decisions/0007). A driver asks `copy_of` then. Blocks of prompts are found by others when
    the iteration that has filled them is over.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAllocator,
        leases: LeaseTable,
        max_num_seqs: int,
        memory: KvReservation = FULL_RESERVATION,
        growth: SwapPreemption | None = None,
    ) -> None:
        self.blocks = blocks
        self.leases = leases
        self.growth = growth
        self.shared = blocks if isinstance(blocks, PrefixBlockAllocator) else None
        self.changed = False
        self.preemptions = 0
        self._batcher = batcher
        self._max_seqs = max_num_seqs
        self._memory = memory if growth is None else growth.memory
        self._here: dict[str, ScheduledSequence] = {}  # all that is known of, whatever it waits for
        self._queues = Queues()
        self._arriving = SequenceQueue()
        # Prompts some of whose blocks are on their way, and all that came after the first of them.
        self._fetching = SequenceQueue()
        self._reads: dict[str, BlockAllocation] = {}  # blocks that this instance fills itself, by request
        self._handing_off = 0
        self.lease_queue = SequenceQueue()
        self._iteration: RunningBatch | None = None
        self._standing = 0  # iterations for which the last selection holds
        self._batch: Batch | None = None
        self._batches = 0
        self._aborted_in_batch: list[BlockAllocation] = []
        self._now = 0.0  # when an iteration was started last

    # -- commands ---------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, *, decodes_here: bool, reused_tokens: int = 0, fetching: bool = False
    ) -> None:
        """Queue a request for prefill here, and for decode too unless it is to be handed off.

        KV of its first `reused_tokens` tokens is not computed, because it is in a cache; `fetching` says that some of
        it is on its way there, and that the prompt may not start before `fetched`. Nor may those behind it: what is
        fetched comes soon, and one that is overtaken may wait for a prompt that takes a thousand times as long.
        """
        sequence = ScheduledSequence(request, decodes_here, computed=_reused(request, reused_tokens))
        sequence.fetching = fetching
        self._enter(sequence)
        if fetching or self._fetching.size:
            self._fetching.append(sequence)
        else:
            self._queue(sequence, self._queues.waiting)

    def fetched(self, request_id: str, reused_tokens: int | None = None) -> None:
        """What was on its way for a prompt is here, or will not come: then fewer tokens are reused than was said.

        Changes nothing for one that was aborted.
        """
        sequence = self._here.get(request_id)
        if sequence is None or not sequence.fetching:
            return
        if reused_tokens is not None:
            sequence.computed = _reused(sequence.request, reused_tokens)
        sequence.fetching = False
        self._let_through()

    def _let_through(self) -> None:
        """Prompts that have all their blocks go on to wait for their turn, up to the next one that has not."""
        while (sequence := self._fetching.first) is not None and not sequence.fetching:
            self._fetching.remove(sequence)
            self._queue(sequence, self._queues.waiting)

    def reserve(self, request: Request, source: str) -> None:
        """Queue a request, whose prefill runs on `source`, for a lease on blocks; `grant` will say when it has one."""
        sequence = _prefilled_elsewhere(request, source)
        self._enter(sequence)
        self.lease_queue.append(sequence)

    def grant(self, now: float) -> list[Lease]:
        """Grant leases, first come first, as far as there are blocks.

        To be called after each command and each completed batch: any of them may have queued a request or
        freed blocks.
        """
        granted: list[Lease] = []
        queue, growth = self.lease_queue, self.growth
        while (sequence := queue.first) is not None and self.blocks.fits(sequence.start_tokens):
            if growth is not None and not growth.admits(sequence, self._queues):
                break
            queue.remove(sequence)
            granted.append(self._lease(sequence, now))
            if not queue.size:
                self._room_made()
        return granted

    def lease_now(self, request: Request, source: str, now: float) -> Lease | None:
        """A lease at once, past any queue for one; None, and nothing changed, when there are not enough blocks."""
        sequence = _prefilled_elsewhere(request, source)
        self._enter(sequence)
        growth = self.growth
        if self.blocks.fits(sequence.start_tokens) and (
            growth is None or growth.admits(sequence, self._queues)
        ):
            return self._lease(sequence, now)
        del self._here[sequence.id]
        return None

    def landed(self, request_id: str, epoch: int) -> bool:
        """The KV cache of a leased request is complete here; True if the request now decodes."""
        self.leases.end(request_id, epoch)
        sequence = self._here.get(request_id)
        if sequence is None or sequence.line is not self._arriving:
            self._room_made()
            return False
        self._arriving.remove(sequence)
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
        sequence = self._here.get(request_id)
        reads = sequence is not None and sequence.line is self._arriving
        if sequence is not None and reads:
            grant = self._reads[request_id] = _granted(sequence)
            self.blocks.begin_transfer(grant)
        self.end_lease(request_id, epoch)
        return reads

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        """Nothing of it is read any more; True if the request now decodes: it is here, and so is its KV cache."""
        self.blocks.end_transfer(self._reads[request_id])
        del self._reads[request_id]
        sequence = self._here.get(request_id) if complete else None
        if sequence is None or sequence.line is not self._arriving:
            self._room_made()
            return False
        self._arriving.remove(sequence)
        self._queue(sequence, self._queues.ready)
        return True

    def peer_lost(self, source: str) -> list[str]:
        """A source is dead and writes no more: end its leases and forget its reservations.

        Returns the requests concerned; those that own blocks still do, until they are aborted.
        """
        queued = [sequence for sequence in self.lease_queue if sequence.source == source]
        for sequence in queued:
            self.lease_queue.remove(sequence)
            del self._here[sequence.id]
        leased = [lease.request_id for lease in self.leases.held_by(source)]
        for request_id in leased:
            self.leases.end(request_id, self.leases.epoch)
        self._room_made()
        return [sequence.id for sequence in queued] + leased

    def handed_off(self, request_id: str) -> None:
        """Nothing will read this request's blocks here any more: its hand-off is over, done or given up."""
        sequence = self._here.get(request_id)
        if sequence is not None and sequence.handing_off:
            sequence.handing_off = False
            self._handing_off -= 1
            self.blocks.end_transfer(_granted(sequence))
            if sequence.line is None:
                del self._here[request_id]
            self._room_made()

    def abort(self, request_id: str) -> None:
        """Forget a request. Blocks that a transfer or the running batch may still touch stay held until it ends."""
        sequence = self._here.get(request_id)
        line = None if sequence is None else sequence.line
        if sequence is None or line is None:
            return
        queues = self._queues
        running = self._is_running(sequence)
        if line is queues.decoding:
            queues.decoding.leave(sequence)
        else:
            line.remove(sequence)
        if sequence.grant is None:  # it waited for a lease, for blocks, or to start, or is swapped out
            if self.growth is not None:
                self.growth.leave(sequence)
            del self._here[request_id]
        else:
            if running:
                self.blocks.begin_transfer(sequence.grant)
                self._aborted_in_batch.append(sequence.grant)
            self._release(sequence)
        if line is self._fetching:
            self._let_through()
            return  # no batcher knows of it
        if line is self.lease_queue or line is self._arriving:
            self._room_made()
        else:
            self._batcher.gone(sequence)
            self.changed = True

    def blocks_of(self, request_id: str) -> Sequence[int]:
        """The blocks of a request in the order of its tokens; empty where only their number is known."""
        return self.blocks.blocks_of(_granted(self._here[request_id]))

    def grant_of(self, request_id: str) -> BlockAllocation:
        """What those blocks are held by: for who reads them beyond the request's end (`begin_transfer`)."""
        return _granted(self._here[request_id])

    def copy_of(self, request_id: str) -> tuple[int, int] | None:
        """The block, and where to, that is to be copied before the iteration that a prompt has just started with."""
        return self._here[request_id].copy

    def reused_tokens(self, request_id: str) -> int:
        """How many tokens of a prompt that has started were not to be computed here; 0 if it is not here."""
        sequence = self._here.get(request_id)
        return 0 if sequence is None else sequence.reused_tokens

    # -- iterations -------------------------------------------------------------------------------------------

    def start(self, now: float) -> RunningBatch | None:
        """Start an iteration, or a run of equal ones; None when there is nothing to run."""
        if self._iteration is not None:
            raise RuntimeError("the previous iteration has not been accounted for")
        self._now = now
        if self.shared is not None:
            self.shared.cache.expire(now)
        queues, selection = self._queues, None
        if self.changed or not self._standing:
            self.changed = False
            self._standing = 0
            if not queues.settled:
                growth, free = self.growth, self.blocks.num_free
                stopped: list[ScheduledSequence] = []
                if growth is not None:
                    stopped = growth.settle(queues)
                    free = growth.offer(queues)
                seats = self._max_seqs - queues.started
                room = SchedulingBudget(
                    self.blocks, free, seats, self.lease_queue.size > 0, growth, self.shared
                )
                selection = self._batcher.select(queues, room)
                self._apply(selection)
                if growth is not None and growth.copies:
                    self.preemptions += len(stopped)
                    selection.pause += stopped
                    selection.stands = False
        iteration = self._iterate(selection)
        if iteration is not None:
            self._iteration = iteration
            self._standing = iteration.limit
        return iteration

    def advance(self, iterations: int = 1) -> list[StepResult]:
        """Account for `iterations` runs of what was started.

        Returns the steps of sequences for which something else comes next: first tokens and ends.
        """
        iteration = self._end_iteration(iterations)
        steps: list[StepResult] = []
        if iteration.prefills:
            self._advance_prefills(iteration, (), steps)
        if iteration.decode_sequences:
            left = self._queues.decoding.advance(iterations)
            for sequence in left:
                if sequence.generated >= sequence.output_tokens:
                    self._done(sequence)
                    steps.append(StepResult(sequence, sequence.generated - 1, _LENGTH, hands_off=False))
            if self.growth is not None:
                steps += [
                    StepResult(sequence, sequence.generated - 1, None, hands_off=False)
                    for sequence in left
                    if sequence.generated < sequence.output_tokens and not self._grow(sequence, self.growth)
                ]
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
        decodes = [self._here.get(item.request_id) for item in batch.items if item.phase is _DECODE]
        made = [
            (sequence, decoding.generated(sequence))
            for sequence in decodes
            if sequence is not None and sequence.line is decoding
        ]
        steps: list[StepResult] = []
        self._advance_prefills(iteration, stopped, steps)
        outcomes = [
            Outcome(step.sequence.id, step.index, step.finish_reason, step.hands_off) for step in steps
        ]
        left = decoding.advance(1) if made else []
        for sequence, index in made:
            goes_on = sequence.line is decoding
            reason = None if goes_on or sequence.generated < sequence.output_tokens else _LENGTH
            if sequence.id in stopped:
                reason = _STOP
                if goes_on:
                    decoding.leave(sequence)
                    self._standing = 0
            if reason is not None:
                self._done(sequence)
            outcomes.append(Outcome(sequence.id, index, reason, hands_off=False))
        if self.growth is not None:
            for sequence in left:
                if sequence.generated < sequence.output_tokens and sequence.id not in stopped:
                    self._grow(sequence, self.growth)
        return outcomes

    def _apply(self, selection: SchedulerOutput) -> None:
        queues, shared = self._queues, self.shared
        for sequence in selection.pause:
            queues.decoding.leave(sequence)
            queues.paused.append(sequence)
        self.preemptions += len(selection.pause)
        for sequence in selection.resume:
            if sequence.line is queues.paused:
                queues.paused.remove(sequence)
            else:
                queues.ready.remove(sequence)
                if sequence.decode_tokens:
                    self.blocks.extend(_granted(sequence), sequence.decode_tokens)
                if shared is not None and sequence.source:
                    # What has landed is in place now at the latest, see `Landing`.
                    _publish(shared, sequence, sequence.computed, 0)
            if self.growth is None:
                queues.decoding.join(sequence)
            else:
                queues.decoding.join(sequence, self.growth.lasts(sequence))
        for part in selection.prefills:
            if part.sequence.line is queues.waiting:
                queues.waiting.remove(part.sequence)
                self._start_prefill(part.sequence)

    def _start_prefill(self, sequence: ScheduledSequence) -> None:
        grant = sequence.grant
        if grant is None:
            sequence.grant = grant = self.blocks.allocate(sequence.id, sequence.start_tokens)
        if not sequence.decodes_here:
            self.blocks.begin_transfer(grant)
            sequence.handing_off = True
            self._handing_off += 1
        elif self.growth is not None:
            self.growth.enter(sequence)
        self._queues.prefilling.append(sequence)

    def _iterate(self, selection: SchedulerOutput | None) -> RunningBatch | None:
        """What runs now: what was selected, or (None) every decode that there is, as often as may be."""
        decoding = self._queues.decoding
        decodes, context = decoding.size, decoding.context_tokens
        if selection is not None and selection.prefills:
            prefills, tokens = selection.prefills, 0
            for part in prefills:
                tokens += part.num_tokens
            return RunningBatch(
                prefills, tokens, len(prefills), decodes, context, 1, selection.resume, selection.pause
            )
        if not decodes:
            return None
        limit = self._standing or decoding.iterations_to_end()
        if selection is None:
            return RunningBatch([], 0, 0, decodes, context, limit)
        if not selection.stands:
            limit = 1
        return RunningBatch([], 0, 0, decodes, context, limit, selection.resume, selection.pause)

    def _end_iteration(self, iterations: int) -> RunningBatch:
        iteration = self._iteration
        if iteration is None or iterations > iteration.limit:
            raise RuntimeError("only what was started can be accounted for")
        self._iteration = None
        self._standing -= iterations
        if self._aborted_in_batch:
            for grant in self._aborted_in_batch:
                self.blocks.end_transfer(grant)
            self._aborted_in_batch.clear()
        if self.growth is not None:
            self.growth.copied()
        return iteration

    def _advance_prefills(
        self, iteration: RunningBatch, stopped: Collection[str], steps: list[StepResult]
    ) -> None:
        prefilling, shared = self._queues.prefilling, self.shared
        for part in iteration.prefills:
            sequence = part.sequence
            if sequence.line is not prefilling:
                continue  # aborted meanwhile
            # Later chunks of it may be under way already, where a pipeline has several.
            computed = part.context_tokens + part.num_tokens
            sequence.computed = max(sequence.computed, computed)
            if shared is not None:
                if sequence.copy is not None:
                    sequence.copy = None
                    shared.copied(_granted(sequence))
                _publish(shared, sequence, computed, part.context_tokens)
            if part.samples:
                if shared is not None and sequence.request.retain_s:
                    _retain(shared, sequence, self._now)
                prefilling.remove(sequence)
                sequence.generated += 1
                steps.append(self._first_token(sequence, sequence.id in stopped))

    def _grow(self, sequence: ScheduledSequence, growth: SwapPreemption) -> bool:
        """A decode has used up its memory: it takes more and goes on, or stands still."""
        queues = self._queues
        if not queues.paused.size and growth.extend(sequence):
            queues.decoding.join(sequence, growth.lasts(sequence))
            return True
        self.preemptions += 1
        queues.paused.append(sequence)
        return False

    def _first_token(self, sequence: ScheduledSequence, stopped: bool) -> StepResult:
        reason = None
        if stopped:
            reason = _STOP
        elif sequence.generated >= sequence.output_tokens:
            reason = _LENGTH
        hands_off = reason is None and not sequence.decodes_here
        if reason is not None or hands_off:
            self._done(sequence)
        else:
            self._queues.ready.append(sequence)
            self._batcher.queued(sequence)
        return StepResult(sequence, sequence.generated - 1, reason, hands_off)

    def _done(self, sequence: ScheduledSequence) -> None:
        """Nothing of a sequence is left to run here."""
        self._batcher.gone(sequence)
        self._release(sequence)

    def _release(self, sequence: ScheduledSequence) -> None:
        self.blocks.release(_granted(sequence))
        if self.growth is not None:
            self.growth.leave(sequence)
        if not sequence.handing_off:
            del self._here[sequence.id]

    # -- accounts ---------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Sequences that are here and not in the iteration that runs."""
        return self._batcher.waiting(self._queues)

    def generated(self, request_id: str) -> int:
        """Output tokens that a request has made, those of the iterations under way not counted; 0 if it is not here."""
        sequence = self._here.get(request_id)
        if sequence is None:
            return 0
        decoding = self._queues.decoding
        return decoding.generated(sequence) if sequence.line is decoding else sequence.generated

    @property
    def empty(self) -> bool:
        """No sequence is here to prefill or decode."""
        queues = self._queues
        return queues.settled and not queues.decoding.size and not self._fetching.size

    def status(self) -> InstanceStatus:
        growth, shared = self.growth, self.shared
        return InstanceStatus(
            waiting=self._queues.waiting.size + self._fetching.size,
            running=self._started(),
            arriving=self._arriving.size,
            handing_off=self._handing_off,
            lease_queue=self.lease_queue.size,
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.num_free,
            blocks_in_flight=self.blocks.num_in_flight,
            swapped=0 if growth is None else growth.swapped,
            swaps=0 if growth is None else growth.swaps,
            swap_blocks_total=0 if growth is None else growth.host.num_blocks,
            swap_blocks_free=0 if growth is None else growth.host.num_free,
            swap_blocks_moved=0 if growth is None else growth.blocks_copied,
            blocks_cached=0 if shared is None else len(shared.cache),
            blocks_evicted=0 if shared is None else shared.cache.removals[RemovalReason.CAPACITY],
            blocks_pinned=0 if shared is None else shared.cache.pinned,
        )

    def _started(self) -> int:
        """Sequences in the running set."""
        return self._queues.started

    def _enter(self, sequence: ScheduledSequence) -> None:
        """A request is known from now on, and how much memory it will take."""
        request_id, output, memory = sequence.id, sequence.output_tokens, self._memory
        if self._here.setdefault(request_id, sequence) is not sequence:
            raise ValueError(f"request {request_id} is already here")
        sequence.start_tokens = memory.at_start(sequence.prompt_tokens, output, sequence.decodes_here)
        if sequence.decodes_here:
            sequence.decode_tokens = memory.at_decode_start(output)

    def _lease(self, sequence: ScheduledSequence, now: float) -> Lease:
        sequence.grant = grant = self.blocks.allocate(sequence.id, sequence.start_tokens)
        if self.growth is not None:
            self.growth.enter(sequence)
        self._arriving.append(sequence)
        return self.leases.grant(grant, sequence.source, now)

    def _queue(self, sequence: ScheduledSequence, line: SequenceQueue) -> None:
        line.append(sequence)
        self._batcher.queued(sequence)
        if not self.changed:
            self.changed = self._batcher.should_reschedule(sequence, self._iteration, self.blocks)

    def _room_made(self) -> None:
        """Blocks became free, or the last lease that was waited for is granted: something may start."""
        if not (self.changed or self._queues.settled):
            self.changed = self._batcher.should_reschedule(None, self._iteration, self.blocks)

    def _is_running(self, sequence: ScheduledSequence) -> bool:
        """Whether the iteration under way computes something for this sequence."""
        if self._iteration is None:
            return False
        return sequence.line is self._queues.decoding or any(
            part.sequence is sequence for part in self._iteration.prefills
        )


def _reused(request: Request, tokens: int) -> int:
    if tokens and not 0 < tokens < request.prompt_tokens:
        raise ValueError(
            f"{tokens} of the {request.prompt_tokens} prompt tokens of {request.id} cannot be reused"
        )
    return tokens


def _prefilled_elsewhere(request: Request, source: str) -> ScheduledSequence:
    sequence = ScheduledSequence(request, decodes_here=True, generated=1)
    sequence.computed, sequence.source = sequence.prompt_tokens, source
    return sequence


def _granted(sequence: ScheduledSequence) -> BlockAllocation:
    grant = sequence.grant
    if grant is None:
        raise KeyError(f"request {sequence.id} has no blocks")
    return grant


def _publish(
    shared: PrefixBlockAllocator, sequence: ScheduledSequence, computed: int, known_tokens: int
) -> None:
    """Of a prompt `computed` tokens are: its whole blocks can be found; those of its first tokens are known already."""
    size = shared.block_size
    keys = sequence.request.prefix_blocks[: min(computed, sequence.prompt_tokens) // size]
    shared.publish(_granted(sequence), keys, known_tokens // size)


def _retain(shared: PrefixBlockAllocator, sequence: ScheduledSequence, now: float) -> None:
    """A prompt that is computed is kept for as long as its request says."""
    request = sequence.request
    keys = request.prefix_blocks[: sequence.prompt_tokens // shared.block_size]
    shared.cache.pin(keys, now + request.retain_s)
