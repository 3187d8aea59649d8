"""Instances as DistServe's simulator has them: every stage of a pipeline has queues of its own, and batches for itself.

Its rules, where they differ from those of `VirtualPipeline`:

- A stage that is free takes prompts if any wait, and else decodes: never both in one batch.
- The first stage batches prompts, first come first served, up to the tokens that fit in memory as its authors
  measured it; the other stages take them as they were batched. Any number of batches may be under way.
- A stage takes every decode that waits at it, with 50,000 tokens at most, whatever batches they came in. What it
  leaves goes before those that come back later.
- A request makes all its output tokens after the one that prefill made: one too many.
- What happens at the same moment is seen by whoever was idle until then: arrivals at one time are batched together.
"""

from collections import deque
from typing import Final

from twofold.cluster.timing import Timing, ps
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.leases import LeaseTable
from twofold.request import FinishReason
from twofold.scheduling.batchers.prefill_fcfs import PrefillFcfs
from twofold.scheduling.instance.batch import RunningBatch, StepResult
from twofold.scheduling.instance.kv_reservation import KvReservation
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import PrefillChunk, ScheduledSequence, SequenceQueue
from twofold.simulation.instance import InstanceEnvironment, VirtualInstance
from twofold.simulation.kernel import Event, EventOrder, Kernel
from twofold.simulation.site import Site

_MOST_DECODE_TOKENS: Final = 50_000  # in a batch of decodes; each counts its context and the token it makes
_LAST: Final = EventOrder.FAILURE + (1 << 40)  # after all else that happens at the same time


class StagewiseScheduler(InstanceScheduler):
    """The queues before the first stage and the accounts of an instance.

    `most_tokens` fit in its memory: no batch has more prompt tokens, nor more decodes.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        leases: LeaseTable,
        max_num_seqs: int,
        most_tokens: int,
        memory: KvReservation,
    ) -> None:
        super().__init__(PrefillFcfs(most_tokens, max_num_seqs), blocks, leases, max_num_seqs, memory)
        self.most_tokens = most_tokens
        self._decoding = SequenceQueue()

    def take_prompts(self) -> list[PrefillChunk]:
        """Whole prompts from the line, as many as fit."""
        parts: list[PrefillChunk] = []
        waiting, room = self._queues.waiting, self.most_tokens
        while (sequence := waiting.first) is not None and sequence.prompt_tokens <= room:
            room -= sequence.prompt_tokens
            waiting.remove(sequence)
            self._start_prefill(sequence)
            parts.append(sequence.prefill(sequence.prompt_tokens))
        return parts

    def take_ready(self) -> list[ScheduledSequence]:
        """All that came to the first stage to decode."""
        ready = list(self._queues.ready)
        for sequence in ready:
            self._queues.ready.remove(sequence)
            self._decoding.append(sequence)
        return ready

    def prefilled(self, parts: list[PrefillChunk]) -> list[StepResult]:
        """Prompts have passed all stages."""
        steps: list[StepResult] = []
        whole = RunningBatch(parts, 0, len(parts), 0, 0, 1)
        self._advance_prefills(whole, (), steps)
        return steps

    def decoded(self, sequences: list[ScheduledSequence]) -> list[StepResult]:
        """Sequences have made a token; the ends among them."""
        steps: list[StepResult] = []
        for sequence in sequences:
            sequence.computed += 1
            sequence.generated += 1
            if sequence.generated > sequence.output_tokens:
                self._decoding.remove(sequence)
                self._done(sequence)
                steps.append(
                    StepResult(sequence, sequence.generated - 1, FinishReason.LENGTH, hands_off=False)
                )
        return steps

    def _first_token(self, sequence: ScheduledSequence, stopped: bool) -> StepResult:
        """Every request decodes, one of a single output token too."""
        hands_off = not sequence.decodes_here
        if hands_off:
            self._done(sequence)
        else:
            self._queues.ready.append(sequence)
        return StepResult(sequence, 0, None, hands_off)

    @property
    def empty(self) -> bool:
        return self._queues.settled and not self._decoding.size


class PipelineStage:
    """One stage: what waits before it, and what it computes."""

    def __init__(self, number: int, timing: Timing, next_stage: "PipelineStage | None") -> None:
        self.number = number
        self.timing = timing
        self.next = next_stage
        self.prompts: deque[list[PrefillChunk]] = deque()
        self.decodes: deque[ScheduledSequence] = deque()
        self.work: _Work | None = None
        self.called = False  # it is idle, and will look at its queues

    def duration(self, iteration: RunningBatch) -> int:
        """Picoseconds, rounded once: over a long run what `Timing` rounds for each token would add up."""
        if iteration.prefills:
            return self.timing.pace(iteration).first_ps
        cost = self.timing.model.decode_cost(iteration.decode_sequences)
        return max(1, ps(cost.base_s + cost.context_s * iteration.context_tokens))

    def take_decodes(self, most: int) -> list[ScheduledSequence]:
        taken: list[ScheduledSequence] = []
        room = _MOST_DECODE_TOKENS
        while self.decodes and len(taken) < most and self.decodes[0].computed < room:
            sequence = self.decodes.popleft()
            room -= sequence.computed + 1
            taken.append(sequence)
        return taken


class StagewiseInstance(VirtualInstance):
    """Stages that work for themselves, the last of which gives decodes back to the first."""

    def __init__(
        self, site: Site, scheduler: InstanceScheduler, kernel: Kernel, world: InstanceEnvironment
    ) -> None:
        super().__init__(site, scheduler, kernel, world)
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
        assert isinstance(scheduler, StagewiseScheduler)  # noqa: S101  (so it was built; tells the type checker)
        return scheduler

    def poke(self) -> None:
        if self.scheduler.changed:
            self.scheduler.changed = False
            self._call(self._stages[0])

    def die(self) -> None:
        now = self._kernel.now
        for stage in self._stages:
            if stage.work is not None:
                self._account_for(stage.work, now)
                stage.work.void = True
        self._new_stages()
        self.iteration = None
        self.milliwatts = 0

    def _call(self, stage: PipelineStage) -> None:
        """Something came to a stage; if it is idle it looks once all else of this moment has happened."""
        if stage.work is None and not stage.called:
            stage.called = True
            self._kernel.schedule(self._kernel.now, _LAST, self._look, stage)

    def _look(self, stage: PipelineStage) -> None:
        stage.called = False
        if stage.work is None and stage is self._stages[stage.number]:  # else it died meanwhile
            self._work_on(stage)

    def _work_on(self, stage: PipelineStage) -> None:
        """Take the next batch, if there is any."""
        now = self._kernel.now
        iteration, decodes = self._batch(stage)
        if iteration is None:
            if all(each.work is None for each in self._stages):
                self.iteration = None
                self._world.idle(self)
            return
        end, milliwatts = now + stage.duration(iteration), stage.timing.pace(iteration).milliwatts
        work = _Work(self, stage, iteration, decodes, now, end, milliwatts)
        stage.work, self.iteration = work, iteration
        self.milliwatts += work.milliwatts - stage.timing.idle_mw
        self._kernel.add(work)
        if stage.number == 0:
            rest = (len(self._stages) - 1) * self._stages[-1].timing.pace(iteration).first_ps
            self._world.started(iteration, work.at + rest)
        iteration.joined = decodes

    def _batch(self, stage: PipelineStage) -> tuple[RunningBatch | None, list[ScheduledSequence]]:
        """What a stage takes; `joined` says which sequences decode for the first time."""
        if stage.number == 0:
            parts = self._queues.take_prompts()
            if parts:
                stage.prompts.append(parts)
            stage.decodes.extend(self._queues.take_ready())
        if stage.prompts:
            parts = stage.prompts.popleft()
            tokens = sum(part.num_tokens for part in parts)
            return RunningBatch(parts, tokens, len(parts), 0, 0, 1), []
        decodes = stage.take_decodes(self._queues.most_tokens)
        if not decodes:
            return None, []
        context = sum(sequence.computed for sequence in decodes)
        new = [sequence for sequence in decodes if sequence.generated == 1]
        return RunningBatch([], 0, 0, len(decodes), context, 1, new), decodes

    def done(self, work: "_Work") -> None:
        """A stage is through with a batch: it goes to the next stage, or has made its tokens."""
        stage, iteration, now = work.stage, work.iteration, self._kernel.now
        stage.work = None
        self._account_for(work, now)
        self.milliwatts -= work.milliwatts - stage.timing.idle_mw
        if stage.next is None:
            self._sample(work, now)
        else:
            if iteration.prefills:
                stage.next.prompts.append(iteration.prefills)
            stage.next.decodes.extend(work.decodes)
            self._call(stage.next)
        self._work_on(stage)

    def _sample(self, work: "_Work", now: int) -> None:
        iteration, first = work.iteration, self._stages[0]
        self.iterations += 1
        self._world.passed(self, iteration, work.begun, 0, work.milliwatts)
        if iteration.prefills:
            steps = self._queues.prefilled(iteration.prefills)
        else:
            steps = self._queues.decoded(work.decodes)
            for sequence in work.decodes:
                sequence.last_token_at = now
            first.decodes.extend(self._queues.take_ready())  # they came before
            first.decodes.extend([each for each in work.decodes if each.line is not None])
        self._call(first)
        if steps:
            self._world.stepped(self, steps)

    def _account_for(self, work: "_Work", now: int) -> None:
        duration, iteration = now - work.begun, work.iteration
        self._spend(duration, work.milliwatts - work.stage.timing.idle_mw)
        sequences = iteration.decode_sequences + iteration.prefill_sequences
        self._use(duration // len(self._stages), sequences)


class _Work(Event):
    """A batch on a stage; it happens when the stage is done with it. `void` when its instance died since."""

    def __init__(
        self,
        instance: StagewiseInstance,
        stage: PipelineStage,
        iteration: RunningBatch,
        decodes: list[ScheduledSequence],
        begun: int,
        at: int,
        milliwatts: int,
    ) -> None:
        self.at = at
        self.order = _LAST
        self.instance = instance
        self.stage = stage
        self.iteration = iteration
        self.decodes = decodes
        self.begun = begun
        self.milliwatts = milliwatts
        self.void = False

    def happen(self) -> None:
        if not self.void:
            self.instance.done(self)
