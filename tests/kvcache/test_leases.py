"""Leases."""

import pytest

from twofold.errors import StaleEpochError
from twofold.kvcache.leases import LeaseTable
from twofold.kvcache.paged import PagedBlockAllocator


@pytest.fixture
def blocks():
    return PagedBlockAllocator(num_blocks=8, block_size=4)


@pytest.fixture
def held(blocks):
    return blocks.allocate("r", 10)


@pytest.fixture
def book(blocks):
    return LeaseTable(blocks, "decode-0", epoch=7, lease_s=10.0)


def test_leased_blocks_outlive_their_request(blocks, book, held):
    """An aborted request does not free memory that its source may still write."""
    lease = book.grant(held, "prefill-0", now=0.0)
    blocks.release(held)
    assert blocks.num_free == 5
    assert book.end("r", lease.epoch)
    assert blocks.num_free == 8
    assert not book.end("r", lease.epoch), "a lease ends once"


def test_another_epoch_is_refused(book, held):
    """Messages about an earlier life of the instance change nothing."""
    book.grant(held, "prefill-0", now=0.0)
    with pytest.raises(StaleEpochError):
        book.end("r", epoch=6)
    assert "r" in book


def test_heartbeats_keep_a_lease_alive(book, held):
    """A lease expires a lease time after its source's last sign of life, and only its source's counts."""
    book.grant(held, "prefill-0", now=0.0)
    assert book.expired(now=9.9) == []
    book.renew("prefill-1", now=9.9)
    book.renew("prefill-0", now=9.9)
    assert book.expired(now=19.8) == []
    assert [lease.request_id for lease in book.expired(now=20.0)] == ["r"]


def test_an_expired_lease_is_reported_once_and_keeps_its_blocks(blocks, book, held):
    """A source that sleeps may yet wake and write: its blocks go to nobody until it says that it is done."""
    lease = book.grant(held, "prefill-0", now=0.0)
    assert len(book.expired(now=11.0)) == 1
    book.renew("prefill-0", now=12.0)
    assert book.expired(now=99.0) == []
    blocks.release(held)
    assert blocks.num_free == 5
    assert book.end("r", lease.epoch)
    assert blocks.num_free == 8


def test_time_in_which_nobody_listened_counts_against_nobody(book, held):
    """After a stop of its own an instance gives its sources a fresh start."""
    book.grant(held, "prefill-0", now=0.0)
    book.renew_all(now=50.0)
    assert book.expired(now=59.0) == []


def test_a_request_has_one_lease_at_a_time(book, held):
    """Two sources would write over each other."""
    book.grant(held, "prefill-0", now=0.0)
    with pytest.raises(ValueError, match="r already has a lease"):
        book.grant(held, "prefill-1", now=0.0)


def test_a_watcher_sees_a_lease_before_it_may_be_used_and_its_end_before_its_blocks_are_free(blocks, held):
    """What it allows and forbids is in force in time."""
    seen = []

    class Watcher:
        def granted(self, lease):
            seen.append(("granted", lease.request_id, blocks.num_in_flight))

        def ended(self, lease):
            seen.append(("ended", lease.request_id, blocks.num_in_flight))

    book = LeaseTable(blocks, "decode-0", epoch=7, lease_s=10.0, watcher=Watcher())
    book.grant(held, "prefill-0", now=0.0)
    book.end("r", epoch=7)
    book.end("r", epoch=7)
    assert seen == [("granted", "r", 3), ("ended", "r", 3)]
