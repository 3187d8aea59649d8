"""Instances as in DistServe's simulator: each pipeline stage has its own queues and forms batches independently."""

from collections import deque
from typing import Final

from msgspec.structs import replace

from twofold.cluster.profiles import InstanceSlot
from twofold.cluster.timing import RunTiming, Timing, ps
from twofold.handoff import Lease
from twofold.kvcache.allocator import BlockAllocator, LeaseTable
from twofold.request import FinishReason, Request
from twofold.scheduling.batchers.one_phase import PrefillFcfs
from twofold.scheduling.instance.queues import RunningBatch, SchedulerOutput, StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import KvReservation, PrefillChunk, ScheduledSequence, SequenceQueue
from twofold.simulation.instance import InstanceEnvironment, SimulatedInstance
from twofold.simulation.kernel import EventOrder, MachineLink

# Differences from other simulated instances (`VirtualInstance`):
# - A free stage runs waiting prompts if there are any, and decodes otherwise, but never both in one batch.
# - The first stage batches prompts in order, up to a token limit that DistServe's authors measured. Later stages keep
#   these batches. Any number of batches may be in the pipeline.
# - A stage batches all decodes that wait for it, up to a limit of KV tokens; the others come first in the next batch.
# - A request generates all its output tokens after the token from its prefill, so one token too many.
# - An idle stage reads its queues after all other events at the same time, so simultaneous arrivals share a batch.

_MAX_DECODE_TOKENS: Final = 50_000  # per batch of decodes; a decode counts its context and one new token
_LAST: Final = EventOrder.FAILURE + (1 << 40)  # after everything else at the same time


class StagewiseScheduler(InstanceScheduler):
    """Queues requests and allocates KV blocks for a pipeline in which each stage forms its own batches."""

    def __init__(
        self, blocks: BlockAllocator, leases: LeaseTable, max_num_seqs: int, max_tokens: int, reservation: KvReservation
    ) -> None:
        super().__init__(PrefillFcfs(max_tokens, max_num_seqs), blocks, leases, max_num_seqs, reservation)
        self.max_tokens = max_tokens  # limits the prompt tokens in a batch, and the decodes in a batch
        self._decoding = SequenceQueue()

    def submit(self, request: Request, *, decodes_here: bool, reused_tokens: int = 0, fetching: bool = False) -> None:
        super().submit(_one_more(request), decodes_here=decodes_here, reused_tokens=reused_tokens, fetching=fetching)

    def reserve(self, request: Request, source: str) -> None:
        super().reserve(_one_more(request), source)

    def lease_now(self, request: Request, source: str, now: float) -> Lease | None:
        return super().lease_now(_one_more(request), source, now)

    def take_prompts(self) -> list[PrefillChunk]:
        """Start as many waiting prompts as fit in one batch, and return their chunks."""
        chunks: list[PrefillChunk] = []
        waiting, left = self.queues.waiting, self.max_tokens
        while (sequence := waiting.first) is not None and sequence.prompt_tokens <= left:
            left -= sequence.prompt_tokens
            self.start_prefill(sequence, self.queues)
            chunks.append(sequence.prefill(sequence.prompt_tokens))
        return chunks

    def take_ready(self) -> list[ScheduledSequence]:
        """Start all sequences that are ready to decode, and return them."""
        ready = list(self.queues.ready)
        for sequence in ready:
            self.queues.ready.remove(sequence)
            self._decoding.append(sequence)
        return ready

    def prefilled(self, chunks: list[PrefillChunk]) -> list[StepResult]:
        """Record computed prompt chunks, and return a result with the first token of each completed prompt."""
        results: list[StepResult] = []
        self.finish_prefills(self.queues, chunks, (), results)
        return results

    def decoded(self, sequences: list[ScheduledSequence]) -> list[StepResult]:
        """Count one more token of each sequence, and return the results of completed sequences."""
        results: list[StepResult] = []
        for sequence in sequences:
            sequence.computed += 1
            sequence.generated += 1
            if sequence.generated >= sequence.output_tokens:
                self._decoding.remove(sequence)
                self.finish(sequence)
                results.append(StepResult(sequence, sequence.generated - 1, FinishReason.LENGTH, hands_off=False))
        return results

    @property
    def empty(self) -> bool:
        return self.queues.settled and not self._decoding.size


def _one_more(request: Request) -> Request:
    return replace(request, output_tokens=request.output_tokens + 1)


class _Work:
    """A batch that a stage is computing."""

    def __init__(
        self, stage: "PipelineStage", batch: RunningBatch, decodes: list[ScheduledSequence], begun: int, milliwatts: int
    ) -> None:
        self.stage, self.batch, self.decodes = stage, batch, decodes
        self.begun, self.milliwatts = begun, milliwatts  # begun: in picoseconds


class PipelineStage:
    """One stage of a pipeline: its queues and the batch that it is computing."""

    def __init__(self, number: int, timing: Timing, next_stage: "PipelineStage | None") -> None:
        self.number = number
        self.timing = timing
        self.next = next_stage
        self.prompts: deque[list[PrefillChunk]] = deque()
        self.decodes: deque[ScheduledSequence] = deque()
        self.work: _Work | None = None
        self.woken = False  # idle, with an event scheduled to read its queues

    def duration(self, batch: RunningBatch) -> int:
        """Return the duration of a batch in picoseconds."""
        if batch.prefills:
            return self.timing.batch(batch).first_ps
        cost = self.timing.model.decode_cost(batch.decode_sequences)
        # Rounded only once, because rounding errors per token would add up.
        return max(1, ps(cost.base_s + cost.context_s * batch.context_tokens))


class StagewiseInstance(SimulatedInstance):
    """A simulated instance whose pipeline stages form batches independently."""

    def __init__(
        self, slot: InstanceSlot, link: MachineLink, scheduler: InstanceScheduler, environment: InstanceEnvironment
    ) -> None:
        super().__init__(slot, link, scheduler, environment)
        self._new_stages()

    def _new_stages(self) -> None:
        first, later = self.timing.stages()
        stage: PipelineStage | None = None
        self._stages: list[PipelineStage] = []
        for number in reversed(range(self.timing.model.stages)):
            stage = PipelineStage(number, later if number else first, stage)
            self._stages.insert(0, stage)

    @property
    def _queues(self) -> StagewiseScheduler:
        scheduler = self.scheduler
        assert isinstance(scheduler, StagewiseScheduler)  # noqa: S101  (so it was built; for the type checker)
        return scheduler

    def poke(self) -> None:
        if self.scheduler.changed:
            self.scheduler.changed = False
            self._wake(self._stages[0])

    def die(self) -> None:
        for stage in self._stages:
            if stage.work is not None:
                self._charge(stage.work)
                stage.work = None
        self._new_stages()
        self.batch = None
        self.milliwatts = 0

    def _wake(self, stage: PipelineStage) -> None:
        if stage.work is None and not stage.woken:
            stage.woken = True
            self.kernel.schedule(self.kernel.now, _LAST, self._look, stage)

    def _look(self, stage: PipelineStage) -> None:
        stage.woken = False
        if stage.work is None and stage is self._stages[stage.number]:  # else the instance has died since
            self._start(stage)

    def _start(self, stage: PipelineStage) -> None:
        now = self.kernel.now
        batch, decodes = self._next_batch(stage)
        if batch is None:
            if all(each.work is None for each in self._stages):
                self.batch = None
                self.environment.idle(self)
            return
        end = now + stage.duration(batch)
        work = _Work(stage, batch, decodes, now, stage.timing.batch(batch).milliwatts)
        stage.work, self.batch = work, batch
        self.milliwatts += work.milliwatts - stage.timing.idle_mw
        self.kernel.schedule(end, _LAST, self._done, work)
        if stage.number == 0:
            rest = (len(self._stages) - 1) * self._stages[-1].timing.batch(batch).first_ps
            self.environment.started(self, batch, end + rest)
        batch.joined = decodes

    def _next_batch(self, stage: PipelineStage) -> tuple[RunningBatch | None, list[ScheduledSequence]]:
        if stage.number == 0:
            chunks = self._queues.take_prompts()
            if chunks:
                stage.prompts.append(chunks)
            stage.decodes.extend(self._queues.take_ready())
        if stage.prompts:
            return RunningBatch(SchedulerOutput(stage.prompts.popleft()), 0, 0, 1), []
        decodes: list[ScheduledSequence] = []
        most, left = self._queues.max_tokens, _MAX_DECODE_TOKENS
        while stage.decodes and len(decodes) < most and stage.decodes[0].computed < left:
            decodes.append(stage.decodes.popleft())
            left -= decodes[-1].computed + 1
        if not decodes:
            return None, []
        context = sum(sequence.computed for sequence in decodes)
        new = [sequence for sequence in decodes if sequence.generated == 1]  # decodes in their first iteration
        return RunningBatch(SchedulerOutput(resume=new), len(decodes), context, 1), decodes

    def _done(self, work: _Work) -> None:
        stage, batch, now = work.stage, work.batch, self.kernel.now
        if stage.work is not work:
            return  # the instance has died since
        stage.work = None
        self._charge(work)
        self.milliwatts -= work.milliwatts - stage.timing.idle_mw
        if stage.next is None:
            self._sample(work, now)
        else:
            if batch.prefills:
                stage.next.prompts.append(batch.prefills)
            stage.next.decodes.extend(work.decodes)
            self._wake(stage.next)
        self._start(stage)

    def _sample(self, work: _Work, now: int) -> None:
        batch, first = work.batch, self._stages[0]
        self.iterations += 1
        self.environment.ran(self, batch, RunTiming(0, 0, work.milliwatts), 1, work.begun, now)
        if batch.prefills:
            results = self._queues.prefilled(batch.prefills)
        else:
            results = self._queues.decoded(work.decodes)
            for sequence in work.decodes:
                sequence.last_token_at = now
            first.decodes.extend(self._queues.take_ready())  # they came before
            first.decodes.extend([each for each in work.decodes if each.queue is not None])
        self._wake(first)
        if results:
            self.environment.stepped(self, results)

    def _charge(self, work: _Work) -> None:
        milliwatts = work.milliwatts - work.stage.timing.idle_mw
        self.charge(self.kernel.now - work.begun, milliwatts, work.batch, len(self._stages))
