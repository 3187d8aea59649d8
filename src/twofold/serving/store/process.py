"""The process of a host's store, from the configuration of the service."""

import hashlib
import logging
import os
import secrets
import threading
from functools import partial
from pathlib import Path

import msgspec
import zmq

from twofold.curve.guard import Guard
from twofold.curve.key import read_key
from twofold.curve.network import Network
from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError
from twofold.serving.config import STORE, ServiceConfig, StoreConfig
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.store.block_fetcher import BlockFetcher
from twofold.serving.store.block_server import BlockServer
from twofold.serving.store.book import StoreBook
from twofold.serving.store.disk import DiskBlocks, blocks_on_disk
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import ToStore, Welcome
from twofold.serving.store.mover import Mover
from twofold.serving.store.peer_frames import blocks_at_once
from twofold.serving.store.peering import Peering
from twofold.serving.store.store import Store

log = logging.getLogger(__name__)

LEAST_SLOTS = 8


def check_store(config: StoreConfig, layout: KvLayout, available_bytes: int) -> None:
    """Raises ConfigurationError where the memory is not there, or does not hold a few blocks."""
    if config.memory_bytes > available_bytes:
        raise ConfigurationError(
            f"--kv-store-dram of {config.memory_bytes / 2**20:,.0f} MiB is more than the "
            f"{available_bytes / 2**20:,.0f} MiB that this machine has left"
        )
    if config.memory_bytes < LEAST_SLOTS * layout.bytes_per_block:
        least = -(-LEAST_SLOTS * layout.bytes_per_block // 2**20)
        raise ConfigurationError(
            f"--kv-store-dram of {config.memory_bytes / 2**20:,.1f} MiB holds fewer than {LEAST_SLOTS} blocks of KV: "
            f"set it to at least {least}MiB"
        )
    if config.disk_dir is not None:
        blocks_on_disk(config.disk_bytes, layout.bytes_per_block)


def contents_of(model: str, layout: KvLayout) -> str:
    """What blocks of KV mean: those of another model, or laid out otherwise, are of no use."""
    return f"{model} {msgspec.json.encode(layout).decode()}"


def run_store(config: ServiceConfig, model: str, layout: KvLayout) -> None:
    """Be the store of this host until the process is ended; `model` names what the KV is of."""
    store = config.store
    assert store is not None  # noqa: S101  (there is no such process otherwise; tells the type checker)
    threading.excepthook = _end_process
    block_bytes, contents = layout.bytes_per_block, contents_of(model, layout)
    disk = None
    if store.disk_dir is not None:
        disk = DiskBlocks(Path(store.disk_dir), store.disk_bytes, block_bytes, contents)
    slots = store.memory_bytes // block_bytes
    memory = SlotMemory.create("store", slots, block_bytes)
    book = StoreBook(slots, 0 if disk is None else disk.capacity, config.engine.eviction)
    for block in () if disk is None else disk.recovered():
        book.recover(block.key, block.position)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToStore] = Inbox(context, config.store_inbox, ToStore)
    welcome = Welcome(
        epoch=secrets.randbits(53),
        pid=os.getpid(),
        address=memory.address,
        slots=slots,
        block_bytes=block_bytes,
    )
    guard = None if config.network is None else Guard(context, read_key(Path(config.network.key_file)))
    outside = Outbox(context, guard, f"{STORE} of {config.host}")
    Store(
        book,
        None if disk is None else Mover(disk, memory),
        inbox,
        Outbox(context),
        welcome,
        partial(outside.send, config.controller),
        config.host,
        None if config.network is None else peering(config.network, book, memory, contents),
    ).run()


def peering(network: Network, book: StoreBook, memory: SlotMemory, contents: str) -> Peering:
    """The way to the stores of the other hosts of `network`; `contents`: see `contents_of`.

    It has a context of its own: what that encrypts, nobody on this host waits for.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, read_key(Path(network.key_file)))
    meaning = hashlib.blake2b(contents.encode(), digest_size=16).digest()
    server = BlockServer(context, guard, network.address, memory, meaning)
    fetcher = BlockFetcher(context, guard, memory, meaning)
    return Peering(book, server, fetcher, blocks_at_once(memory.block_bytes))


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A store that lost a thread would leave questions without an answer: its next life does not."""
    thread = failed.thread.name if failed.thread is not None else "a thread"
    trace = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    log.critical("%s failed", thread, exc_info=trace)
    os._exit(1)
