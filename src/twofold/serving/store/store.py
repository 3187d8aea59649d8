"""The process of a host's store: answers clients, ends what dead ones had, and tells the controller what there is."""

import os
import selectors
import time
from collections.abc import Callable
from math import inf

from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.messages import StoreChanged, StoreStatus, StoreTier
from twofold.serving.store.book import TIERS, Asker, Granted, StoreBook
from twofold.serving.store.messages import (
    Answer,
    Answered,
    Ask,
    Commit,
    Fetch,
    Fetched,
    Found,
    Held,
    Hello,
    Leased,
    Load,
    Lookup,
    Put,
    Release,
    ToStore,
    Welcome,
)
from twofold.serving.store.mover import Mover
from twofold.serving.store.moves import Write
from twofold.serving.store.peering import Peering

_LOOK_S = (
    1.0  # a look at the inbox even if nothing says that it has something; and between two reports of status
)

Tell = Callable[[StoreChanged | StoreStatus], None]


class Store:
    """One life of the store of `host`; `welcome` is what clients need to know of it, `tell` reaches the controller.

    `peers` are the stores of other hosts, where there may be some.
    """

    def __init__(
        self,
        book: StoreBook,
        mover: Mover | None,
        inbox: Inbox[ToStore],
        outbox: Outbox,
        welcome: Welcome,
        tell: Tell,
        host: str,
        peers: Peering | None = None,
    ) -> None:
        self._book, self._mover, self._peers = book, mover, peers
        self._inbox, self._outbox = inbox, outbox
        self._welcome, self._tell, self._host = welcome, tell, host
        self._introduced = False
        self._told: StoreStatus | None = None
        self._told_s = 0.0
        self._clients: dict[str, int] = {}  # the pidfd of each, by its inbox
        self._selector = selectors.DefaultSelector()
        mover_wakes = () if mover is None else (mover.fileno(),)
        peers_wake = () if peers is None else peers.filenos()
        for fileno in (inbox.fileno(), *mover_wakes, *peers_wake):
            self._selector.register(fileno, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.turn(_LOOK_S)

    def turn(self, timeout_s: float) -> None:
        """Wait until there is something to do, and do all that there is."""
        for key, _ in self._selector.select(min(timeout_s, self._peers_s())):
            if key.data is not None:
                self._lose(key.data)
        for message in self._inbox.drain():
            self._handle(message)
        if self._peers is not None:
            self._peers.turn(time.monotonic())
        if self._mover is not None:
            self._take_moved(self._mover)
            self._mover.begin(self._book.take_moves())
        for granted in self._book.take_granted():
            self._grant(granted)
        self._answer_fetches()
        self._tell_changes()
        self._tell_status()

    def status(self) -> StoreStatus:
        """The accounts as they are now."""
        tiers = {
            name: StoreTier(
                capacity=tier.capacity,
                blocks=len(tier),
                hits=tier.hits,
                removals={reason.value: count for reason, count in tier.removals.items()},
            )
            for name, tier in zip(TIERS, self._book.tiers.tiers, strict=False)
        }
        size = self._welcome.block_bytes
        moved = {way: blocks * size for way, blocks in self._book.moved.items()}
        return StoreStatus(host=self._host, epoch=self._welcome.epoch, tiers=tiers, bytes_moved=moved)

    def _tell_changes(self) -> None:
        """The first time also that there are none: this life has nothing of what an earlier one had."""
        stored, removed = self._book.take_changes()
        if stored or removed or not self._introduced:
            self._introduced = True
            address = None if self._peers is None else self._peers.address
            epoch = self._welcome.epoch
            self._tell(
                StoreChanged(host=self._host, epoch=epoch, stored=stored, removed=removed, address=address)
            )

    def _tell_status(self) -> None:
        now = time.monotonic()
        if now - self._told_s >= _LOOK_S and (status := self.status()) != self._told:
            self._told, self._told_s = status, now
            self._tell(status)

    def close(self) -> None:
        """What clients have of the memory stays theirs; the store knows nothing of it any more."""
        for pidfd in self._clients.values():
            os.close(pidfd)
        self._selector.close()
        if self._mover is not None:
            self._mover.close()
        if self._peers is not None:
            self._peers.close()

    def _handle(self, message: ToStore) -> None:
        if isinstance(message, Hello):
            self._meet(message)
        elif message.epoch == self._welcome.epoch and message.client in self._clients:
            self._asked(message)  # others are meant for an earlier life, or from somebody who is dead

    def _asked(self, message: Ask) -> None:
        asker, now = (message.client, message.number), time.monotonic()
        match message.what:
            case Lookup(keys=keys):
                blocks, in_memory = self._book.lookup(keys)
                self._answer(asker, Found(blocks, in_memory))
            case Load(keys=keys):
                self._book.load(asker, keys, now)
            case Put(keys=keys, start=start):
                self._book.put(asker, keys, start)
            case Commit(blocks=blocks):
                self._book.commit(asker, blocks, now)
            case Release(slots=None):
                self._book.end(asker)
            case Release(slots=list() as slots):
                self._book.release(asker, slots)
            case Fetch():
                self._fetch(asker, message.what, now)

    def _fetch(self, asker: Asker, what: Fetch, now: float) -> None:
        if self._peers is None:
            self._answer(asker, Fetched(self._book.lookup(what.keys)[0]))
        else:
            self._peers.fetch(asker, what, now)

    def _peers_s(self) -> float:
        """In how many seconds the time of a fetch is up."""
        return inf if self._peers is None else self._peers.wait_s(time.monotonic())

    def _answer_fetches(self) -> None:
        for asker, blocks in () if self._peers is None else self._peers.take_done():
            self._answer(asker, Fetched(blocks))

    def _meet(self, message: Hello) -> None:
        """From here on the end of its process, that is of all its threads, is seen at once."""
        if message.client not in self._clients:
            try:
                pidfd = os.pidfd_open(message.pid)
            except ProcessLookupError:
                return  # it is dead already
            self._clients[message.client] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, data=message.client)
        self._outbox.send(message.client, self._welcome)

    def _lose(self, client: str) -> None:
        pidfd = self._clients.pop(client)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._outbox.forget(client)
        self._book.lose(client)
        if self._peers is not None:
            self._peers.lose(client)

    def _take_moved(self, mover: Mover) -> None:
        now = time.monotonic()
        for move, checksum in mover.take():
            if isinstance(move, Write):
                self._book.written(move, done=checksum is not None)
            else:
                self._book.was_read(move, checksum, now)

    def _grant(self, granted: Granted) -> None:
        if self._peers is not None and self._peers.granted(granted):
            return
        if granted.puts:
            slots = {index: block.slot for index, block in granted.blocks.items()}
            self._answer(granted.asker, Leased(slots, granted.last))
        else:
            self._answer(granted.asker, Held(granted.blocks, granted.last))

    def _answer(self, asker: Asker, what: Answered) -> None:
        client, number = asker
        self._outbox.send(client, Answer(epoch=self._welcome.epoch, number=number, what=what))
