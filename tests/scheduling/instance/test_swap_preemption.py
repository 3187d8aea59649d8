"""Decodes that take memory as they go, one decision at a time."""

import pytest

from support.scheduled import EPOCH, request, scheduler, step
from twofold.kvcache.allocator import BlockAllocator
from twofold.scheduling.instance.swap_preemption import SwapPreemption


def growing(num_blocks, batcher="decode", swap_blocks=100):
    """Blocks of 4 tokens, and steps of a block."""
    return scheduler(batcher, num_blocks=num_blocks, swap_blocks=swap_blocks)


def lease(instance, *names, prompt=8, output=9):
    """Room for requests: by default 3 blocks each, and 4 in the end."""
    for name in names:
        assert instance.lease_now(request(name, prompt, output), "p", 0.0) is not None


def arrive(instance, *names, **sizes):
    lease(instance, *names, **sizes)
    for name in names:
        assert instance.kv_received(name, EPOCH)


def turn(instance):
    """One iteration: who was in it, and what was copied before it (out?, blocks here, blocks on the host)."""
    batch = instance.next_batch(0.0)
    copies = [(copy.out, copy.device_blocks, copy.host_blocks) for copy in instance.swap.take_copies()]
    instance.complete(batch)
    return [item.request_id for item in batch.items], copies


def test_a_request_takes_its_prompt_and_a_step_and_then_a_step_at_a_time():
    """And no more than it needs in the end: the last output token has no KV."""
    decode = growing(12)
    arrive(decode, "a", output=10)
    used = []
    while not decode.empty:
        step(decode)
        used.append(12 - decode.status().blocks_free)
    assert used == [3, 3, 3, 4, 4, 4, 4, 5, 0]
    assert decode.status().idle


def test_without_room_the_last_that_came_is_swapped_out_until_there_is_some():
    """Its blocks are the first one's in the same iteration, and it goes on where it was."""
    decode = growing(6)
    arrive(decode, "a", "b")
    blocks = tuple(decode.blocks_of("b"))
    for _ in range(4):
        assert turn(decode) == (["a", "b"], [])
    assert turn(decode) == (["a"], [(True, blocks, (0, 1, 2))])
    assert decode.blocks_of("a")[3] in blocks
    status = decode.status()
    assert (status.swapped, status.swaps, status.swap_blocks_free, status.running) == (1, 1, 97, 2)
    for _ in range(3):
        assert turn(decode) == (["a"], []), "there is no room for what b has, and a step"
    batch = decode.next_batch(0.0)
    ((out, _, host),) = [(c.out, c.device_blocks, c.host_blocks) for c in decode.swap.take_copies()]
    assert (out, host) == (False, (0, 1, 2))
    assert [(item.request_id, item.context_tokens) for item in batch.items] == [("b", 12)]
    assert decode.status().blocks_in_flight == 4, "nobody else gets them while they are filled"
    decode.complete(batch)
    assert decode.status().blocks_in_flight == 0
    while not decode.empty:
        turn(decode)
    assert decode.status().idle
    assert decode.status().swap_blocks_free == 100


def test_no_more_are_swapped_out_than_it_takes():
    """The last of three makes room for both others, and comes back when one of them has gone."""
    decode = growing(9)
    arrive(decode, "a", "b", "c")
    for _ in range(4):
        turn(decode)
    third = tuple(decode.blocks_of("c"))
    assert turn(decode) == (["a", "b"], [(True, third, (0, 1, 2))]), "its memory is enough for both"
    decode.abort("b")
    running, ((out, _, host),) = turn(decode)
    assert (running, out, host) == (["a", "c"], False, (0, 1, 2))


def test_nobody_begins_while_somebody_stands_still():
    """A lease is granted when those that were swapped out are back, and there is room for a step more of all."""
    decode = growing(6)
    arrive(decode, "a", "b")
    decode.reserve(request("c", prompt=1, output=2), "p")
    for _ in range(5):
        turn(decode)
        assert decode.grant(0.0) == []
    decode.abort("b")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["c"]


def test_what_a_transfer_may_touch_stays_where_it_is():
    """One that waits for its KV cannot be swapped out: the first then stands still, with its memory, until it can."""
    decode = growing(6)
    lease(decode, "a", "b")
    decode.kv_received("a", EPOCH)
    for _ in range(4):
        turn(decode)
    assert decode.next_batch(0.0) is None
    assert (decode.status().blocks_free, decode.status().swapped) == (0, 0)
    decode.kv_received("b", EPOCH)
    running, ((out, _, _),) = turn(decode)
    assert (running, out) == (["a"], True)


def test_the_host_has_a_place_for_all_that_begin():
    """So that swapping cannot fail; what has no place there waits, whatever room there is here."""
    decode = growing(100, swap_blocks=8)
    for name in "abc":
        decode.reserve(request(name, prompt=8, output=9), "p")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["a", "b"]
    decode.abort("a")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["c"]
    mixed = growing(100, swap_blocks=8, batcher="mixed")
    for name in "abc":
        mixed.submit(request(name, prompt=8, output=9), decodes_here=True)
    assert turn(mixed)[0] == ["a", "b"]


def test_a_swapped_request_can_be_aborted():
    """Its place on the host is free at once."""
    decode = growing(6)
    arrive(decode, "a", "b")
    for _ in range(5):
        turn(decode)
    decode.abort("b")
    assert decode.status().swap_blocks_free == 100
    for _ in range(3):
        assert turn(decode)[0] == ["a"]
    assert decode.status().idle


def test_one_that_stops_by_itself_takes_no_more_memory():
    """Its last token came with the last of its memory."""
    decode = growing(3)
    arrive(decode, "a", output=90)
    for _ in range(3):
        step(decode)
    step(decode, {"a"})
    assert decode.status().idle


def test_memory_grows_by_something():
    """A step of nothing would never end."""
    with pytest.raises(ValueError, match="at least one token"):
        SwapPreemption(BlockAllocator(1, 1), BlockAllocator(1, 1), 0)
