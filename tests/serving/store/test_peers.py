"""Block fetches between the KV stores of two emulated hosts, over TCP on this machine."""

import itertools
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from support.stores import BLOCK_BYTES, keys_of, load, put, running_store, store_client
from twofold.security.guard import Guard
from twofold.security.key import ClusterKey
from twofold.serving.store.messages import MOST_KEYS, BlocksFollow, GetBlocks, blocks_at_once

KEY, ANOTHER = ClusterKey(b"\x01" * 32), ClusterKey(b"\x02" * 32)
LONG_S = 300.0  # longer than any test


class Hosts:
    """Two emulated hosts, each with a KV store and a client of the store."""

    def __init__(self, tmp_path, running, here, there):
        self.here = running.enter_context(running_store(tmp_path / "here", **{"key": KEY, **here}))
        self.closing = running.enter_context(ExitStack())
        self.there = self.closing.enter_context(running_store(tmp_path / "there", **{"key": KEY, **there}))
        self.client, self.far = (running.enter_context(store_client(tmp_path / host)) for host in ("here", "there"))
        assert self.client.wait(600)
        assert self.far.wait(600)
        self.address = self.there.peers.server.address

    def fetch(self, keys, limit_s=LONG_S):
        return self.client.fetch(keys, self.address, limit_s)

    def close_there(self):
        """Close the second host's store without notice, like a crash."""
        self.closing.close()

    def brought(self):
        """Return the number of blocks that the first host has fetched from the second."""
        return self.here.manager.moved["peer_read"]


@contextmanager
def two_hosts(tmp_path, here=None, there=None):
    with ExitStack() as running:
        yield Hosts(tmp_path, running, here or {}, there or {})


def test_fetches_blocks_once(tmp_path):
    keys = keys_of(1, 12)
    with two_hosts(tmp_path) as hosts:
        put(hosts.far, keys)
        assert hosts.fetch(keys) == 12
        assert load(hosts.client, keys) == 12
        assert hosts.fetch(keys) == 12
        assert hosts.brought() == hosts.there.manager.moved["peer_sent"] == 12
        told = [message for message in hosts.here.reports if hasattr(message, "stored")]
        assert {key for message in told for key in message.stored} == set(keys)
        assert {message.address for message in told} == {hosts.here.peers.server.address}
        assert hosts.there.manager.tiers.tiers[0].hits == 12
    assert hosts.there.manager.slots.num_free == 32 - 12, "all other slots are free"


def test_fetches_missing_blocks_only(tmp_path):
    keys = keys_of(1, 12)
    with two_hosts(tmp_path) as hosts:
        put(hosts.far, keys[:10])
        put(hosts.client, keys[:4])
        assert hosts.fetch(keys) == 10
        assert hosts.brought() == 6
        assert load(hosts.client, keys) == 10


def test_fetches_blocks_from_a_remote_disk(tmp_path):
    disk = (2 << 20) + 60 * (BLOCK_BYTES + 256)
    prompts = [keys_of(prompt, 10) for prompt in range(4)]
    with two_hosts(tmp_path, there={"slots": 16, "disk_bytes": disk}) as hosts:
        for keys in prompts:
            put(hosts.far, keys)
        available = hosts.far.lookup(prompts[1]).blocks
        assert hosts.fetch(prompts[1]) == available > 0
        assert load(hosts.client, prompts[1]) == available


def test_fetches_at_most_the_capacity(tmp_path):
    keys = keys_of(1, 30)
    with two_hosts(tmp_path, here={"slots": 9}, there={"slots": 64}) as hosts:
        put(hosts.far, keys)
        put(hosts.client, keys_of(2, 8))
        assert hosts.fetch(keys) == 8
        assert len(hosts.here.manager.tiers.tiers[0]) == 8
        assert load(hosts.client, keys) == 8
        assert hosts.here.manager.slots.num_free == 1


def test_concurrent_fetches_share_blocks(tmp_path):
    keys = keys_of(1, 40)
    with two_hosts(tmp_path, here={"slots": 64}, there={"slots": 64}) as hosts:
        put(hosts.far, keys)
        counts = []
        fetches = [threading.Thread(target=lambda n=n: counts.append(hosts.fetch(keys[:n]))) for n in (40, 24, 40, 31)]
        for fetch in fetches:
            fetch.start()
        for fetch in fetches:
            fetch.join()
        assert sorted(counts) == [24, 31, 40, 40]
        assert hosts.brought() == 40
        assert load(hosts.client, keys) == 40


def test_rejects_a_corrupted_block(tmp_path):
    keys = keys_of(1, 12)
    with two_hosts(tmp_path) as hosts:
        put(hosts.far, keys)
        hosts.there.memory.slot(hosts.there.manager._blocks[keys[7]].slot)[5] ^= 1
        assert hosts.fetch(keys) == 7
        assert load(hosts.client, keys) == 7


def test_does_not_wait_for_a_stopped_store(tmp_path):
    keys = keys_of(1, 12)
    with two_hosts(tmp_path) as hosts:
        hosts.close_there()
        assert hosts.fetch(keys) == 0
        assert hosts.here.manager.slots.num_free == 32


def test_keeps_blocks_received_before_a_crash(tmp_path):
    keys = keys_of(1, 200)
    with two_hosts(tmp_path, here={"slots": 256, "at_once": 1}, there={"slots": 256}) as hosts:
        put(hosts.far, keys)
        counts = []
        fetching = threading.Thread(target=lambda: counts.append(hosts.fetch(keys)))
        fetching.start()
        while hosts.brought() < 5:
            time.sleep(0.001)
        hosts.close_there()
        fetching.join()
        assert counts[0] >= 5
        assert load(hosts.client, keys) == counts[0]
        assert hosts.here.manager.slots.num_free == 256 - counts[0]


def test_ends_a_fetch_at_its_deadline(tmp_path):
    keys, own = keys_of(1, 12), keys_of(2, 6)
    with two_hosts(tmp_path) as hosts:
        put(hosts.far, keys)
        put(hosts.client, own)
        hosts.there.pause()
        counts = []
        fetching = threading.Thread(target=lambda: counts.append(hosts.fetch(keys, 1.0)))
        fetching.start()
        while not hosts.here.manager.slots._leased:
            time.sleep(0.001)
        assert load(hosts.client, own) == 6
        assert not counts, "the fetch is still running"
        fetching.join()
        assert counts == [0]
        assert hosts.here.manager.slots.num_free == 32 - 6


def test_a_store_without_peers_fetches_nothing(tmp_path):
    keys = keys_of(1, 6)
    with running_store(tmp_path / "alone") as alone, store_client(tmp_path / "alone") as client:
        assert client.wait(600)
        assert alone.peers is None
        put(client, keys[:2])
        assert client.fetch(keys, "tcp://127.0.0.1:1", LONG_S) == 2


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "no address"])
def test_does_not_wait_for_an_unused_address(tmp_path, address):
    with two_hosts(tmp_path) as hosts:
        assert hosts.client.fetch(keys_of(1, 6), address, LONG_S) == 0
        assert hosts.here.manager.slots.num_free == 32


# -- malformed messages ------------------------------------------------------------------------------------------


def test_refuses_another_key(tmp_path):
    keys = keys_of(1, 6)
    with two_hosts(tmp_path, here={"key": ANOTHER}) as hosts:
        put(hosts.far, keys)
        assert hosts.fetch(keys, 10.0) == 0
        while not hosts.there.peers.guard.refused:
            time.sleep(0.01)
        assert hosts.there.manager.moved["peer_sent"] == 0


def test_refuses_stores_without_a_key(tmp_path):
    with two_hosts(tmp_path) as hosts, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        put(hosts.far, keys_of(1, 6))
        socket.connect(hosts.address)
        socket.send(msgspec.msgpack.encode(GetBlocks(b"same", 1, keys_of(1, 6))))
        assert not socket.poll(1000)
        assert hosts.there.manager.moved["peer_sent"] == 0


def test_refuses_blocks_of_another_model(tmp_path):
    keys = keys_of(1, 6)
    with two_hosts(tmp_path, there={"contents": b"other"}) as hosts:
        put(hosts.far, keys)
        assert hosts.fetch(keys) == 0


@contextmanager
def guarded(kind):
    """Yield a `Guard`, which authenticates ZeroMQ peers, and a socket that it can protect."""
    context = zmq.Context()
    guard, socket = Guard(context, KEY), context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        yield guard, socket
    finally:
        socket.close()
        guard.close()
        context.term()


def frames_near(message, kind):
    """Hypothesis strategy for malformed variants of a message."""
    whole = msgspec.msgpack.encode(message)
    values = st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=80) | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
        max_leaves=4,
    )
    fields = st.fixed_dictionaries(
        {"type": st.just(kind.__name__)}, optional=dict.fromkeys(kind.__struct_fields__, values)
    )
    cut = st.integers(0, len(whole) - 1).map(lambda end: whole[:end])
    return st.binary(max_size=60) | cut | fields.map(msgspec.msgpack.encode)


def test_ignores_malformed_requests(tmp_path):
    keys = keys_of(1, 6)
    too_many = GetBlocks(b"same", 1, [b"k"] * (MOST_KEYS + 1))
    with two_hosts(tmp_path) as hosts, guarded(zmq.DEALER) as (guard, socket):
        put(hosts.far, keys)
        guard.call(socket, hosts.address, bulk=True)
        socket.connect(hosts.address)

        @settings(max_examples=60)
        @given(
            st.lists(
                frames_near(GetBlocks(b"same", 1, keys), GetBlocks) | st.just(msgspec.msgpack.encode(too_many)),
                max_size=3,
            )
        )
        def any_frames(frames):
            if frames:
                socket.send_multipart(frames)
            socket.send(msgspec.msgpack.encode(GetBlocks(b"same", 77, keys[:2])))
            answer = None
            while answer is None or answer.number != 77:
                assert socket.poll(30_000)
                answer = msgspec.msgpack.decode(socket.recv_multipart()[0], type=BlocksFollow)
            assert len(answer.checksums) == 2
            assert answer.last

        any_frames()
        assert hosts.there.peers.server.dropped


def test_survives_malformed_replies(tmp_path):
    block, numbers = bytes(BLOCK_BYTES), itertools.count()
    right = BlocksFollow(1, {index: zlib.crc32(block) for index in range(4)}, last=True)
    answers = st.builds(
        BlocksFollow,
        st.integers(0, 2),
        st.dictionaries(st.integers(-1, 5), st.sampled_from([zlib.crc32(block), 7]), max_size=5),
        st.booleans(),
    ).map(msgspec.msgpack.encode)
    bodies = st.lists(st.sampled_from([block, block[1:], b"", block + b"\0"]), max_size=5)
    with two_hosts(tmp_path) as hosts, guarded(zmq.ROUTER) as (guard, socket):
        guard.listen(socket, "127.0.0.1", bulk=True)
        socket.bind("tcp://127.0.0.1:*")
        address = socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

        @settings(max_examples=60)
        @given(frames_near(right, BlocksFollow) | answers, bodies)
        def any_answer(head, body):
            keys = [next(numbers).to_bytes(4) for _ in range(4)]
            counts = []
            fetching = threading.Thread(target=lambda: counts.append(hosts.client.fetch(keys, address, LONG_S)))
            fetching.start()
            assert socket.poll(30_000)
            caller, _ = socket.recv_multipart()
            socket.send_multipart([caller, head, *body])
            socket.send_multipart([caller, b"the end"])
            fetching.join()
            assert counts[0] == hosts.client.lookup(keys).blocks
            here = len(hosts.here.manager.tiers.tiers[0])
            assert hosts.here.manager.slots.num_free == 32 - here
            for slot in hosts.here.manager._blocks.values():
                assert zlib.crc32(hosts.here.memory.slot(slot.slot)) == slot.checksum

        any_answer()


def test_limits_blocks_per_request():
    assert blocks_at_once(1 << 40) == 1
    assert blocks_at_once(1 << 20) == 16
    assert blocks_at_once(16) == MOST_KEYS
