"""The transport `curve`, which encrypts KV transfers between hosts."""

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cache_peer import Cache, cache_peer, lease
from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ConfigurationError, InstanceLostError, StaleEpochError
from twofold.security.key import write_key
from twofold.transport.base import KvCacheSpec
from twofold.transport.curve_server import LeaseGate
from twofold.transport.pooled import load_transport

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),) * 3, block_size=4, dtype="float32", itemsize=4)
OURS, THEIRS = 12, 9


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    write_key(file)
    return file


@pytest.fixture(scope="module")
def peer(key):
    with cache_peer("decode", key) as running:
        yield running


@pytest.fixture
def cache(key):
    made = Cache("prefill", key)
    yield made
    made.close()


def prepared(cache, peer, blocks=(5, 6, 7)):
    """Fill two caches with known contents, and return an encrypted connection between them."""
    cache.make("curve", 1, LAYOUT, OURS, everything=False)
    theirs = peer.do("make", "curve", 2, LAYOUT, THEIRS, False)
    cache.fill(1)
    peer.do("fill", 2)
    peer.do("grant", lease("decode", 2, "prefill", blocks))
    return cache.connect(theirs)


def test_writes_leased_blocks(cache, peer):
    connection = prepared(cache, peer)
    expected, ours = peer.do("rows"), cache.rows()
    connection.write(range(3), [1, 2], [7, 5])
    for layer in range(3):
        expected[layer][[7, 5]] = ours[layer][[1, 2]]
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), expected, strict=True))


@pytest.mark.parametrize("blocks", [[4], [5, 8], [5, 6, 7, 8], [0], [-4]])
def test_denies_writes_outside_the_lease(cache, peer, blocks):
    connection = prepared(cache, peer)
    before = peer.do("rows")
    with pytest.raises(StaleEpochError, match="decode refused KV: prefill has no lease"):
        connection.write(range(3), list(range(len(blocks))), blocks)
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), before, strict=True))


def test_denies_writes_after_the_lease(cache, peer):
    connection = prepared(cache, peer)
    connection.write(range(1), [1], [5])
    before = peer.do("rows")
    peer.do("revoke", lease("decode", 2, "prefill", (5, 6, 7)))
    with pytest.raises(StaleEpochError):
        connection.write(range(1, 2), [1], [5])
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), before, strict=True))


def test_denies_requests_to_another_epoch(cache, peer):
    connection = prepared(cache, peer)
    connection._peer = msgspec.structs.replace(connection._peer, epoch=1)
    with pytest.raises(StaleEpochError, match="epoch 1 is over"):
        connection.write(range(1), [1], [5])


def test_waits_for_a_silent_peer_until_closed(cache, key):
    with cache_peer("decode", key) as other:
        connection = prepared(cache, other)
    failed = []

    def write():
        try:
            connection.write(range(1), [1], [5])
        except InstanceLostError as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    connection.close()
    writer.join(60)
    assert failed
    with pytest.raises(InstanceLostError):
        connection.write(range(1), [1], [5])


def test_uses_shared_memory_within_a_host(key):
    ours, theirs = Cache("prefill", key, host="same"), Cache("decode", key, host="same")
    ours.make("curve", 1, LAYOUT, OURS, everything=False)
    connection = ours.connect(theirs.make("curve", 2, LAYOUT, THEIRS, everything=False))
    assert type(connection).__name__ == "SharedMemoryConnection"
    ours.fill(1)
    connection.write(range(3), [1], [2])
    assert all(np.array_equal(a[1], b[2]) for a, b in zip(ours.rows(), theirs.rows(), strict=True))
    ours.close()
    theirs.close()


def test_rejects_a_single_host_service():
    with pytest.raises(ConfigurationError, match="--listen-workers"):
        load_transport("curve")(KvCacheSpec("prefill", 1, LAYOUT, 4))


LEASES = st.tuples(st.sampled_from("pq"), st.sampled_from("abc"), st.frozensets(st.integers(0, 9), min_size=1))


@given(st.lists(st.tuples(st.booleans(), LEASES), max_size=30), st.sampled_from("pq"), st.frozensets(st.integers(0, 9)))
def test_the_gate_admits_blocks_of_one_current_lease(changes, source, blocks):
    gate, standing = LeaseGate(), {}
    for opens, (holder, request_id, leased) in changes:
        if opens:
            gate.open(holder, request_id, tuple(leased))
            standing[holder, request_id] = leased
        else:
            gate.close(holder, request_id)
            standing.pop((holder, request_id), None)
    with gate.passing(source, tuple(blocks)) as allowed:
        assert allowed == any(holder == source and blocks <= leased for (holder, _), leased in standing.items())


def test_close_waits_for_running_writes():
    gate, closed = LeaseGate(), threading.Event()
    gate.open("p", "r", (1, 2))

    def close():
        gate.close("p", "r")
        closed.set()

    with gate.passing("p", (1,)) as allowed:
        assert allowed
        threading.Thread(target=close, daemon=True).start()
        assert not closed.wait(0.2)
    assert closed.wait(600)
    with gate.passing("p", (1,)) as allowed:
        assert not allowed
