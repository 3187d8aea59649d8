"""The controller's records of remote hosts and their workers, on a fake clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.instance import Role
from twofold.serving.config import EngineConfig, JoinTerms, ServiceConfig
from twofold.serving.controller.heartbeat import WATCHDOG_MARGIN_S, WATCHDOG_S
from twofold.serving.controller.remote import Hosts
from twofold.serving.launch.worker_plan import BatchPolicies
from twofold.serving.messages import (
    HeartbeatAck,
    HostAlive,
    HostFinish,
    HostJoins,
    HostRefused,
    HostUnknown,
    HostWelcome,
    KillWorker,
    StartWorker,
    WorkerLife,
)

SPLIT = BatchPolicies().terms(colocated=False)
LONG = WATCHDOG_S + WATCHDOG_MARGIN_S + 0.1


class Outbox:
    """Outbox stub that records messages by address."""

    def __init__(self):
        self.sent = []

    def send(self, address, message):
        self.sent.append((address, message))

    def forget(self, address):
        pass

    def take(self):
        sent, self.sent = self.sent, []
        return sent


class Local:
    """Launcher stub that records commands."""

    def __init__(self):
        self.orders = []

    def start_worker(self, instance):
        self.orders.append(("start", instance))

    def kill_worker(self, instance):
        self.orders.append(("kill", instance))

    def release_worker(self, instance):
        self.orders.append(("free", instance))


class Scene:
    def __init__(self, terms=SPLIT, transport="curve", own=()):
        workers = (terms.worker("prefill-0", Role.PREFILL),) if Role.PREFILL in terms.batchers else ()
        config = ServiceConfig(
            engine=EngineConfig(model="/m"), workers=workers, run_dir="/r", terms=terms, transport=transport
        )
        self.outbox, self.local = Outbox(), Local()
        self.hosts = Hosts(config, "model", "1", self.local, self.outbox, own)

    def joins(self, now=0.0, host="b", life=1, **changes):
        fields = {"version": "1", "model": "model", "workers": {Role.DECODE: 2}} | changes
        return self.hosts.joins(HostJoins(host=host, life=life, inbox=f"tcp://{host}", **fields), now)

    def alive(self, now, seats, host="b", life=1):
        return self.hosts.alive(
            HostAlive(host=host, life=life, inbox=f"tcp://{host}", said_s=now + 7, workers=seats), now
        )

    def told(self, *kinds):
        return [message for _, message in self.outbox.take() if isinstance(message, kinds)]


def running(*lives):
    return {f"decode-{i}": WorkerLife(life, runs=True) for i, life in enumerate(lives)}


def test_a_welcome_carries_the_hosts_workers():
    scene = Scene()
    joined = scene.joins()
    assert dict(joined.workers) == {"decode-0": Role.DECODE, "decode-1": Role.DECODE}
    (welcome,) = scene.told(HostWelcome)
    assert [worker.batcher for worker in welcome.config.workers] == ["decode", "decode"]
    # Local settings of the service are omitted.
    assert (welcome.config.run_dir, welcome.config.network, welcome.config.journal_dir) == ("", None, None)


def test_a_repeated_join_is_answered_and_counted_once():
    scene = Scene()
    scene.joins()
    assert not scene.joins().workers
    assert len(scene.told(HostWelcome)) == 2


@pytest.mark.parametrize(
    ("scene", "changes", "reason"),
    [
        (Scene(), {"version": "2"}, "runs Twofold 2 and the service 1"),
        (Scene(), {"model": "other"}, "b has another model"),
        (Scene(), {"workers": {Role.MIXED: 1}}, "cannot use a mixed worker: it is split"),
        (Scene(transport="shared_memory"), {}, "shared_memory, which b does not share"),
        (Scene(), {"host": ""}, "needs a name"),
        (Scene(JoinTerms(batchers={Role.MIXED: "mixed"})), {}, "cannot use a decode worker: it is colocated"),
    ],
)
def test_rejects_an_incompatible_host(scene, changes, reason, caplog):
    assert not scene.joins(**changes).workers
    (refused,) = scene.told(HostRefused)
    assert reason in refused.reason
    assert reason in caplog.text


def test_commands_go_to_the_workers_host():
    scene = Scene()
    scene.joins()
    scene.outbox.take()
    scene.hosts.kill_worker("prefill-0")
    scene.hosts.start_worker("prefill-0")
    assert scene.local.orders == [("kill", "prefill-0"), ("start", "prefill-0")]
    scene.hosts.kill_worker("decode-1")
    assert scene.outbox.take() == [("tcp://b", KillWorker(instance="decode-1", life=1))]


def test_an_exit_is_reported_once():
    scene = Scene()
    scene.joins()
    assert scene.alive(0.2, running(1, 1)) == []
    seats = running(1, 1) | {"decode-1": WorkerLife(1, runs=False)}
    assert scene.alive(0.4, seats) == ["decode-1"]
    assert scene.alive(0.6, seats) == []
    assert HeartbeatAck(said_s=7.6) in scene.told(HeartbeatAck)


def test_commands_are_repeated_until_executed():
    scene = Scene()
    scene.joins()
    scene.hosts.kill_worker("decode-0")
    scene.outbox.take()
    scene.alive(0.2, running(1, 1))
    assert scene.told(KillWorker) == [KillWorker(instance="decode-0", life=1)]
    ended = running(1, 1) | {"decode-0": WorkerLife(1, runs=False)}
    assert scene.alive(0.4, ended) == ["decode-0"]
    scene.hosts.start_worker("decode-0")
    scene.outbox.take()
    scene.alive(0.6, ended)
    assert scene.told(StartWorker) == [StartWorker(instance="decode-0", life=2)]
    scene.alive(0.8, running(2, 1))
    assert scene.told(StartWorker, KillWorker) == []


def test_workers_of_a_silent_host_are_presumed_dead_after_the_watchdog_term():
    """A host counts as alive while any of its workers still sends messages."""
    scene = Scene()
    scene.joins()
    scene.alive(1.0, running(1, 1))
    assert scene.hosts.sweep(LONG, lambda _: 0.0) == []
    assert scene.hosts.sweep(1.0 + LONG, lambda _: 3.0) == []
    assert scene.hosts.sweep(1.0 + LONG, lambda _: 0.0) == ["decode-0", "decode-1"]
    assert scene.hosts.sweep(9.0 + LONG, lambda _: 0.0) == []


def test_a_returning_host_kills_workers_presumed_dead():
    """When an unreachable host returns, its old worker is killed, and restarted only after the exit of its process."""
    scene = Scene()
    scene.joins()
    scene.hosts.sweep(LONG, lambda _: 0.0)
    scene.hosts.start_worker("decode-0")
    assert scene.told(StartWorker) == [], "the host is unreachable"
    assert scene.alive(20.0, running(1, 1)) == []
    assert scene.told(KillWorker, StartWorker) == [KillWorker(instance="decode-0", life=1)]
    assert scene.alive(20.2, running(1, 1) | {"decode-0": WorkerLife(1, runs=False)}) == []
    assert scene.told(KillWorker, StartWorker) == [StartWorker(instance="decode-0", life=2)]


def test_a_restarted_host_reuses_worker_names_after_the_watchdog_term():
    """A restarted host may join only once its old workers have certainly ended."""
    scene = Scene()
    scene.joins()
    scene.told()
    scene.joins(1.0, life=2)
    assert scene.told(HostWelcome, HostRefused) == []
    scene.hosts.sweep(LONG, lambda _: 0.0)
    joined = scene.joins(LONG, life=2, workers={Role.DECODE: 1, Role.PREFILL: 1})
    assert set(joined.workers) == {"decode-0", "prefill-1"}
    assert set(joined.gone) == {"decode-1"}
    assert len(scene.told(HostWelcome)) == 1


def test_rejects_a_second_host_of_the_same_name():
    scene = Scene()
    scene.joins()
    scene.joins(1.0, life=2)
    scene.alive(1.5, running(1, 1))
    scene.joins(2.0, life=2)
    assert "--name" in scene.told(HostRefused)[0].reason


def test_an_unknown_host_is_asked_to_rejoin():
    scene = Scene()
    assert scene.alive(0.0, running(1, 1)) == []
    assert scene.outbox.take() == [("tcp://b", HostUnknown(life=1))]


def test_a_leaving_host_is_removed_with_its_workers():
    scene = Scene()
    scene.joins()
    assert scene.hosts.leaves("b", 2) == []
    assert scene.hosts.leaves("b", 1) == ["decode-0", "decode-1"]
    assert scene.hosts.leaves("b", 1) == []


def test_a_launched_host_runs_the_worker_of_its_name():
    scene = Scene(own=["prefill-0"])
    joined = scene.joins(host="prefill-0", workers={Role.PREFILL: 1})
    assert dict(joined.workers) == {"prefill-0": Role.PREFILL}
    assert scene.hosts.leaves("prefill-0", 1) == ["prefill-0"]
    joined = scene.joins(host="prefill-0", workers={Role.PREFILL: 1}, life=2)
    assert dict(joined.workers) == {"prefill-0": Role.PREFILL}


def test_a_launched_host_is_replaced_once_presumed_dead():
    """The launcher replaces a host only once the host is presumed dead."""
    scene = Scene(own=["prefill-0"])
    scene.joins(host="prefill-0", workers={Role.PREFILL: 1})
    scene.hosts.start_worker("prefill-0")
    assert scene.told(StartWorker) == [StartWorker(instance="prefill-0", life=2)]
    assert scene.local.orders == []
    assert scene.hosts.sweep(LONG, lambda _: 0.0) == ["prefill-0"]
    scene.hosts.start_worker("prefill-0")
    assert scene.local.orders == [("start", "prefill-0")]
    # The old host may return later. It is refused, and its exit is not reported again.
    assert scene.alive(LONG + 1.0, {"prefill-0": WorkerLife(2, runs=False)}, host="prefill-0") == []
    (refused,) = scene.told(HostRefused)
    assert "another host replaced it" in refused.reason
    assert scene.hosts.leaves("prefill-0", 1) == []
    assert scene.joins(LONG + 2.0, host="prefill-0", workers={Role.PREFILL: 1}, life=2).workers


def test_resources_are_released_by_the_launcher_that_holds_them():
    scene = Scene(own=["prefill-0"])
    scene.joins(host="prefill-0", workers={Role.PREFILL: 1})
    scene.joins()
    for worker in ("prefill-0", "decode-0"):
        scene.hosts.release_worker(worker)
    assert scene.local.orders == [("free", "prefill-0")]


def test_present_hosts_are_told_of_the_shutdown():
    scene = Scene()
    scene.joins()
    scene.joins(host="c")
    scene.hosts.sweep(LONG, lambda instance: LONG if instance == "decode-0" else 0.0)
    scene.outbox.take()
    scene.hosts.finish()
    assert scene.outbox.take() == [("tcp://b", HostFinish())]


class Lossy:
    """A host whose messages to and from the controller may be lost."""

    def __init__(self):
        self.scene, self.now = Scene(), 0.0
        self.life, self.runs = 1, True
        self.scene.joins(workers={Role.DECODE: 1})

    def alive(self, heard=True, hears=True):
        self.now += 0.2
        if heard:
            self._ended(self.scene.alive(self.now, {"decode-0": WorkerLife(self.life, self.runs)}))
        for _, message in self.scene.outbox.take():
            if hears:
                self._told(message)

    def lost(self):
        self.alive(heard=False)

    def deaf(self):
        self.alive(hears=False)

    def dies(self):
        self.runs = False

    def kill(self):
        self.scene.hosts.kill_worker("decode-0")

    def silence(self):
        self.now += LONG
        self._ended(self.scene.hosts.sweep(self.now, lambda _: 0.0))

    def _ended(self, instances):
        for instance in instances:
            self.scene.hosts.start_worker(instance)

    def _told(self, message):
        if isinstance(message, KillWorker) and message.life == self.life:
            self.runs = False
        elif isinstance(message, StartWorker) and message.life > self.life and not self.runs:
            self.life, self.runs = message.life, True


@given(st.lists(st.sampled_from(["alive", "lost", "deaf", "dies", "kill", "silence"]), max_size=40))
def test_the_desired_worker_runs_despite_lost_messages(events):
    lossy = Lossy()
    for event in events:
        getattr(lossy, event)()
    for _ in range(6):
        lossy.alive()
    before = lossy.life
    assert lossy.runs
    assert before == lossy.scene.hosts.joined["b"].workers["decode-0"].life
    lossy.alive()
    assert (lossy.life, lossy.runs) == (before, True), "no further command must follow"


def test_worker_names_are_unique():
    scene = Scene()
    given_names = []
    for number in range(4):
        given_names += scene.joins(host=f"h{number}").workers
        scene.hosts.leaves(f"h{number}", 1)
    assert len(set(given_names)) == len(given_names) == 8
    assert all(name.startswith("decode-") for name in given_names)
