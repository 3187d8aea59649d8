"""Main loops of a worker, which run the batches of its scheduler on its engine."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twofold.batch import Batch, BatchItem
from twofold.engine.base import NO_TOKEN, Engine, OnLayer, PipelineEngine, Sampled, SequenceStep
from twofold.request import BlockKey, Phase, TokenOutput
from twofold.scheduling.instance.queues import StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.worker.engines import HostSwapSpace
from twofold.serving.worker.prefixes import LayerSync
from twofold.serving.worker.state import SharedWorkerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, and the data that the engine needs to run it."""

    batch: Batch
    steps: list[SequenceStep]
    reused: dict[str, int]  # cached prompt tokens by request id
    filled: list[tuple[str, int, BlockKey]]  # blocks that decodes fill: request id, index and key
    handing_off: list[str]  # requests that are handed off after this batch
    layers: LayerSync | None  # synchronizes the batch with the KV store
    received: list[Sequence[int]]  # blocks from peers, copied before the batch
    copies: list[BlockCopy]  # swapped blocks, copied before the batch
    started_s: float


class BatchLoop:
    """Main loop of a worker: runs the scheduler's batches on the engine and sends their tokens to the controller."""

    def __init__(
        self,
        state: SharedWorkerState,
        scheduler: InstanceScheduler,
        engine: Engine,
        eos_token_ids: frozenset[int],
        swap_space: HostSwapSpace | None = None,
    ) -> None:
        self._state, self._scheduler = state, scheduler
        self._engine, self._eos = engine, eos_token_ids
        self._swap_space = swap_space

    def run(self) -> None:
        while (started := self._next_batch()) is not None:
            self._prepare(started)
            try:
                waits = None if started.layers is None else started.layers.wait_for
                sampled = self._engine.run(started.steps, self._on_layer(started), waits)
            except Exception as error:
                log.exception("%s failed to run a batch", self._state.instance)
                self._fail(started, f"{type(error).__name__} on {self._state.instance}")
            else:
                self._complete(started, sampled)

    def _prepare(self, started: PreparedBatch) -> None:
        self._state.landing.copy(started.received)
        if self._swap_space is not None and started.copies:
            self._swap_space.copy(started.copies)
        if started.layers is not None and any(step.copies for step in started.steps):
            started.layers.wait_for_loads()

    def _on_layer(self, started: PreparedBatch) -> OnLayer | None:
        layers, handing_off = started.layers, started.handing_off
        hand_off = partial(self._state.sender.layer_computed, handing_off) if handing_off else None
        if layers is None:
            return hand_off
        if hand_off is None:
            return layers.computed

        def both(layer: int) -> None:
            layers.computed(layer)
            hand_off(layer)

        return both

    def _next_batch(self) -> PreparedBatch | None:
        state = self._state
        with state.changed:
            while not state.closing:
                now = time.monotonic()
                batch = self._scheduler.next_batch(now)
                if batch is not None:
                    state.batches_started_s.append(now)
                    if state.announced:
                        for item in batch.items:
                            state.prefill_starts(item.request_id)
                    copies = self._swapped()
                    steps = [self._step(item) for item in batch.items]
                    prompts = [item.request_id for item in batch.items if item.phase is Phase.PREFILL]
                    reused = {request_id: self._scheduler.reused_tokens(request_id) for request_id in prompts}
                    filled = [] if self._scheduler.shared is None else self._fill_blocks(batch)
                    handing_off = self._begin_handoffs(batch)
                    layers, received = state.prefixes.begin(batch), state.landing.take()
                    return PreparedBatch(batch, steps, reused, filled, handing_off, layers, received, copies, now)
                state.report_changes()
                state.changed.wait()
            return None

    def _swapped(self) -> list[BlockCopy]:
        swap = self._scheduler.swap
        if swap is None:
            return []
        self._state.grant()  # leases that were deferred until paused decodes resumed
        return swap.take_copies()

    def _step(self, item: BatchItem) -> SequenceStep:
        sequence, scheduler = self._state.sequences[item.request_id], self._scheduler
        copy = scheduler.copy_of(item.request_id)
        token_ids, top = sequence.slice(item.context_tokens, item.num_tokens), sequence.sampling.prompt_logprobs
        scores = top is not None and item.phase is Phase.PREFILL
        return SequenceStep(
            request_id=item.request_id,
            token_ids=token_ids,
            start=item.context_tokens,
            block_table=tuple(scheduler.blocks_of(item.request_id)),
            sampling=sequence.sampling if item.samples else None,
            output_index=sequence.generated,
            history=sequence.token_ids if item.samples and sequence.sampling.needs_history else (),
            scored_ids=sequence.slice(item.context_tokens + 1, len(token_ids)) if scores else (),
            top=top or 0,
            copies=() if copy is None else (copy,),
        )

    def _fill_blocks(self, batch: Batch) -> list[tuple[str, int, BlockKey]]:
        filled: list[tuple[str, int, BlockKey]] = []
        for item in batch.items:
            if item.phase is Phase.DECODE:
                sequence = self._state.sequences[item.request_id]
                if sequence.fill_block(item.context_tokens + 1):
                    filled.append((item.request_id, len(sequence.block_keys) - 1, sequence.block_keys[-1]))
        return filled

    def _begin_handoffs(self, batch: Batch) -> list[str]:
        completed = [i.request_id for i in batch.items if i.phase is Phase.PREFILL and i.samples]
        blocks_of = self._scheduler.blocks_of
        return [rid for rid in completed if self._state.sender.begin(rid, blocks_of(rid))]

    def _complete(self, started: PreparedBatch, sampled: list[Sampled | None]) -> None:
        state, items = self._state, started.batch.items
        drawn: dict[str, Sampled] = {}
        with state.changed:
            state.batches_started_s.popleft()
            for item, result in zip(items, sampled, strict=True):
                if result is None:
                    continue
                if result.error is not None:
                    state.fail(item.request_id, result.error)
                if result.prompt_scores and item.request_id in state.sequences:
                    state.sequences[item.request_id].prompt_scores.extend(result.prompt_scores)
                if result.token_id != NO_TOKEN:
                    drawn[item.request_id] = result
            for request_id, position, key in started.filled:
                self._scheduler.filled(request_id, position, key)
            outcomes = self._scheduler.complete(started.batch, self._stopped(drawn))
            tokens = [(o.request_id, self._token(o, drawn[o.request_id], started.reused)) for o in outcomes]
            state.grant()
            report = state.next_report()
            state.report_blocks()
        began = [i.request_id for i in items if i.context_tokens == started.reused.get(i.request_id)]
        state.tell_step(report, started.started_s, began, tokens)
        for outcome in outcomes:
            if outcome.hands_off:
                state.prefill_ended(outcome.request_id, [drawn[outcome.request_id].token_id])
            elif outcome.finish_reason is not None:
                state.prefill_ended(outcome.request_id, None)

    def _fail(self, started: PreparedBatch, reason: str) -> None:
        if started.layers is not None:
            started.layers.give_up()
        batch = started.batch
        with self._state.changed:
            self._state.batches_started_s.popleft()
            for item in batch.items:
                self._state.fail(item.request_id, reason)
            self._scheduler.complete(batch)
            self._state.grant()

    def _stopped(self, drawn: dict[str, Sampled]) -> set[str]:
        sequences = self._state.sequences
        return {
            request_id
            for request_id, sample in drawn.items()
            if request_id in sequences and sequences[request_id].ends_with(sample.token_id, self._eos)
        }

    def _token(self, outcome: StepResult, sample: Sampled, reused: dict[str, int]) -> TokenOutput:
        sequence = self._state.sequences[outcome.request_id]
        if outcome.finish_reason is not None or outcome.hands_off:
            del self._state.sequences[outcome.request_id]
        else:
            sequence.append(sample.token_id)
        return TokenOutput(
            index=outcome.index,
            token_id=sample.token_id,
            logprob=sample.logprob,
            top_logprobs=sample.top_logprobs,
            finish_reason=outcome.finish_reason,
            reused_tokens=reused.get(outcome.request_id, 0),
            prompt_scores=() if outcome.index else tuple(sequence.prompt_scores),
        )


class PipelinedBatchLoop(BatchLoop):
    """Main loop for pipeline parallelism, which runs several batches in different stages at the same time."""

    _engine: PipelineEngine

    def run(self) -> None:
        while (started := self._next_batch()) is not None:
            self._prepare(started)
            # Returns after the first stage. A thread of the engine calls `_ended` after the last stage.
            self._engine.begin(started.steps, self._on_layer(started), partial(self._ended, started))
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: not state.batches_started_s)

    def _ended(self, started: PreparedBatch, sampled: list[Sampled | None]) -> None:
        self._complete(started, sampled)
        with self._state.changed:
            self._state.changed.notify()
