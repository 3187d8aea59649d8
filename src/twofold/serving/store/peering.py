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
_GIVES, _FETCHES = "gives to peers", "fetches from peers"


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks that are brought for a client's question, or for nobody any more when that is dead."""

    asker: Requester | None
    keys: Sequence[bytes]
    address: str
    until_s: float
    here: int = 0  # leading blocks that were seen here
    puts: bool = True  # the book has more slots for it, or may have
    ordered: bool = False  # slots are being filled
    over: bool = False  # no more are to be filled


class Peering:
    """All is called from the thread that has the `book`, and returns at once.

    A fetch asks for `at_once` blocks at a time, and ends when its time is up or what it is to bring is here. A block
    that is on its way to here already is waited for, and not brought twice.
    """

    def __init__(self, book: StoreManager, server: BlockServer, fetcher: BlockFetcher, at_once: int) -> None:
        self._book, self._server, self._fetcher, self._at_once = book, server, fetcher, at_once
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
            0.0, min((each.until_s for each in self._fetches.values() if not each.over), default=inf) - now
        )

    def fetch(self, asker: Requester, what: FetchBlocks, now: float) -> None:
        """Begin to bring what is not here, as far as memory could hold it."""
        keys = what.keys[: self._book.tiers.tiers[MEMORY].capacity]
        self._number += 1
        self._fetches[self._number] = _Fetch(asker, keys, what.address, now + what.limit_s)
        self._book.put((_FETCHES, self._number), keys, 0, way="peer_read", most=self._at_once)

    def lose(self, client: str) -> None:
        """A client is dead; what is on its way for it is of use to others."""
        for fetch in self._fetches.values():
            if fetch.asker is not None and fetch.asker[0] == client:
                fetch.asker = None

    def turn(self, now: float) -> None:
        """Take up what other stores asked and sent, and end what took too long."""
        for said in self._server.take():
            if isinstance(said, PeerRequest):
                self._number += 1
                self._callers[self._number] = said.caller
                self._book.load((_GIVES, self._number), said.keys, way="peer_sent")
            else:
                self._sent(said)
        for brought in self._fetcher.take():
            self._brought(brought)
        for number, fetch in self._fetches.items():
            if not fetch.over and now >= fetch.until_s:
                self._stop(number, fetch)

    def granted(self, granted: StoreGrant) -> bool:
        """The book has slots, or blocks, for somebody; whether that is another store, or for a fetch."""
        who, number = granted.asker
        if who == _GIVES:
            self._server.give(PeerReply(number, self._callers[number], granted.blocks, granted.last))
        elif who == _FETCHES:
            self._order(number, granted)
        return who in {_GIVES, _FETCHES}

    def take_done(self) -> list[tuple[Requester, int]]:
        """The questions whose fetches are over since this was asked last, and how many leading blocks are here now."""
        done = []
        for number, fetch in list(self._fetches.items()):
            if not self._goes_on(fetch):
                del self._fetches[number]
                self._fetcher.over(number)
                if fetch.asker is not None:
                    done.append((fetch.asker, self._book.lookup(fetch.keys)[0]))
        return done

    def close(self) -> None:
        self._fetcher.close()
        self._server.close()

    def _sent(self, sent: ReplySent) -> None:
        gift = sent.gift
        asker = (_GIVES, gift.load)
        if gift.last:
            del self._callers[gift.load]
            self._book.end(asker)
        else:
            self._book.release(asker, [block.slot for block in gift.blocks.values()])

    def _order(self, number: int, granted: StoreGrant) -> None:
        fetch = self._fetches.get(number)
        if fetch is None or fetch.over:
            return  # its slots were given back
        fetch.puts = not granted.last
        if granted.blocks:
            keys = [fetch.keys[index] for index in granted.blocks]
            slots = [block.slot for block in granted.blocks.values()]
            self._fetcher.bring(FetchOrder(number, fetch.address, keys, slots))
            fetch.ordered = True

    def _brought(self, brought: FetchedSlots) -> None:
        fetch = self._fetches[brought.fetch]
        fetch.ordered = False
        self._book.commit((_FETCHES, brought.fetch), brought.blocks)
        if fetch.over or not brought.whole:
            self._stop(brought.fetch, fetch)

    def _stop(self, number: int, fetch: _Fetch) -> None:
        """Bring no more. Slots that are being filled are given back when nobody does so any more."""
        fetch.over = True
        if fetch.ordered:
            self._fetcher.over(number)
        else:
            self._book.end((_FETCHES, number))

    def _goes_on(self, fetch: _Fetch) -> bool:
        if fetch.ordered or fetch.over:
            return fetch.ordered
        if fetch.puts:
            return True
        keys, tiers = fetch.keys, self._book.tiers
        while fetch.here < len(keys) and keys[fetch.here] in tiers:
            fetch.here += 1
        return fetch.here < len(keys) and self._book.coming(keys[fetch.here])
