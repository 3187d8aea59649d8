"""The driver process of the Ray launcher, against a fake Ray."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from twofold.instance import Role
from twofold.serving.config import EngineConfig
from twofold.serving.launch.child_process import Report, WorkerCommand
from twofold.serving.launch.ray import driver as module
from twofold.serving.launch.ray.driver import DOUBT_S, ROOM_S, RayDriver
from twofold.serving.launch.ray.launcher import HostJob, RayJob


class FakeRay:
    """Fake of Ray's API with a given number of CPUs per node."""

    class exceptions:  # noqa: N801  (as Ray calls it)
        class RayError(Exception):
            pass

    def __init__(self, **cpus):
        self.cpus, self.stuck = cpus, set()  # placement groups stay pending on the nodes in `stuck`
        self.groups, self.outcomes = [], {}

    # -- interface of Ray

    def nodes(self):
        return [
            {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": cpus}}
            for name, cpus in self.cpus.items()
        ]

    def free(self):
        return {name: {"CPU": cpus - len(self.on(name))} for name, cpus in self.cpus.items()}

    def group(self, bundles, strategy, bundle_label_selector):
        assert (bundles, strategy) == ([{"CPU": 1.0}], "STRICT_PACK")
        named = None if bundle_label_selector is None else bundle_label_selector[0]["ray.io/node-id"]
        made = SimpleNamespace(named=named, node=None)
        self.groups.append(made)
        return made

    def table(self, group):
        free = self.free()
        able = [name for name in ([group.named] if group.named else self.cpus) if name not in self.stuck]
        fits = [name for name in able if free.get(name, {"CPU": 0})["CPU"] >= 1]
        group.node = group.node or next(iter(fits), None)
        return {"state": "CREATED" if group.node else "PENDING", "bundles_to_node_id": {0: group.node}}

    def remote(self, _cls):
        end = lambda _job: object()  # noqa: E731
        actor = SimpleNamespace(run=SimpleNamespace(remote=end))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def kill(self, actor):
        pass

    def wait(self, ends, num_returns, timeout):
        return [end for end in ends if end in self.outcomes], []

    def get(self, end):
        outcome = self.outcomes[end]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    # -- interface of the tests

    def on(self, node):
        return [group for group in self.groups if group.node == node]


class Scene:
    def __init__(self, monkeypatch, *workers, **cpus):
        self.ray, self.reports, self.now = FakeRay(**cpus), [], 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        for name, contents in {
            "ray": {},
            "ray.util": {},
            "ray._private": {},
            "ray._private.state": {"available_resources_per_node": self.ray.free},
            "ray.util.placement_group": {
                "placement_group": self.ray.group,
                "placement_group_table": self.ray.table,
                "remove_placement_group": self.ray.groups.remove,
            },
            "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_: None},
        }.items():
            fake = ModuleType(name)
            fake.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, fake)
        hosts = tuple(
            HostJob(
                controller="tcp://c:1",
                key="k",
                model="/m",
                worker=name,
                role=Role(name.partition("-")[0]),
                threads=1,
                log_format="text",
            )
            for name in workers
        )
        job = RayJob(address="a", bundle={"CPU": 1.0}, link_label="rack", engine=EngineConfig(model="/m"), hosts=hosts)
        self.driver = RayDriver(self.ray, job, self.reports.append)
        for name in workers:
            self.driver.start(name)
            self.look()

    def look(self, seconds=0.0):
        self.now += seconds
        self.driver.poll()

    def ends(self, worker, outcome):
        self.ray.outcomes[self.driver._placed[worker].end] = outcome
        self.look()

    def waiting(self):
        return [report.waiting for report in self.reports if report.waiting is not None]

    def where(self):
        return {name: placed.node for name, placed in self.driver._placed.items()}


@pytest.fixture
def scene(monkeypatch):
    def made(*workers, **cpus):
        return Scene(monkeypatch, *workers, **cpus)

    return made


def test_a_worker_without_room_waits_for_a_node(scene):
    running = scene("prefill-0", "decode-0", a=1)
    assert running.where() == {"prefill-0": "a", "decode-0": None}
    running.look(1.0)
    running.ray.cpus["b"] = 1
    running.look(1.0)
    assert running.where()["decode-0"] == "b"
    assert running.waiting() == [("decode-0",), ()]


def test_an_exit_is_reported_and_a_start_creates_a_new_actor(scene):
    running = scene("prefill-0", a=1)
    running.ends("prefill-0", (2, "there is no model directory /m"))
    assert running.reports[-1] == Report(exited="prefill-0", code=2, why="there is no model directory /m")
    running.look(5.0)
    assert running.where() == {}
    assert running.ray.groups == []
    running.driver.start("prefill-0")
    assert running.where() == {"prefill-0": "a"}


def test_a_node_failure_is_reported_in_one_sentence(scene):
    running = scene("prefill-0", a=1)
    error = FakeRay.exceptions.RayError("The actor died.\n\tThe actor died because its node has died. Node Id: a")
    running.ends("prefill-0", error)
    assert running.reports[-1].why == "Ray reports: The actor died because its node has died. Node Id: a"


def test_a_silently_lost_worker_avoids_its_node_for_a_while(scene):
    running = scene("prefill-0", a=1)
    running.ray.cpus["b"] = 1
    running.driver.start("prefill-0")
    assert running.where() == {"prefill-0": "b"}
    assert len(running.ray.groups) == 1
    running.now += DOUBT_S
    running.driver.start("prefill-0")
    assert running.where() == {"prefill-0": "a"}


def test_another_node_is_chosen_when_placement_stalls(scene):
    running = scene(a=2, b=1)
    running.driver._hosts["prefill-0"] = HostJob(
        controller="c", key="", model="/m", worker="prefill-0", role=Role.PREFILL, threads=1, log_format="text"
    )
    running.ray.stuck.add("a")
    running.driver.start("prefill-0")
    assert running.where() == {"prefill-0": "a"}
    running.look(ROOM_S + 1.0)
    assert running.where() == {"prefill-0": "b"}
    assert len(running.ray.groups) == 1


def test_a_retired_workers_resources_are_released(scene):
    running = scene("prefill-0", "decode-0", a=1)
    running.driver.execute(WorkerCommand(free="prefill-0"))
    running.look()
    assert running.where() == {"decode-0": "a"}
    running.driver.execute(WorkerCommand(free="prefill-0"))  # idempotent


def test_shutdown_waits_for_running_hosts_only(scene):
    running = scene("prefill-0", "decode-0", a=1)
    running.driver.execute(WorkerCommand(finish=True))
    assert list(running.where()) == ["prefill-0"]
    running.ends("prefill-0", (0, ""))
    assert running.where() == {}
