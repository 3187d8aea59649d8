"""The instance scheduler, driven through whole lives of requests."""

import pytest

from twofold.kvcache.blocks import BlockManager
from twofold.kvcache.leases import LeaseBook
from twofold.request import FinishReason, Request
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance import InstanceScheduler

EPOCH = 3


def scheduler(batcher, num_blocks=64, block_size=4, max_seqs=16, budget=2048):
    blocks = BlockManager(num_blocks, block_size)
    leases = LeaseBook(blocks, batcher, EPOCH, lease_s=10.0)
    return InstanceScheduler(BATCHERS[batcher](budget, max_seqs), blocks, leases, max_seqs)


def request(name, prompt=10, output=3):
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)


def step(instance, stopped=()):
    return instance.complete(instance.next_batch(0.0), stopped)


def test_a_colocated_request_makes_its_tokens_and_leaves():
    """Prefill makes token 0, each decode one more, the last one ends it."""
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    outcomes = [step(mixed)[0] for _ in range(3)]
    assert [o.index for o in outcomes] == [0, 1, 2]
    assert [o.finish_reason for o in outcomes] == [None, None, FinishReason.LENGTH]
    assert mixed.status().idle


def test_a_stop_token_ends_a_request_early():
    """The driver says which sampled tokens end the output."""
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    assert step(mixed, stopped={"a"})[0].finish_reason is FinishReason.STOP
    assert mixed.next_batch(0.0) is None


def test_prefill_blocks_stay_held_until_the_hand_off_is_over():
    """The request is done here with its first token, but its KV is still being read."""
    prefill = scheduler("prefill")
    prefill.submit(request("a"), decodes_here=False)
    outcome = step(prefill)[0]
    assert outcome.hands_off
    assert prefill.status().blocks_free == 61
    prefill.handed_off("a")
    assert prefill.status().idle


def test_leases_wait_for_room_first_come_first_served():
    """A large request at the head of the lease queue is not overtaken by a small one."""
    decode = scheduler("decode", num_blocks=10)
    for name, prompt in (("a", 20), ("b", 30), ("c", 4)):
        decode.reserve(request(name, prompt=prompt), "p")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["a"]
    decode.abort("a")
    assert decode.grant(0.0) == [], "the source of a's lease may still write"
    decode.landed("a", EPOCH)
    assert [lease.request_id for lease in decode.grant(0.0)] == ["b", "c"]


def test_a_landed_request_decodes_from_its_second_token():
    """The first token came from the prefill instance."""
    decode = scheduler("decode")
    decode.reserve(request("a"), "p")
    decode.grant(0.0)
    assert decode.next_batch(0.0) is None, "nothing runs before the KV cache has landed"
    assert decode.landed("a", EPOCH)
    assert [step(decode)[0].index for _ in range(2)] == [1, 2]
    assert decode.status().idle


def test_an_abort_in_a_running_batch_keeps_its_blocks_until_the_batch_ends():
    """The engine is still writing to them."""
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    batch = mixed.next_batch(0.0)
    mixed.abort("a")
    assert mixed.status().blocks_free == 61
    assert mixed.complete(batch) == []
    assert mixed.status().idle


def test_a_request_is_known_once():
    """Sending it twice is a fault of the sender, said at once."""
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    with pytest.raises(ValueError, match="already here"):
        mixed.submit(request("a"), decodes_here=True)


def test_a_dead_source_takes_its_reservations_and_leases_with_it():
    """Nothing waits for KV that will never come, and nobody else's turn is held up by it."""
    decode = scheduler("decode", num_blocks=10)
    for name, prompt, source in (("a", 20, "dead"), ("b", 30, "dead"), ("c", 4, "alive")):
        decode.reserve(request(name, prompt=prompt), source)
    decode.grant(0.0)
    assert decode.lose_source("dead") == ["b", "a"]
    for name in "ab":
        decode.abort(name)
    assert [lease.request_id for lease in decode.grant(0.0)] == ["c"]
