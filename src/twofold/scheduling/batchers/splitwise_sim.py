"""SplitwiseSim's machine-level scheduler, rule by rule, for comparisons with its results.

It departs from the paper (and from `splitwise`) in what follows from its implementation; the order of the
rules is that of its `SplitwiseInstance`:

- Whatever waits ages: a prompt, or a decode that was not taken, counts a pre-emption at each selection. From four
  on it goes first, in an order that is sorted by age only where it was when the last of them came.
- A prompt that would not fit beside the running decodes does not end their run: it waits until one of them ends.
- A decode on the instance of its prefill is queued together with its prompt, and interrupts for itself.
"""

from bisect import bisect_left, insort_right
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.kvcache.accounts import BlockAccounts
from twofold.scheduling.batcher import Batcher, Queues, Room, Selection
from twofold.scheduling.iteration import StartedIteration
from twofold.scheduling.sequence import ScheduledSequence


class _Task:
    """A prompt or the decodes of one sequence. It ages while it is the sequence's next task and is left out."""

    __slots__ = ("missed", "paused", "pending", "place", "prompt", "sequence", "since", "tokens")

    def __init__(
        self,
        sequence: ScheduledSequence,
        prompt: bool,
        tokens: int,
        place: tuple[float, int],
        missed: int = 0,
        since: int | None = None,
        paused: bool = False,
        pending: bool = False,
    ) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.tokens = tokens
        self.place = place
        self.missed = missed
        self.since = since
        self.paused = paused
        self.pending = pending


class _Choice:
    """A batch in the making: which tasks were chosen, and what they leave of the limits."""

    __slots__ = ("budget", "room", "seats", "tasks")

    def __init__(self, room: Room, seats: int, budget: int) -> None:
        self.room = room
        self.seats = seats
        self.budget = budget
        self.tasks: dict[_Task, None] = {}

    def full(self, tokens: int) -> bool:
        """A task of `tokens` tokens does not fit any more; the first of a batch always does."""
        return self.seats < 1 or (bool(self.tasks) and tokens > self.budget)

    def take(self, task: _Task) -> bool:
        """Choose a task if there is memory for it; one that was paused has its memory."""
        sequence = task.sequence
        if not task.paused and not (
            self.room.take(sequence) if task.prompt else self.room.take_output(sequence)
        ):
            return False
        self.tasks[task] = None
        self.seats -= 1
        self.budget -= task.tokens
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseSimBatcher(Batcher):
    """At most `max_seqs` (512) sequences and `token_budget` (2,048) tokens in a batch, four pre-emptions."""

    MAX_PREEMPTIONS: ClassVar[int] = 4

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs
        self._selections = 0
        self._arrivals = 0
        self._tasks: dict[str, _Task] = {}  # of each sequence here, the task that is its next or runs
        self._chained: dict[str, _Task] = {}  # decodes queued together with their prompts
        self._pending: list[_Task] = []
        self._prompts: dict[str, _Task] = {}
        self._blocked: dict[str, _Task] = {}
        self._left_out: list[_Task] = []  # next tasks that are not in the batch, by arrival of their request

    # -- what comes and goes --------------------------------------------------------------------------------------

    def queued(self, sequence: ScheduledSequence) -> None:
        if sequence.generated:
            if sequence.id in self._chained:
                task = self._chained[sequence.id]
                del self._chained[sequence.id]
            else:
                task = self._new_task(sequence, prompt=False)
            self._next(task)
            return
        task = self._new_task(sequence, prompt=True)
        self._prompts[sequence.id] = task
        self._next(task)
        if sequence.decodes_here:
            chained = self._chained[sequence.id] = _Task(sequence, False, 1, task.place)
            self._append(chained)

    def gone(self, sequence: ScheduledSequence) -> None:
        for tasks in (self._tasks, self._chained):
            task = tasks.get(sequence.id)
            if task is not None:
                del tasks[sequence.id]
                self._drop(task)

    def waiting(self, queues: Queues) -> int:
        return len(self._pending)

    def reselects(
        self, sequence: ScheduledSequence | None, running: StartedIteration | None, blocks: BlockAccounts
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
        running: StartedIteration | None,
        blocks: BlockAccounts,
    ) -> bool:
        if running is None:
            return blocks.fits(sequence.start_tokens if prompt else sequence.decode_tokens)
        if running.prefill_sequences:
            return False
        tokens = sequence.prompt_tokens if prompt else 1
        if (
            running.decode_sequences < self.max_seqs
            and running.decode_sequences + tokens <= self.token_budget
        ):
            return True
        return prompt and tokens <= self.token_budget

    def _room_made(self, running: StartedIteration | None, blocks: BlockAccounts) -> bool:
        if not self._pending:
            return False
        if running is None:
            head = self._pending[0]
            return blocks.fits(head.sequence.start_tokens if head.prompt else head.sequence.decode_tokens)
        if running.prefill_sequences:
            return False
        return running.decode_sequences < min(self.max_seqs, self.token_budget)

    # -- selection ------------------------------------------------------------------------------------------------

    def select(self, queues: Queues, room: Room) -> Selection:
        room.free_seats = self.max_seqs  # its own limit is on the batch alone
        if len(self._left_out) == 1 and not self._blocked:
            task, decodes = self._left_out[0], queues.decoding.size
            if decodes < self.max_seqs and (not decodes or decodes + task.tokens <= self.token_budget):
                return self._one_more(task, room)
        choice = _Choice(room, self.max_seqs, self.token_budget)
        self._take_overdue(choice)
        self._take_prompts(choice)
        for task in self._blocked.values():
            if task not in choice.tasks and (choice.full(1) or not choice.take(task)):
                break
        kept = self._keep_running(choice, queues.decoding.size)
        self._take_rest(choice, kept)
        return self._settle(choice, queues.decoding.last(queues.decoding.size - kept))

    def _one_more(self, task: _Task, room: Room) -> Selection:
        """The same, where one task waits and fits beside all that run: by far the most common case."""
        selection, sequence = Selection(), task.sequence
        if room.take(sequence) if task.prompt else room.take_output(sequence):
            self._drop(task)
            if task.prompt:
                selection.prefills.append(sequence.prefill(task.tokens))
            else:
                selection.resume.append(sequence)
        self._selections += 1
        return selection

    def _take_overdue(self, choice: _Choice) -> None:
        for task in self._pending:
            if self._age(task)[0] < self.MAX_PREEMPTIONS or choice.full(task.tokens):
                break
            choice.take(task)

    def _take_prompts(self, choice: _Choice) -> None:
        for task in self._prompts.values():
            if choice.full(task.tokens):
                break
            if task not in choice.tasks and not choice.take(task):
                break

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
            if task in choice.tasks:
                continue
            if ((choice.tasks or kept) and task.tokens > choice.budget) or not choice.take(task):
                break

    def _settle(self, choice: _Choice, pause: list[ScheduledSequence]) -> Selection:
        selection = Selection()
        selection.pause = pause[::-1]
        # Paused tasks go into the line while those that were chosen still stand in it.
        for sequence in selection.pause:
            task = self._tasks[sequence.id]
            task.paused = True
            self._blocked[sequence.id] = task
            self._next(task, ages_from=self._selections)
        for task in choice.tasks:
            self._drop(task)
            if task.prompt:
                selection.prefills.append(task.sequence.prefill(task.tokens))
            else:
                selection.resume.append(task.sequence)
        self._selections += 1
        return selection

    # -- the queues -----------------------------------------------------------------------------------------------

    def _new_task(self, sequence: ScheduledSequence, *, prompt: bool) -> _Task:
        self._arrivals += 1
        tokens = sequence.prompt_tokens if prompt else 1
        return _Task(sequence, prompt, tokens, (sequence.request.arrival_s, self._arrivals))

    def _next(self, task: _Task, ages_from: int | None = None) -> None:
        """This task is what its sequence needs next."""
        self._tasks[task.sequence.id] = task
        if not task.pending:
            self._append(task)
        task.since = self._selections if ages_from is None else ages_from
        left_out = self._left_out
        if not left_out or left_out[-1].place <= task.place:  # as it mostly is
            left_out.append(task)
        else:
            insort_right(left_out, task, key=_place)

    def _append(self, task: _Task) -> None:
        task.pending = True
        pending = self._pending
        if not pending or (len(pending) <= 2 and self._age(pending[-1]) <= self._age(task)):
            pending.append(task)  # of so few, bisection looks at the last one first, sorted or not
        else:
            insort_right(pending, task, key=self._age)

    def _drop(self, task: _Task) -> None:
        """It waits no more: it runs, or is gone."""
        if task.pending:
            _remove(self._pending, task)
            task.pending = False
        if task.since is not None:
            task.missed += self._selections - task.since
            task.since = None
            left_out = self._left_out
            first = left_out[0] is task
            del left_out[0 if first else bisect_left(left_out, task.place, key=_place)]
        task.paused = False
        request_id = task.sequence.id
        if request_id in self._blocked:
            del self._blocked[request_id]
        if task.prompt and request_id in self._prompts:
            del self._prompts[request_id]

    def _age(self, task: _Task) -> tuple[int, float]:
        aged = 0 if task.since is None else self._selections - task.since
        return task.missed + aged, task.place[0]


def _remove(tasks: list[_Task], gone: _Task) -> None:
    for place, task in enumerate(tasks):  # `list.remove` would ask whether tasks are equal
        if task is gone:
            del tasks[place]
            return


def _place(task: _Task) -> tuple[float, int]:
    return task.place
