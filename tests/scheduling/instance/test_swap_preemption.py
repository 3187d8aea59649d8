"""Swap preemption: which sequences are swapped out, and when they resume."""

import pytest

from support.scheduled import EPOCH, request, scheduler, step
from twofold.kvcache.allocator import BlockAllocator
from twofold.scheduling.instance.swap_preemption import SwapPreemption


def growing(num_blocks, batcher="decode", swap_blocks=100):
    """Return an instance with swap preemption."""
    return scheduler(batcher, num_blocks=num_blocks, swap_blocks=swap_blocks)


def lease(instance, *names, prompt=8, output=9):
    """Lease blocks for each request."""
    # By default, 3 of the 4 blocks that a request will need.
    for name in names:
        assert instance.lease_now(request(name, prompt, output), "p", 0.0) is not None


def arrive(instance, *names, **sizes):
    lease(instance, *names, **sizes)
    for name in names:
        assert instance.kv_received(name, EPOCH)


def turn(instance):
    """Run one iteration; return its request ids and its swaps."""
    batch = instance.next_batch(0.0)
    copies = [(copy.out, copy.device_blocks, copy.host_blocks) for copy in instance.swap.take_copies()]
    instance.complete(batch)
    return [item.request_id for item in batch.items], copies


def test_allocates_prompt_and_one_step_then_step_by_step():
    decode = growing(12)
    arrive(decode, "a", output=10)
    used = []
    while not decode.empty:
        step(decode)
        used.append(12 - decode.status().blocks_free)
    assert used == [3, 3, 3, 4, 4, 4, 4, 5, 0]
    assert decode.status().idle


def test_swaps_out_the_latest_sequence_without_free_blocks():
    """When blocks run out, the last sequence to join is swapped out."""
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
        assert turn(decode) == (["a"], []), "b's blocks and another step do not fit"
    batch = decode.next_batch(0.0)
    ((out, _, host),) = [(c.out, c.device_blocks, c.host_blocks) for c in decode.swap.take_copies()]
    assert (out, host) == (False, (0, 1, 2))
    assert [(item.request_id, item.context_tokens) for item in batch.items] == [("b", 12)]
    assert decode.status().blocks_in_flight == 4, "they are in flight until the copy is done"
    decode.complete(batch)
    assert decode.status().blocks_in_flight == 0
    while not decode.empty:
        turn(decode)
    assert decode.status().idle
    assert decode.status().swap_blocks_free == 100


def test_swaps_out_as_few_sequences_as_possible():
    decode = growing(9)
    arrive(decode, "a", "b", "c")
    for _ in range(4):
        turn(decode)
    third = tuple(decode.blocks_of("c"))
    assert turn(decode) == (["a", "b"], [(True, third, (0, 1, 2))]), "its memory is enough for both"
    decode.abort("b")
    running, ((out, _, host),) = turn(decode)
    assert (running, out, host) == (["a", "c"], False, (0, 1, 2))


def test_admits_none_while_sequences_are_paused():
    decode = growing(6)
    arrive(decode, "a", "b")
    decode.reserve(request("c", prompt=1, output=2), "p")
    for _ in range(5):
        turn(decode)
        assert decode.grant(0.0) == []
    decode.abort("b")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["c"]


def test_does_not_swap_out_blocks_in_a_transfer():
    """A sequence whose KV is still being received is not swapped out."""
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


def test_admission_is_bounded_by_host_blocks():
    """A request is admitted only if host memory could hold the KV of all admitted requests at once."""
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


def test_aborts_a_swapped_request():
    """The abort frees the request's host blocks at once."""
    decode = growing(6)
    arrive(decode, "a", "b")
    for _ in range(5):
        turn(decode)
    decode.abort("b")
    assert decode.status().swap_blocks_free == 100
    for _ in range(3):
        assert turn(decode)[0] == ["a"]
    assert decode.status().idle


def test_stopped_request_is_not_extended():
    """A request that stops when its blocks are full allocates no further block."""
    decode = growing(3)
    arrive(decode, "a", output=90)
    for _ in range(3):
        step(decode)
    step(decode, {"a"})
    assert decode.status().idle


def test_rejects_a_step_without_tokens():
    with pytest.raises(ValueError, match="at least one token"):
        SwapPreemption(BlockAllocator(1, 1), BlockAllocator(1, 1), 0)
