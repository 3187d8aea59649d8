"""SplitwiseSim's machine-level scheduler, rule by rule, for comparisons with its results.

It departs from the paper (and from `splitwise`) in what follows from its implementation; the order of the
rules is that of its `SplitwiseInstance`:

- Whatever waits ages: a prompt, or a decode that was not taken, counts a pre-emption at each selection. From four
  on it goes first, in an order that is sorted by age only where it was when the last of them came.
- A prompt that would not fit beside the running decodes does not end their run: it waits until one of them ends.
- A decode on the instance of its prefill is queued together with its prompt, and interrupts for itself.
"""

from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocator
from twofold.scheduling.instance.batch import RunningBatch
from twofold.scheduling.instance.batcher import Batcher, SchedulerOutput, SchedulingBudget
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import Note, ScheduledSequence


@mypyc_attr(free_list_len=1)
class _Task(Note):
    """A prompt or the decodes of one sequence. It ages while it is the sequence's next task and is left out."""

    __slots__ = (
        "arrival",
        "arrival_s",
        "chained",
        "chosen",
        "left_out",
        "missed",
        "pending",
        "prompt",
        "sequence",
        "since",
        "tokens",
    )

    def __init__(self, sequence: ScheduledSequence, prompt: bool, arrival_s: float, arrival: int) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.tokens = sequence.prefill_remaining if prompt else 1
        self.arrival_s = arrival_s
        self.arrival = arrival
        self.missed = 0
        self.left_out = False
        self.since = 0  # the selection from which on it is left out
        self.pending = False
        self.chosen = False
        self.chained: _Task | None = None  # of a prompt: the decodes that were queued together with it

    def came_before(self, other: "_Task") -> bool:
        if self.arrival_s != other.arrival_s:
            return self.arrival_s < other.arrival_s
        return self.arrival < other.arrival

    def is_younger(self, other: "_Task", selections: int) -> bool:
        """By selections missed, then by arrival."""
        age, its = self.age(selections), other.age(selections)
        return age < its if age != its else self.arrival_s < other.arrival_s

    def age(self, selections: int) -> int:
        return self.missed + selections - self.since if self.left_out else self.missed


@mypyc_attr(free_list_len=1)
class _Choice:
    """A batch in the making: which tasks were chosen, and what they leave of the limits."""

    __slots__ = ("budget", "queues", "room", "seats", "tasks")

    def __init__(self, queues: Queues, room: SchedulingBudget, seats: int, budget: int) -> None:
        self.queues = queues
        self.room = room
        self.seats = seats
        self.budget = budget
        self.tasks: list[_Task] = []

    def full(self, tokens: int) -> bool:
        """A task of `tokens` tokens does not fit any more; the first of a batch always does."""
        return self.seats < 1 or (len(self.tasks) > 0 and tokens > self.budget)

    def take(self, task: _Task) -> bool:
        """Choose a task if there is memory for it; one that was paused has its memory."""
        if task.sequence.line is not self.queues.paused and not _take_memory(task, self.room):
            return False
        task.chosen = True
        self.tasks.append(task)
        self.seats -= 1
        self.budget -= task.tokens
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseSimBatcher(Batcher):
    """At most `max_num_seqs` (512) sequences and `max_num_batched_tokens` (2,048) tokens in a batch, four pre-emptions.

    The note of a sequence is the task that is its next or runs.
    """

    MAX_PREEMPTIONS: ClassVar[int] = 4

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._selections = 0
        self._arrivals = 0
        self._pending: list[_Task] = []
        self._left_out: list[_Task] = []  # next tasks that are not in the batch, by arrival of their request

    # -- what comes and goes --------------------------------------------------------------------------------------

    def queued(self, sequence: ScheduledSequence) -> None:
        before = sequence.note
        if isinstance(before, _Task) and before.chained is not None:
            self._next(before.chained)
            return
        self._arrivals += 1
        task = _Task(sequence, not sequence.generated, sequence.request.arrival_s, self._arrivals)
        self._next(task)
        if task.prompt and sequence.decodes_here:
            task.chained = _Task(sequence, False, task.arrival_s, task.arrival)
            self._append(task.chained)

    def gone(self, sequence: ScheduledSequence) -> None:
        task = sequence.note
        sequence.note = None
        if isinstance(task, _Task):
            self._drop(task)
            if task.chained is not None:
                self._drop(task.chained)

    def waiting(self, queues: Queues) -> int:
        return len(self._pending)

    def should_reschedule(
        self, sequence: ScheduledSequence | None, running: RunningBatch | None, blocks: BlockAllocator
    ) -> bool:
        if sequence is None:
            return self._room_made(running, blocks)
        prompt = not sequence.generated
        if self._interrupts(sequence, prompt, running, blocks):
            return True
        return prompt and sequence.decodes_here and self._interrupts(sequence, False, running, blocks)

    def _interrupts(
        self,
        sequence: ScheduledSequence,
        prompt: bool,
        running: RunningBatch | None,
        blocks: BlockAllocator,
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

    def _room_made(self, running: RunningBatch | None, blocks: BlockAllocator) -> bool:
        if not self._pending:
            return False
        if running is None:
            head = self._pending[0]
            return blocks.fits(head.sequence.start_tokens if head.prompt else head.sequence.decode_tokens)
        if running.prefill_sequences:
            return False
        return running.decode_sequences < min(self.max_num_seqs, self.max_num_batched_tokens)

    # -- selection ------------------------------------------------------------------------------------------------

    def select(self, queues: Queues, room: SchedulingBudget) -> SchedulerOutput:
        room.free_seats = self.max_num_seqs  # its own limit is on the batch alone
        if len(self._left_out) == 1 and not queues.paused.size:
            task, decodes = self._left_out[0], queues.decoding.size
            if decodes < self.max_num_seqs and (
                not decodes or decodes + task.tokens <= self.max_num_batched_tokens
            ):
                return self._one_more(task, room)
        choice = _Choice(queues, room, self.max_num_seqs, self.max_num_batched_tokens)
        self._take_overdue(choice)
        self._take_prompts(choice)
        self._take_paused(choice)
        kept = self._keep_running(choice, queues.decoding.size)
        self._take_rest(choice, kept)
        return self._settle(choice, queues.decoding.latest(queues.decoding.size - kept))

    def _one_more(self, task: _Task, room: SchedulingBudget) -> SchedulerOutput:
        """The same, where one task waits and fits beside all that run: by far the most common case."""
        selection = SchedulerOutput()
        if _take_memory(task, room):
            self._choose(task, selection)
        self._selections += 1
        return selection

    def _take_overdue(self, choice: _Choice) -> None:
        for task in self._pending:
            if task.age(self._selections) < self.MAX_PREEMPTIONS or choice.full(task.tokens):
                break
            choice.take(task)

    def _take_prompts(self, choice: _Choice) -> None:
        sequence = choice.queues.waiting.first
        while sequence is not None:
            task = _task(sequence)
            if choice.full(task.tokens) or not (task.chosen or choice.take(task)):
                break
            sequence = sequence.after

    def _take_paused(self, choice: _Choice) -> None:
        sequence = choice.queues.paused.first
        while sequence is not None:
            task = _task(sequence)
            if not task.chosen and (choice.full(1) or not choice.take(task)):
                break
            sequence = sequence.after

    def _keep_running(self, choice: _Choice, decodes: int) -> int:
        """How many of the running decodes stay, those that joined first; the others are paused."""
        kept = min(decodes, choice.seats, max(choice.budget, 0 if choice.tasks else 1))
        choice.seats -= kept
        choice.budget -= kept
        return kept

    def _take_rest(self, choice: _Choice, kept: int) -> None:
        for task in self._left_out:
            if choice.seats < 1:
                break
            if task.chosen:
                continue
            if ((choice.tasks or kept) and task.tokens > choice.budget) or not choice.take(task):
                break

    def _settle(self, choice: _Choice, pause: list[ScheduledSequence]) -> SchedulerOutput:
        selection = SchedulerOutput()
        selection.pause = pause[::-1]
        # Paused tasks go into the line while those that were chosen still stand in it.
        for sequence in selection.pause:
            self._next(_task(sequence))
        for task in choice.tasks:
            self._choose(task, selection)
        self._selections += 1
        return selection

    def _choose(self, task: _Task, selection: SchedulerOutput) -> None:
        self._drop(task)
        if task.prompt:
            selection.prefills.append(task.sequence.prefill(task.tokens))
        else:
            selection.resume.append(task.sequence)

    # -- the queues -----------------------------------------------------------------------------------------------

    def _next(self, task: _Task) -> None:
        """This task is what its sequence needs next."""
        task.sequence.note = task
        if not task.pending:
            self._append(task)
        task.left_out = True
        task.since = self._selections
        self._left_out.insert(_place(self._left_out, task), task)

    def _append(self, task: _Task) -> None:
        task.pending = True
        pending, low = self._pending, 0
        high = len(pending)
        while low < high:  # bisection, whether it is sorted or not
            middle = (low + high) // 2
            if task.is_younger(pending[middle], self._selections):
                high = middle
            else:
                low = middle + 1
        pending.insert(low, task)

    def _drop(self, task: _Task) -> None:
        """It waits no more: it runs, or is gone."""
        task.chosen = False
        if task.pending:
            task.pending = False
            for place, other in enumerate(self._pending):  # `list.remove` would ask whether tasks are equal
                if other is task:
                    self._pending.pop(place)
                    break
        if task.left_out:
            task.left_out = False
            task.missed += self._selections - task.since
            self._left_out.pop(_place(self._left_out, task))


def _task(sequence: ScheduledSequence) -> _Task:
    task = sequence.note
    assert isinstance(task, _Task)  # noqa: S101  (it was queued; tells the type checker)
    return task


def _take_memory(task: _Task, room: SchedulingBudget) -> bool:
    return room.take(task.sequence) if task.prompt else room.take_output(task.sequence)


def _place(tasks: list[_Task], task: _Task) -> int:
    """Where a task is, or belongs, by arrival."""
    low, high = 0, len(tasks)
    while low < high:
        middle = (low + high) // 2
        if tasks[middle].came_before(task):
            low = middle + 1
        else:
            high = middle
    return low
