"""The Ray driver: a process that creates the Ray actors of workers on command of the launcher.

Restarts of actors by Ray are turned off, because processes of an actor that Ray considers dead may still run.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from twofold.errors import UserError
from twofold.instance import Role
from twofold.raycluster.cluster import Bundle, RayNode, connect, list_nodes
from twofold.serving.launch.child_process import Report, SendReport, WorkerCommand, WorkerStarter, begin
from twofold.serving.launch.model_source import model_facts
from twofold.serving.launch.ray.launcher import HostJob, RayJob, WorkerHost
from twofold.serving.telemetry.logs import configure_logs


class PlacedNeighbour(msgspec.Struct, frozen=True):
    """Role and Ray node of another worker of the service."""

    role: Role
    node: str


def choose_node(
    role: Role, bundle: Bundle, nodes: Sequence[RayNode], others: Iterable[PlacedNeighbour], link_label: str
) -> RayNode | None:
    """Return the Ray node for a new worker, or None if no node has room for the resources in `bundle`.

    Nodes with equal values of the label `link_label` share a fast network. Prefer the network with the most
    workers, and within this network the node with the fewest workers of the role `role`.
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
    return int(min((node.free.get(name, 0.0) / amount for name, amount in bundle.items()), default=0.0))


log = logging.getLogger("twofold.serving.launch.ray.driver")  # __main__ in the driver process

POLL_S = 0.25
ROOM_S = 5.0  # a placement group that is pending for longer is requested on another node
DOUBT_S = 30.0  # how long to avoid a node after the loss of a worker: Ray may notice the end of a node late


def main() -> None:
    job, report = begin(RayJob)
    configure_logs(job.hosts[0].log_format if job.hosts else "text")
    try:
        report(Report(stage=f"connecting to Ray at {job.address}"))
        ray = connect(job.address, "--launcher ray")
        facts = model_facts(job.engine)
    except UserError as error:
        report(Report(failure=str(error)))
        sys.exit(2)
    report(Report(stage="starting workers", facts=facts))
    driver = RayDriver(ray, job, report)
    for host in job.hosts:
        driver.start(host.worker)
    driver.watch()
    # A regular shutdown of Ray takes seconds. Ray removes this driver's actors and placement groups.
    os._exit(0)


class PlacedWorker:
    """Record of a worker on Ray: its actor, placement group and node."""

    def __init__(self, group: Any, actor: Any, end: Any, node: str | None, now: float) -> None:  # noqa: ANN401  (Ray's)
        # `end` is ready when the actor has ended; `node` is None while no node has room.
        self.group, self.actor, self.end, self.node = group, actor, end, node
        self.asked_s = now
        self.made = False


class RayDriver(WorkerStarter):
    """Creates and removes the Ray actors of workers on command, and reports workers that have ended."""

    poll_s = POLL_S

    def __init__(self, ray: Any, job: RayJob, report: SendReport) -> None:  # noqa: ANN401  (the module, which has no types)
        super().__init__(report)
        self._ray, self._job = ray, job
        self._hosts = {host.worker: host for host in job.hosts}
        self._placed: dict[str, PlacedWorker] = {}
        self._doubts: dict[str, float] = {}  # nodes to avoid, and until when
        self._waiting: tuple[str, ...] = ()

    # -- commands ----------------------------------------------------------------------------------------------------

    def start(self, worker: str) -> None:
        """Create the actor of a worker, or replace its current actor."""
        now = time.monotonic()
        before = self._placed.get(worker)
        if before is not None:
            if before.node is not None:
                self._doubts[before.node] = now + DOUBT_S
            self._remove(worker)
        self._place(self._hosts[worker], now)

    def execute(self, command: WorkerCommand) -> None:
        if command.finish:
            for worker in [name for name, placed in self._placed.items() if not placed.made]:
                self._remove(worker)
        if command.start is not None:
            self.start(command.start)
        for unwanted in (command.kill, command.free):
            if unwanted is not None and unwanted in self._placed:
                self._remove(unwanted)

    def kill_all(self) -> None:
        for worker in list(self._placed):
            self._remove(worker)

    # -- Ray --------------------------------------------------------------------------------------------------------

    def _place(self, host: HostJob, now: float) -> None:
        from ray.util.placement_group import placement_group  # noqa: PLC0415  (an extra)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        job = self._job
        nodes = list_nodes(self._ray, with_room=True)
        preferred = [node for node in nodes if self._doubts.get(node.id, 0.0) <= now]
        known = ((self._hosts[name].role, placed.node) for name, placed in self._placed.items())
        others = [PlacedNeighbour(role, node) for role, node in known if node is not None]
        # An avoided node with room is better than no node.
        node = choose_node(host.role, job.bundle, preferred, others, job.link_label) or choose_node(
            host.role, job.bundle, nodes, others, job.link_label
        )
        # Ray does not know the link domains of the service's workers, so the node is selected by id.
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

    def poll(self) -> bool:
        now = time.monotonic()
        for worker, placed in list(self._placed.items()):
            if not placed.made:
                self._check_placement(worker, placed, now)
        self._collect()
        waiting = tuple(name for name, placed in self._placed.items() if placed.node is None)
        if waiting != self._waiting:
            for worker in set(waiting) - set(self._waiting):
                log.warning("%s waits: no node of the Ray cluster has room for %s", worker, self._needs)
            self._waiting = waiting
            self._report(Report(waiting=waiting))
        return bool(self._placed)

    def _check_placement(self, worker: str, placed: PlacedWorker, now: float) -> None:
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415  (an extra)

        found = placement_group_table(placed.group)
        if found.get("state") == "CREATED":
            placed.made, placed.node = True, found["bundles_to_node_id"][0]
            self._report(Report(stage=f"{worker} is on node {placed.node} of the Ray cluster"))
        elif placed.node is not None and now - placed.asked_s > ROOM_S:  # still pending: try another node
            self._doubts[placed.node] = now + DOUBT_S
            self._remove(worker)
            self._place(self._hosts[worker], now)

    def _collect(self) -> None:
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
        try:
            code, reason = self._ray.get(end)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines()]
            reasons = [line for line in lines if "because" in line] or lines[:1]
            return 1, f"Ray reports: {' '.join(reasons)}"
        return code, reason or f"its host ended with code {code}"

    @property
    def _needs(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self._job.bundle.items())


if __name__ == "__main__":
    main()
