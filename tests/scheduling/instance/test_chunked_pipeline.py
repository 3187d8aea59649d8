"""Chunked pipelines: several chunks of one prompt run at once on different stages."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.scheduler import InstanceScheduler


def make(stages, chunk=10, *, blocks=1000, max_num_seqs=8):
    accounts = PagedBlockAllocator(blocks, 4)
    leases = LeaseTable(accounts, "i", 1, lease_s=1e9)
    batcher = BATCHERS["prefill-chunks"](chunk, max_num_seqs)
    return InstanceScheduler(batcher, accounts, leases, max_num_seqs, stages=stages)


def request(name, prompt, output=5):
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


def parts(batch):
    return [(item.request_id, item.context_tokens, item.num_tokens) for item in batch.items]


def test_runs_as_many_chunks_of_a_prompt_as_stages():
    scheduler = make(2)
    scheduler.submit(request("a", 30), decodes_here=False)
    first, second = scheduler.next_batch(0), scheduler.next_batch(0)
    assert (parts(first), parts(second)) == ([("a", 0, 10)], [("a", 10, 10)])
    assert scheduler.next_batch(0) is None
    assert scheduler.complete(first) == []
    third = scheduler.next_batch(0)
    assert parts(third) == [("a", 20, 10)]
    assert [item.samples for batch in (first, second, third) for item in batch.items] == [False, False, True]
    assert scheduler.complete(second) == []
    assert scheduler.next_batch(0) is None, "all of it has begun"
    (outcome,) = scheduler.complete(third)
    assert (outcome.request_id, outcome.index, outcome.hands_off) == ("a", 0, True)
    scheduler.handed_off("a")
    assert scheduler.status().idle


def test_next_prompt_enters_behind_the_last_chunk():
    scheduler = make(2)
    for name in "ab":
        scheduler.submit(request(name, 20), decodes_here=False)
    batches = [scheduler.next_batch(0), scheduler.next_batch(0)]
    scheduler.complete(batches[0])
    assert parts(scheduler.next_batch(0)) == [("b", 0, 10)]


def test_holds_blocks_of_an_aborted_prompt_until_its_last_chunk_ends():
    scheduler = make(3)
    scheduler.submit(request("a", 40), decodes_here=False)
    batches = [scheduler.next_batch(0) for _ in range(3)]
    scheduler.abort("a")
    scheduler.handed_off("a")
    for batch in batches:
        assert scheduler.status().blocks_in_flight
        assert scheduler.complete(batch) == []
    assert scheduler.status().idle
    assert scheduler.next_batch(0) is None


def test_frees_blocks_of_a_prompt_aborted_between_chunks():
    scheduler = make(2)
    scheduler.submit(request("a", 30), decodes_here=False)
    scheduler.submit(request("b", 10), decodes_here=False)
    for batch in [scheduler.next_batch(0), scheduler.next_batch(0)]:
        scheduler.complete(batch)
    scheduler.abort("a")
    scheduler.handed_off("a")
    assert scheduler.status().blocks_free == scheduler.status().blocks_total
    assert parts(scheduler.next_batch(0)) == [("b", 0, 10)]


sizes = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 3)), min_size=1, max_size=20)
chunks = st.sampled_from([1, 7, 20, 64])


@settings(max_examples=400)
@given(st.integers(2, 4), sizes, chunks, st.integers(0, 1 << 32))
def test_chunks_run_in_order_under_random_commands(stages, sizes, chunk, seed):  # noqa: C901  (one story)
    chance = random.Random(seed)
    scheduler = make(stages, chunk, blocks=60)
    todo = [request(str(number), *size) for number, size in enumerate(sizes)]
    prompts = {each.id: each.prompt_tokens for each in todo}
    begun, ended, aborted, under_way = dict.fromkeys(prompts, 0), [], set(), []
    submitted = []
    while todo or under_way or not scheduler.empty:
        action = chance.choice(["submit", "start", "start", "end", "abort"])
        batch = None
        if action == "submit" and todo:
            new = todo.pop(0)
            scheduler.submit(new, decodes_here=False)
            submitted.append(new.id)
        elif action == "abort" and submitted and chance.random() < 0.1:
            chosen = chance.choice(submitted)
            if chosen not in ended:
                scheduler.abort(chosen)
                scheduler.handed_off(chosen)
                aborted.add(chosen)
        elif action == "start":
            batch = scheduler.next_batch(0)
        if batch is not None:
            assert sum(item.num_tokens for item in batch.items) <= chunk
            for item in batch.items:
                assert item.request_id not in aborted
                assert item.context_tokens == begun[item.request_id], "its predecessor began before"
                begun[item.request_id] += item.num_tokens
                assert item.samples == (begun[item.request_id] == prompts[item.request_id])
            under_way.append(batch)
            assert len(under_way) <= stages
        elif under_way and action in ("start", "end"):
            oldest = under_way.pop(0)
            last = [item.request_id for item in oldest.items if item.samples]
            outcomes = scheduler.complete(oldest)
            assert [outcome.request_id for outcome in outcomes] == [n for n in last if n not in aborted]
            for outcome in outcomes:
                ended.append(outcome.request_id)
                scheduler.handed_off(outcome.request_id)
        elif not todo and not under_way and action == "start":
            assert scheduler.empty, "something waits, and nothing runs that could make room"
        assert scheduler.status().running <= len(submitted)
    assert sorted(ended) == sorted(set(prompts) - aborted)
    assert all(begun[name] == prompts[name] for name in ended)
    assert scheduler.status().idle
