"""Reports of the prompt blocks in vLLM's prefix cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from twofold.engine.vllm.core import CachedPromptBlocks
from twofold.kvcache.cache import CacheChanges


def names(*hashes):
    """Return a 32-byte vLLM block hash for each integer in `hashes`."""
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


def test_reports_prompt_blocks_by_the_service_keys(monkeypatch):
    """Reports of cached prompt blocks contain Twofold's block keys instead of vLLM's hashes."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    blocks = CachedPromptBlocks()
    blocks.expect("r", names(1, 2, 3), (b"one", b"two"))
    stored(blocks, 1, 2, 3, 9)
    assert told(blocks) == ([b"one", b"two"], [])
    blocks.forget("r")
    removed(blocks, 2, 3, 9)
    assert told(blocks) == ([], [b"two"])


def test_an_aborted_prompt_leaves_no_names(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    blocks = CachedPromptBlocks()
    blocks.expect("r", names(1), (b"one",))
    blocks.forget("r")
    stored(blocks, 1)
    assert told(blocks) == ([], [])


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["expect", "forget", "stored", "removed"]))))
def test_reports_equal_the_cache(steps):
    """After any sequence of events, the reported blocks are the cached blocks."""
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
