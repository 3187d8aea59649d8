"""Scheduler queues with given sequences, and the batches that a batcher selects from the queues."""

from dataclasses import dataclass, field

from twofold.batch import BatchItem
from twofold.kvcache.allocator import BlockAllocator
from twofold.request import Request
from twofold.scheduling.instance.batcher import Batcher, SchedulingBudget
from twofold.scheduling.instance.queues import Queues, SchedulerOutput
from twofold.scheduling.instance.sequence import ScheduledSequence

OUTPUT_TOKENS = 8


@dataclass
class State:
    """The sequences in each queue of a scheduler."""

    waiting: list[ScheduledSequence] = field(default_factory=list)
    prefilling: list[ScheduledSequence] = field(default_factory=list)
    ready: list[ScheduledSequence] = field(default_factory=list)
    decodes: list[ScheduledSequence] = field(default_factory=list)


@dataclass
class Selected:
    """Ids of the requests that a batcher selected to prefill, resume or pause."""

    prefills: list[tuple[str, int]]
    resume: list[str]
    pause: list[str]
    items: list[BatchItem]


def sequence(name: str, prompt: int = 10, output: int = OUTPUT_TOKENS, **more: int) -> ScheduledSequence:
    request = Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
    made = ScheduledSequence(request, decodes_here=True, **more)
    made.start_tokens = prompt + output - 1
    return made


def waiting(*prompts: int, name: str = "w") -> State:
    """Return scheduler queues with one waiting prompt for each length in `prompts`."""
    return State(waiting=[sequence(f"{name}{i}", prompt) for i, prompt in enumerate(prompts)])


def prefilling(prompt: int, computed: int, name: str = "s") -> State:
    """Return scheduler queues with one partly computed prompt."""
    return State(prefilling=[sequence(name, prompt, computed=computed)])


def ready(count: int, output_tokens: tuple[int, ...] = ()) -> State:
    """Return scheduler queues with `count` sequences that are ready to decode."""
    made = [sequence(f"r{i}", computed=10, generated=1) for i in range(count)]
    for each, tokens in zip(made, output_tokens, strict=False):
        each.decode_tokens = tokens
    return State(ready=made)


def decoding(count: int) -> State:
    """Return scheduler queues with `count` decoding sequences, each with one generated token."""
    return State(decodes=[sequence(f"d{i}", computed=10, generated=1) for i in range(count)])


def room(blocks: int = 1000, seats: int = 64, block_size: int = 16) -> SchedulingBudget:
    return SchedulingBudget(BlockAllocator(max(blocks, 1), block_size), blocks, seats)


def merged(states: tuple[State, ...]) -> Queues:
    queues = Queues()
    for state in states:
        for line, members in (
            (queues.waiting, state.waiting),
            (queues.prefilling, state.prefilling),
            (queues.ready, state.ready),
        ):
            for each in members:
                line.append(each)
        for each in state.decodes:
            queues.decoding.join(each)
    return queues


def named(selection: SchedulerOutput) -> Selected:
    return Selected(
        [(item.sequence.id, item.num_tokens) for item in selection.prefills],
        [each.id for each in selection.resume],
        [each.id for each in selection.pause],
        selection.prefills,
    )


def selected(batcher: Batcher, *parts: State | SchedulingBudget) -> Selected:
    """Return the batch that `batcher` selects from the given scheduler queues."""
    states = tuple(part for part in parts if isinstance(part, State))
    running = merged((State(ready=[each for state in states for each in state.decodes]),))
    for each in running.ready:
        batcher.on_queued(each)
    batcher.select(running, room())
    for each in list(running.ready):
        running.ready.remove(each)
    queues = merged(states)
    for each in (*queues.waiting, *queues.ready):
        batcher.on_queued(each)
    given = next((part for part in parts if isinstance(part, SchedulingBudget)), room())
    return named(batcher.select(queues, given))
