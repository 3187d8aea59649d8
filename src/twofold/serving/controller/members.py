"""The workers of the service: they register, say how they are, change their roles, retire and are lost."""

import logging
import time
from collections.abc import Callable

from twofold.errors import ConfigurationError, StaleEpochError
from twofold.instance import Role
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.outcome import InstanceStatus
from twofold.serving.controller.requests import Requests
from twofold.serving.controller.trust import Trust
from twofold.serving.fleet import Fleet
from twofold.serving.hosts import Hosts
from twofold.serving.live_forecast import LiveForecast
from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import (
    InstanceFenced,
    InstanceLost,
    Refused,
    Registered,
    Shutdown,
    Status,
    StepDone,
)
from twofold.serving.roles import Roles
from twofold.serving.service import PoolMember
from twofold.serving.telemetry import Telemetry

log = logging.getLogger(__name__)


class Members:
    """Brings workers into the cluster and takes them out; `on_registered` is called when one has come."""

    def __init__(
        self,
        requests: Requests,
        cluster: ClusterScheduler,
        fleet: Fleet,
        roles: Roles,
        trust: Trust,
        telemetry: Telemetry,
        paths: MeasuredPaths,
        hosts: Hosts | None,
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
            self._fleet.refuse(message, Refused(reason=str(error)))
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
