"""What the controller knows of the stores of hosts."""

from twofold.serving.host_stores import HostStores
from twofold.serving.messages import StoreChanged

KEYS = [b"a", b"b", b"c"]


def changed(stores, host, epoch, stored=(), removed=()):
    stores.changed(StoreChanged(host=host, epoch=epoch, stored=list(stored), removed=list(removed)))


def test_leading_blocks_by_host():
    """What comes and goes is counted from the first block on."""
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "far", 2, KEYS[:2])
    assert stores.prefixes(KEYS) == {"": 3, "far": 2}
    changed(stores, "", 1, removed=KEYS[1:2])
    assert stores.prefixes(KEYS) == {"": 1, "far": 2}


def test_another_life_has_what_it_says():
    """What an earlier one had in memory is gone."""
    stores = HostStores()
    changed(stores, "", 1, KEYS)
    changed(stores, "", 2, KEYS[:1])
    assert stores.prefixes(KEYS) == {"": 1}
