"""Worker registration, failure detection and restarts, on a fake clock."""

import itertools

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import BreakerState
from twofold.scheduling.instance.status import InstanceStatus
from twofold.security.network import HOME
from twofold.serving.controller.heartbeat import ALIVE_S
from twofold.serving.controller.registry import HealthTimeouts, WorkerRegistry, WorkerState
from twofold.serving.messages import Abort, Alive, HeartbeatAck, Peer, Peers, Registered
from twofold.transport.base import MemoryDescriptor

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),), block_size=16, dtype="float32", itemsize=4)
IDLE = InstanceStatus(0, 0, 0, 0, 0, 4, 4, 0)


class Outbox:
    """Outbox stub that records messages."""

    def __init__(self):
        self.sent = []
        self.forgotten = []

    def send(self, address, message):
        self.sent.append((address, message))

    def forget(self, address):
        self.forgotten.append(address)


class Orders:
    """Stub of the worker launcher that records every call."""

    def __init__(self):
        self.started, self.killed, self.freed, self.refused = [], [], [], []

    def start_worker(self, instance):
        self.started.append(instance)

    def kill_worker(self, instance):
        self.killed.append(instance)

    def refuse_worker(self, instance, reason):
        self.refused.append((instance, reason))

    def release_worker(self, instance):
        self.freed.append(instance)


def registered(instance, epoch=1, model="/m", layout=LAYOUT, host=HOME, now_s=0.0):
    memory = MemoryDescriptor(instance=instance, epoch=epoch, address="", num_blocks=4, layout=layout)
    outside = f"tcp://{host}:{epoch}"
    peer = Peer(inbox=f"ipc:///nowhere/{instance}-{epoch}.sock", memory=memory, host=host, outside=outside)
    return Registered(peer=peer, role=Role.PREFILL, model=model, status=IDLE, now_s=now_s)


class Scene:
    """A registry of one prefill and one decode worker, on a fake clock."""

    def __init__(self):
        self.outbox, self.orders, self.now = Outbox(), Orders(), 0.0
        self.registry = WorkerRegistry(
            {"p": Role.PREFILL, "d": Role.DECODE}, self.outbox, self.orders, HealthTimeouts(batch_s=5.0)
        )

    def up(self):
        self.registry.register(registered("p"), self.now)
        self.registry.register(registered("d"), self.now)
        return self

    def look(self, seconds, living=("p", "d"), batch_s=0.0):
        lost = []
        for _ in range(round(seconds / ALIVE_S)):
            self.now += ALIVE_S
            for instance in living:
                self.registry.heartbeat(Alive(instance=instance, epoch=1, batch_s=batch_s), self.now)
            lost += self.registry.sweep(self.now)[0]
        return lost


def test_peers_are_announced_once_all_workers_registered():
    scene = Scene()
    scene.registry.register(registered("p"), 0.0)
    assert not scene.registry.complete
    assert not scene.outbox.sent
    scene.registry.register(registered("d"), 0.0)
    assert scene.registry.complete
    told = [message for _, message in scene.outbox.sent]
    assert len(told) == 2
    assert all(
        isinstance(message, Peers) and [peer.memory.instance for peer in message.peers] == ["p", "d"]
        for message in told
    )


def test_a_worker_with_heartbeats_is_kept():
    scene = Scene().up()
    assert scene.look(60.0) == []
    assert scene.orders.killed == []


def test_a_silent_worker_is_killed_within_two_seconds_then_restarted():
    scene = Scene().up()
    began = scene.now
    lost = []
    while not lost:
        lost = scene.look(ALIVE_S, living=["p"])
    assert lost == ["d"]
    assert scene.now - began < 2.0
    assert scene.orders.killed == ["d"]
    scene.look(10.0, living=["p"])
    assert scene.orders.started == [], "the process may still run"
    assert not scene.registry.exited("d", scene.now), "the loss is known already"
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.registry.register(registered("d", epoch=2), scene.now)
    assert scene.registry.breaker("d").state is BreakerState.HALF_OPEN


def test_a_worker_that_hangs_while_it_restarts_is_killed():
    scene = Scene()
    scene.look(1.0)
    scene.up()
    scene.registry.exited("d", scene.now)
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    assert scene.look(9.0, living=["p"]) == []
    assert scene.orders.killed == []
    assert scene.look(3.0, living=["p"]) == [], "it was lost before"
    assert scene.orders.killed == ["d"]
    scene.registry.exited("d", scene.now)
    scene.look(2.0, living=["p"])
    assert scene.orders.started == ["d", "d"]
    scene.look(15.0, living=["p"])
    assert scene.orders.killed == ["d"], "twice the time, in case the machine has become slower"
    scene.registry.register(registered("d", epoch=2), scene.now)
    assert scene.registry.is_current("d", 2)


def test_a_restart_may_take_ten_times_as_long_as_the_first_start():
    scene = Scene()
    scene.look(30.0)
    scene.up()
    scene.registry.exited("d", scene.now)
    scene.look(290.0, living=["p"])
    assert scene.orders.killed == []
    scene.look(20.0, living=["p"])
    assert scene.orders.killed == ["d"]


def test_the_longest_start_sets_the_time_limit():
    """A quick restart does not shorten the time that a later start may take."""
    scene = Scene()
    scene.look(30.0)
    scene.up()
    scene.registry.exited("d", scene.now)
    scene.look(1.0, living=["p"])
    scene.registry.register(registered("d", epoch=2), scene.now)
    scene.registry.exited("d", scene.now)
    scene.look(290.0, living=["p"])
    assert scene.orders.killed == []


def test_a_worker_of_a_host_that_joins_again_starts_anew():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    scene.registry.register(registered("r", host="b"), scene.now)
    scene.registry.exited("r", scene.now)
    scene.registry.retire("r")
    scene.look(3600.0)
    scene.registry.unretire("r", Role.DECODE, scene.now + 3600.0)
    scene.registry.expect("r", Role.DECODE)
    scene.look(5.0)
    assert scene.orders.killed == []


def test_the_first_start_of_a_worker_has_no_time_limit():
    scene = Scene()
    scene.registry.register(registered("p"), scene.now)
    scene.look(3600.0, living=["p"])
    assert scene.orders.killed == []


def test_a_worker_with_an_endless_batch_counts_as_hung():
    scene = Scene().up()
    assert set(scene.look(1.0, batch_s=6.0)) == {"p", "d"}


def test_a_stalled_controller_does_not_fail_workers():
    scene = Scene().up()
    scene.look(1.0)
    scene.now += 60.0
    assert scene.registry.sweep(scene.now)[0] == []
    assert scene.look(1.0, living=["p", "d"]) == []
    assert scene.look(2.0, living=["p"]) == ["d"]


def test_messages_of_an_earlier_epoch_are_ignored():
    scene = Scene().up()
    assert scene.registry.exited("d", scene.now)
    assert not scene.registry.is_current("d", 1)
    assert not scene.registry.register(registered("d"), scene.now)
    assert "was given up" in scene.outbox.sent[-1][1].reason
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.registry.register(registered("d", epoch=2), scene.now)
    assert not scene.registry.is_current("d", 1)
    assert scene.registry.is_current("d", 2)


def test_nothing_is_sent_to_a_dead_worker():
    scene = Scene().up()
    scene.registry.exited("d", scene.now)
    scene.outbox.sent.clear()
    scene.registry.send("d", Abort(request_id="r"))
    assert scene.outbox.sent == []
    assert scene.outbox.forgotten == ["ipc:///nowhere/d-1.sock"]


def test_restarts_back_off_exponentially():
    scene = Scene().up()
    starts = []
    scene.registry.exited("d", scene.now)
    while len(starts) < 5:
        before = len(scene.orders.started)
        scene.look(ALIVE_S, living=["p"])
        if len(scene.orders.started) > before:
            starts.append(scene.now)
            assert scene.registry.members["d"].state is WorkerState.STARTING
            scene.registry.exited("d", scene.now)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (registered("d", model="/other"), "another model"),
        (
            registered("d", layout=KvLayout(layers=(LayerShape(2, 8, 8),), block_size=32, dtype="float32", itemsize=4)),
            "another KV cache layout",
        ),
        (registered("x"), "no worker called"),
    ],
)
def test_rejects_an_incompatible_worker_at_registration(message, reason):
    scene = Scene()
    scene.registry.register(registered("p"), 0.0)
    assert not scene.registry.register(message, 0.0)
    assert reason in scene.outbox.sent[-1][1].reason
    assert reason in scene.orders.refused[-1][1]
    assert not scene.registry.up("d")


def test_heartbeats_of_remote_workers_are_acknowledged():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    scene.registry.register(registered("r", host="b"), 0.0)
    scene.outbox.sent.clear()
    for instance in ("p", "r"):
        scene.registry.heartbeat(Alive(instance=instance, epoch=1, said_s=7.0), 1.0)
    # Local workers end with the controller, so they need no acknowledgement.
    assert scene.outbox.sent == [("tcp://b:1", HeartbeatAck(said_s=7.0))]


def test_a_fenced_worker_gets_no_acknowledgement():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    scene.registry.register(registered("r", host="b"), scene.now)
    assert scene.look(2.0) == ["r"]
    scene.outbox.sent.clear()
    scene.registry.heartbeat(Alive(instance="r", epoch=1, said_s=7.0), scene.now)
    assert scene.outbox.sent == []


def test_a_late_worker_is_announced_to_all_peers():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    assert scene.registry.complete
    scene.outbox.sent.clear()
    scene.registry.register(registered("r", host="b"), 0.0)
    told = {address: message for address, message in scene.outbox.sent if isinstance(message, Peers)}
    assert set(told) == {"ipc:///nowhere/p-1.sock", "ipc:///nowhere/d-1.sock", "tcp://b:1"}
    assert all(len(message.peers) == 3 for message in told.values())


def test_a_worker_with_lost_messages_is_killed():
    scene = Scene().up()
    scene.registry.message_lost("nobody")
    scene.registry.message_lost("d")
    assert scene.look(ALIVE_S) == ["d"]
    assert scene.orders.killed == ["d"]
    scene.registry.exited("d", scene.now)
    scene.look(1.0, living=["p"])
    scene.registry.register(registered("d", epoch=2), scene.now)
    assert scene.registry.sweep(scene.now)[0] == []


def test_remote_times_are_converted_to_the_local_clock():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    scene.registry.register(registered("r", host="b", now_s=5000.0), 10.0)
    assert scene.registry.to_local_time("r", 5002.0) == 12.0
    assert scene.registry.to_local_time("p", 5002.0) == 5002.0
    scene.registry.heartbeat(Alive(instance="r", epoch=1, now_s=5001.5), 11.0)
    assert scene.registry.to_local_time("r", 5001.5) == 11.0


def test_a_removed_worker_is_not_restarted():
    scene = Scene().up()
    scene.registry.expect("r", Role.DECODE)
    scene.registry.exited("r", scene.now)
    scene.registry.remove("r")
    scene.look(60.0)
    assert scene.orders.started == []
    assert "r" not in scene.registry.members


def test_a_retired_worker_is_restarted_on_request_only():
    """The retirement of a worker does not count as a failure."""
    scene = Scene().up()
    scene.registry.retire("d")
    assert scene.registry.retiring() == ["d"]
    scene.registry.exited("d", scene.now)
    scene.look(5.0, living=["p"])
    assert scene.orders.started == []
    assert (scene.registry.retiring(), scene.registry.retired()) == ([], ["d"])
    assert scene.orders.freed == ["d"]
    scene.registry.unretire("d", Role.PREFILL, scene.now)
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.registry.register(registered("d", epoch=2), scene.now)
    assert scene.registry.breaker("d").state is BreakerState.CLOSED
    assert scene.registry.members["d"].role is Role.PREFILL
