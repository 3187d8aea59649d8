"""The instance scheduler: a state machine over queues, running batches and KV blocks.

Each method moves sequences from one state to another:

    submit       new prompt → waiting, or new prompt → fetching while cached KV of the prompt is copied
    fetched      fetching → waiting
    start        waiting → prefilling; ready or paused → decoding; decoding → paused
    advance      prefilling → ready (or handing off, or done); decoding → done (or paused)
    handed_off   handing off → done

On a decode instance, a sequence gets a lease on blocks, into which the prefill instance writes its KV:

    reserve      new sequence → waiting for a lease
    grant        waiting for a lease → receiving KV
    kv_received  receiving KV → ready

The simulator calls `start` and `advance`. A live worker calls `next_batch` instead of `start`, and
`complete` instead of `advance`. The scheduler reads no clock and does no I/O.
"""

from collections.abc import Collection, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.batch import Batch
from twofold.kvcache.allocator import BlockAllocation, BlockAllocator, LeaseTable
from twofold.kvcache.cache import RemovalReason
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.request import BlockKey, FinishReason, Phase, Request
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget
from twofold.scheduling.instance.kv_receiver import KvReceiver, allocation_of
from twofold.scheduling.instance.queues import (
    NO_CHANGES,
    DecodeSet,
    Lane,
    Queues,
    RunningBatch,
    SchedulerOutput,
    StepResult,
)
from twofold.scheduling.instance.sequence import (
    FULL_RESERVATION,
    KvReservation,
    PrefillChunk,
    ScheduledSequence,
    SequenceQueue,
)
from twofold.scheduling.instance.status import InstanceStatus
from twofold.scheduling.instance.swap_preemption import SwapPreemption

_LENGTH: Final = FinishReason.LENGTH
_STOP: Final = FinishReason.STOP
_DECODE: Final = Phase.DECODE


@mypyc_attr(allow_interpreted_subclasses=True)
class InstanceScheduler(KvReceiver):
    """Schedules the requests of one instance.

    With `stages` > 1, the instance is a pipeline with one lane (group of sequences) per stage, and one running batch
    per lane. `max_num_seqs` applies to each batch.

    With a `PrefixBlockAllocator`, a prompt gets the blocks of its cached prefix when it starts, and full blocks of
    prompts are published for reuse after each batch. A live worker publishes full blocks of outputs with `filled`.
    """

    def __init__(
        self,
        batcher: Batcher,
        blocks: BlockAllocator,
        leases: LeaseTable,
        max_num_seqs: int,
        reservation: KvReservation = FULL_RESERVATION,
        swap: SwapPreemption | None = None,
        stages: int = 1,
    ) -> None:
        super().__init__(blocks, leases, reservation, swap)
        self.batcher = batcher
        self.max_num_seqs = max_num_seqs
        self.stages = stages
        self.queues = Queues()
        # Waiting requests hold no blocks (docs/decisions/0007).
        self.shared = blocks if isinstance(blocks, PrefixBlockAllocator) else None
        self._budget = SchedulingBudget(blocks, 0, 0)
        self._budget.swap, self._budget.shared = swap, self.shared
        self.changed = False  # a new batch must be selected, even if the running batch could repeat
        self.preemptions = 0
        # Lanes share waiting prompts and, with a chunked batcher, partly computed prompts: chunks pass each stage in
        # order, so a chunk finds the KV of earlier chunks (Mooncake section 5.1).
        self._shares_prefills = stages > 1 and batcher.chunked
        self._lane = Lane(0, self.queues, stages > 1)  # the only lane unless this is a pipeline
        self._lanes = [self._lane]
        for number in range(1, stages):
            prefilling = self.queues.prefilling if self._shares_prefills else None
            self._lanes.append(Lane(number, Queues(self.queues.waiting, prefilling), True))
        # The running lanes, oldest batch first, then the idle lanes, idle longest first.
        self._turns = list(self._lanes)
        self._running = 0  # number of running lanes
        # Prompts with a prefix being fetched, and every prompt submitted after the first of them.
        self._fetching = SequenceQueue()
        self._handing_off = 0
        self._batches = 0
        self._now = 0.0  # time of the last start
        if swap is not None:  # the caller carries out `swap.take_copies()` after each `start` or `next_batch`
            swap.queues = self.queues

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, decodes_here: bool, reused_tokens: int = 0, fetching: bool = False) -> None:
        """Queue a request for prefill and, if `decodes_here`, for decode. If `fetching`, cached KV of the prompt is
        being fetched, and the prompt waits for a call of `fetched`.
        """
        # The KV of the first `reused_tokens` prompt tokens is cached, or a part of it is still being fetched. Later
        # prompts wait too, because a long prompt could delay this prompt for longer than the fetch.
        sequence = ScheduledSequence(request, decodes_here, computed=_reused(request, reused_tokens))
        sequence.fetching = fetching
        self.add(sequence)
        if fetching or self._fetching.size:
            self._fetching.append(sequence)
        else:
            self._enqueue(sequence, self.queues.waiting)

    def fetched(self, request_id: str, reused_tokens: int | None = None) -> None:
        """Record the end of a request's prefix fetch. `reused_tokens` replaces the value passed to `submit`."""
        sequence = self.sequences.get(request_id)
        if sequence is None or not sequence.fetching:
            return
        if reused_tokens is not None:
            sequence.computed = _reused(sequence.request, reused_tokens)
        sequence.fetching = False
        self._end_fetches()

    def _end_fetches(self) -> None:
        """Move prompts to the waiting queue in order, up to the first prompt whose prefix is still being fetched."""
        while (sequence := self._fetching.first) is not None and not sequence.fetching:
            self._fetching.remove(sequence)
            self._enqueue(sequence, self.queues.waiting)

    def handed_off(self, request_id: str) -> None:
        """End the hand-off of a request, successful or not, and release its blocks."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.handing_off:
            sequence.handing_off = False
            self._handing_off -= 1
            self.blocks.end_transfer(allocation_of(sequence))
            if sequence.queue is None:
                del self.sequences[request_id]
            self.blocks_freed()

    def abort(self, request_id: str) -> None:
        """Remove a request. The request's KV blocks are freed when no transfer and no running batch uses the blocks."""
        sequence = self.sequences.get(request_id)
        queue = None if sequence is None else sequence.queue
        if sequence is None or queue is None:
            return
        computing = [lane for lane in self._turns[: self._running] if lane.computes(sequence)]
        queue.remove(sequence)
        allocation = sequence.allocation
        if allocation is None:  # waiting for a lease, for blocks or to start, or swapped out
            if self.swap is not None:
                self.swap.forget(sequence)
            del self.sequences[request_id]
        else:
            if computing:
                self.blocks.begin_transfer(allocation)
                computing[-1].aborted.append(allocation)  # with the last chunk of its prompt
            self._release(sequence)
        if queue is self._fetching:
            self._end_fetches()  # not yet in a queue of the batcher
        elif queue is self.lease_queue or queue is self.arriving:
            self.blocks_freed()
        else:
            self.batcher.on_finished(sequence)
            self.changed = True

    def blocks_of(self, request_id: str) -> Sequence[int]:
        """Return the block ids of a request in token order; empty if the allocator only counts blocks."""
        return self.blocks.blocks_of(allocation_of(self.sequences[request_id]))

    def allocation_of(self, request_id: str) -> BlockAllocation:
        """Return the allocated blocks of a request, for a transfer that may outlast the request."""
        return allocation_of(self.sequences[request_id])

    def copy_of(self, request_id: str) -> tuple[int, int] | None:
        """Return the (source, target) blocks to copy before a prompt's first batch; None if no copy is needed."""
        return self.sequences[request_id].copy

    def reused_tokens(self, request_id: str) -> int:
        """Return the number of a request's prompt tokens found in the prefix cache; 0 for unknown requests."""
        sequence = self.sequences.get(request_id)
        return 0 if sequence is None else sequence.reused_tokens

    def generated(self, request_id: str) -> int:
        """Return the number of output tokens that a request has generated; 0 for unknown requests."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return 0
        for lane in self._lanes:
            if sequence.queue is lane.queues.decoding:
                return lane.queues.decoding.generated(sequence)
        return sequence.generated

    # -- batches ------------------------------------------------------------------------------------------------------

    def start(self, now: float) -> RunningBatch | None:
        """Start and return a batch of the lane that is idle longest; None without work, or if the pipeline is full."""
        if self._running == self.stages:
            if self.stages == 1:
                raise RuntimeError("the running batch has not been completed")
            return None
        self._now = now
        if self.shared is not None:
            self.shared.cache.expire(now)
        turns = self._turns
        for turn in range(self._running, self.stages):
            batch = self._start_lane(turns[turn])
            if batch is not None:
                if turn > self._running:
                    turns.insert(self._running, turns.pop(turn))
                self._running += 1
                if self._shares_prefills:
                    for chunk in batch.prefills:
                        chunk.sequence.computed += chunk.num_tokens
                return batch
        return None

    def _start_lane(self, lane: Lane) -> RunningBatch | None:
        """Start and return the next batch of an idle lane (group of sequences); return None if there is no work."""
        queues, changes = lane.queues, NO_CHANGES
        if self.changed or not lane.remaining:
            self.changed = False
            lane.remaining = 0
            if not queues.settled:
                changes = self._select(queues)
        decoding, limit = queues.decoding, 1
        decodes = decoding.size
        if not changes.prefills:
            if not decodes:
                return None
            if changes.repeatable and not lane.single_step:
                limit = lane.remaining or decoding.iterations_to_end()
        lane.remaining = limit
        lane.batch = batch = RunningBatch(changes, decodes, decoding.context_tokens, limit, lane.number)
        return batch

    def advance(self, iterations: int = 1) -> list[StepResult]:
        """Complete `iterations` iterations of the oldest running batch. Return a result for each sequence that got its
        first token, ended or was paused.
        """
        lane = self._turns[0]
        batch = self._finish(lane, iterations)
        results: list[StepResult] = []
        if batch.prefills:
            self.finish_prefills(lane.queues, batch.prefills, (), results)
        if batch.decode_sequences:
            left = lane.queues.decoding.advance(iterations)
            for sequence in left:
                if sequence.generated >= sequence.output_tokens:
                    self.finish(sequence)
                    results.append(StepResult(sequence, sequence.generated - 1, _LENGTH, hands_off=False))
            if self.swap is not None:
                results += [
                    StepResult(sequence, sequence.generated - 1, None, hands_off=False)
                    for sequence in left
                    if sequence.generated < sequence.output_tokens and not self._grow(sequence, self.swap)
                ]
        return results

    def next_batch(self, now: float) -> Batch | None:
        """Start one iteration and return its batch; None if there is nothing to run."""
        running = self.start(now)
        if running is None:
            return None
        lane = self._lanes[running.lane]
        items = [chunk.item() for chunk in running.prefills] + lane.queues.decoding.items()
        lane.message = batch = Batch(self._batches, tuple(items))
        self._batches += 1
        return batch

    def filled(self, request_id: str, position: int, key: BlockKey) -> None:
        """Let later prompts reuse the block at index `position` of a request, which a decode has just filled.

        Call this before `complete`. It does nothing for unknown requests and without a prefix cache.
        """
        sequence = self.sequences.get(request_id)
        if self.shared is not None and sequence is not None and sequence.queue is not None:
            self.shared.publish_block(allocation_of(sequence), key, position)

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[StepResult]:
        """Complete the oldest batch. Return a result per sampled token. `stopped` requests end with their new token."""
        if not self._running or batch is not self._turns[0].message:
            raise RuntimeError("only the oldest running batch can be completed")
        lane = self._turns[0]
        running = self._finish(lane, 1)
        decoding = lane.queues.decoding
        made = self._tokens_made(batch, decoding)
        results: list[StepResult] = []
        self.finish_prefills(lane.queues, running.prefills, stopped, results)
        left = decoding.advance(1) if made else []
        for sequence, index in made:
            continues = sequence.queue is decoding
            reason = None if continues or sequence.generated < sequence.output_tokens else _LENGTH
            if sequence.id in stopped:
                reason = _STOP
                if continues:
                    decoding.remove(sequence)
                    lane.remaining = 0
            if reason is not None:
                self.finish(sequence)
            results.append(StepResult(sequence, index, reason, hands_off=False))
        if self.swap is not None:
            for sequence in left:
                if sequence.generated < sequence.output_tokens and sequence.id not in stopped:
                    self._grow(sequence, self.swap)
        return results

    def _tokens_made(self, batch: Batch, decoding: DecodeSet) -> list[tuple[ScheduledSequence, int]]:
        """Return the decoded sequences of a batch, each with the index of the new token in the sequence's output."""
        made: list[tuple[ScheduledSequence, int]] = []  # without aborted sequences
        for item in batch.items:
            sequence = self.sequences.get(item.request_id) if item.phase is _DECODE else None
            if sequence is not None and sequence.queue is decoding:
                made.append((sequence, decoding.generated(sequence)))
        return made

    def _select(self, queues: Queues) -> SchedulerOutput:
        swap, free = self.swap, self.blocks.num_free
        preempted: list[ScheduledSequence] = []
        if swap is not None:
            preempted = swap.resume_paused()
            free = swap.begin_selection()
        budget = self._budget
        budget.free_blocks, budget.free_seats = free, self.max_num_seqs - queues.started
        budget.leases_first = self.lease_queue.size > 0
        output = self.batcher.select(queues, budget)
        self._apply(output, queues)
        if swap is not None and swap.copies:
            self.preemptions += len(preempted)
            output.pause += preempted
            output.repeatable = False
        return output

    def _apply(self, output: SchedulerOutput, queues: Queues) -> None:
        shared = self.shared
        for sequence in output.pause:
            queues.decoding.remove(sequence)
            queues.paused.append(sequence)
        self.preemptions += len(output.pause)
        for sequence in output.resume:
            if sequence.queue is queues.paused:
                queues.paused.remove(sequence)
            else:
                queues.ready.remove(sequence)
                if sequence.decode_tokens:
                    self.blocks.extend(allocation_of(sequence), sequence.decode_tokens)
                if shared is not None and sequence.source:
                    # Received KV is in the engine's pool by now, see `Landing`.
                    _publish(shared, sequence, sequence.computed, 0)
            if self.swap is None:
                queues.decoding.join(sequence)
            else:
                queues.decoding.join(sequence, self.swap.iterations_left(sequence))
        for chunk in output.prefills:
            if chunk.sequence.queue is queues.waiting:
                self.start_prefill(chunk.sequence, queues)

    def start_prefill(self, sequence: ScheduledSequence, queues: Queues) -> None:
        """Move a waiting sequence to the prefilling sequences and allocate its blocks."""
        queues.waiting.remove(sequence)
        allocation = sequence.allocation
        if allocation is None:
            sequence.allocation = allocation = self.blocks.allocate(sequence.id, sequence.start_tokens)
        if not sequence.decodes_here:
            self.blocks.begin_transfer(allocation)
            sequence.handing_off = True
            self._handing_off += 1
        elif self.swap is not None:
            self.swap.admit(sequence)
        queues.prefilling.append(sequence)

    def _finish(self, lane: Lane, iterations: int) -> RunningBatch:
        """End the oldest running batch."""
        batch = lane.batch
        if batch is None or iterations > batch.limit:
            raise RuntimeError("only a batch that was started can be completed")
        if self.stages > 1:
            self._turns.append(self._turns.pop(0))
        self._running -= 1
        lane.batch = lane.message = None
        lane.remaining -= iterations
        if lane.aborted:
            for allocation in lane.aborted:
                self.blocks.end_transfer(allocation)
            lane.aborted.clear()
        if self.swap is not None:
            self.swap.batch_ended()
        return batch

    def finish_prefills(
        self, queues: Queues, chunks: list[PrefillChunk], stopped: Collection[str], results: list[StepResult]
    ) -> None:
        """Record computed prompt chunks, and append the first output token of each finished prefill to `results`."""
        shared = self.shared
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.queue is not queues.prefilling:
                continue  # aborted meanwhile
            # In a pipeline, later chunks may have started already.
            computed = chunk.context_tokens + chunk.num_tokens
            sequence.computed = max(sequence.computed, computed)
            if shared is not None:
                if sequence.copy is not None:
                    sequence.copy = None
                    shared.copied(allocation_of(sequence))
                _publish(shared, sequence, computed, chunk.context_tokens)
            if chunk.samples:
                if shared is not None and sequence.request.retain_s:
                    keys = sequence.request.prefix_blocks[: sequence.prompt_tokens // shared.block_size]
                    shared.cache.pin(keys, self._now + sequence.request.retain_s)
                queues.prefilling.remove(sequence)
                sequence.generated += 1
                results.append(self._first_token(sequence, sequence.id in stopped))

    def _first_token(self, sequence: ScheduledSequence, stopped: bool) -> StepResult:
        reason = None
        if stopped:
            reason = _STOP
        elif sequence.generated >= sequence.output_tokens:
            reason = _LENGTH
        hands_off = reason is None and not sequence.decodes_here
        if reason is not None or hands_off:
            self.finish(sequence)
        else:
            self._lane_for_decode().queues.ready.append(sequence)
            self.batcher.on_queued(sequence)
        return StepResult(sequence, sequence.generated - 1, reason, hands_off)

    def _grow(self, sequence: ScheduledSequence, swap: SwapPreemption) -> bool:
        """Allocate the next blocks of a decode; if too few are free, pause the decode and return False."""
        queues = self.queues
        if not queues.paused.size and swap.extend(sequence):
            queues.decoding.join(sequence, swap.iterations_left(sequence))
            return True
        self.preemptions += 1
        queues.paused.append(sequence)
        return False

    def finish(self, sequence: ScheduledSequence) -> None:
        """Release the blocks of a sequence that has finished on this instance."""
        self.batcher.on_finished(sequence)
        self._release(sequence)

    def _release(self, sequence: ScheduledSequence) -> None:
        self.blocks.release(allocation_of(sequence))
        if self.swap is not None:
            self.swap.forget(sequence)
        if not sequence.handing_off:
            del self.sequences[sequence.id]

    # -- queues -------------------------------------------------------------------------------------------------------

    def enqueue_ready(self, sequence: ScheduledSequence) -> None:
        self._enqueue(sequence, self._lane_for_decode().queues.ready)

    def _enqueue(self, sequence: ScheduledSequence, queue: SequenceQueue) -> None:
        queue.append(sequence)
        self.batcher.on_queued(sequence)
        if not self.changed:
            self.changed = self.batcher.should_reschedule(sequence, self._lane.batch, self.blocks)

    def blocks_freed(self) -> None:
        if self.changed:
            return
        for lane in self._lanes:
            if not lane.queues.settled:
                self.changed = self.batcher.should_reschedule(None, self._lane.batch, self.blocks)
                return

    def _lane_for_decode(self) -> Lane:
        """Return the lane (group of sequences that share batches) with the fewest decodes."""
        return self._lane if self.stages == 1 else min(self._lanes, key=lambda lane: lane.queues.decodes)

    # -- status -------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Number of sequences that wait for a batch. Routers use it as a measure of load."""
        queued = self.batcher.num_queued(self.queues)
        for number in range(1, self.stages):
            queued += self._lanes[number].queues.ready.size + self._lanes[number].queues.paused.size
        return queued

    @property
    def empty(self) -> bool:
        """Whether the instance has no sequences left to prefill or decode."""
        lanes_empty = all(lane.queues.settled and not lane.queues.decoding.size for lane in self._lanes)
        return lanes_empty and not self._fetching.size

    def status(self) -> InstanceStatus:
        swap, shared = self.swap, self.shared
        running = sum(lane.queues.decodes for lane in self._lanes)
        for lane in self._lanes[:1] if self._shares_prefills else self._lanes:
            running += lane.queues.prefilling.size
        return InstanceStatus(
            waiting=self.queues.waiting.size + self._fetching.size,
            running=running,
            arriving=self.arriving.size,
            handing_off=self._handing_off,
            lease_queue=self.lease_queue.size,
            blocks_total=self.blocks.num_blocks,
            blocks_free=self.blocks.num_free,
            blocks_in_flight=self.blocks.num_in_flight,
            swapped=0 if swap is None else swap.swapped,
            swaps=0 if swap is None else swap.swaps,
            swap_blocks_total=0 if swap is None else swap.host.num_blocks,
            swap_blocks_free=0 if swap is None else swap.host.num_free,
            swap_blocks_moved=0 if swap is None else swap.blocks_copied,
            blocks_cached=0 if shared is None else len(shared.cache),
            blocks_evicted=0 if shared is None else shared.cache.removals[RemovalReason.CAPACITY],
            blocks_pinned=0 if shared is None else shared.cache.pinned,
        )


def _reused(request: Request, tokens: int) -> int:
    if tokens and not 0 < tokens < request.prompt_tokens:
        raise ValueError(f"cannot reuse {tokens} of the {request.prompt_tokens} prompt tokens of request {request.id}")
    return tokens


def _publish(shared: PrefixBlockAllocator, sequence: ScheduledSequence, computed: int, published_tokens: int) -> None:
    """Let other requests reuse the full KV blocks of the prompt tokens computed so far."""
    size = shared.block_size
    keys = sequence.request.prefix_blocks[: min(computed, sequence.prompt_tokens) // size]
    shared.publish(allocation_of(sequence), keys, published_tokens // size)
