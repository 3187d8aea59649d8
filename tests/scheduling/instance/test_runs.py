"""One batch that runs for k iterations gives the same results as k batches of one iteration."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduled import EPOCH, request, scheduler
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Phase
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.batcher import SchedulingBudget
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation

# Commands to an instance: action, request, prompt length, output length.
commands = st.lists(
    st.tuples(
        st.sampled_from(
            ["colocated", "handed off", "reserve", "lease now", "land", "land", "give up", "abort", "hand-off over"]
        ),
        st.integers(0, 8),
        st.integers(1, 30),
        st.integers(1, 12),
    ),
    max_size=3,
)
# Commands before an iteration, commands during it, and the number of iterations of the run.
rounds = st.lists(st.tuples(commands, commands, st.integers(1, 12)), min_size=1, max_size=25)


@dataclass
class Side:
    """One of two instances whose results are compared."""

    instance: InstanceScheduler
    told: list[tuple[object, ...]] = field(default_factory=list)

    def tell(self, action, number, prompt, output):
        """Apply a command to the instance if it is possible, and log the result."""
        made = self.instance
        name = str(number)
        here = name in made.sequences
        if action in ("colocated", "handed off") and not here:
            made.submit(request(name, prompt, output), decodes_here=action == "colocated")
        elif action == "reserve" and not (here or name in made.leases):
            made.reserve(request(name, prompt, output + 1), "source")
        elif action == "lease now" and not (here or name in made.leases):
            self.told.append((made.lease_now(request(name, prompt, output + 1), "source", 0.0) is not None,))
        elif action == "land" and name in made.leases:
            self.told.append((made.kv_received(name, EPOCH),))
        elif action == "give up" and name in made.leases:
            made.end_lease(name, EPOCH)
            made.abort(name)
        elif action == "abort":
            made.abort(name)
        elif action == "hand-off over" and not (here and made.sequences[name].queue):  # after its prefill
            made.handed_off(name)
        self.told += [("lease", lease.request_id) for lease in made.grant(0.0)]

    def hear(self, outcomes):
        """Log the first tokens and the ends of requests."""
        self.told += [
            (o.request_id, o.index, o.finish_reason, o.hands_off)
            for o in outcomes
            if o.index == 0 or o.finish_reason is not None
        ]

    @property
    def accounts(self):
        made = self.instance
        stages = made.queues
        lines = (stages.waiting, stages.prefilling, stages.ready, stages.paused)
        context = stages.decoding.context_tokens, stages.decoding.items()
        return (
            made.status(),
            made.queued,
            made.empty,
            made.preemptions,
            [[sequence.id for sequence in line] for line in lines],
            context,
        )


def one_round(together, single, during, count):
    """Run up to `count` iterations: at once on the scheduler `together`, one by one on the scheduler `single`."""
    iteration = together.instance.start(0.0)
    if iteration is None:
        assert single.instance.next_batch(0.0) is None
        return
    count = min(count, iteration.limit)
    for _ in range(count - 1):
        single.hear(single.instance.complete(single.instance.next_batch(0.0)))
    batch = single.instance.next_batch(0.0)
    decodes = [item for item in batch.items if item.phase is Phase.DECODE]
    assert sum(item.num_tokens for item in batch.items) == iteration.prefill_tokens + iteration.decode_sequences
    assert len(decodes) == iteration.decode_sequences
    context = sum(item.context_tokens for item in decodes)
    assert context == iteration.context_tokens + (count - 1) * iteration.decode_sequences
    for command in during:
        together.tell(*command)
        single.tell(*command)
    together.hear(together.instance.advance(count))
    single.hear(single.instance.complete(batch))


@settings(max_examples=1500)
@given(
    st.sampled_from(sorted(BATCHERS)),
    rounds,
    st.sampled_from([3, 20]),
    st.sampled_from([FULL_RESERVATION, KvReservation(output_at_decode_start=True, extra=1)]),
)
def test_a_run_equals_single_iterations(batcher, rounds, budget, memory):
    how = {"num_blocks": 24, "max_num_seqs": 6, "budget": budget, "memory": memory}
    together = Side(scheduler(batcher, accounts=BlockAllocator, **how))
    single = Side(scheduler(batcher, accounts=PagedBlockAllocator, **how))
    for before, during, count in rounds:
        for command in before:
            together.tell(*command)
            single.tell(*command)
        assert together.instance.changed == single.instance.changed
        one_round(together, single, during, count)
        assert together.told == single.told
        assert together.instance.changed == single.instance.changed
        assert together.accounts == single.accounts


def selected_anew(instance):
    """Return the sequences that the batcher would select now."""
    queues = instance.queues
    seats = instance.max_num_seqs - queues.started
    room = SchedulingBudget(instance.blocks, instance.blocks.num_free, seats, instance.lease_queue.size > 0)
    selection = instance.batcher.select(queues, room)
    return [*selection.prefills, *selection.resume, *selection.pause]


@settings(max_examples=800)
@given(
    st.sampled_from(["prefill", "decode", "mixed", "chunked-prefill"]),
    rounds,
    st.sampled_from([FULL_RESERVATION, KvReservation(output_at_decode_start=True, extra=1)]),
)
def test_selection_is_empty_while_changed_is_unset(batcher, rounds, memory):
    side = Side(scheduler(batcher, num_blocks=24, max_num_seqs=6, budget=20, memory=memory))
    instance, idle = side.instance, False
    for before, during, count in rounds:
        for command in before:
            side.tell(*command)
        if idle and not instance.changed:
            assert selected_anew(instance) == []
        iteration = instance.start(0.0)
        idle = iteration is None
        for command in during:
            side.tell(*command)
        if iteration is not None:
            side.hear(instance.advance(min(count, iteration.limit)))
            if count < iteration.limit and not instance.changed:
                assert selected_anew(instance) == []


def test_runs_are_long_without_events():
    """Without arrivals or aborts, a batch runs until one of its requests ends."""
    for batcher in sorted(set(BATCHERS) - {"prefill", "prefill-balanced", "prefill-chunks"}):
        made = scheduler(batcher, num_blocks=1000)
        for name in "ab":
            made.lease_now(request(name, output=200), "source", 0.0)
            made.kv_received(name, EPOCH)
        assert made.start(0.0).limit == 199, batcher
