"""Properties of all transports, tested with two processes."""

import importlib.util

import numpy as np
import pytest

from support.cache_peer import Cache, cache_peer
from support.transports import MOONCAKE, NIXL
from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ConfigurationError, InstanceLostError, TwofoldError
from twofold.security.key import write_key
from twofold.transport.base import SCRATCH_BYTES
from twofold.transport.registry import TRANSPORTS, check_transport

ONE_SIDED = [pytest.param("nixl", marks=NIXL), pytest.param("mooncake", marks=MOONCAKE)]
EVERY = ["shared_memory", "curve", *ONE_SIDED]
LAYOUTS = {
    "small": KvLayout(layers=(LayerShape(2, 8, 8),) * 3, block_size=4, dtype="float32", itemsize=4),
    "wide": KvLayout(layers=(LayerShape(8, 128, 128),) * 2, block_size=16, dtype="bfloat16", itemsize=2),
    "uneven": KvLayout(layers=(LayerShape(1, 3, 5), LayerShape(2, 8, 4)), block_size=3, dtype="float16", itemsize=2),
}
OURS, THEIRS = 12, 9  # blocks; caches may differ in size


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


def prepared(cache, peer, transport, layout):
    """Fill two caches with known contents, and return the connection between them."""
    cache.make(transport, 1, layout, OURS)
    theirs = peer.do("make", transport, 2, layout, THEIRS)
    cache.fill(1)
    peer.do("fill", 2)
    return cache.connect(theirs)


@pytest.mark.covers(transport=("shared_memory", "curve", "nixl", "mooncake"), feature="blocks")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("transport", EVERY)
def test_a_write_changes_only_its_blocks_and_layers(cache, peer, transport, layout):
    connection = prepared(cache, peer, transport, layout)
    expected, ours = peer.do("rows"), cache.rows()
    moves = [(range(2), [2, 3, 4, 9], [5, 6, 7, 0]), (range(1, 2), [11], [8]), (range(1), [], [])]
    for layers, source, target in moves:
        moved = connection.write(layers, source, target)
        assert moved == sum(layout.layer_bytes_per_block(layer) for layer in layers) * len(source)
        for layer in layers:
            expected[layer][target] = ours[layer][source]
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("transport", EVERY)
def test_a_read_changes_only_its_blocks_and_layers(cache, peer, transport, layout):
    connection = prepared(cache, peer, transport, layout)
    expected, theirs = cache.rows(), peer.do("rows")
    connection.read(range(1, 2), [8, 0, 1], [3, 10, 11])
    expected[1][[3, 10, 11]] = theirs[1][[8, 0, 1]]
    assert all(np.array_equal(a, b) for a, b in zip(cache.rows(), expected, strict=True))


@pytest.mark.parametrize("transport", EVERY)
def test_a_probe_changes_no_block(cache, peer, transport):
    connection = prepared(cache, peer, transport, LAYOUTS["small"])
    before = peer.do("rows")
    connection.probe(1)
    connection.probe(SCRATCH_BYTES)
    assert all(np.array_equal(a, b) for a, b in zip(peer.do("rows"), before, strict=True))


@pytest.mark.parametrize("transport", EVERY)
def test_rejects_another_kv_layout(cache, peer, transport):
    cache.make(transport, 1, LAYOUTS["small"], OURS)
    theirs = peer.do("make", transport, 2, LAYOUTS["wide"], THEIRS)
    with pytest.raises(ConfigurationError, match="different KV layouts"):
        cache.connect(theirs)


@pytest.mark.parametrize("transport", ONE_SIDED)
def test_writes_to_a_dead_peer_fail_and_never_reach_its_successor(cache, key, transport):
    layout = LAYOUTS["small"]
    with cache_peer("decode", key) as first:
        connection = prepared(cache, first, transport, layout)
        old = first.do("make", transport, 3, layout, THEIRS)
        stale = cache.connect(old)
    with cache_peer("decode", key) as second:
        new = second.do("make", transport, 4, layout, THEIRS)
        second.do("fill", 2)
        before = second.do("rows")
        for dead in (connection, stale):
            with pytest.raises(InstanceLostError):
                dead.write(range(3), [0], [0])
        with pytest.raises(TwofoldError):
            cache.connect(old)
        assert all(np.array_equal(a, b) for a, b in zip(second.do("rows"), before, strict=True))
        assert cache.connect(new).write(range(3), [0], [0]) > 0


@pytest.mark.parametrize("transport", ONE_SIDED)
def test_a_closed_connection_moves_nothing(cache, peer, transport):
    connection = prepared(cache, peer, transport, LAYOUTS["small"])
    connection.close()
    with pytest.raises(InstanceLostError):
        connection.write(range(1), [0], [0])


@pytest.mark.parametrize("transport", ONE_SIDED)
def test_rejects_an_address_of_another_transport(cache, peer, transport):
    layout = LAYOUTS["small"]
    cache.make(transport, 1, layout, OURS)
    with pytest.raises(ConfigurationError, match=f"--transport {transport}"):
        cache.connect(peer.do("make", "shared_memory", 2, layout, THEIRS))


@pytest.mark.parametrize("extra", ["nixl", "mooncake"])
def test_names_the_missing_extra(extra):
    if any(importlib.util.find_spec(package) for package in TRANSPORTS[extra].packages):
        pytest.skip(f"the {extra} extra is installed")
    with pytest.raises(ConfigurationError, match=f"twofold\\[{extra}\\]"):
        check_transport(extra)
