"""The transport `mooncake`, and the memory that Mooncake's transfer engine registers."""

import ctypes
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cache_peer import Cache, cache_peer
from support.transports import MOONCAKE
from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.security.key import write_key
from twofold.transport import mooncake
from twofold.transport import mooncake as mooncake_engine
from twofold.transport.base import KvCacheSpec
from twofold.transport.memory import SharedMemory
from twofold.transport.pooled import load_transport

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),) * 3, block_size=4, dtype="float32", itemsize=4)
LARGE = KvLayout(layers=(LayerShape(8, 128, 128),) * 2, block_size=16, dtype="float32", itemsize=4)
OURS, THEIRS = 12, 9


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    write_key(file)
    return file


@pytest.fixture
def peer(key):
    with cache_peer("decode", key) as running:
        yield running


@pytest.fixture
def cache(key):
    made = Cache("prefill", key)
    yield made
    made.close()


def prepared(cache, peer, layout=LAYOUT, blocks=THEIRS):
    """Fill two caches with known contents, and return the connection between them."""
    cache.make("mooncake", 1, layout, blocks)
    theirs = peer.do("make", "mooncake", 2, layout, blocks)
    cache.fill(1)
    peer.do("fill", 2)
    return cache.connect(theirs)


@MOONCAKE
def test_uses_shared_memory_within_a_host(key):
    ours, theirs = Cache("prefill", key, host="same"), Cache("decode", key, host="same")
    ours.make("mooncake", 1, LAYOUT, OURS)
    connection = ours.connect(theirs.make("mooncake", 2, LAYOUT, THEIRS))
    assert type(connection).__name__ == "SharedMemoryConnection"
    ours.fill(1)
    connection.write(range(3), [1], [2])
    assert all(np.array_equal(a[1], b[2]) for a, b in zip(ours.rows(), theirs.rows(), strict=True))
    ours.close()
    theirs.close()


@MOONCAKE
def test_rejects_a_single_host_service():
    with pytest.raises(ConfigurationError, match="--listen-workers"):
        load_transport("mooncake")(KvCacheSpec("prefill", 1, LAYOUT, 4))


@MOONCAKE
def test_refuses_data_for_another_epoch_at_the_same_port(cache, peer):
    prepared(cache, peer)
    old = mooncake.MooncakeAddress.decode(peer.do("make", "mooncake", 3, LAYOUT, THEIRS).address)
    new = peer.do("make", "mooncake", 4, LAYOUT, THEIRS)
    peer.do("fill", 2)
    before, address = peer.do("rows"), mooncake.MooncakeAddress.decode(new.address)
    mixed = msgspec.structs.replace(address, base=old.base)
    connection = cache.connect(msgspec.structs.replace(new, address=mixed.encode()))
    with pytest.raises(InstanceLostError):
        connection.write(range(3), [1, 2], [3, 4])
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), before, strict=True))


@MOONCAKE
def test_a_failed_write_has_no_pieces_in_flight(cache, peer):
    blocks = 64
    connection = prepared(cache, peer, LARGE, blocks)
    keys = connection._remote._parts[0]
    keys[0] = (0, keys[0][1])  # an invalid address for the first keys
    with pytest.raises(InstanceLostError):
        connection.write(range(2), range(blocks), range(blocks))
    first = peer.do("rows")
    time.sleep(0.05)
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), first, strict=True))


@MOONCAKE
def test_splits_writes_beyond_the_engine_queue(cache, peer):
    blocks = 2 * mooncake_engine.MAX_UNDER_WAY
    connection = prepared(cache, peer, LAYOUT, blocks)
    expected, ours, some = peer.do("rows"), cache.rows(), list(range(0, blocks, 2))
    connection.write(range(3), some, some)
    for layer in range(3):
        expected[layer][some] = ours[layer][some]
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), expected, strict=True))


@MOONCAKE
def test_closing_ends_a_running_write(cache, peer):
    connection = prepared(cache, peer, LARGE, 64)
    failed = []

    def write():
        try:
            connection.write(range(2), range(64), range(64))
        except InstanceLostError as error:
            failed.append(error)

    connection.probe(1)
    peer.stop()
    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    connection.close()
    writer.join(60)
    assert failed


@MOONCAKE
def test_stages_blocks_of_accelerators_on_the_host(cache, peer):
    connection = prepared(cache, peer)
    transport = cache.transport
    transport.engine_pool = KvPool(LAYOUT, THEIRS)
    cache.fill(3)
    pool = transport.engine_pool
    computed = [np.concatenate([part.numpy() for part in pool.block_rows(k)], axis=1) for k in range(3)]
    connection.write(range(3), [4, 5], [1, 0])
    landed = peer.do("rows")
    assert all(np.array_equal(landed[k][[1, 0]], computed[k][[4, 5]]) for k in range(3))


def test_names_the_system_packages_that_the_engine_needs(monkeypatch):

    def fail(_name):
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake_engine, "import_module", fail)
    with pytest.raises(ConfigurationError, match=r"libibverbs\.so\.1.*libibverbs1"):
        mooncake_engine.MooncakeEngine("127.0.0.1")


@given(st.integers(0, 2**53 - 1), st.integers(0, 2**53 - 1), st.integers(1, 2**40))
def test_epochs_have_equal_or_disjoint_addresses(first, second, nbytes):
    a, b = mooncake.own_address(first, nbytes), mooncake.own_address(second, nbytes)
    assert a == b or abs(a - b) >= nbytes
    assert 1 << 44 <= a <= (1 << 46) - nbytes


def test_maps_memory_again_at_the_requested_address():
    memory = SharedMemory.create("again", 8192)
    address = mooncake.own_address(12345, memory.nbytes)
    assert memory.map_again(address) == address
    again = (ctypes.c_ubyte * 8192).from_address(address)
    again[5] = 7
    assert memory.view()[5] == 7
    assert memory.map_again(address) != address  # already in use
    memory.close()
