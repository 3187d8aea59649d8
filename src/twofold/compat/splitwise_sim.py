"""Batch scheduler of SplitwiseSim. Where its code differs from the Splitwise paper, the scheduler follows the code."""

from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocator
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget
from twofold.scheduling.instance.queues import Queues, RunningBatch, SchedulerOutput
from twofold.scheduling.instance.sequence import ScheduledSequence


@mypyc_attr(free_list_len=1)
class _Task:
    """The prefill or the decode of one sequence."""

    __slots__ = (
        *("sequence", "prompt", "tokens", "arrival", "arrival_s", "since"),
        *("chosen", "left_out", "missed", "pending", "chained"),
    )

    def __init__(self, sequence: ScheduledSequence, prompt: bool, arrival_s: float, arrival: int) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.tokens = sequence.prefill_remaining if prompt else 1
        self.arrival_s = arrival_s
        self.arrival = arrival
        self.missed = 0
        self.left_out = False
        self.since = 0  # number of the first selection that skipped it
        self.pending = False
        self.chosen = False
        self.chained: _Task | None = None  # of a prompt: the decodes queued together with it

    def is_younger(self, other: "_Task", selections: int) -> bool:
        age, other_age = self.age(selections), other.age(selections)
        return age < other_age if age != other_age else self.arrival_s < other.arrival_s

    def age(self, selections: int) -> int:  # number of batches that left out this task
        return self.missed + selections - self.since if self.left_out else self.missed


@mypyc_attr(acyclic=True, free_list_len=1)
class _Draft:
    """Batch under construction, and the numbers of sequences and tokens that still fit."""

    __slots__ = ("budget", "queues", "seats", "tasks", "tokens")

    def __init__(self, queues: Queues, budget: SchedulingBudget, seats: int, tokens: int) -> None:
        self.queues = queues
        self.budget = budget
        self.seats = seats
        self.tokens = tokens
        self.tasks: list[_Task] = []

    def full(self, tokens: int) -> bool:
        # An empty batch with a free slot has room for any task.
        return self.seats < 1 or (len(self.tasks) > 0 and tokens > self.tokens)

    def take(self, task: _Task) -> bool:
        """Add a task to the batch; return False if too few KV blocks are free."""
        # Paused sequences have all their blocks.
        if task.sequence.queue is not self.queues.paused and not _admit(task, self.budget):
            return False
        task.chosen = True
        self.tasks.append(task)
        self.seats -= 1
        self.tokens -= task.tokens
        return True


# Differences between SplitwiseSim's code (`SplitwiseInstance`) and the paper:
# - A waiting prompt or paused decode counts one preemption for each batch without it. With four or more, it comes
#   first. Fewer preemptions matter only when it is queued: they decide its place in the queue.
# - A prompt that does not fit beside the running decodes does not interrupt them. It waits until a decode ends.
# - If a request has its prefill and decode on the same instance, both are queued when the prompt arrives, and the
#   decode may interrupt a batch, too.
@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseSimBatcher(Batcher):
    """Forms batches by the rules of SplitwiseSim's machine-level scheduler."""

    MAX_PREEMPTIONS: ClassVar[int] = 4
    may_preempt: ClassVar[bool] = True
    reuses_prefix: ClassVar[bool] = False
    pipelined: ClassVar[bool] = False

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self._selections = 0
        self._arrivals = 0
        self._pending: list[_Task] = []
        self._left_out: list[_Task] = []  # next tasks outside the batch, by arrival of their request

    # -- arrivals and ends --------------------------------------------------------------------------------------------

    def on_queued(self, sequence: ScheduledSequence) -> None:
        before: _Task | None = sequence.batcher_state
        if before is not None and before.chained is not None:
            self._set_next(before.chained)
            return
        self._arrivals += 1
        task = _Task(sequence, not sequence.generated, sequence.request.arrival_s, self._arrivals)
        self._set_next(task)
        if task.prompt and sequence.decodes_here:
            task.chained = _Task(sequence, False, task.arrival_s, task.arrival)
            self._append(task.chained)

    def on_finished(self, sequence: ScheduledSequence) -> None:
        task: _Task | None = sequence.batcher_state
        if task is not None:
            sequence.batcher_state = None
            if task.pending or task.left_out:
                self._drop(task)
            if task.chained is not None:
                self._drop(task.chained)

    def num_queued(self, queues: Queues) -> int:
        return len(self._pending)

    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        if sequence is None:
            return self._blocks_freed(running, blocks)
        prompt = not sequence.generated
        if self._interrupts(sequence, prompt, running, blocks):
            return True
        return prompt and sequence.decodes_here and self._interrupts(sequence, False, running, blocks)

    def _interrupts(
        self, sequence: ScheduledSequence, prompt: bool, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        if running is None:
            return blocks.fits(sequence.start_tokens if prompt else sequence.decode_tokens)
        if running.prefill_sequences:
            return False
        tokens = sequence.prefill_remaining if prompt else 1
        if (
            running.decode_sequences < self.max_num_seqs
            and running.decode_sequences + tokens <= self.max_num_batched_tokens
        ):
            return True
        return prompt and tokens <= self.max_num_batched_tokens

    def _blocks_freed(self, running: RunningBatch | None, blocks: BlockAllocator) -> bool:
        if not self._pending:
            return False
        if running is None:
            head = self._pending[0]
            return blocks.fits(head.sequence.start_tokens if head.prompt else head.sequence.decode_tokens)
        if running.prefill_sequences:
            return False
        return running.decode_sequences < min(self.max_num_seqs, self.max_num_batched_tokens)

    # -- selection ----------------------------------------------------------------------------------------------------

    def select(self, queues: Queues, budget: SchedulingBudget) -> SchedulerOutput:
        budget.free_seats = self.max_num_seqs  # SplitwiseSim limits only the sequences of a batch
        # The most frequent case: one task waits, and it fits beside the running decodes.
        if len(self._left_out) == 1 and not queues.paused.size:
            task, decodes = self._left_out[0], queues.decoding.size
            if decodes < self.max_num_seqs and (not decodes or decodes + task.tokens <= self.max_num_batched_tokens):
                return self._one_more(task, budget)
        draft = _Draft(queues, budget, self.max_num_seqs, self.max_num_batched_tokens)
        self._take_overdue(draft)
        self._take_prompts(draft)
        self._take_paused(draft)
        kept = self._keep_running(draft, queues.decoding.size)
        self._take_rest(draft, kept)
        return self._settle(draft, queues.decoding.latest(queues.decoding.size - kept))

    def _one_more(self, task: _Task, budget: SchedulingBudget) -> SchedulerOutput:
        output = SchedulerOutput()
        if _admit(task, budget):
            self._choose(task, output)
        self._selections += 1
        return output

    def _take_overdue(self, draft: _Draft) -> None:
        for task in self._pending:
            if task.age(self._selections) < self.MAX_PREEMPTIONS or draft.full(task.tokens):
                break
            draft.take(task)

    def _take_prompts(self, draft: _Draft) -> None:
        sequence = draft.queues.waiting.first
        while sequence is not None:
            task: _Task = sequence.batcher_state  # the next or running task
            if draft.full(task.tokens) or not (task.chosen or draft.take(task)):
                break
            sequence = sequence.next

    def _take_paused(self, draft: _Draft) -> None:
        sequence = draft.queues.paused.first
        while sequence is not None:
            task: _Task = sequence.batcher_state  # the next or running task
            if not task.chosen and (draft.full(1) or not draft.take(task)):
                break
            sequence = sequence.next

    def _keep_running(self, draft: _Draft, decodes: int) -> int:
        """Return the number of running decodes that stay in the batch."""
        most = min(decodes, draft.seats)  # mypyc compiles calls with two arguments to comparisons
        kept = min(most, max(draft.tokens, 0 if draft.tasks else 1))
        draft.seats -= kept
        draft.tokens -= kept
        return kept

    def _take_rest(self, draft: _Draft, kept: int) -> None:
        for task in self._left_out:
            if draft.seats < 1:
                break
            if task.chosen:
                continue
            if ((draft.tasks or kept) and task.tokens > draft.tokens) or not draft.take(task):
                break

    def _settle(self, draft: _Draft, pause: list[ScheduledSequence]) -> SchedulerOutput:
        output = SchedulerOutput()
        output.pause = pause[::-1]
        # Paused tasks are queued while the chosen ones are still in the queue.
        for sequence in output.pause:
            self._set_next(sequence.batcher_state)
        for task in draft.tasks:
            self._choose(task, output)
        self._selections += 1
        return output

    def _choose(self, task: _Task, output: SchedulerOutput) -> None:
        self._drop(task)
        if task.prompt:
            output.prefills.append(task.sequence.prefill(task.tokens))
        else:
            output.resume.append(task.sequence)

    # -- queues -------------------------------------------------------------------------------------------------------

    def _set_next(self, task: _Task) -> None:
        """Queue a task, and record it as the current task of its sequence."""
        task.sequence.batcher_state = task
        if not task.pending:
            self._append(task)
        task.left_out = True
        task.since = self._selections
        left_out = self._left_out
        left_out.insert(_place(left_out, task) if left_out else 0, task)

    def _append(self, task: _Task) -> None:
        task.pending = True
        pending, low = self._pending, 0
        high = len(pending)
        while low < high:  # bisects the queue whether or not it is sorted, as SplitwiseSim does
            middle = (low + high) // 2
            if task.is_younger(pending[middle], self._selections):
                high = middle
            else:
                low = middle + 1
        pending.insert(low, task)

    def _drop(self, task: _Task) -> None:
        """Remove a task from the queues."""
        task.chosen = False
        if task.pending:
            task.pending = False
            pending = self._pending
            if pending[-1] is task:
                pending.pop()
            else:
                for place, other in enumerate(pending):  # `list.remove` would compare by equality
                    if other is task:
                        pending.pop(place)
                        break
        if task.left_out:
            task.left_out = False
            task.missed += self._selections - task.since
            left_out = self._left_out
            if left_out[-1] is task:
                left_out.pop()
            else:
                left_out.pop(_place(left_out, task))


def _admit(task: _Task, budget: SchedulingBudget) -> bool:
    return budget.admit(task.sequence) if task.prompt else budget.admit_decode(task.sequence)


def _place(tasks: list[_Task], task: _Task) -> int:
    """Return the index at which a task is, or belongs, in a list sorted by arrival time."""
    low, high = 0, len(tasks)
    while low < high:
        middle = (low + high) // 2
        other = tasks[middle]
        if other.arrival_s < task.arrival_s or (other.arrival_s == task.arrival_s and other.arrival < task.arrival):
            low = middle + 1
        else:
            high = middle
    return low
