"""A KV store and its clients on one host."""

import pytest

from support.stores import BLOCK_BYTES, LAYOUT, filled, keys_of, load, put, running_store, store_client
from twofold.serving.store.messages import LookupResult

DISK = (2 << 20) + 200 * (BLOCK_BYTES + 256)


def test_loads_blocks_of_another_client(tmp_path):
    keys = keys_of(1, 12)
    with running_store(tmp_path), store_client(tmp_path, "a") as writer, store_client(tmp_path, "b") as reader:
        assert writer.wait(600)
        assert reader.wait(600)
        assert load(reader, keys) == 0
        assert put(writer, keys[:9]) == 9
        assert reader.lookup(keys) == LookupResult(9, 9)
        assert load(reader, keys) == 9
        assert load(reader, keys_of(2, 3)) == 0
        assert put(writer, keys) == 3, "the other blocks are stored already"
        assert load(reader, keys) == 12


def test_loads_layer_by_layer_after_the_count(tmp_path):
    keys, seen = keys_of(1, 4), []
    with running_store(tmp_path), store_client(tmp_path) as client:
        assert client.wait(600)
        put(client, keys)
        load(client, keys, on_count=lambda count: seen.append(f"{count} blocks"), on_layer=seen.append)
        assert seen == ["4 blocks", *range(len(LAYOUT.layers))]


def test_stores_layers_as_they_are_computed(tmp_path):
    keys, blocks = keys_of(1, 6), filled(keys_of(1, 6))
    with running_store(tmp_path, slots=7), store_client(tmp_path) as client:
        assert client.wait(600)
        asked = []
        assert client.store(keys, blocks.copier, range(6), computed=lambda n: asked.append(n) or n == 0) == 0
        assert asked == [0, 1]
        assert client.lookup(keys) == LookupResult(0, 0)
        assert put(client, keys) == 6
        assert load(client, keys) == 6


@pytest.mark.parametrize("eviction", ["lru", "lfu", "length-aware"])
def test_overflows_to_disk_within_both_capacities(tmp_path, eviction):
    prompts = [keys_of(prompt, 10) for prompt in range(12)]
    with (
        running_store(tmp_path, slots=16, disk_bytes=DISK, eviction=eviction) as store,
        store_client(tmp_path) as client,
    ):
        assert client.wait(600)
        for keys in prompts:
            put(client, keys)
        found = [load(client, keys) for keys in prompts + prompts]
        status = store.status()
    # The store drops blocks that exceed the write rate of the disk.
    assert sum(found) > 16 * 4
    assert status.tiers["disk"].hits
    assert status.tiers["memory"].blocks <= 16
    assert sum(path.stat().st_size for path in (tmp_path / "disk").iterdir()) <= DISK
    assert client.damaged == 0


def test_recovers_blocks_from_disk(tmp_path):
    keys = keys_of(1, 10)
    with running_store(tmp_path, disk_bytes=DISK), store_client(tmp_path, "a") as client:
        assert client.wait(600)
        put(client, keys)
    with running_store(tmp_path, disk_bytes=DISK), store_client(tmp_path, "b") as client:
        assert client.wait(600)
        found = client.lookup(keys)
        assert found.blocks
        assert not found.in_memory
        assert load(client, keys) == found.blocks
        assert client.lookup(keys).in_memory == found.blocks


def test_reports_stored_and_removed_blocks(tmp_path):
    with running_store(tmp_path, slots=9) as store, store_client(tmp_path) as client:
        assert client.wait(600)
        for prompt in range(3):
            put(client, keys_of(prompt, 5))
        assert client.lookup(keys_of(2, 5)).blocks == 5
    there = set()
    for message in store.reports:
        if hasattr(message, "stored"):
            assert message.epoch == store.epoch
            there = (there | set(message.stored)) - set(message.removed)
    assert there == {key for prompt in range(3) for key in keys_of(prompt, 5) if key in store.manager.tiers}
    assert len(there) == 8


def test_rejects_corrupted_memory(tmp_path):
    keys = keys_of(1, 6)
    with running_store(tmp_path) as store, store_client(tmp_path) as client:
        assert client.wait(600)
        put(client, keys)
        store.memory.slot(store.manager._blocks[keys[4]].slot)[7] ^= 1
        assert load(client, keys) == 4
        assert client.damaged == 1


def test_does_not_wait_for_a_silent_store(tmp_path):
    keys = keys_of(1, 6)
    with running_store(tmp_path) as store, store_client(tmp_path, timeout_s=0.2) as client:
        assert client.wait(600)
        put(client, keys)
        store.pause()
        assert load(client, keys) == 0
        assert client.epoch is None
        assert client.lookup(keys) == LookupResult(0, 0)
        assert put(client, keys_of(2, 3)) == 0


def test_keeps_epochs_apart(tmp_path):
    keys = keys_of(1, 6)
    with store_client(tmp_path, timeout_s=0.2) as client:
        with running_store(tmp_path) as first:
            assert client.wait(600)
            put(client, keys)
            assert client.epoch == first.epoch
        with running_store(tmp_path) as second:
            assert load(client, keys) == 0, "the request was sent to the first epoch"
            assert client.wait(600)
            assert client.epoch == second.epoch
            assert load(client, keys) == 0
            assert put(client, keys) == 6
            assert load(client, keys) == 6


def test_loads_nothing_without_a_store(tmp_path):
    seen = []
    with store_client(tmp_path) as client:
        assert client.lookup(keys_of(1, 3)) == LookupResult(0, 0)
        assert load(client, keys_of(1, 3), on_count=seen.append) == 0
        assert put(client, keys_of(1, 3)) == 0
    assert seen == [0], "reports a count of 0"
