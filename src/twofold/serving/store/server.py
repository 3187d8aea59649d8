"""The process of a KV store, which serves the workers of its host."""

import hashlib
import logging
import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import msgspec
import zmq

from twofold.engine.base import KvLayout
from twofold.errors import require
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.security.network import HostNetwork
from twofold.serving.config import STORE, ServiceConfig, StoreConfig
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.messages import StoreChanged, StoreStatus, StoreTier
from twofold.serving.store import messages
from twofold.serving.store.disk import DiskBlocks, DiskThread, blocks_on_disk
from twofold.serving.store.manager import TIERS, Requester, StoreGrant, StoreManager
from twofold.serving.store.peering import Peering
from twofold.serving.store.peers import BlockFetcher, BlockServer
from twofold.serving.telemetry.logs import end_process
from twofold.transport.memory import SharedMemory, SlotMemory

_LOOK_S = 1.0  # maximum wait for events, and interval of status reports

SendReport = Callable[[StoreChanged | StoreStatus], None]


class StoreServer:
    """Server of a host's KV store. `report` sends to the controller; with `peers`, hosts exchange blocks."""

    def __init__(
        self,
        manager: StoreManager,
        mover: DiskThread | None,
        inbox: Inbox[messages.ToStore],
        outbox: Outbox,
        welcome: messages.Welcome,
        report: SendReport,
        host: str,
        peers: Peering | None = None,
    ) -> None:
        self._manager, self._mover, self._peers = manager, mover, peers
        self._inbox, self._outbox = inbox, outbox
        self._welcome, self._report, self._host = welcome, report, host
        self._introduced = False
        self._reported: StoreStatus | None = None
        self._reported_s = 0.0
        self._clients: dict[str, int] = {}  # pidfd of each client by inbox
        self._selector = selectors.DefaultSelector()
        mover_wakes = () if mover is None else (mover.fileno(),)
        peers_wake = () if peers is None else peers.filenos()
        for fileno in (inbox.fileno(), *mover_wakes, *peers_wake):
            self._selector.register(fileno, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve clients and other stores until the process is terminated."""
        while True:
            self.turn(_LOOK_S)

    def turn(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for events, and process them."""
        wait_s = inf if self._peers is None else self._peers.wait_s(time.monotonic())
        for key, _ in self._selector.select(min(timeout_s, wait_s)):
            if key.data is not None:
                self._lose(key.data)
        for message in self._inbox.drain():
            self._handle(message)
        if self._peers is not None:
            self._peers.turn(time.monotonic())
        if self._mover is not None:
            self._take_moved(self._mover)
            for move in self._manager.take_moves():
                self._mover.put(move)
        for granted in self._manager.take_grants():
            self._grant(granted)
        for requester, blocks in () if self._peers is None else self._peers.take_done():
            self._answer(requester, messages.FetchResult(blocks))
        self._report_changes()
        self._report_status()

    def status(self) -> StoreStatus:
        """Return the sizes and hit counts of memory and disk, and the bytes moved."""
        tiers = {
            name: StoreTier(
                capacity=tier.capacity,
                blocks=len(tier),
                hits=tier.hits,
                removals={reason.value: count for reason, count in tier.removals.items()},
            )
            for name, tier in zip(TIERS, self._manager.tiers.tiers, strict=False)
        }
        size = self._welcome.block_bytes
        moved = {way: blocks * size for way, blocks in self._manager.moved.items()}
        return StoreStatus(host=self._host, epoch=self._welcome.epoch, tiers=tiers, bytes_moved=moved)

    def _report_changes(self) -> None:
        # The first report announces the epoch, even without changes.
        stored, removed = self._manager.changes.take()
        if stored or removed or not self._introduced:
            self._introduced = True
            address = None if self._peers is None else self._peers.address
            epoch = self._welcome.epoch
            self._report(StoreChanged(host=self._host, epoch=epoch, stored=stored, removed=removed, address=address))

    def _report_status(self) -> None:
        now = time.monotonic()
        if now - self._reported_s >= _LOOK_S and (status := self.status()) != self._reported:
            self._reported, self._reported_s = status, now
            self._report(status)

    def close(self) -> None:
        """Close the server's resources."""
        for pidfd in self._clients.values():
            os.close(pidfd)
        self._selector.close()
        if self._mover is not None:
            self._mover.close()
        if self._peers is not None:
            self._peers.close()

    def _handle(self, message: messages.ToStore) -> None:
        if isinstance(message, messages.Hello):
            self._register(message)
        elif message.epoch == self._welcome.epoch and message.client in self._clients:
            self._execute(message)  # ignore requests to another epoch or of dead clients

    def _execute(self, message: messages.StoreRequest) -> None:
        requester = (message.client, message.number)
        match message.what:
            case messages.Lookup(keys=keys):
                blocks, in_memory = self._manager.lookup(keys)
                self._answer(requester, messages.LookupResult(blocks, in_memory))
            case messages.Load(keys=keys):
                self._manager.load(requester, keys)
            case messages.Put(keys=keys, start=start):
                self._manager.put(requester, [b""] * start + keys, start)  # the keys of earlier blocks are not needed
            case messages.Commit(blocks=blocks):
                self._manager.commit(requester, blocks)
            case messages.Release(slots=None):
                self._manager.end(requester)
            case messages.Release(slots=list() as slots):
                self._manager.release(requester, slots)
            case messages.FetchBlocks():
                self._fetch(requester, message.what)

    def _fetch(self, requester: Requester, what: messages.FetchBlocks) -> None:
        if self._peers is None:
            self._answer(requester, messages.FetchResult(self._manager.lookup(what.keys)[0]))
        else:
            self._peers.fetch(requester, what, time.monotonic())

    def _register(self, message: messages.Hello) -> None:
        if message.client not in self._clients:
            try:
                pidfd = os.pidfd_open(message.pid)
            except ProcessLookupError:
                return  # the client has exited
            self._clients[message.client] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, data=message.client)  # its requests end when it exits
        self._outbox.send(message.client, self._welcome)

    def _lose(self, client: str) -> None:
        pidfd = self._clients.pop(client)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._outbox.forget(client)
        self._manager.lose(client)
        if self._peers is not None:
            self._peers.lose(client)

    def _take_moved(self, mover: DiskThread) -> None:
        for move, checksum in mover.take():
            if isinstance(move, messages.DiskWrite):
                self._manager.written(move, done=checksum is not None)
            else:
                self._manager.was_read(move, checksum)

    def _grant(self, granted: StoreGrant) -> None:
        if self._peers is not None and self._peers.granted(granted):
            return
        if granted.puts:
            slots = {index: block.slot for index, block in granted.blocks.items()}
            self._answer(granted.requester, messages.LeasedSlots(slots, granted.last))
        else:
            self._answer(granted.requester, messages.HeldBlocks(granted.blocks, granted.last))

    def _answer(self, requester: Requester, what: messages.StoreResult) -> None:
        client, number = requester
        self._outbox.send(client, messages.StoreReply(epoch=self._welcome.epoch, number=number, what=what))


log = logging.getLogger(__name__)

LEAST_SLOTS = 8


def check_store(config: StoreConfig, layout: KvLayout, available_bytes: int) -> None:
    """Raise ConfigurationError if the KV store's memory or disk has an invalid size.

    The memory must be at most `available_bytes` and hold at least 8 KV blocks. A disk must hold at least 1 block.
    """
    require(
        config.memory_bytes <= available_bytes,
        f"--kv-store-dram of {config.memory_bytes / 2**20:,.0f} MiB exceeds the "
        f"{available_bytes / 2**20:,.0f} MiB available on this machine",
    )
    least = LEAST_SLOTS * layout.bytes_per_block
    require(
        config.memory_bytes >= least,
        f"--kv-store-dram of {config.memory_bytes / 2**20:,.1f} MiB holds fewer than {LEAST_SLOTS} blocks of KV: "
        f"set it to at least {-(-least // 2**20)}MiB",
    )
    if config.disk_dir is not None:
        blocks_on_disk(config.disk_bytes, layout.bytes_per_block)


def contents_of(model: str, layout: KvLayout) -> str:
    """Return a text that identifies the model and KV layout of stored blocks."""
    return f"{model} {msgspec.json.encode(layout).decode()}"


def run_store(config: ServiceConfig, model: str, layout: KvLayout) -> None:
    """Run the KV store of this host until the process is terminated."""
    store = config.store
    assert store is not None  # noqa: S101  (narrows the type)
    threading.excepthook = partial(end_process, log)  # the fork server restarts the process
    block_bytes, contents = layout.bytes_per_block, contents_of(model, layout)
    disk = None
    if store.disk_dir is not None:
        disk = DiskBlocks(Path(store.disk_dir), store.disk_bytes, block_bytes, contents)
    slots = store.memory_bytes // block_bytes
    memory = SlotMemory(SharedMemory.create("store", slots * block_bytes, "--kv-store-dram"), block_bytes)
    manager = StoreManager(slots, 0 if disk is None else disk.capacity, config.engine.eviction)
    for key, position in () if disk is None else disk.recovered:
        manager.recover(key, position)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[messages.ToStore] = Inbox(context, config.store_inbox, messages.ToStore)
    welcome = messages.Welcome(
        epoch=secrets.randbits(53), pid=os.getpid(), address=memory.address, slots=slots, block_bytes=block_bytes
    )
    guard = None if config.network is None else Guard(context, read_key(Path(config.network.key_file)))
    outside = Outbox(context, guard, f"{STORE} of {config.host}")
    StoreServer(
        manager,
        None if disk is None else DiskThread(disk, memory),
        inbox,
        Outbox(context),
        welcome,
        partial(outside.send, config.controller),
        config.host,
        None if config.network is None else peering(config.network, manager, memory, contents),
    ).run()


def peering(network: HostNetwork, manager: StoreManager, memory: SlotMemory, contents: str) -> Peering:
    """Create the threads that exchange blocks with other hosts' stores."""
    # Encryption runs in the threads of this separate context.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, read_key(Path(network.key_file)))
    digest = hashlib.blake2b(contents.encode(), digest_size=16).digest()
    server = BlockServer(context, guard, network.address, memory, digest)
    fetcher = BlockFetcher(context, guard, memory, digest)
    return Peering(manager, server, fetcher, messages.blocks_at_once(memory.block_bytes))
