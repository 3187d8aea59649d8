"""The controller's index of the blocks in each host's KV store."""

from twofold.serving.controller.forecast import HostStores
from twofold.serving.messages import StoreChanged

KEYS = [b"a", b"b", b"c"]


def changed(stores, host, epoch, stored=(), removed=(), address=None):
    message = StoreChanged(host=host, epoch=epoch, stored=list(stored), removed=list(removed), address=address)
    stores.changed(message)


def test_prefix_matches_are_counted_by_host():
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "far", 2, KEYS[:2])
    assert stores.index.prefixes(KEYS) == {"": 3, "far": 2}
    changed(stores, "", 1, removed=KEYS[1:2])
    assert stores.index.prefixes(KEYS) == {"": 1, "far": 2}


def test_a_new_epoch_replaces_the_blocks_of_the_last():
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "", 2, KEYS[:1])
    assert stores.index.prefixes(KEYS) == {"": 1}


def test_the_address_is_that_of_the_current_epoch():
    stores = HostStores()
    assert stores.address("far") is None
    changed(stores, "far", 1, KEYS, address="tcp://far:1")
    changed(stores, "far", 2, address="tcp://far:2")
    changed(stores, "", 1, KEYS)
    assert stores.address("far") == "tcp://far:2"
    assert stores.address("") is None


def test_a_lost_host_has_no_blocks_until_it_reports():
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "far", 2, KEYS)
    stores.lost("far")
    stores.lost("nobody")
    assert stores.index.prefixes(KEYS) == {"": 3}
    changed(stores, "far", 2, KEYS[:1])
    assert stores.index.prefixes(KEYS) == {"": 3, "far": 1}
