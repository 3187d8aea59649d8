"""What a store does with those of other hosts: gives them blocks, and brings blocks from them for its clients.

To the accounts (`book.py`) another store is a client like any other. What it asks for is a load, which holds blocks
until they are sent. What is brought from it is a put: two fetches of one block lease one slot for it, and it is found
when it is whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from twofold.serving.store.manager import MEMORY, Requester, StoreGrant, StoreManager
from twofold.serving.store.messages import FetchBlocks
from twofold.serving.store.peers import (
    BlockFetcher,
    BlockServer,
    FetchedSlots,
    FetchOrder,
    PeerCaller,
    PeerReply,
    PeerRequest,
    ReplySent,
)

# Who asks the book, where a client's inbox would be.
_SENDS, _FETCHES = "gives to peers", "fetches from peers"


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks that are brought for a client's question, or for nobody any more when that is dead."""

    requester: Requester | None
    keys: Sequence[bytes]
    address: str
    until_s: float
    found: int = 0  # leading blocks that were seen here
    puts: bool = True  # the book has more slots for it, or may have
    ordered: bool = False  # slots are being filled
    ended: bool = False  # no more are to be filled


class Peering:
    """All is called from the thread that has the `book`, and returns at once.

    A fetch asks for `at_once` blocks at a time, and ends when its time is up or what it is to bring is here. A block
    that is on its way to here already is waited for, and not brought twice.
    """

    def __init__(
        self, manager: StoreManager, server: BlockServer, fetcher: BlockFetcher, at_once: int
    ) -> None:
        self._manager, self._server, self._fetcher, self._at_once = manager, server, fetcher, at_once
        self._number = 0
        self._callers: dict[int, PeerCaller] = {}
        self._fetches: dict[int, _Fetch] = {}

    @property
    def address(self) -> str:
        """Where other stores ask this one."""
        return self._server.address

    def filenos(self) -> tuple[int, int]:
        """One of them is readable when there is something to do."""
        return self._server.fileno(), self._fetcher.fileno()

    def wait_s(self, now: float) -> float:
        """When, in seconds, the time of a fetch is up."""
        return max(
            0.0, min((each.until_s for each in self._fetches.values() if not each.ended), default=inf) - now
        )

    def fetch(self, requester: Requester, what: FetchBlocks, now: float) -> None:
        """Begin to bring what is not here, as far as memory could hold it."""
        keys = what.keys[: self._manager.tiers.tiers[MEMORY].capacity]
        self._number += 1
        self._fetches[self._number] = _Fetch(requester, keys, what.address, now + what.limit_s)
        self._manager.put((_FETCHES, self._number), keys, 0, counter="peer_read", limit=self._at_once)

    def lose(self, client: str) -> None:
        """A client is dead; what is on its way for it is of use to others."""
        for fetch in self._fetches.values():
            if fetch.requester is not None and fetch.requester[0] == client:
                fetch.requester = None

    def turn(self, now: float) -> None:
        """Take up what other stores asked and sent, and end what took too long."""
        for event in self._server.take():
            if isinstance(event, PeerRequest):
                self._number += 1
                self._callers[self._number] = event.caller
                self._manager.load((_SENDS, self._number), event.keys, counter="peer_sent")
            else:
                self._sent(event)
        for brought in self._fetcher.take():
            self._brought(brought)
        for number, fetch in self._fetches.items():
            if not fetch.ended and now >= fetch.until_s:
                self._stop(number, fetch)

    def granted(self, granted: StoreGrant) -> bool:
        """The book has slots, or blocks, for somebody; whether that is another store, or for a fetch."""
        who, number = granted.requester
        if who == _SENDS:
            self._server.reply(PeerReply(number, self._callers[number], granted.blocks, granted.last))
        elif who == _FETCHES:
            self._order(number, granted)
        return who in {_SENDS, _FETCHES}

    def take_done(self) -> list[tuple[Requester, int]]:
        """The questions whose fetches are over since this was asked last, and how many leading blocks are here now."""
        done = []
        for number, fetch in list(self._fetches.items()):
            if not self._running(fetch):
                del self._fetches[number]
                self._fetcher.end(number)
                if fetch.requester is not None:
                    done.append((fetch.requester, self._manager.lookup(fetch.keys)[0]))
        return done

    def close(self) -> None:
        self._fetcher.close()
        self._server.close()

    def _sent(self, sent: ReplySent) -> None:
        reply = sent.reply
        requester = (_SENDS, reply.load)
        if reply.last:
            del self._callers[reply.load]
            self._manager.end(requester)
        else:
            self._manager.release(requester, [block.slot for block in reply.blocks.values()])

    def _order(self, number: int, granted: StoreGrant) -> None:
        fetch = self._fetches.get(number)
        if fetch is None or fetch.ended:
            return  # its slots were given back
        fetch.puts = not granted.last
        if granted.blocks:
            keys = [fetch.keys[index] for index in granted.blocks]
            slots = [block.slot for block in granted.blocks.values()]
            self._fetcher.order(FetchOrder(number, fetch.address, keys, slots))
            fetch.ordered = True

    def _brought(self, brought: FetchedSlots) -> None:
        fetch = self._fetches[brought.fetch]
        fetch.ordered = False
        self._manager.commit((_FETCHES, brought.fetch), brought.blocks)
        if fetch.ended or not brought.whole:
            self._stop(brought.fetch, fetch)

    def _stop(self, number: int, fetch: _Fetch) -> None:
        """Bring no more. Slots that are being filled are given back when nobody does so any more."""
        fetch.ended = True
        if fetch.ordered:
            self._fetcher.end(number)
        else:
            self._manager.end((_FETCHES, number))

    def _running(self, fetch: _Fetch) -> bool:
        if fetch.ordered or fetch.ended:
            return fetch.ordered
        if fetch.puts:
            return True
        keys, tiers = fetch.keys, self._manager.tiers
        while fetch.found < len(keys) and keys[fetch.found] in tiers:
            fetch.found += 1
        return fetch.found < len(keys) and self._manager.incoming(keys[fetch.found])
