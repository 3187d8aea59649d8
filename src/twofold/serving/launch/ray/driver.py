"""Which node of a Ray cluster a worker goes to.

The driver: one process that speaks to Ray for a service, and makes an actor for each worker that should run.

It reads a RayJob and then orders (see `WorkerCommand`) from its standard input, and reports on its standard output (see
`Report`). It ends when told to, when its input closes, or when the process that started it dies; its actors and
placement groups are Ray's to end then, as those of a driver that is gone.

Ray restarts nothing by itself (`max_restarts` is 0). A worker is made anew when the fleet says so, which is when the
one before has certainly ended; that Ray takes an actor for dead proves nothing about its processes.
"""

import logging
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from twofold.errors import UserError
from twofold.instance import Role
from twofold.raycluster.cluster import Bundle, RayNode, connect, list_nodes
from twofold.serving.launch.child_process import (
    CommandPipe,
    Report,
    Say,
    WorkerCommand,
    die_with_parent,
    read_line,
    take_stdout,
)
from twofold.serving.launch.model_source import model_facts
from twofold.serving.launch.ray.launcher import HostJob, RayJob, WorkerHost
from twofold.serving.telemetry.logs import configure_logs


class PlacedNeighbour(msgspec.Struct, frozen=True):
    """A worker of the same service that has a node already."""

    role: Role
    node: str


def choose_node(
    role: Role, bundle: Bundle, nodes: Sequence[RayNode], others: Iterable[PlacedNeighbour], link_label: str
) -> RayNode | None:
    """The node for one more worker, None where no node has room for it.

    KV caches travel between the phases, so a worker goes where most of the others are within reach of the fast link:
    nodes with the same value of `link_label`; the first goes where such a group has most room. Within it the workers of
    a phase are spread, so that a node that is lost takes no phase with it; then all workers, over those with most room.
    """
    placed = list(others)
    on_node = Counter(each.node for each in placed)
    of_role = Counter(each.node for each in placed if each.role is role)
    near, room = Counter[str | None](), Counter[str | None]()
    for node in nodes:
        group = node.labels.get(link_label)
        near[group] += on_node[node.id]
        room[group] += _room(node, bundle)

    def rank(node: RayNode) -> tuple[int, int, int, int, int, str]:
        group = node.labels.get(link_label)
        spread = -of_role[node.id], -on_node[node.id]
        return near[group], room[group], *spread, _room(node, bundle), node.id

    return max((node for node in nodes if node.has_room(bundle)), key=rank, default=None)


def _room(node: RayNode, bundle: Bundle) -> int:
    """How many such bundles are free on a node."""
    return int(min((node.free.get(name, 0.0) / amount for name, amount in bundle.items()), default=0.0))


log = logging.getLogger("twofold.serving.launch.ray.driver")  # which is __main__ where it runs

LOOK_S = 0.25
# From when a group is asked for until the node that was chosen is taken to have no room after all.
ROOM_S = 5.0
# How long a node is avoided whose worker was lost without a word from Ray, which may not know of its end yet.
DOUBT_S = 30.0


def main() -> None:
    die_with_parent(signal.SIGTERM, os.getppid())
    say = take_stdout()
    job = msgspec.json.decode(read_line(sys.stdin.fileno()), type=RayJob)
    configure_logs(job.hosts[0].log_format if job.hosts else "text")

    def report(entry: Report) -> None:
        say(msgspec.json.encode(entry))

    try:
        report(Report(stage=f"connecting to Ray at {job.address}"))
        ray = connect(job.address, "--launcher ray")
        facts = model_facts(job.engine)
    except UserError as error:
        report(Report(failure=str(error)))
        sys.exit(2)
    report(
        Report(
            stage="starting workers",
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            model=facts.name,
        )
    )
    driver = RayDriver(ray, job, say)
    for host in job.hosts:
        driver.start(host.worker)
    driver.watch()
    # Ray's own end takes seconds, and what is left belongs to this driver and ends with it.
    os._exit(0)


class PlacedWorker:
    """The placement group and the actor of a worker; `end` is there when the actor's host has ended.

    `node` is where it is, or is meant to be: None while no node has room, and Ray takes the first that will.
    """

    def __init__(self, group: Any, actor: Any, end: Any, node: str | None, now: float) -> None:  # noqa: ANN401  (Ray's)
        self.group, self.actor, self.end, self.node = group, actor, end, node
        self.asked_s = now
        self.made = False


class RayDriver:
    """Makes and ends actors as it is told, and reports those that end."""

    def __init__(self, ray: Any, job: RayJob, say: Say) -> None:  # noqa: ANN401  (the module, which has no types)
        self._ray, self._job, self._say = ray, job, say
        self._hosts = {host.worker: host for host in job.hosts}
        self._placed: dict[str, PlacedWorker] = {}
        self._doubts: dict[str, float] = {}  # nodes to be avoided, and until when
        self._waiting: tuple[str, ...] = ()
        self._orders = CommandPipe()
        self._finishing = self._ending = False

    # -- orders -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Do as ordered and report what ends, until told to end."""
        signal.signal(signal.SIGTERM, self._end)  # Ray has taken it when it was connected
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ)
            while not (self._ending or (self._finishing and not self._placed)):
                if selector.select(timeout=LOOK_S):
                    for order in self._orders.read():
                        self._obey(order)
                    self._ending = self._ending or self._orders.ended
                self._look()
        for worker in list(self._placed):
            self._remove(worker)

    def start(self, worker: str) -> None:
        """Make an actor for a worker, in place of the one that there may be: its end is certain."""
        now = time.monotonic()
        before = self._placed.get(worker)
        if before is not None:
            if before.node is not None:
                self._doubts[before.node] = now + DOUBT_S
            self._remove(worker)
        self._place(self._hosts[worker], now)

    def _obey(self, order: WorkerCommand) -> None:
        if order.finish:
            self._finishing = True
            for worker in [name for name, placed in self._placed.items() if not placed.made]:
                self._remove(worker)
        if order.start is not None:
            self.start(order.start)
        for unwanted in (order.kill, order.free):
            if unwanted is not None and unwanted in self._placed:
                self._remove(unwanted)

    def _end(self, _signal: int, _frame: object) -> None:
        self._ending = True

    # -- Ray --------------------------------------------------------------------------------------------------------

    def _place(self, host: HostJob, now: float) -> None:
        from ray.util.placement_group import placement_group  # noqa: PLC0415  (an extra)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        job = self._job
        nodes = list_nodes(self._ray, with_room=True)
        trusted = [node for node in nodes if self._doubts.get(node.id, 0.0) <= now]
        others = [
            PlacedNeighbour(self._hosts[name].role, placed.node)
            for name, placed in self._placed.items()
            if placed.node is not None
        ]
        # A node that is doubted is better than none: Ray says that it has room.
        node = choose_node(host.role, job.bundle, trusted, others, job.link_label) or choose_node(
            host.role, job.bundle, nodes, others, job.link_label
        )
        # One bundle is always on one node. Ray does not know which node is near which of ours, so the node is named.
        group = placement_group(
            [job.bundle],
            strategy="STRICT_PACK",
            bundle_label_selector=None if node is None else [{"ray.io/node-id": node.id}],
        )
        rest = {name: amount for name, amount in job.bundle.items() if name not in {"CPU", "GPU"}}
        actor = (
            self._ray.remote(WorkerHost)
            .options(
                num_cpus=job.bundle.get("CPU", 0),
                num_gpus=job.bundle.get("GPU", 0),
                resources=rest,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote()
        )
        end = actor.run.remote(msgspec.json.encode(host))
        self._placed[host.worker] = PlacedWorker(group, actor, end, None if node is None else node.id, now)

    def _remove(self, worker: str) -> None:
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415  (an extra)

        placed = self._placed.pop(worker)
        self._ray.kill(placed.actor)
        remove_placement_group(placed.group)

    def _look(self) -> None:
        now = time.monotonic()
        for worker, placed in list(self._placed.items()):
            if not placed.made:
                self._see(worker, placed, now)
        self._collect()
        waiting = tuple(name for name, placed in self._placed.items() if placed.node is None)
        if waiting != self._waiting:
            for worker in set(waiting) - set(self._waiting):
                log.warning("%s waits: no node of the Ray cluster has room for %s", worker, self._needs)
            self._waiting = waiting
            self._report(Report(waiting=waiting))

    def _see(self, worker: str, placed: PlacedWorker, now: float) -> None:
        """Whether a group that was asked for has been made by now, and where."""
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415  (an extra)

        found = placement_group_table(placed.group)
        if found.get("state") == "CREATED":
            placed.made, placed.node = True, found["bundles_to_node_id"][0]
            self._report(Report(stage=f"{worker} is on node {placed.node} of the Ray cluster"))
        elif placed.node is not None and now - placed.asked_s > ROOM_S:
            self._doubts[placed.node] = now + DOUBT_S
            self._remove(worker)
            self._place(self._hosts[worker], now)

    def _collect(self) -> None:
        """Report those whose host, actor or node has ended."""
        ends = {placed.end: worker for worker, placed in self._placed.items()}
        if not ends:
            return
        done, _ = self._ray.wait(list(ends), num_returns=len(ends), timeout=0)
        for end in done:
            worker = ends[end]
            code, why = self._outcome(end)
            if not self._finishing:
                log.error("%s: %s", worker, why)
            self._remove(worker)
            self._report(Report(exited=worker, code=code, why=why))

    def _outcome(self, end: Any) -> tuple[int, str]:  # noqa: ANN401  (Ray's)
        """What became of a host: its exit status, and a sentence."""
        try:
            code, said = self._ray.get(end)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines()]
            reasons = [line for line in lines if "because" in line] or lines[:1]
            return 1, f"Ray says: {' '.join(reasons)}"
        return code, said or f"its host ended with code {code}"

    @property
    def _needs(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self._job.bundle.items())

    def _report(self, entry: Report) -> None:
        self._say(msgspec.json.encode(entry))


if __name__ == "__main__":
    main()
