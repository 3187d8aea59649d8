"""Exchange of KV blocks with the stores of other hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from twofold.serving.store import peers
from twofold.serving.store.manager import MEMORY, Requester, StoreGrant, StoreManager
from twofold.serving.store.messages import FetchBlocks

# Names of these requesters to the manager, in place of a client's inbox.
_SENDS, _FETCHES = "sends to peers", "fetches from peers"


@dataclass(slots=True, eq=False)
class _Fetch:
    requester: Requester | None  # None after the client has died
    keys: Sequence[bytes]
    address: str
    until_s: float
    found: int = 0  # leading blocks found in the store
    puts: bool = True  # the manager may grant more slots
    ordered: bool = False  # slots are being filled
    ended: bool = False  # no more slots will be filled


class Peering:
    """Sends blocks to other hosts' stores and fetches blocks from them, in background threads."""

    def __init__(
        self, manager: StoreManager, server: peers.BlockServer, fetcher: peers.BlockFetcher, at_once: int
    ) -> None:
        self._manager, self._server, self._fetcher, self._at_once = manager, server, fetcher, at_once
        self._number = 0
        self._sending: dict[int, peers.PeerRequest] = {}
        self._fetches: dict[int, _Fetch] = {}

    @property
    def address(self) -> str:
        """Address at which other stores can request blocks."""
        return self._server.address

    def filenos(self) -> tuple[int, int]:
        """Return descriptors that become readable with a result of a background thread. Then call `Peering.turn`."""
        return self._server.fileno(), self._fetcher.fileno()

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next deadline of a fetch; infinity without fetches."""
        return max(0.0, min((each.until_s for each in self._fetches.values() if not each.ended), default=inf) - now)

    def fetch(self, requester: Requester, what: FetchBlocks, now: float) -> None:
        """Start to fetch missing blocks of a prompt from another host."""
        keys = what.keys[: self._manager.tiers.tiers[MEMORY].capacity]
        self._number += 1
        self._fetches[self._number] = _Fetch(requester, keys, what.address, now + what.limit_s)
        self._manager.put((_FETCHES, self._number), keys, 0, counter="peer_read", limit=self._at_once)

    def lose(self, client: str) -> None:
        """Remove a dead client."""
        for fetch in self._fetches.values():
            if fetch.requester is not None and fetch.requester[0] == client:
                fetch.requester = None  # the fetch continues, because other clients may need the blocks

    def turn(self, now: float) -> None:
        """Process the results of the background threads, and end fetches whose deadline has passed."""
        for event in self._server.take():
            if isinstance(event, peers.PeerRequest):
                self._number += 1
                self._sending[self._number] = event
                self._manager.load((_SENDS, self._number), event.keys, counter="peer_sent")
            else:
                self._sent(event)
        for brought in self._fetcher.take():
            self._brought(brought)
        for number, fetch in self._fetches.items():
            if not fetch.ended and now >= fetch.until_s:
                self._stop(number, fetch)

    def granted(self, granted: StoreGrant) -> bool:
        """If a background thread requested the memory slots, pass the slots to this thread and return True."""
        who, number = granted.requester
        if who == _SENDS:
            self._server.put(peers.PeerReply(number, self._sending[number], granted.blocks, granted.last))
        elif who == _FETCHES:
            self._order(number, granted)
        return who in {_SENDS, _FETCHES}

    def take_done(self) -> list[tuple[Requester, int]]:
        """Return (requester, length of the cached prefix in blocks) of each fetch that has ended."""
        done = []
        for number, fetch in list(self._fetches.items()):
            if not self._running(fetch):
                del self._fetches[number]
                self._fetcher.put(peers.FetchEnd(number))
                if fetch.requester is not None:
                    done.append((fetch.requester, self._manager.lookup(fetch.keys)[0]))
        return done

    def close(self) -> None:
        self._fetcher.close()
        self._server.close()

    def _sent(self, reply: peers.PeerReply) -> None:
        requester = (_SENDS, reply.load)
        if reply.last:
            del self._sending[reply.load]
            self._manager.end(requester)
        else:
            self._manager.release(requester, [block.slot for block in reply.blocks.values()])

    def _order(self, number: int, granted: StoreGrant) -> None:
        fetch = self._fetches.get(number)
        if fetch is None or fetch.ended:
            return  # the slots have been released
        fetch.puts = not granted.last
        if granted.blocks:
            keys = [fetch.keys[index] for index in granted.blocks]
            slots = [block.slot for block in granted.blocks.values()]
            self._fetcher.put(peers.FetchOrder(number, fetch.address, keys, slots))
            fetch.ordered = True

    def _brought(self, brought: peers.FetchedSlots) -> None:
        fetch = self._fetches[brought.fetch]
        fetch.ordered = False
        self._manager.commit((_FETCHES, brought.fetch), brought.blocks)
        if fetch.ended or not brought.whole:
            self._stop(brought.fetch, fetch)

    def _stop(self, number: int, fetch: _Fetch) -> None:
        fetch.ended = True
        if fetch.ordered:
            self._fetcher.put(peers.FetchEnd(number))  # the slots become free once the thread no longer fills them
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
