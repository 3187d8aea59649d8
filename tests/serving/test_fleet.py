"""Which workers live, and what is done about those that do not; time is the test's."""

import itertools

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ConfigurationError, StaleEpochError
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import BreakerState
from twofold.scheduling.instance.status import InstanceStatus
from twofold.security.network import HOME
from twofold.serving.controller.registry import ALIVE_S, HealthTimeouts, WorkerRegistry, WorkerState
from twofold.serving.messages import Abort, Alive, HeartbeatAck, Peer, Peers, Registered
from twofold.transport.base import MemoryDescriptor

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 8),), block_size=16, dtype="float32", itemsize=4)
IDLE = InstanceStatus(0, 0, 0, 0, 0, 4, 4, 0)


class Outbox:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []
        self.forgotten = []

    def send(self, address, message):
        self.sent.append((address, message))

    def forget(self, address):
        self.forgotten.append(address)


class Orders:
    """Keeps what is ordered."""

    def __init__(self):
        self.started, self.killed, self.freed = [], [], []

    def start_worker(self, instance):
        self.started.append(instance)

    def kill_worker(self, instance):
        self.killed.append(instance)

    def release_worker(self, instance):
        self.freed.append(instance)


def registered(instance, epoch=1, model="/m", layout=LAYOUT, host=HOME, now_s=0.0):
    memory = MemoryDescriptor(instance=instance, epoch=epoch, address="", num_blocks=4, layout=layout)
    outside = f"tcp://{host}:{epoch}"
    peer = Peer(inbox=f"ipc:///nowhere/{instance}-{epoch}.sock", memory=memory, host=host, outside=outside)
    return Registered(peer=peer, role=Role.PREFILL, model=model, status=IDLE, now_s=now_s)


class Scene:
    """Two workers, p and d; `look` passes time in steps in which those named in `living` say that they live."""

    def __init__(self):
        self.outbox, self.orders, self.now = Outbox(), Orders(), 0.0
        self.fleet = WorkerRegistry(
            {"p": Role.PREFILL, "d": Role.DECODE}, self.outbox, self.orders, HealthTimeouts(batch_s=5.0)
        )

    def up(self):
        self.fleet.register(registered("p"), self.now)
        self.fleet.register(registered("d"), self.now)
        return self

    def look(self, seconds, living=("p", "d"), batch_s=0.0):
        lost = []
        for _ in range(round(seconds / ALIVE_S)):
            self.now += ALIVE_S
            for instance in living:
                self.fleet.heard(Alive(instance=instance, epoch=1, batch_s=batch_s), self.now)
            lost += self.fleet.look(self.now).lost
        return lost


def test_workers_are_introduced_to_each_other_when_all_are_there():
    """Before that nobody is told anything."""
    scene = Scene()
    scene.fleet.register(registered("p"), 0.0)
    assert not scene.fleet.complete
    assert not scene.outbox.sent
    scene.fleet.register(registered("d"), 0.0)
    assert scene.fleet.complete
    told = [message for _, message in scene.outbox.sent]
    assert len(told) == 2
    assert all(
        isinstance(message, Peers) and [peer.memory.instance for peer in message.peers] == ["p", "d"]
        for message in told
    )


def test_who_says_that_it_lives_is_left_alone():
    """For as long as it does."""
    scene = Scene().up()
    assert scene.look(60.0) == []
    assert scene.orders.killed == []


def test_a_silent_worker_is_killed_within_two_seconds_and_restarted_after_its_end():
    """Killed first, so that it cannot write any more; started again only when it is really gone."""
    scene = Scene().up()
    began = scene.now
    lost = []
    while not lost:
        lost = scene.look(ALIVE_S, living=["p"])
    assert lost == ["d"]
    assert scene.now - began < 2.0
    assert scene.orders.killed == ["d"]
    scene.look(10.0, living=["p"])
    assert scene.orders.started == [], "it may still be there"
    assert not scene.fleet.exited("d", scene.now), "that is known already"
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.fleet.register(registered("d", epoch=2), scene.now)
    assert scene.fleet.breaker("d").state is BreakerState.HALF_OPEN


def test_a_batch_that_does_not_end_is_a_hung_worker():
    """Its other threads may well say that they live."""
    scene = Scene().up()
    assert set(scene.look(1.0, batch_s=6.0)) == {"p", "d"}


def test_time_in_which_nobody_looked_is_not_held_against_them():
    """The machine, or this process, stood still."""
    scene = Scene().up()
    scene.look(1.0)
    scene.now += 60.0
    assert scene.fleet.look(scene.now).lost == []
    assert scene.look(1.0, living=["p", "d"]) == []
    assert scene.look(2.0, living=["p"]) == ["d"]


def test_what_an_earlier_life_says_is_not_heard():
    """Its messages may have been under way when it ended."""
    scene = Scene().up()
    assert scene.fleet.exited("d", scene.now)
    assert not scene.fleet.is_current("d", 1)
    with pytest.raises(StaleEpochError, match="is over"):
        scene.fleet.register(registered("d"), scene.now)
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.fleet.register(registered("d", epoch=2), scene.now)
    assert not scene.fleet.is_current("d", 1)
    assert scene.fleet.is_current("d", 2)


def test_nothing_is_sent_to_who_is_not_there():
    """A message to a dead worker would wait for one that never comes."""
    scene = Scene().up()
    scene.fleet.exited("d", scene.now)
    scene.outbox.sent.clear()
    scene.fleet.send("d", Abort(request_id="r"))
    assert scene.outbox.sent == []
    assert scene.outbox.forgotten == ["ipc:///nowhere/d-1.sock"]


def test_a_worker_that_dies_at_every_start_is_tried_less_and_less_often():
    """Back-off: the fifth start comes after more than twice the time of the fourth."""
    scene = Scene().up()
    starts = []
    scene.fleet.exited("d", scene.now)
    while len(starts) < 5:
        before = len(scene.orders.started)
        scene.look(ALIVE_S, living=["p"])
        if len(scene.orders.started) > before:
            starts.append(scene.now)
            assert scene.fleet.members["d"].state is WorkerState.STARTING
            scene.fleet.exited("d", scene.now)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (registered("d", model="/other"), "another model"),
        (
            registered(
                "d",
                layout=KvLayout(layers=(LayerShape(2, 8, 8),), block_size=32, dtype="float32", itemsize=4),
            ),
            "laid out otherwise",
        ),
        (registered("x"), "no place"),
    ],
)
def test_a_worker_that_cannot_work_with_the_others_is_refused_when_it_registers(message, reason):
    """Not at the first request that would have to move."""
    scene = Scene()
    scene.fleet.register(registered("p"), 0.0)
    with pytest.raises(ConfigurationError, match=reason):
        scene.fleet.register(message, 0.0)
    assert not scene.fleet.up("d")


def test_a_worker_on_another_host_is_reached_there_and_told_that_it_is_heard():
    """Who is not told so has to end. Those of this host are not: they end with us."""
    scene = Scene().up()
    scene.fleet.expect("r", Role.DECODE)
    scene.fleet.register(registered("r", host="b"), 0.0)
    scene.outbox.sent.clear()
    for instance in ("p", "r"):
        scene.fleet.heard(Alive(instance=instance, epoch=1, said_s=7.0), 1.0)
    assert scene.outbox.sent == [("tcp://b:1", HeartbeatAck(said_s=7.0))]


def test_who_is_given_up_is_not_told_that_it_is_heard():
    """It would live on, and the controller counts on its end."""
    scene = Scene().up()
    scene.fleet.expect("r", Role.DECODE)
    scene.fleet.register(registered("r", host="b"), scene.now)
    assert scene.look(2.0) == ["r"]
    scene.outbox.sent.clear()
    scene.fleet.heard(Alive(instance="r", epoch=1, said_s=7.0), scene.now)
    assert scene.outbox.sent == []


def test_who_comes_later_meets_everybody():
    """And they it; what was complete stays so."""
    scene = Scene().up()
    scene.fleet.expect("r", Role.DECODE)
    assert scene.fleet.complete
    scene.outbox.sent.clear()
    scene.fleet.register(registered("r", host="b"), 0.0)
    told = {address: message for address, message in scene.outbox.sent if isinstance(message, Peers)}
    assert set(told) == {"ipc:///nowhere/p-1.sock", "ipc:///nowhere/d-1.sock", "tcp://b:1"}
    assert all(len(message.peers) == 3 for message in told.values())


def test_a_worker_of_which_something_was_missed_is_ended():
    """Nobody knows what it has and what it has not; its next life is without fault."""
    scene = Scene().up()
    scene.fleet.missed("nobody")
    scene.fleet.missed("d")
    assert scene.look(ALIVE_S) == ["d"]
    assert scene.orders.killed == ["d"]
    scene.fleet.exited("d", scene.now)
    scene.look(1.0, living=["p"])
    scene.fleet.register(registered("d", epoch=2), scene.now)
    assert scene.fleet.look(scene.now).lost == []


def test_moments_of_another_hosts_clock_are_told_on_ours():
    """Its machine was started at another time."""
    scene = Scene().up()
    scene.fleet.expect("r", Role.DECODE)
    scene.fleet.register(registered("r", host="b", now_s=5000.0), 10.0)
    assert scene.fleet.ours("r", 5002.0) == 12.0
    assert scene.fleet.ours("p", 5002.0) == 5002.0
    scene.fleet.heard(Alive(instance="r", epoch=1, now_s=5001.5), 11.0)
    assert scene.fleet.ours("r", 5001.5) == 11.0


def test_who_is_dismissed_is_not_started_again():
    """Its host is gone."""
    scene = Scene().up()
    scene.fleet.expect("r", Role.DECODE)
    scene.fleet.exited("r", scene.now)
    scene.fleet.dismiss("r")
    scene.look(60.0)
    assert scene.orders.started == []
    assert "r" not in scene.fleet.members


def test_a_retired_worker_is_not_started_again():
    """It ends as it was told to: that is no failure, and it comes back as one that is trusted."""
    scene = Scene().up()
    scene.fleet.retire("d")
    assert scene.fleet.retiring() == ["d"]
    scene.fleet.exited("d", scene.now)
    scene.look(5.0, living=["p"])
    assert scene.orders.started == []
    assert (scene.fleet.retiring(), scene.fleet.retired()) == ([], ["d"])
    assert scene.orders.freed == ["d"]
    scene.fleet.want("d", Role.PREFILL, scene.now)
    scene.look(1.0, living=["p"])
    assert scene.orders.started == ["d"]
    scene.fleet.register(registered("d", epoch=2), scene.now)
    assert scene.fleet.breaker("d").state is BreakerState.CLOSED
    assert scene.fleet.members["d"].role is Role.PREFILL
