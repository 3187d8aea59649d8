"""Hand-offs on a decode worker: KV reads in pull mode, and verification of checksums."""

import pytest
import torch

from support.scheduled import EPOCH, request, scheduler
from twofold.engine.base import KvLayout, LayerShape
from twofold.request import SamplingParams
from twofold.serving.messages import HandoffEnded, HandoffOffered, HandoffReport, HandoffTaken, Peer, RequestFailed
from twofold.serving.worker.inbox import HandoffEvents
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.receiver import HandoffReader, HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import KvLanding, SharedWorkerState, TokenSequence
from twofold.transport.base import KvCacheSpec
from twofold.transport.shared_memory import SharedMemoryTransport

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),) * 5, block_size=4, dtype="float32", itemsize=4)
BLOCKS = 64
SOURCE_BLOCKS = (7, 8, 3)


class Sent(list):
    """Stub of the outbox that records sent messages."""

    def send(self, address, message):
        self.append((address, message))


class Decode:
    """A decode worker that the test advances step by step."""

    def __init__(self):
        self.source = SharedMemoryTransport(KvCacheSpec("p", 11, LAYOUT, BLOCKS))
        for layer in range(5):
            for part in self.source.engine_pool.block_rows(layer):
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        ours = SharedMemoryTransport(KvCacheSpec("d", EPOCH, LAYOUT, BLOCKS))
        self.state = SharedWorkerState(
            instance="d",
            scheduler=scheduler("decode", num_blocks=BLOCKS),
            sender=HandoffSender(5, lambda: 0.0),
            receiver=HandoffReceiver(),
            landing=KvLanding(),
            peers=PeerDirectory(ours),
            outbox=Sent(),
            controller="controller",
        )
        self.pool = ours.landing_pool
        self.state.peers.update([Peer(inbox="p's", memory=self.source.descriptor)])
        self.state.sequences["a"] = TokenSequence(SamplingParams(max_tokens=3), offset=10)
        self.state.scheduler.reserve(request("a"), "p")
        (self.lease,) = self.state.scheduler.grant(0.0)
        self.work = HandoffReader(self.state.peers, lambda _: 2)
        self.events = HandoffEvents(self.state)

    def offer(self, **changed):
        fields = {"epoch": EPOCH, "source_epoch": 11, "tokens": [5], **changed}
        message = HandoffOffered(request_id="a", source="p", blocks=SOURCE_BLOCKS, **fields)
        self.events.offered(message)

    def next_incoming(self):
        (incoming,) = self.state.receiver._waiting
        return incoming

    def receive(self):
        incoming = self.next_incoming()
        self.work.receive(incoming)
        self.events.received(incoming)
        return incoming

    def sent(self, kind):
        return [(to, message) for to, message in self.state.outbox if isinstance(message, kind)]

    def ran(self):
        batch = self.state.scheduler.next_batch(0.0)
        return [] if batch is None else [item.request_id for item in batch.items]

    def same_as_source(self):
        return all(
            torch.equal(ours[list(self.lease.blocks[:3])], theirs[list(SOURCE_BLOCKS)])
            for layer in range(5)
            for ours, theirs in zip(self.pool.block_rows(layer), self.source.engine_pool.block_rows(layer), strict=True)
        )

    def sums(self):
        made = [0] * 3
        self.source.add_checksums(range(5), SOURCE_BLOCKS, made, landed=False)
        return made


@pytest.mark.parametrize("checked", [False, True])
def test_an_offered_kv_cache_is_read_decoded_and_released(checked):
    decode = Decode()
    decode.offer(checksums=decode.sums() if checked else None)
    decode.receive()
    assert decode.same_as_source()
    assert decode.sent(HandoffTaken) == [("p's", HandoffTaken(request_id="a", epoch=11, complete=True))]
    ((_, report),) = decode.sent(HandoffReport)
    assert (report.instance, report.request_id, report.bytes_moved) == ("d", "a", 3 * LAYOUT.bytes_per_block)
    assert decode.ran() == ["a"]


def test_blocks_stay_held_while_a_read_is_in_flight():
    decode = Decode()
    decode.offer()
    incoming = decode.next_incoming()
    decode.state.abort("a")
    assert incoming.cancelled
    assert decode.state.scheduler.blocks.num_in_flight == len(decode.lease.blocks)
    decode.events.received(incoming)
    assert decode.state.scheduler.status().idle
    assert [message.complete for _, message in decode.sent(HandoffTaken)] == [False]


def test_a_lost_source_fails_the_request_after_pending_reads():
    decode = Decode()
    decode.offer()
    incoming = decode.next_incoming()
    assert decode.state.scheduler.peer_lost("p") == []
    assert decode.state.scheduler.blocks.num_in_flight == len(decode.lease.blocks)
    decode.state.receiver.cancel_from("p")
    decode.events.received(incoming)
    assert [m.reason for _, m in decode.sent(RequestFailed)] == ["p ended during the hand-off"]
    assert decode.state.scheduler.status().idle


def test_an_offer_for_a_finished_request_is_declined():
    decode = Decode()
    decode.state.abort("a")
    decode.offer()
    assert [message.complete for _, message in decode.sent(HandoffTaken)] == [False]
    assert decode.state.scheduler.status().idle


@pytest.mark.parametrize("wrong", [{"epoch": EPOCH + 1}, {"source_epoch": 12}])
def test_an_offer_of_another_epoch_is_not_read(wrong):
    decode = Decode()
    before = [part.clone() for part in decode.pool.block_rows(0)]
    decode.offer(**wrong)
    if "source_epoch" in wrong:
        assert "has ended" in decode.receive().error
    assert all(torch.equal(a, b) for a, b in zip(decode.pool.block_rows(0), before, strict=True))
    assert [message.complete for _, message in decode.sent(HandoffTaken)] == [False]


@pytest.mark.parametrize("pulled", [True, False])
def test_a_checksum_mismatch_fails_the_request(pulled):
    decode = Decode()
    damaged = [decode.sums()[0] ^ 1, *decode.sums()[1:]]
    if pulled:
        decode.offer(checksums=damaged)
    else:
        blocks = decode.lease.blocks[:3]
        with decode.state.peers.connected("p", 11) as connection:
            connection.read(range(5), SOURCE_BLOCKS, blocks)
        decode.events.ended(HandoffEnded(request_id="a", epoch=EPOCH, tokens=[5], checksums=damaged))
        assert decode.ran() == [], "it is not decoded before it was checked"
    decode.receive()
    (reason,) = [message.reason for _, message in decode.sent(RequestFailed)]
    assert "checksum mismatch in 1 of 3 KV blocks sent from p to d" in reason
    assert decode.ran() == []
    assert decode.state.scheduler.status().idle
