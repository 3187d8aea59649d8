"""Prompts that wait until a cached prefix is fetched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.scheduled import ran, request, scheduler
from twofold.request import FinishReason
from twofold.scheduling.batchers import BATCHERS


@pytest.mark.parametrize("batcher", ["prefill", "prefill-balanced", "mixed", "chunked-prefill", "splitwise"])
def test_computes_only_uncached_prompt_tokens(batcher):
    """Blocks are allocated for the whole prompt, but only its uncached tokens are computed."""
    made = scheduler(batcher)
    made.submit(request("a", prompt=40), decodes_here=True, reused_tokens=32)
    batch = made.next_batch(0.0)
    (item,) = batch.items
    assert (item.num_tokens, item.context_tokens, item.samples) == (8, 32, True)
    assert made.status().blocks_free <= 64 - 10
    assert made.complete(batch)[0].index == 0


def test_chunks_start_after_the_cached_prefix():
    made = scheduler("chunked-prefill", budget=16)
    made.submit(request("a", prompt=60, output=2), decodes_here=True, reused_tokens=20)
    parts = []
    while not made.status().idle:
        batch = made.next_batch(0.0)
        parts += [(item.num_tokens, item.context_tokens) for item in batch.items]
        made.complete(batch)
    assert parts == [(16, 20), (16, 36), (8, 52), (1, 60)]


def test_prompts_do_not_overtake_a_fetching_prompt():
    made = scheduler("prefill")
    made.submit(request("first", output=1), decodes_here=True)
    made.submit(request("a", output=1), decodes_here=True, reused_tokens=4, fetching=True)
    made.submit(request("b", output=1), decodes_here=True)
    made.submit(request("c", output=1), decodes_here=True, fetching=True)
    assert ran(made) == ["first"]
    assert made.next_batch(0.0) is None
    assert made.status().waiting == 3
    assert not made.empty
    made.fetched("c")
    assert made.next_batch(0.0) is None, "it is not its turn"
    made.fetched("a")
    made.fetched("a")  # a repeated call changes nothing
    assert ran(made) == ["a", "b", "c"]


def test_computes_blocks_after_a_failed_fetch():
    """After a failed fetch, the prefill computes the whole prompt."""
    made = scheduler("prefill")
    made.submit(request("a", output=1), decodes_here=True, reused_tokens=8, fetching=True)
    assert made.next_batch(0.0) is None
    made.fetched("a", reused_tokens=0)
    assert made.next_batch(0.0).items[0].num_tokens == 10


@pytest.mark.parametrize("batcher", ["prefill", "splitwise", "splitwise-sim"])
def test_aborts_a_fetching_prompt(batcher):
    """The abort of a prompt that waits for a fetch unblocks later prompts."""
    made = scheduler(batcher)
    made.submit(request("a"), decodes_here=True, fetching=True)
    made.submit(request("b", output=1), decodes_here=True)
    made.abort("a")
    assert ran(made) == ["b"], "it was behind the other"
    assert made.status().idle
    assert made.empty
    made.fetched("a")
    made.fetched("nobody")
    assert made.next_batch(0.0) is None


@pytest.mark.parametrize("tokens", [-1, 10, 11])
def test_rejects_invalid_numbers_of_reused_tokens(tokens):
    """At least the last prompt token must be computed."""
    with pytest.raises(ValueError, match="cannot reuse"):
        scheduler("prefill").submit(request("a", prompt=10), decodes_here=True, reused_tokens=tokens)


PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 59), st.booleans()), min_size=1, max_size=12)


@given(st.sampled_from(sorted({*BATCHERS} - {"decode"})), PROMPTS, st.randoms(use_true_random=False))
def test_computes_each_uncached_token_once(batcher, prompts, draw):
    made = scheduler(batcher, budget=64, max_num_seqs=8)
    left, computed, ended = {}, {}, set()
    for number, (prompt, most, fetching) in enumerate(prompts):
        name, reused = str(number), min(most, prompt - 1)
        made.submit(request(name, prompt=prompt, output=1), decodes_here=True, reused_tokens=reused, fetching=fetching)
        computed[name] = reused
        if fetching:
            left[name] = reused
    while len(ended) < len(prompts):
        if left and draw.random() < 0.5:
            name = draw.choice(sorted(left))
            computed[name] = draw.randint(0, left.pop(name))
            made.fetched(name, computed[name])
        batch = made.next_batch(0.0)
        for item in () if batch is None else batch.items:
            assert item.context_tokens == computed[item.request_id]
            computed[item.request_id] += item.num_tokens
        if batch is not None:
            ended |= {o.request_id for o in made.complete(batch) if o.finish_reason is FinishReason.LENGTH}
    assert list(computed.values()) == [prompt for prompt, _, _ in prompts]
    assert made.status().idle
