"""Exchange of blocks between KV stores, tested with random events."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twofold.serving.store.manager import MEMORY, StoreManager
from twofold.serving.store.messages import Block, FetchBlocks
from twofold.serving.store.peering import Peering
from twofold.serving.store.peers import FetchedSlots, FetchEnd, PeerRequest

SLOTS, AT_ONCE = 9, 3
PROMPTS = [[bytes([prompt, i]) for i in range(7)] for prompt in range(3)]
CLIENTS = ("a", "b", "c")


class Server:
    """Stub of the server that sends blocks to other hosts. The stub records each reply instead of sending the reply."""

    def __init__(self):
        self.events, self.replies = [], []

    def take(self):
        events, self.events = self.events, []
        return events

    def put(self, reply):
        self.replies.append(reply)


class Fetcher:
    """Stub of the block fetcher, which records the requested fetches."""

    def __init__(self):
        self.brought, self.orders = [], {}

    def take(self):
        brought, self.brought = self.brought, []
        return brought

    def put(self, order):
        if not isinstance(order, FetchEnd):
            assert order.fetch not in self.orders, "a fetch has one order at a time"
            self.orders[order.fetch] = order
        elif self.orders.pop(order.fetch, None) is not None:
            self.brought.append(FetchedSlots(order.fetch, [], whole=False))


class PeersLive(RuleBasedStateMachine):
    """Hypothesis state machine that tests a KV store whose clients die and whose peers reply late or in part."""

    def __init__(self):
        super().__init__()
        self.manager, self.server, self.fetcher = StoreManager(SLOTS, 0, "lru"), Server(), Fetcher()
        self.peering = Peering(self.manager, self.server, self.fetcher, AT_ONCE)
        self.now, self.number = 0.0, 0
        self.memory = [None] * SLOTS
        self.asked = {}  # keys of pending fetches
        self.putting = {}  # keys of leased slots by requester
        self.puts = {}  # keys by requester
        self.wanted = {}  # keys of peer requests by number

    def turn(self):
        self.peering.turn(self.now)
        for granted in self.manager.take_grants():
            if self.peering.granted(granted):
                continue
            assert granted.puts
            keys = self.puts.get(granted.requester)
            if keys is not None:
                self.putting[granted.requester] = {block.slot: keys[index] for index, block in granted.blocks.items()}
        for requester, blocks in self.peering.take_done():
            keys = self.asked.pop(requester)
            assert blocks == self.manager.lookup(keys)[0]

    @rule(
        client=st.sampled_from(CLIENTS),
        prompt=st.sampled_from(PROMPTS),
        start=st.integers(0, 6),
        limit_s=st.integers(0, 20),
    )
    def fetch(self, client, prompt, start, limit_s):
        self.number += 1
        keys = prompt[start:]
        self.asked[client, self.number] = keys
        self.peering.fetch((client, self.number), FetchBlocks(keys, "there", limit_s), self.now)
        self.turn()

    @rule(client=st.sampled_from(CLIENTS), prompt=st.sampled_from(PROMPTS), count=st.integers(1, 7))
    def put(self, client, prompt, count):
        self.number += 1
        self.puts[client, self.number] = prompt[:count]
        self.manager.put((client, self.number), prompt[:count], 0)
        self.turn()

    @precondition(lambda self: any(self.putting.values()))
    @rule(data=st.data())
    def commit(self, data):
        requester = data.draw(st.sampled_from([requester for requester, slots in self.putting.items() if slots]))
        for slot, key in self.putting[requester].items():
            self.memory[slot] = key
        whole = [Block(slot, 0) for slot in self.putting.pop(requester)]
        self.manager.commit(requester, whole)
        self.turn()

    @precondition(lambda self: self.fetcher.orders)
    @rule(data=st.data(), some=st.integers(0, AT_ONCE))
    def order(self, data, some):
        order = self.fetcher.orders.pop(data.draw(st.sampled_from(sorted(self.fetcher.orders))))
        whole = list(zip(order.keys, order.slots, strict=True))[:some]
        for key, slot in whole:
            self.memory[slot] = key
        blocks = [Block(slot, 0) for _, slot in whole]
        self.fetcher.brought.append(FetchedSlots(order.fetch, blocks, len(blocks) == len(order.slots)))
        self.turn()

    @rule(prompt=st.sampled_from(PROMPTS), start=st.integers(0, 6))
    def ask(self, prompt, start):
        self.number += 1
        self.wanted[self.number] = prompt[start:]
        self.server.events.append(PeerRequest(b"peer", self.number, prompt[start:]))
        self.turn()

    @precondition(lambda self: self.server.replies)
    @rule()
    def send(self):
        self.server.events.append(self.server.replies.pop(0))
        self.turn()

    @rule(client=st.sampled_from(CLIENTS))
    def die(self, client):
        for of in (self.asked, self.puts, self.putting):
            for requester in [requester for requester in of if requester[0] == client]:
                del of[requester]
        self.manager.lose(client)
        self.peering.lose(client)
        self.turn()

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds):
        self.now += seconds
        self.turn()

    @invariant()
    def nothing_is_filled_twice(self):
        orders = self.fetcher.orders.values()
        slots = [slot for order in orders for slot in order.slots]
        keys = [key for order in orders for key in order.keys]
        for filled in self.putting.values():
            slots += filled
            keys += filled.values()
        assert len(set(slots)) == len(slots)
        assert len(set(keys)) == len(keys)
        assert not any(slot in self.manager.slots._kept for slot in slots)

    @invariant()
    def what_is_found_is_whole(self):
        for key, block in self.manager._blocks.items():
            assert self.memory[block.slot] == key

    @invariant()
    def what_is_given_is_whole(self):
        for reply in self.server.replies:
            keys = self.wanted[reply.request.number]
            for index, block in reply.blocks.items():
                assert self.memory[block.slot] == keys[index]

    @invariant()
    def capacity_is_kept(self):
        assert len(self.manager.tiers.tiers[MEMORY]) < SLOTS

    def teardown(self):
        """End all clients and fetches, then check that no slot of the memory tier is still leased."""
        for client in CLIENTS:
            for of in (self.puts, self.putting):
                for requester in [requester for requester in of if requester[0] == client]:
                    del of[requester]
            self.manager.lose(client)
        while self.server.replies:
            self.send()
        self.wait(100)
        self.turn()
        assert not self.fetcher.orders
        assert not self.asked, "a fetch was not answered"
        assert self.peering.wait_s(self.now) > 1e9
        assert self.manager.slots.num_free == SLOTS - len(self.manager.tiers.tiers[MEMORY])


TestPeersLive = PeersLive.TestCase
