"""A KV store and its clients in one process."""

import os
import secrets
import threading
from contextlib import contextmanager

import torch
import zmq

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.security.guard import Guard
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.store.client import StoreClient
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.disk import DiskBlocks, DiskThread
from twofold.serving.store.manager import StoreManager
from twofold.serving.store.messages import ToStore, Welcome
from twofold.serving.store.peering import Peering
from twofold.serving.store.peers import BlockFetcher, BlockServer
from twofold.serving.store.server import StoreServer
from twofold.transport.memory import SharedMemory, SlotMemory

LAYOUT = KvLayout((LayerShape(2, 8, 4), LayerShape(1, 8, 8)), block_size=4, dtype="float32", itemsize=4)
BLOCK_BYTES = LAYOUT.bytes_per_block


def keys_of(prompt, count):
    """Return the keys of the first `count` blocks of test prompt number `prompt`."""
    return [bytes([prompt, index]) * 8 for index in range(count)]


class Blocks:
    """KV pool with test data: the content of a block is generated from the block's key."""

    def __init__(self, count):
        self.pool = KvPool(LAYOUT, count)
        self.copier = PoolCopier(self.pool)

    def _parts(self, block):
        for layer in range(len(LAYOUT.layers)):
            for part, rows in enumerate(self.pool.block_rows(layer)):
                yield layer * 2 + part, rows[block]

    def fill(self, block, key):
        for number, row in self._parts(block):
            row.copy_(_pattern(key, number, len(row)))

    def holds(self, block, key):
        return all(torch.equal(row, _pattern(key, number, len(row))) for number, row in self._parts(block))


def _pattern(key, number, size):
    drawn = torch.Generator().manual_seed(int.from_bytes(key[:2], "big") * 16 + number)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=drawn)


class RunningPeering:
    """Block server and block fetcher of a KV store on an emulated host."""

    def __init__(self, manager, memory, key, contents, at_once):
        self._context = zmq.Context()
        self.guard = Guard(self._context, key)
        self.server = BlockServer(self._context, self.guard, "127.0.0.1", memory, contents)
        fetcher = BlockFetcher(self._context, self.guard, memory, contents)
        self.peering = Peering(manager, self.server, fetcher, at_once)

    def close(self):
        self.guard.close()
        self._context.term()


class RunningStore:
    """A KV store on a thread, optionally connected to other stores."""

    def __init__(
        self,
        directory,
        slots,
        disk=None,
        eviction="lru",
        key=None,
        contents=b"same",
        at_once=5,
        block_bytes=BLOCK_BYTES,
    ):
        self.memory = SlotMemory(SharedMemory.create("test", slots * block_bytes), block_bytes)
        self.manager = StoreManager(slots, 0 if disk is None else disk.capacity, eviction)
        for block, position in () if disk is None else disk.recovered:
            self.manager.recover(block, position)
        self.reports = []
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, f"ipc://{directory}/store.sock", ToStore)
        self._outbox = Outbox(self._context)
        welcome = Welcome(
            epoch=secrets.randbits(53),
            pid=os.getpid(),
            address=self.memory.address,
            slots=slots,
            block_bytes=block_bytes,
        )
        self.epoch = welcome.epoch
        mover = None if disk is None else DiskThread(disk, self.memory)
        self.peers = None if key is None else RunningPeering(self.manager, self.memory, key, contents, at_once)
        self._store = StoreServer(
            self.manager,
            mover,
            self._inbox,
            self._outbox,
            welcome,
            self.reports.append,
            "",
            None if self.peers is None else self.peers.peering,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            self._store.turn(0.01)

    def pause(self):
        """Stop the store's thread, so that clients get no more replies."""
        self._stop.set()
        self._thread.join()

    def status(self):
        return self._store.status()

    def close(self):
        self.pause()
        self._store.close()
        if self.peers is not None:
            self.peers.close()
        self._outbox.close()
        self._inbox.close()
        self._context.term()
        self.memory.close()


@contextmanager
def running_store(directory, slots=32, disk_bytes=0, **options):
    """Yield a KV store with `slots` memory slots and, if `disk_bytes` is not 0, a disk of this size."""
    directory.mkdir(exist_ok=True)
    disk = DiskBlocks(directory / "disk", disk_bytes, BLOCK_BYTES, "test") if disk_bytes else None
    store = RunningStore(directory, slots, disk, **options)
    try:
        yield store
    finally:
        store.close()
        if disk is not None:
            disk.close()


@contextmanager
def store_client(directory, name="client", **options):
    """Yield a client of the KV store in `directory`."""
    directory.mkdir(exist_ok=True)
    context = zmq.Context()
    client = StoreClient(
        context, f"ipc://{directory}/{name}.sock", f"ipc://{directory}/store.sock", verify=True, **options
    )
    try:
        yield client
    finally:
        client.close()
        context.term()


def filled(keys):
    """Return engine memory that holds the blocks with the given keys."""
    blocks = Blocks(len(keys))
    for block, key in enumerate(keys):
        blocks.fill(block, key)
    return blocks


def put(client, keys):
    """Put the blocks of `keys` into the KV store, and return the number of blocks that were new to the store."""
    return client.store(keys, filled(keys).copier, range(len(keys)))


def load(client, keys, **options):
    """Load blocks from the KV store, check their contents, and return their number."""
    blocks = Blocks(2 * len(keys))
    places = range(1, 2 * len(keys), 2)  # arbitrary positions
    count = client.load(keys, blocks.copier, places, **options)
    assert all(blocks.holds(place, key) for place, key in zip(places, keys[:count], strict=False))
    return count
