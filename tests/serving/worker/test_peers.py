"""Connections of a worker to its peers."""

from contextlib import suppress

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import InstanceLostError, StaleEpochError
from twofold.serving.messages import Peer
from twofold.serving.worker.peers import PeerDirectory
from twofold.transport.base import MemoryDescriptor

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),), block_size=4, dtype="float32", itemsize=4)


def memory(instance, epoch):
    return MemoryDescriptor(instance=instance, epoch=epoch, address="", num_blocks=4, layout=LAYOUT)


class Connection:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


class Transport:
    """A stub of the transport that records its connections."""

    descriptor = memory("own", 1)

    def __init__(self):
        self.made = []

    def connect(self, peer):
        self.made.append(Connection())
        return self.made[-1]


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def peers(transport):
    directory = PeerDirectory(transport)
    directory.update([Peer(inbox="d's", memory=memory("d", 7))])
    return directory


def use(peers, epoch=7, error=None):
    with peers.connected("d", epoch) as connection:
        if error is not None:
            raise error
        return connection


def test_a_connection_is_made_once(peers, transport):
    """Two transfers to a peer that has not restarted share one connection."""
    assert use(peers) is use(peers)
    assert len(transport.made) == 1


def test_reconnects_after_a_failure(peers, transport):
    first = use(peers)
    with pytest.raises(InstanceLostError):
        use(peers, error=InstanceLostError("reset"))
    assert first.closed
    assert use(peers) is transport.made[1]
    assert not transport.made[1].closed


def test_a_late_failure_keeps_the_new_connection(peers, transport):
    """A failure on an old connection does not close its replacement."""
    with suppress(InstanceLostError), peers.connected("d", 7):
        with pytest.raises(InstanceLostError):
            use(peers, error=InstanceLostError("reset"))
        assert use(peers) is transport.made[1]
        raise InstanceLostError("reset")
    assert not transport.made[1].closed
    assert use(peers) is transport.made[1]


def test_a_new_epoch_gets_a_new_connection(peers):
    first = use(peers)
    with pytest.raises(StaleEpochError):
        use(peers, epoch=8)
    peers.update([Peer(inbox="d's", memory=memory("d", 8))])
    assert first.closed
    assert use(peers, epoch=8) is not first
    peers.remove("d")
    with pytest.raises(InstanceLostError):
        use(peers, epoch=8)
