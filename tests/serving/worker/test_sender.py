"""The hand-off sender: order of layers, cancellation, and release of blocks in push and pull mode."""

import threading
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.handoff import HandoffMode, Lease
from twofold.serving.worker.sender import HandoffSender, HandoffWriter, OutgoingHandoff

LAYERS = 4


# Push modes; pull has its own tests.
SENT = [HandoffMode.SERIALIZED, HandoffMode.LAYER_WISE]


class Recording:
    """A hand-off sender that logs its writes and the ends of hand-offs."""

    def __init__(self, **options):
        self.log = []
        self.writes = []
        self.over = threading.Event()
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.writing = threading.Event()
        self.offered = threading.Event()
        self.sender = HandoffSender(LAYERS, lambda: 0.0, **options)
        self.sender.start(self._write, self._offer, self._ended)

    def _write(self, outgoing, layers):
        self.writing.set()
        assert self.write_gate.wait(600)
        self.writes.append(layers)
        self.log.extend(("write", outgoing.request_id, layer) for layer in layers)
        return 10 * len(layers)

    def _offer(self, outgoing):
        self.log.append(("offer", outgoing.request_id))
        self.offered.set()

    def _ended(self, outgoing):
        self.log.append(("ended", outgoing.request_id, outgoing.cancelled, outgoing.bytes_moved))
        self.over.set()

    def finished(self):
        assert self.over.wait(600)
        self.sender.close()
        return self.log


def lease(name="r", **more):
    return Lease(request_id=name, source="p", instance="d", epoch=1, blocks=(1, 2), deadline_s=1.0, **more)


def compute(sender, name="r", layers=range(LAYERS)):
    for layer in layers:
        sender.layer_computed([name], layer)


@pytest.mark.parametrize("mode", SENT)
@pytest.mark.parametrize("lease_first", [True, False])
def test_all_layers_are_sent_in_order(mode, lease_first):
    """Layers are sent in order, whether the lease arrives before or after the layers are computed."""
    recording = Recording()
    sender = recording.sender
    sender.expect("r", "d", mode)
    if lease_first:
        assert sender.lease(lease())
    assert sender.begin("r", [7, 8])
    compute(sender)
    sender.prefilled("r", tokens=[42])
    if not lease_first:
        assert sender.lease(lease())
    log = recording.finished()
    assert log == [("write", "r", layer) for layer in range(LAYERS)] + [("ended", "r", False, 40)]


def test_layer_wise_overlaps_the_prefill_and_serialized_does_not():
    early, late = Recording(), Recording()
    for recording, mode in ((early, HandoffMode.LAYER_WISE), (late, HandoffMode.SERIALIZED)):
        recording.sender.expect("r", "d", mode)
        recording.sender.lease(lease())
        recording.sender.begin("r", [7])
        compute(recording.sender, layers=range(1))
    assert early.writing.wait(600)
    assert not late.writing.is_set()
    for recording in (early, late):
        compute(recording.sender, layers=range(1, LAYERS))
        recording.sender.prefilled("r", 1)
        recording.finished()


class Peers:
    """Stub of the peers of a worker: records the writes to them."""

    def __init__(self):
        self.written = []

    @contextmanager
    def connected(self, instance, epoch):
        assert (instance, epoch) == ("d", 1)
        yield self

    def write(self, layers, source, target):
        self.written.append((layers, tuple(source), tuple(target)))
        return len(source)


@pytest.mark.parametrize("cached", [0, 1, 3])
def test_only_blocks_that_the_target_lacks_are_written(cached):
    peers = Peers()
    writer = HandoffWriter(None, peers, None, checksums=False)
    outgoing = OutgoingHandoff("r", "d", HandoffMode.SERIALIZED, blocks=(7, 8, 9))
    outgoing.lease = msgspec.structs.replace(lease(cached_blocks=cached), blocks=(1, 2, 3, 4)[cached:])
    assert writer.write_layers(outgoing, range(2)) == 3 - cached
    expected = (range(2), (7, 8, 9)[cached:], (1, 2, 3)[cached:])
    assert peers.written == ([] if cached == 3 else [expected])


def test_nothing_is_written_after_a_cancelled_handoff_ended():
    recording = Recording()
    sender = recording.sender
    sender.expect("r", "d", HandoffMode.LAYER_WISE)
    sender.lease(lease())
    sender.begin("r", [7])
    recording.write_gate.clear()
    compute(sender)
    assert recording.writing.wait(600)
    sender.cancel("r")
    assert not recording.over.is_set(), "a write is under way"
    recording.write_gate.set()
    assert recording.finished() == [("write", "r", 0), ("ended", "r", True, 10)]


def test_waiting_layers_share_one_write():
    recording = Recording(layers_at_once=lambda blocks: 3 if blocks == 2 else 1)
    sender = recording.sender
    sender.expect("r", "d", HandoffMode.SERIALIZED)
    sender.lease(lease())
    sender.begin("r", [7, 8])
    compute(sender)
    sender.prefilled("r", tokens=[42])
    recording.finished()
    assert recording.writes == [range(3), range(3, 4)]


def pulled(recording, *, lease_first=True):
    """Prefill a request in pull mode until its KV is offered to the decode instance."""
    sender = recording.sender
    sender.expect("r", "d", HandoffMode.PULL)
    if lease_first:
        sender.lease(lease())
    sender.begin("r", [7, 8])
    compute(sender)
    sender.prefilled("r", tokens=[42])
    if not lease_first:
        assert not recording.offered.is_set(), "the target has no room yet"
        sender.lease(lease())
    assert recording.offered.wait(600)


@pytest.mark.parametrize("lease_first", [True, False])
def test_a_pulled_handoff_is_offered_once_and_held_until_taken(lease_first):
    recording = Recording()
    pulled(recording, lease_first=lease_first)
    assert not recording.over.wait(0.05)
    recording.sender.taken("r", complete=True)
    assert recording.finished() == [("offer", "r"), ("ended", "r", False, 0)]


def test_offered_blocks_are_held_after_the_request_ended():
    recording = Recording()
    pulled(recording)
    assert recording.sender.cancel("r")
    assert not recording.over.wait(0.05)
    recording.sender.taken("r", complete=False)
    assert recording.finished() == [("offer", "r"), ("ended", "r", True, 0)]


def test_a_lost_target_releases_its_offers():
    recording = Recording()
    pulled(recording)
    recording.sender.cancel_to("d")
    assert recording.finished() == [("offer", "r"), ("ended", "r", True, 0)]


def test_a_lease_for_a_finished_handoff_is_declined():
    recording = Recording()
    recording.sender.expect("r", "d", HandoffMode.LAYER_WISE)
    recording.sender.cancel("r")
    recording.finished()
    assert not recording.sender.lease(lease())


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abc"), max_size=30), st.sampled_from(list(HandoffMode)), st.randoms())
def test_each_handoff_ends_once_under_any_interleaving(steps, mode, random):
    recording = Recording()
    sender = recording.sender
    progress = dict.fromkeys("abc", 0)
    for name in progress:
        sender.expect(name, "d", mode)
    actions = [
        lambda name: sender.lease(lease(name)),
        lambda name: sender.begin(name, [1]),
        *(lambda name, layer=layer: sender.layer_computed([name], layer) for layer in range(LAYERS)),
        lambda name: sender.prefilled(name, 5),
    ]
    for name in steps:
        if random.random() < 0.05:
            sender.cancel(name)
        if progress[name] < len(actions):
            actions[progress[name]](name)
            progress[name] += 1
    for name in progress:
        sender.cancel(name)
        sender.taken(name, complete=False)
    sender.cancel_to("d")  # an offer that was made after that
    while sum(entry[0] == "ended" for entry in list(recording.log)) < 3:
        recording.over.wait(0.01)
    log = recording.finished()
    for name in "abc":
        mine = [entry for entry in log if entry[1] == name]
        writes = [entry[2] for entry in mine if entry[0] == "write"]
        assert writes == list(range(len(writes)))
        assert [entry[0] for entry in mine].count("ended") == 1
        assert mine[-1][0] == "ended"
