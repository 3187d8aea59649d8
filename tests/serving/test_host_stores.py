"""What the controller knows of the stores of hosts."""

from twofold.serving.controller.forecast import HostStores
from twofold.serving.messages import StoreChanged

KEYS = [b"a", b"b", b"c"]


def changed(stores, host, epoch, stored=(), removed=(), address=None):
    message = StoreChanged(
        host=host, epoch=epoch, stored=list(stored), removed=list(removed), address=address
    )
    stores.changed(message)


def test_leading_blocks_by_host():
    """What comes and goes is counted from the first block on."""
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "far", 2, KEYS[:2])
    assert stores.index.prefixes(KEYS) == {"": 3, "far": 2}
    changed(stores, "", 1, removed=KEYS[1:2])
    assert stores.index.prefixes(KEYS) == {"": 1, "far": 2}


def test_another_life_has_what_it_says():
    """What an earlier one had in memory is gone."""
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "", 2, KEYS[:1])
    assert stores.index.prefixes(KEYS) == {"": 1}


def test_where_a_store_gives_blocks_to_others():
    """As its last life said; those of a service of one host do not."""
    stores = HostStores()
    assert stores.address("far") is None
    changed(stores, "far", 1, KEYS, address="tcp://far:1")
    changed(stores, "far", 2, address="tcp://far:2")
    changed(stores, "", 1, KEYS)
    assert stores.address("far") == "tcp://far:2"
    assert stores.address("") is None


def test_a_host_that_is_lost_has_nothing():
    """Until it says something again, in the same life or another."""
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "far", 2, KEYS)
    stores.lost("far")
    stores.lost("nobody")
    assert stores.index.prefixes(KEYS) == {"": 3}
    changed(stores, "far", 2, KEYS[:1])
    assert stores.index.prefixes(KEYS) == {"": 3, "far": 1}
