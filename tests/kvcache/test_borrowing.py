"""Blocks of engine memory that somebody reads or fills who is no request."""

import pytest

from twofold.errors import OutOfBlocksError
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PrefixBlockAllocator

KEYS = [b"a", b"b", b"c", b"d"]


def test_what_is_filled_is_found_when_it_was_published():
    """And stays when it is given back, as what a request computed does; what was not published does not."""
    blocks = PrefixBlockAllocator(8, 4, create_eviction("lru"))
    grant, here = blocks.borrow("store", KEYS)
    assert (here, len(blocks.blocks_of(grant)), blocks.num_free) == (0, 4, 4)
    blocks.publish(grant, KEYS[:3])
    blocks.release(grant)
    assert blocks.match(KEYS) == 3
    assert blocks.num_free == 8
    assert not blocks.hits + blocks.misses, "no request asked"


def test_what_is_here_is_lent_and_stays_meanwhile():
    """Those who read have the same blocks, which nobody is given before they are done."""
    blocks = PrefixBlockAllocator(4, 4, create_eviction("lru"))
    grant, _ = blocks.borrow("store", KEYS[:2])
    blocks.publish(grant, KEYS[:2])
    lent, here = blocks.borrow("reader", KEYS[:3])
    assert here == 2
    assert list(blocks.blocks_of(lent))[:2] == list(blocks.blocks_of(grant))
    blocks.release(grant)
    with pytest.raises(OutOfBlocksError):
        blocks.borrow("other", [b"x", b"y"])
    blocks.release(lent)
    blocks.borrow("other", [b"w", b"x", b"y", b"z"])
    assert blocks.match(KEYS) == 0
