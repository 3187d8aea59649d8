"""What each batcher puts into an iteration."""

import pytest

from twofold.kvcache.blocks import BlockManager
from twofold.request import Phase, Request
from twofold.scheduling.batcher import Room
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.sequence import ScheduledSequence


def waiting(*prompt_lengths, decodes_here=True):
    requests = [
        Request(id=f"w{i}", arrival_s=0.0, prompt_tokens=length, output_tokens=8)
        for i, length in enumerate(prompt_lengths)
    ]
    return [ScheduledSequence(request, decodes_here) for request in requests]


def decoding(count, prompt=10):
    requests = [
        Request(id=f"d{i}", arrival_s=0.0, prompt_tokens=prompt, output_tokens=8) for i in range(count)
    ]
    return [ScheduledSequence(r, decodes_here=True, computed=prompt, generated=1) for r in requests]


def room(blocks=1000, seats=64, block_size=16):
    return Room(BlockManager(max(blocks, 1), block_size), blocks, seats)


def shape(items):
    return [(item.request_id, item.num_tokens) for item in items]


def test_prefill_stops_at_its_token_budget():
    """First come first served up to 2,048 tokens; what exceeds waits, and nothing overtakes it."""
    items = BATCHERS["prefill"](2048, 64).select(waiting(1000, 1000, 100, 10), [], room())
    assert shape(items) == [("w0", 1000), ("w1", 1000)]


def test_a_prompt_over_the_budget_runs_alone():
    """Splitwise section 4.2."""
    items = BATCHERS["prefill"](2048, 64).select(waiting(5000, 10), [], room())
    assert shape(items) == [("w0", 5000)]
    items = BATCHERS["prefill"](2048, 64).select(waiting(10, 5000), [], room())
    assert shape(items) == [("w0", 10)]


def test_a_large_prompt_without_room_is_not_overtaken():
    """Small requests behind it must not starve it of blocks."""
    items = BATCHERS["prefill"](2048, 64).select(waiting(10, 1000, 10), [], room(blocks=5))
    assert shape(items) == [("w0", 10)]


def test_a_handed_off_prompt_takes_blocks_for_the_prompt_alone():
    """The output's KV is the decode instance's business."""
    (kept,), (handed,) = waiting(16), waiting(16, decodes_here=False)
    assert (kept.cache_tokens, handed.cache_tokens) == (16 + 8 - 1, 16)


def test_decode_runs_everybody_once_up_to_the_limit():
    """One token each, in the order of arrival."""
    items = BATCHERS["decode"](2048, 3).select([], decoding(5), room())
    assert shape(items) == [("d0", 1), ("d1", 1), ("d2", 1)]
    assert all(item.phase is Phase.DECODE and item.context_tokens == 10 for item in items)


def test_mixed_puts_whole_prompts_before_decodes():
    """The colocated baseline that interferes."""
    items = BATCHERS["mixed"](2048, 64).select(waiting(1500), decoding(2), room())
    assert shape(items) == [("w0", 1500), ("d0", 1), ("d1", 1)]


def test_chunked_prefill_fills_what_decodes_leave():
    """Decodes first; then prompts started earlier; then new ones; never more than the budget."""
    started = waiting(300)[0]
    started.computed = 100
    items = BATCHERS["chunked-prefill"](256, 64).select(waiting(100)[:1], [*decoding(2), started], room())
    assert shape(items) == [("d0", 1), ("d1", 1), ("w0", 200), ("w0", 54)]
    assert [item.samples for item in items] == [True, True, True, False]


@pytest.mark.parametrize("name", sorted(BATCHERS))
def test_nothing_to_do_makes_no_items(name):
    """An idle instance runs no empty batches."""
    assert BATCHERS[name](512, 8).select([], [], room()) == []
