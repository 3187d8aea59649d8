"""Leases, the rights to write KV into blocks of another instance: epochs, deadlines and renewal."""

import pytest

from twofold.errors import StaleEpochError
from twofold.kvcache.allocator import LeaseTable
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


def test_keeps_leased_blocks_after_the_request_ends(blocks, book, held):
    lease = book.grant(held, "prefill-0", now=0.0)
    blocks.release(held)
    assert blocks.num_free == 5
    assert book.end("r", lease.epoch)
    assert blocks.num_free == 8
    assert not book.end("r", lease.epoch), "a lease ends once"


def test_rejects_another_epoch(book, held):
    book.grant(held, "prefill-0", now=0.0)
    with pytest.raises(StaleEpochError):
        book.end("r", epoch=6)
    assert "r" in book


def test_heartbeats_of_the_source_extend_its_leases(book, held):
    book.grant(held, "prefill-0", now=0.0)
    assert book.expired(now=9.9) == []
    book.renew("prefill-1", now=9.9)
    book.renew("prefill-0", now=9.9)
    assert book.expired(now=19.8) == []
    assert [lease.request_id for lease in book.expired(now=20.0)] == ["r"]


def test_reports_an_expired_lease_once_and_keeps_its_blocks(blocks, book, held):
    lease = book.grant(held, "prefill-0", now=0.0)
    assert len(book.expired(now=11.0)) == 1
    book.renew("prefill-0", now=12.0)
    assert book.expired(now=99.0) == []
    blocks.release(held)
    assert blocks.num_free == 5
    assert book.end("r", lease.epoch)
    assert blocks.num_free == 8


def test_renewal_of_all_sources_extends_every_lease(book, held):
    book.grant(held, "prefill-0", now=0.0)
    book.renew(None, now=50.0)
    assert book.expired(now=59.0) == []


def test_rejects_a_second_lease_of_a_request(book, held):
    book.grant(held, "prefill-0", now=0.0)
    with pytest.raises(ValueError, match="r already has a lease"):
        book.grant(held, "prefill-1", now=0.0)


def test_notifies_the_watcher_while_blocks_are_in_flight(blocks, held):
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
