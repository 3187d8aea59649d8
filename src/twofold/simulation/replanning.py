"""Re-planning in the simulator, with simulated durations of plan searches and instance starts."""

from collections.abc import Sequence

from twofold.cluster.profiles import InstanceProfile
from twofold.cluster.spec import ClusterSpec
from twofold.cluster.timing import PS, ps
from twofold.errors import require
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.replan.replanner import (
    ReplanAction,
    ReplanDecision,
    Replanner,
    ReplanSearch,
    ReplanStep,
    RoleSplit,
    SearchResult,
)
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.kernel import EventOrder
from twofold.simulation.observers.base import Observer
from twofold.timeline import Timeline


class SimulatedReplanning(Observer):
    """Observer that re-plans a simulated cluster: changes roles, and starts and retires instances.

    A plan search takes `search_s` simulated seconds. `spare` is the initial number of stopped instances, which
    re-planning may start.
    """

    def __init__(self, replanner: Replanner, search: ReplanSearch, *, search_s: float, spare: int = 0) -> None:
        self._replanner, self._search = replanner, search
        self._search_s, self._spare = search_s, spare
        self._retired: list[str] = []
        self.log: Sequence[ReplanDecision] = replanner.log
        self._cluster: VirtualCluster

    def attach(self, cluster: VirtualCluster) -> None:
        """Connect this observer to a cluster, before the first request."""
        self._cluster = cluster
        self._retired = list(cluster.instances)[len(cluster.instances) - self._spare :]
        for name in self._retired:
            cluster.scheduler.pause(name)

    def arrived(self, request: Request, now: float) -> None:
        number = self._replanner.arrived(request, now)
        traffic = self._replanner.query(self._generated, now)
        if traffic is None:
            return
        running = RoleSplit.of(self._cluster.scheduler.pools)
        stock = running.instances + len(self._startable())
        findings = self._search.search(traffic, running, stock)
        at = self._cluster.kernel.now + ps(self._search_s)
        self._cluster.kernel.schedule(at, EventOrder.REPLAN + number, self._decide, findings)

    def ended(self, timeline: Timeline, now: float) -> None:
        self._replanner.ended(timeline)

    def _generated(self, request_id: str) -> int:
        simulated = self._cluster.requests.get(request_id)
        return 0 if simulated is None else simulated.decode.scheduler.generated(request_id)

    def _decide(self, findings: SearchResult) -> None:
        cluster = self._cluster
        pools, now_s = cluster.scheduler.pools, cluster.kernel.now / PS
        decision = self._replanner.decide(findings, pools, self._startable(), now_s)
        cluster.note("replan", decision.outcome.value, str(decision))
        for step in decision.steps:
            if step.action is ReplanAction.RETIRE:
                cluster.scheduler.pause(step.instance)
                self._retired.append(step.instance)
            elif step.action is ReplanAction.START:
                self._retired.remove(step.instance)
                at = cluster.kernel.now + ps(self._replanner.rules.start_up_s)
                order = EventOrder.REPLAN + cluster.instances[step.instance].number
                cluster.kernel.schedule(at, order, self._started, step)
            else:
                self._give_role(step)

    def _started(self, step: ReplanStep) -> None:
        self._give_role(step)
        self._cluster.scheduler.resume(step.instance)

    def _give_role(self, step: ReplanStep) -> None:
        if step.role is not None:
            self._cluster.instances[step.instance].role = step.role  # also after a failure
            self._cluster.scheduler.set_role(step.instance, step.role)

    def _startable(self) -> list[str]:
        loads = [self._cluster.scheduler.pools.get(name) for name in self._retired]
        return [load.id for load in loads if load is not None and not load.place]


def assign(cluster: VirtualCluster, split: RoleSplit) -> None:
    """Assign roles in an idle cluster: the first instances prefill, the next ones decode, the others are paused."""
    roles = [Role.PREFILL] * split.prefill + [Role.DECODE] * split.decode
    for place, name in enumerate(cluster.instances):
        if place < len(roles):
            cluster.scheduler.set_role(name, roles[place])
        else:
            cluster.scheduler.pause(name)


def require_movable(spec: ClusterSpec, kinds: Sequence[InstanceProfile]) -> None:
    """Raise ConfigurationError unless the instances of this cluster can exchange roles."""
    movers = [name for name in ROUTERS if name not in FIXED_ROLE_ROUTERS]
    moves = spec.router in movers
    require(moves, f"the router {spec.router} never moves an instance: re-plan with {', '.join(movers)}")
    mixed = any(kind.pool.role is Role.MIXED for kind in kinds)
    require(not mixed, "re-planning splits instances between prefill and decode: give no mixed pool")
    require(
        len({(kind.machine.name, kind.tensor_parallel, kind.batcher) for kind in kinds}) <= 1,
        "re-planning lets instances take each other's place: give pools of one machine, one degree and one batcher",
    )
