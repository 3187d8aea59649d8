"""The pools of a live service: which worker plays which role, and what may be changed about it.

The workers of the service: they register, say how they are, change their roles, retire and are lost.
"""

import logging
import time
from collections.abc import Callable, Mapping
from operator import attrgetter

from twofold.errors import ConfigurationError, RequestError, StaleEpochError
from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.health import Worker, WorkerGroup, WorkerHealth
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.remote import RemoteHosts
from twofold.serving.controller.requests import Requests
from twofold.serving.controller.service import PoolMember
from twofold.serving.messages import (
    InstanceFenced,
    InstanceLost,
    Registered,
    Shutdown,
    Status,
    StepDone,
    WorkerRefused,
)
from twofold.serving.telemetry.telemetry import Telemetry

_prefills, _decodes = attrgetter("prefills"), attrgetter("decodes")


class WorkerRoles:
    """Of the workers that are up, as the cluster scheduler has them; `move` says whether they may change."""

    def __init__(self, cluster: ClusterScheduler, fleet: WorkerGroup, *, move: bool) -> None:
        self._cluster, self._fleet = cluster, fleet
        self.move = move

    @property
    def able(self) -> bool:
        """Whether there is somebody for both phases."""
        pools = self._cluster.pools
        prefill, decode, mixed = len(pools.prefill), len(pools.decode), len(pools.mixed)
        return (prefill + decode + mixed if self.move else prefill * decode + mixed) > 0

    def members(self, statuses: Mapping[str, InstanceStatus]) -> list[PoolMember]:
        """Every worker that there should be, with what those that are up have said last."""
        pools = self._cluster.pools
        return [
            _member(member, pools.get(instance), statuses.get(instance))
            for instance, member in self._fleet.members.items()
        ]

    def set(self, instance: str, role: Role) -> None:
        """Let a worker play another role; raises RequestError where it cannot."""
        load = self._cluster.pools.get(instance)
        if load is None:
            raise RequestError(
                f"there is no worker {instance!r} that is up", status=404, code="unknown_instance"
            )
        if not self.move:
            raise RequestError(
                "the workers of this service have fixed roles: serve with --router splitwise to move them",
                status=409,
                code="roles_fixed",
            )
        others = [one.role for one in self._cluster.pools if one is not load]
        if not all(any(phase(one) for one in [role, *others]) for phase in (_prefills, _decodes)):
            raise RequestError(
                f"{instance} is the last worker for its phase: with it as {role.value} nobody would do that phase",
                status=409,
                code="last_of_its_phase",
            )
        self._cluster.set_role(instance, role)
        self._fleet.members[instance].role = role


def _member(member: Worker, load: InstanceLoad | None, status: InstanceStatus | None) -> PoolMember:
    """`load` is there while it may be given work, and `status` when it has said how it is."""
    role = member.role if load is None else load.role
    return PoolMember(
        instance=member.instance,
        role=role,
        home=role if load is None else load.home,
        state="retired" if member.retired else member.state.value,
        trusted=member.breaker.state.value,
        restarts=member.restarts,
        waiting=0 if status is None else status.waiting,
        running=0 if status is None else status.running,
        blocks_total=0 if status is None else status.blocks_total,
        blocks_free=0 if status is None else status.blocks_free,
    )


log = logging.getLogger(__name__)


class Membership:
    """Brings workers into the cluster and takes them out; `on_registered` is called when one has come."""

    def __init__(
        self,
        requests: Requests,
        cluster: ClusterScheduler,
        fleet: WorkerRegistry,
        roles: WorkerRoles,
        trust: WorkerHealth,
        telemetry: Telemetry,
        paths: MeasuredPaths,
        hosts: RemoteHosts | None,
        forecast: LiveForecast | None,
        on_registered: Callable[[], None],
    ) -> None:
        self._requests, self._cluster, self._fleet = requests, cluster, fleet
        self._roles, self._trust, self._telemetry = roles, trust, telemetry
        self._paths, self._hosts, self._forecast = paths, hosts, forecast
        self._on_registered = on_registered
        self._reports: dict[str, int] = {}
        self._newcomers: dict[str, Registered] = {}  # not in the cluster yet
        self._statuses: dict[str, InstanceStatus] = {}

    # -- they come --------------------------------------------------------------------------------------------------

    def register(self, message: Registered) -> None:
        """A worker is ready; one that cannot be part of the service is told why."""
        instance, now = message.peer.memory.instance, time.monotonic()
        try:
            self._fleet.register(message, now)
        except (ConfigurationError, StaleEpochError) as error:
            log.error("%s", error)  # noqa: TRY400  (it is one sentence about a worker, not a fault of ours)
            self._fleet.refuse(message, WorkerRefused(reason=str(error)))
            if self._hosts is not None and isinstance(error, ConfigurationError):
                self._hosts.refuse_worker(instance, str(error))
            return
        self._reports[instance] = 0
        self._paths.registered(message)
        self._newcomers[instance] = message
        if self._fleet.complete:
            self._let_in()
        self._on_registered()
        self._requests.place_waiting()

    def _let_in(self) -> None:
        """Newcomers join in the order of the plan, as in a simulation: among equals routers prefer who joined first."""
        for instance, member in self._fleet.members.items():
            message = self._newcomers.pop(instance, None)
            if message is not None:
                memory = message.peer.memory
                # A worker that comes back plays the role that it had.
                self._cluster.add_instance(
                    instance,
                    member.role,
                    memory.num_blocks * memory.layout.block_size,
                    cell=message.peer.host,
                )
                load = self._cluster.pools.get(instance)
                if self._forecast is not None and load is not None:
                    self._forecast.joined(load, message.peer.host)
                self._telemetry.role(instance, member.role)
                self._trust.tell(instance)
                self._took_note(instance, message.status)

    # -- they say how they are --------------------------------------------------------------------------------------

    def status(self, message: Status | StepDone) -> None:
        """Reports come over two ways: an older one that comes later, or after the worker's end, is dropped."""
        instance = message.instance
        if self._fleet.is_current(instance, message.epoch) and message.number > self._reports[instance]:
            self._reports[instance] = message.number
            self._took_note(instance, message.status)

    def _took_note(self, instance: str, status: InstanceStatus) -> None:
        self._statuses[instance] = status
        self._telemetry.status(instance, status)
        if self._roles.move:
            self._cluster.waits(instance, status.waiting)

    def pools(self) -> list[PoolMember]:
        """Every worker, with the role that it plays now."""
        return self._roles.members(self._statuses)

    # -- they change ------------------------------------------------------------------------------------------------

    def set_role(self, instance: str, role: Role) -> None:
        """Let a worker play another role from the next request on. What it has goes on as it began."""
        self._roles.set(instance, role)
        self._requests.place_waiting()

    def retire(self, instance: str) -> None:
        """Give a worker nothing new, and end it when it has ended what it has."""
        self._trust.withdraw(instance)
        self._fleet.retire(instance)

    def want(self, instance: str, role: Role) -> None:
        """Start a worker that was retired, in this role; one that has not ended yet goes on."""
        self._fleet.want(instance, role, time.monotonic())
        if self._cluster.pools.get(instance) is not None:
            self._cluster.set_role(instance, role)
            if self._trust.resume(instance):
                self._requests.place_waiting()

    # -- they go ----------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """To be called every `ALIVE_S`: those that are silent are ended, and those that have nothing left to do."""
        looked = self._fleet.look(now)
        for instance in looked.lost:
            self._lose(instance)
            self._fleet.tell_all(InstanceFenced(instance=instance))
        for instance in looked.restarted:
            self._telemetry.restarted(instance)
        for instance in self._fleet.retiring():
            load = self._cluster.pools.get(instance)
            if load is not None and not load.requests:
                self._fleet.send(instance, Shutdown())

    def exited(self, instance: str) -> None:
        """A worker's process has ended: it writes no more, and its peers are told so."""
        if self._fleet.exited(instance, time.monotonic()):
            if self._fleet.members[instance].retired:
                log.info("%s has retired", instance)
            else:
                log.error("%s has ended", instance)
            self._lose(instance)
        self._fleet.tell_all(InstanceLost(instance=instance))
        self._requests.place_waiting()

    def _lose(self, instance: str) -> None:
        """A worker works no more; what it held begins anew elsewhere."""
        self._telemetry.remove(instance)
        self._statuses.pop(instance, None)
        self._newcomers.pop(instance, None)
        if self._forecast is not None:
            self._forecast.lost(instance)
        for attempt_id in self._cluster.remove_instance(instance):
            self._requests.replay(attempt_id, instance, f"{instance} was lost")
