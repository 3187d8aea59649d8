"""Prefix reuse within an instance: prompts skip tokens that earlier prompts computed."""

import msgspec
import pytest

from support.scheduled import EPOCH, arrive, ran, request, scheduler, step
from twofold.batch import BatchItem
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.request import Phase

PREFILLS = [
    "prefill",
    "prefill-balanced",
    "prefill-chunks",
    "prefill-first",
    "mixed",
    "inlined",
    "chunked-prefill",
    "splitwise",
]


def shared(blocks, size):
    return PrefixBlockAllocator(size, PrefixCache(blocks, create_eviction("lru")))


def reusing(batcher, **how):
    return scheduler(batcher, accounts=shared, **how)


def prompt(name, tokens=10, keys="abcdefgh", **how):
    """Return a request whose block keys are made of the letters of `keys`."""
    blocks = tuple(keys[: end + 1].encode() for end in range(tokens // 4))
    return msgspec.structs.replace(request(name, prompt=tokens, **how), prefix_blocks=blocks)


def items(instance):
    """Run one batch and return its prefill items."""
    batch = instance.next_batch(0.0)
    instance.complete(batch)
    return [item for item in batch.items if item.phase is Phase.PREFILL]


@pytest.mark.parametrize("batcher", PREFILLS)
def test_second_prompt_skips_shared_blocks(batcher):
    instance = reusing(batcher)
    for name, keys, found in (("a", "abc", 0), ("b", "abx", 8), ("c", "axc", 4), ("d", "xbc", 0)):
        instance.submit(prompt(name, 14, keys), decodes_here=False)
        assert items(instance) == [BatchItem(name, Phase.PREFILL, 14 - found, found, samples=True)]
        assert instance.reused_tokens(name) == found
        instance.handed_off(name)
    assert instance.status().idle
    assert instance.status().blocks_cached == 3 + 1 + 2 + 3


@pytest.mark.parametrize("batcher", PREFILLS)
def test_fully_cached_prompt_recomputes_its_last_token(batcher):
    instance = reusing(batcher)
    instance.submit(prompt("a", 8), decodes_here=False)
    step(instance)
    instance.submit(prompt("b", 8), decodes_here=False)
    batch = instance.next_batch(0.0)
    assert batch.items == (BatchItem("b", Phase.PREFILL, 1, 7, samples=True),)
    first, second = instance.blocks_of("a"), instance.blocks_of("b")
    assert first[0] == second[0]
    assert instance.copy_of("b") == (first[1], second[1])
    instance.complete(batch)
    assert instance.copy_of("b") is None
    instance.handed_off("a")
    instance.handed_off("b")
    instance.submit(prompt("c", 8), decodes_here=False)
    batch = instance.next_batch(0.0)
    assert batch.items == (BatchItem("c", Phase.PREFILL, 1, 7, samples=True),)
    assert instance.copy_of("c") is None
    assert list(instance.blocks_of("c")) == list(first)


def test_publishes_full_blocks_after_each_chunk():
    """A prompt reuses full blocks of an earlier prompt whose chunked prefill is still running."""
    instance = reusing("chunked-prefill", budget=10)
    instance.submit(prompt("a", 22, "abcde"), decodes_here=True)
    step_items = items(instance)
    assert [(item.num_tokens, item.context_tokens) for item in step_items] == [(10, 0)]
    instance.submit(prompt("b", 14, "abc"), decodes_here=True)
    assert [(i.request_id, i.num_tokens, i.context_tokens) for i in items(instance)] == [("a", 10, 10)]
    assert [(i.request_id, i.num_tokens, i.context_tokens) for i in items(instance)] == [("a", 2, 20), ("b", 2, 12)]


def test_keeps_full_blocks_of_an_aborted_prefill():
    instance = reusing("chunked-prefill", budget=8)
    instance.submit(prompt("a", 22, "abcde"), decodes_here=True)
    step(instance)
    batch = instance.next_batch(0.0)
    instance.abort("a")
    instance.complete(batch)
    assert instance.status().idle
    assert instance.status().blocks_cached == 2
    instance.submit(prompt("b", 22, "abcde"), decodes_here=True)
    assert [(item.num_tokens, item.context_tokens) for item in items(instance)] == [(8, 8)]


def test_waiting_prompt_holds_no_cached_blocks():
    """The cached prefix of a waiting prompt can be evicted."""
    instance = reusing("prefill", num_blocks=8)
    instance.submit(prompt("a", 12, "abc"), decodes_here=False)
    step(instance)
    instance.handed_off("a")
    instance.submit(prompt("b", 32, "xyzuvwst"), decodes_here=False)
    instance.submit(prompt("c", 12, "abc"), decodes_here=False)
    assert ran(instance) == ["b"], "which takes all there is"
    assert instance.status().blocks_evicted == 3
    instance.handed_off("b")
    assert [(item.num_tokens, item.context_tokens) for item in items(instance)] == [(12, 0)]


def test_selected_prompts_keep_their_cached_prefix():
    """Adding a second prompt to a batch does not evict the cached prefix of the first."""
    instance = reusing("prefill", num_blocks=10)
    instance.submit(prompt("a", 16, "abcd"), decodes_here=False)
    step(instance)
    instance.handed_off("a")
    instance.submit(prompt("b", 18, "abcd"), decodes_here=False)
    instance.submit(prompt("c", 20, "uvwxy"), decodes_here=False)
    batch = instance.next_batch(0.0)
    assert [(i.request_id, i.num_tokens) for i in batch.items] == [("b", 2), ("c", 20)]
    assert not set(instance.blocks_of("b")) & set(instance.blocks_of("c"))


def test_shared_prefix_is_stored_once():
    """Prompts with a shared prefix need fewer blocks, so more of them run at once."""
    instance = reusing("mixed", num_blocks=11)
    for number in range(4):
        instance.submit(prompt(str(number), 17, "abcd", output=4), decodes_here=True)
    assert ran(instance) == ["0", "1"], "nothing is there to be found yet"
    assert instance.status().blocks_free == 1
    assert ran(instance) == ["2", "0", "1"]


def test_publishes_received_kv_when_decode_starts():
    """Once a request decodes, later prompts can reuse its received KV."""
    instance = reusing("splitwise")
    arrive(instance, prompt("a", 10, "ab"))
    assert instance.status().blocks_cached == 0, "where it has landed it may yet have to be copied"
    assert ran(instance) == ["a"]
    instance.submit(prompt("b", 10, "ab"), decodes_here=True)
    assert [(item.num_tokens, item.context_tokens) for item in items(instance)] == [(2, 8)]


@pytest.mark.parametrize("batcher", ["decode", "splitwise"])
def test_leases_only_the_blocks_that_it_lacks(batcher):
    """The KV of earlier turns is not sent again, and no peer may write to it."""
    instance = reusing(batcher)
    first = instance.lease_now(prompt("a", 14, "abc", output=3), "p", 0.0)
    assert (first.cached_blocks, len(first.blocks)) == (0, 4)
    instance.kv_received("a", EPOCH)
    assert instance.lease_now(prompt("early", 14, "abc"), "p", 0.0).cached_blocks == 0, "it may yet have to be copied"
    assert ran(instance) == ["a"]
    table = instance.blocks_of("a")
    second = instance.lease_now(prompt("b", 15, "abx"), "p", 0.0)
    assert second.cached_blocks == 2
    assert tuple(instance.blocks_of("b")) == (*table[:2], *second.blocks)
    assert not set(second.blocks) & set(table)
    instance.abort("a")
    instance.kv_received("b", EPOCH)
    assert ran(instance) == ["b"]
    for name in ("early", "b"):
        instance.abort(name)
    instance.end_lease("early", EPOCH)
    assert instance.status().idle


def test_prompts_without_keys_reuse_nothing():
    instance = reusing("prefill")
    for name in "ab":
        instance.submit(request(name, prompt=12), decodes_here=False)
        assert [item.num_tokens for item in items(instance)] == [12]
    assert instance.status().blocks_cached == 0


def test_retains_a_prompt_for_its_retention_time():
    """The blocks of a prompt stay cached for `retain_s` seconds."""
    instance = reusing("prefill", num_blocks=8)

    def compute(name, keys, now, retain_s=0.0):
        asked = msgspec.structs.replace(prompt(name, 14, keys), retain_s=retain_s)
        instance.submit(asked, decodes_here=False)
        batch = instance.next_batch(now)
        instance.complete(batch)
        instance.handed_off(name)
        return instance.reused_tokens(name), batch.items[0].context_tokens

    compute("kept", "abc", 0.0, retain_s=10.0)
    compute("other", "xyz", 1.0)
    assert instance.status().blocks_pinned == 3
    for number, now in enumerate((2.0, 3.0, 4.0)):
        compute(f"flood {number}", f"{number}ij", now)
    assert compute("kept again", "abc", 5.0)[1] == 12
    assert compute("other again", "xyz", 6.0)[1] == 0
    compute("late", "lmn", 10.0)
    assert instance.status().blocks_pinned == 0
    compute("later", "opq", 11.0)
    assert compute("no more", "abc", 12.0)[1] < 12


def test_evicts_retained_blocks_for_a_prompt_that_needs_them():
    instance = reusing("prefill", num_blocks=8)
    instance.submit(msgspec.structs.replace(prompt("kept", 12, "abc"), retain_s=1e9), decodes_here=False)
    step(instance)
    instance.handed_off("kept")
    assert instance.status().blocks_pinned == 3
    instance.submit(prompt("all", 32, "xyzuvwst"), decodes_here=False)
    assert ran(instance) == ["all"]
    assert instance.status().blocks_pinned == 0


@pytest.mark.parametrize("batcher", ["mixed", "chunked-prefill", "splitwise"])
def test_the_next_turn_reuses_the_answer(batcher):
    instance = reusing(batcher)
    instance.submit(prompt("a", 10, "ab", output=8), decodes_here=True)
    while (batch := instance.next_batch(0.0)) is not None:
        for item in batch.items:
            position, rest = divmod(item.context_tokens + 1, 4)
            if item.phase is Phase.DECODE and rest == 0:
                instance.filled("a", position - 1, b"abcdef"[:position])
        instance.filled("unknown", 0, b"x")
        instance.complete(batch)
    # KV exists of 10 prompt tokens and of all output tokens but the last: four full blocks.
    assert instance.status().blocks_cached == 4
    instance.submit(prompt("b", 22, "abcdx"), decodes_here=True)
    assert items(instance) == [BatchItem("b", Phase.PREFILL, 6, 16, samples=True)]


def test_an_aborted_answer_leaves_its_full_blocks():
    instance = reusing("mixed")
    instance.submit(prompt("a", 10, "ab", output=8), decodes_here=True)
    step(instance)
    step(instance)
    batch = instance.next_batch(0.0)
    instance.filled("a", 2, b"abc")
    instance.abort("a")
    instance.filled("a", 3, b"abcd")
    instance.complete(batch)
    instance.submit(prompt("b", 22, "abcdx"), decodes_here=True)
    assert items(instance) == [BatchItem("b", Phase.PREFILL, 10, 12, samples=True)]
