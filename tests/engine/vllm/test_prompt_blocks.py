"""What vLLM says of its cache is told under the names that the service knows, each once as it comes and goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from twofold.engine.vllm.core import CachedPromptBlocks
from twofold.serving.worker.state import CacheChanges


def names(*hashes):
    """vLLM's names of blocks, as its requests have them."""
    return [bytes([0] * 31 + [number]) for number in hashes]


def stored(blocks, *hashes):
    blocks.publish(KVEventBatch(ts=0.0, events=[_stored(each) for each in hashes]))


def _stored(number):
    return BlockStored(
        block_hashes=[number],
        parent_block_hash=None,
        token_ids=[],
        block_size=32,
        lora_id=None,
        medium=None,
        lora_name=None,
    )


def removed(blocks, *hashes):
    blocks.publish(KVEventBatch(ts=0.0, events=[BlockRemoved(block_hashes=list(hashes), medium=None)]))


def told(blocks):
    changes = CacheChanges()
    blocks.report(changes)
    return changes.take()


def test_a_prompts_blocks_are_told_by_the_services_names(monkeypatch):
    """And keep them when the request is over; output, and what nobody has asked for, has none."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    blocks = CachedPromptBlocks()
    blocks.expect("r", names(1, 2, 3), (b"one", b"two"))
    stored(blocks, 1, 2, 3, 9)
    assert told(blocks) == ([b"one", b"two"], [])
    blocks.forget("r")
    removed(blocks, 2, 3, 9)
    assert told(blocks) == ([], [b"two"])


def test_a_block_that_was_never_cached_is_forgotten_with_its_request(monkeypatch):
    """An aborted prompt leaves no name behind."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    blocks = CachedPromptBlocks()
    blocks.expect("r", names(1), (b"one",))
    blocks.forget("r")
    stored(blocks, 1)
    assert told(blocks) == ([], [])


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["expect", "forget", "stored", "removed"]))))
def test_what_is_told_is_what_is_cached(steps):
    """Copies of a block count as one, in any order of events, and nothing is kept of what is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
        blocks, cached, known, live = CachedPromptBlocks(), dict.fromkeys(range(1, 5), 0), set(), set()
        for number, step in steps:
            if step == "expect" and number not in live:
                live.add(number)
                blocks.expect(f"r{number}", names(number), (number,))
            elif step == "forget":
                live.discard(number)
                blocks.forget(f"r{number}")
            elif step == "stored":
                cached[number] += number in live or cached[number] > 0
                stored(blocks, number)
            elif step == "removed":
                cached[number] -= cached[number] > 0
                removed(blocks, number)
            come, gone = told(blocks)
            known = (known | set(come)) - set(gone)
            assert known == {each for each, count in cached.items() if count}
        for number in range(1, 5):
            blocks.forget(f"r{number}")
            removed(blocks, *[number] * cached[number])
        assert not blocks._names
        assert not blocks._wanted
