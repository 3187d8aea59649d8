"""Instances with pipeline stages: several batches of disjoint sequences run at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import FinishReason, Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.scheduler import InstanceScheduler


def make(stages, batcher="mixed", *, blocks=1000, budget=64, max_num_seqs=8):
    accounts = PagedBlockAllocator(blocks, 4)
    leases = LeaseTable(accounts, "i", 1, lease_s=1e9)
    return InstanceScheduler(BATCHERS[batcher](budget, max_num_seqs), accounts, leases, max_num_seqs, stages=stages)


def request(name, prompt=10, output=5):
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


def members(batch):
    return [item.request_id for item in batch.items]


def test_runs_as_many_batches_as_stages():
    scheduler = make(2, budget=10)
    for name in "abc":
        scheduler.submit(request(name), decodes_here=True)
    first, second = scheduler.next_batch(0), scheduler.next_batch(0)
    assert (members(first), members(second)) == (["a"], ["b"])
    assert scheduler.next_batch(0) is None
    (outcome,) = scheduler.complete(first)
    assert (outcome.request_id, outcome.index) == ("a", 0)
    assert members(scheduler.next_batch(0)) == ["c", "a"]


def test_rejects_completion_out_of_order():
    scheduler = make(2, budget=10)
    for name in "ab":
        scheduler.submit(request(name), decodes_here=True)
    first, second = scheduler.next_batch(0), scheduler.next_batch(0)
    with pytest.raises(RuntimeError, match="only the oldest running batch"):
        scheduler.complete(second)
    with pytest.raises(RuntimeError, match="only a batch that was started"):
        make(2).advance()
    assert first is not None


def test_balances_decodes_over_lanes():
    """Decodes are divided evenly into batches (lanes), one per pipeline stage."""
    scheduler = make(2)
    for name in "abcdef":
        scheduler.submit(request(name), decodes_here=True)
    scheduler.complete(scheduler.next_batch(0))
    batches = scheduler.next_batch(0), scheduler.next_batch(0)
    assert [sorted(members(batch)) for batch in batches] == [["b", "d", "f"], ["a", "c", "e"]]


def test_holds_blocks_of_an_aborted_request_until_its_batch_ends():
    scheduler = make(2, budget=10)
    for name in "ab":
        scheduler.submit(request(name), decodes_here=True)
    first, second = scheduler.next_batch(0), scheduler.next_batch(0)
    scheduler.abort("b")
    assert scheduler.status().blocks_in_flight
    scheduler.complete(first)
    assert scheduler.status().blocks_in_flight
    scheduler.complete(second)
    assert not scheduler.status().blocks_in_flight


sizes = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=20)
BOTH_PHASES = set(BATCHERS) - {"prefill", "prefill-balanced", "prefill-chunks", "decode"}
batchers = st.sampled_from(sorted(name for name in BOTH_PHASES if BATCHERS[name].pipelined))


@settings(max_examples=400)
@given(st.integers(2, 4), batchers, sizes, st.sampled_from([6, 64]), st.integers(0, 1 << 32))
def test_invariants_hold_under_random_commands(stages, batcher, sizes, budget, seed):  # noqa: C901 (one story)
    """A sequence is in one batch at a time, generates tokens in order, ends once and frees its blocks."""
    chance = random.Random(seed)
    scheduler = make(stages, batcher, blocks=60, budget=budget)
    todo = [request(str(number), *size) for number, size in enumerate(sizes)]
    outputs = {each.id: each.output_tokens for each in todo}
    tokens, ended, aborted, under_way = {}, {}, set(), []
    while todo or under_way or not scheduler.empty:
        action = chance.choice(["submit", "start", "start", "end", "abort"])
        batch = None
        if action == "submit" and todo:
            new = todo.pop(0)
            scheduler.submit(new, decodes_here=True)
            tokens[new.id] = []
        elif action == "abort" and tokens and chance.random() < 0.1:
            chosen = chance.choice(sorted(tokens))
            scheduler.abort(chosen)
            aborted.add(chosen)
        elif action == "start":
            batch = scheduler.next_batch(0)
        if batch is not None:
            busy = {name for other in under_way for name in members(other)} - aborted
            assert busy.isdisjoint(members(batch))
            under_way.append(batch)
            assert len(under_way) <= stages
        elif under_way and action in ("start", "end"):
            for outcome in scheduler.complete(under_way.pop(0)):
                assert outcome.index == len(tokens[outcome.request_id])
                tokens[outcome.request_id].append(outcome.index)
                if outcome.finish_reason is not None:
                    assert outcome.request_id not in ended
                    ended[outcome.request_id] = outcome.finish_reason
        elif not todo and not under_way and action == "start":
            assert scheduler.empty, "something waits, and nothing runs that could make room"
    for name, output in outputs.items():
        if name not in aborted:
            assert ended[name] is FinishReason.LENGTH
            assert len(tokens[name]) == output
    assert scheduler.status().idle
    assert scheduler.queued == 0
