"""Translation of vLLM 0.32's KV cache events (msgpack) to prefix keys."""

import msgspec
import pytest

from twofold.kvcache.prefix import prefix_keys
from twofold.request import Generation, Request, SamplingParams
from twofold.serving.upstream.forecast import UpstreamPromptKeys
from twofold.serving.upstream.kv_events import CachedBlocks, decode

SIZE = 4
PROMPT = list(range(20))
KEYS = list(prefix_keys(PROMPT, SIZE))
CLEARED = {"type": "AllBlocksCleared"}


def stored(first, last, parent=None, prompt=PROMPT, **fields):
    """Return vLLM's `BlockStored` event for the given blocks of a prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": [b"h%d" % number for number in range(first, last)],
        "parent_block_hash": parent,
        "token_ids": prompt[first * SIZE : last * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "session_id": "some",
        **fields,
    }


def removed(*numbers, **fields):
    names = [b"h%d" % number for number in numbers]
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", **fields}


class Index:
    """Stub of the prefix index that records its changes."""

    def __init__(self):
        self.changes = []

    def stored(self, instance, keys):
        self.changes.append(("stored", keys))

    def removed(self, instance, keys):
        self.changes.append(("removed", keys))

    def lost(self, instance):
        self.changes.append(("lost", []))


def follow(*events):
    """Translate vLLM events; return the resulting changes of the prefix index."""
    index = Index()
    CachedBlocks("one", index, SIZE).follow(decode(msgspec.msgpack.encode([1.5, events, 0])))
    return index.changes


def test_stored_blocks_get_the_prompt_keys():
    """The stored blocks of a prompt get the same keys whether vLLM reports them in one event or in several."""
    changes = follow(stored(0, 2), stored(2, 5, parent=b"h1"))
    assert changes == [("stored", KEYS[:2]), ("stored", KEYS[2:])]


def test_removed_blocks_are_forgotten():
    changes = follow(stored(0, 3), removed(2, 9), removed(0, medium="CPU"), removed(0, group_idx=1))
    assert changes[1:] == [("removed", [KEYS[2]])]


def test_clearing_forgets_every_block():
    changes = follow(stored(0, 3), CLEARED, removed(0))
    assert changes[1:] == [("lost", []), ("removed", [])]


@pytest.mark.parametrize(
    "event",
    [
        stored(1, 2, parent=b"never heard of"),
        stored(0, 2, medium="CPU"),
        stored(0, 2, lora_name="other"),
        stored(0, 2, group_idx=1),
        stored(0, 2, block_size=8),
        stored(0, 1, extra_keys=[[["image", 0]]]),
        stored(0, 1, extra_keys=[["salt", "more"]]),
    ],
)
def test_ignores_blocks_that_no_prompt_can_match(event):
    assert follow(event) == []


@pytest.mark.parametrize(("key", "salt"), [("", ""), ("", "mine"), ("alice", ""), ("alice", "mine"), ("bob", "")])
def test_prompt_keys_equal_event_keys(key, salt):
    """The gateway's block keys for a prompt equal the keys derived from vLLM's events."""
    names = UpstreamPromptKeys()
    names.block_tokens = SIZE
    request = Request(id="r", arrival_s=0.0, prompt_tokens=20, output_tokens=3)
    sampling = SamplingParams(max_tokens=3)
    asked = Generation(request=request, prompt_token_ids=PROMPT, sampling=sampling, key=key, cache_salt=salt)
    named = names.name(asked)
    extra = [[named.cache_salt], None] if named.cache_salt else None
    ((_, found),) = follow(stored(0, 2, extra_keys=extra))
    assert list(named.request.prefix_blocks[:2]) == found
    assert bool(named.cache_salt) == bool(key or salt)


def test_api_keys_do_not_share_prefixes():
    """Requests with different API keys or cache salts share no prefix in vLLM's cache."""
    names = UpstreamPromptKeys()
    request = Request(id="r", arrival_s=0.0, prompt_tokens=20, output_tokens=3)
    salts = {
        names.name(
            Generation(
                request=request,
                prompt_token_ids=PROMPT,
                sampling=SamplingParams(max_tokens=3),
                key=key,
                cache_salt=salt,
            )
        ).cache_salt
        for key in ("alice", "bob")
        for salt in ("", "one")
    }
    assert len(salts) == 4


def test_rejects_other_payloads():
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode({"not": "events"}))
