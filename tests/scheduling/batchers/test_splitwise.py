"""Splitwise's batcher for mixed instances."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduled import arrive, ran, request, scheduler
from support.selecting import decoding, ready, room, selected, waiting
from twofold.scheduling.batchers.splitwise import SplitwiseMixed


def test_prompts_go_first_and_decodes_share_the_rest():
    """If the remaining token budget is too small for all decodes, the newest decodes are paused."""
    chosen = selected(SplitwiseMixed(100, 64), waiting(60, 37, 20), decoding(5))
    assert chosen.prefills == [("w0", 60), ("w1", 37)]
    assert chosen.pause == ["d4", "d3"]
    assert chosen.resume == []


def test_a_prompt_over_the_budget_runs_alone():
    chosen = selected(SplitwiseMixed(100, 64), waiting(500, 1), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([("w0", 500)], [], ["d1", "d0"])


def test_limits_prompts_and_decodes_together():
    chosen = selected(SplitwiseMixed(100, 4), waiting(10, 10, 10), decoding(3), room(seats=2))
    assert chosen.prefills == [("w0", 10), ("w1", 10)]
    assert chosen.pause == ["d2"]


def test_running_decodes_go_before_ready_ones():
    chosen = selected(SplitwiseMixed(2048, 4), decoding(2), ready(3))
    assert (chosen.resume, chosen.pause) == (["r0", "r1"], [])


def test_paused_decodes_go_before_running_ones():
    """Paused decodes take precedence over running decodes."""
    mixed = scheduler("splitwise", num_blocks=1000, budget=10)
    for name in "abcd":
        arrive(mixed, request(name, output=50))
    assert ran(mixed) == ["a", "b", "c", "d"]
    for number in range(3):
        mixed.submit(request(f"p{number}", prompt=8), decodes_here=False)
    assert ran(mixed) == ["p0", "a", "b"]
    assert ran(mixed) == ["p1", "d", "c"]
    assert ran(mixed) == ["p2", "b", "a"]
    assert sorted(ran(mixed)) == ["a", "b", "c", "d"]
    assert mixed.preemptions == 6


def test_decode_skipped_four_times_goes_before_prompts():
    mixed = scheduler("splitwise", num_blocks=1000, budget=10)
    arrive(mixed, request("a", output=50))
    assert ran(mixed) == ["a"]
    for number in range(8):
        mixed.submit(request(f"p{number}", prompt=10), decodes_here=False)
    assert [ran(mixed) for _ in range(5)] == [["p0"], ["p1"], ["p2"], ["p3"], ["a"]]


def test_prompts_continue_after_one_turn_of_an_overdue_decode():
    mixed = scheduler("splitwise", num_blocks=1000, budget=10)
    arrive(mixed, request("a", output=50))
    assert ran(mixed) == ["a"]
    for number in range(8):
        mixed.submit(request(f"p{number}", prompt=10), decodes_here=False)
    assert [ran(mixed) for _ in range(6)][-2:] == [["a"], ["p4"]]


def test_paused_decode_keeps_its_blocks_until_aborted():
    mixed = scheduler("splitwise", budget=10)
    arrive(mixed, request("a", output=5))
    assert ran(mixed) == ["a"]
    mixed.submit(request("p", prompt=10, output=1), decodes_here=True)
    batch = mixed.next_batch(0.0)
    assert mixed.queued == 1
    assert mixed.status().blocks_free == 64 - 4 - 3
    mixed.abort("a")
    assert mixed.status().blocks_free == 64 - 3
    mixed.complete(batch)
    assert mixed.status().idle
    assert mixed.empty


class Watched(SplitwiseMixed):
    """Splitwise's batcher with assertions on each selection."""

    def __init__(self, max_num_batched_tokens, max_num_seqs):
        super().__init__(max_num_batched_tokens, max_num_seqs)
        self.left_out = Counter()
        self.longest = 0

    def select(self, queues, room):
        waiting, paused, ready = ([s.id for s in line] for line in (queues.waiting, queues.paused, queues.ready))
        before = list(queues.decoding)
        selection = super().select(queues, room)
        pause, resume = {s.id for s in selection.pause}, [s.id for s in selection.resume]
        stay = [s.id for s in before if s.id not in pause]
        started = [item.sequence.id for item in selection.prefills]
        running = resume + stay
        self._check_limits(selection, running)
        assert started == waiting[: len(started)], "a prompt was overtaken"
        begun = [name for name in resume if name in ready]
        assert begun == ready[: len(begun)], "a ready sequence was overtaken"
        assert [s.id for s in before][: len(stay)] == stay, "the last to join are paused"
        assert not (stay or begun) or set(paused) <= set(resume), "paused decodes go first"
        self._count({s.id for s in before} | set(paused), set(running))
        return selection

    def _check_limits(self, selection, running):
        tokens = sum(item.num_tokens for item in selection.prefills) + len(running)
        alone = len(selection.prefills) == 1 and not running
        assert tokens <= self.max_num_batched_tokens or alone
        assert len(selection.prefills) + len(running) <= self.max_num_seqs

    def _count(self, those, running):
        for name in those & running:
            self.left_out.pop(name, None)
        for name in those - running:
            self.left_out[name] += 1
        self.longest = max(self.longest, *self.left_out.values(), 0)


lives = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 14), st.integers(1, 12), st.sampled_from(["here", "goes", "comes"])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=500)
@given(lives, st.integers(1, 12), st.integers(1, 8))
def test_skips_no_decode_more_than_four_times_in_a_row(lives, budget, max_num_seqs):
    watched = Watched(budget, max_num_seqs)
    mixed = scheduler(watched, num_blocks=2000, max_num_seqs=max_num_seqs)
    lives = sorted(((*life, str(number)) for number, life in enumerate(lives)), reverse=True)
    total, ended, iteration = len(lives), 0, 0
    while lives or not mixed.empty:
        while lives and lives[-1][0] <= iteration:
            _, prompt, output, kind, name = lives.pop()
            made = request(name, prompt, output + (kind == "comes"))
            if kind == "comes":
                arrive(mixed, made)
            else:
                mixed.submit(made, decodes_here=kind == "here")
        batch = mixed.next_batch(0.0)
        if batch is not None:
            for outcome in mixed.complete(batch):
                ended += outcome.finish_reason is not None or outcome.hands_off
        iteration += 1
        assert iteration < 5000, "somebody starves"
    assert ended == total
    assert watched.longest <= SplitwiseMixed.MAX_PREEMPTIONS
    assert not watched._skipped, "notes about nobody"


def test_decodes_are_skipped_four_times():
    """With enough prompts, a decode is skipped four times, which is the limit."""
    watched = Watched(10, 16)
    mixed = scheduler(watched, num_blocks=1000)
    arrive(mixed, request("a", output=50))
    ran(mixed)
    for number in range(8):
        mixed.submit(request(f"p{number}", prompt=10), decodes_here=False)
    for _ in range(8):
        ran(mixed)
    assert watched.longest == SplitwiseMixed.MAX_PREEMPTIONS
