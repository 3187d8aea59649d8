"""Workers of the cluster: registration, status reports, retirement and loss."""

import logging
import time
from collections.abc import Callable

from twofold.instance import Role
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.messages import InstanceFenced, InstanceLost, Registered, Shutdown, Status
from twofold.serving.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


class Membership:
    """Adds and removes workers of the cluster, and stores their latest status."""

    def __init__(
        self,
        requests: LiveRequests,
        cluster: ClusterScheduler,
        registry: WorkerRegistry,
        telemetry: Telemetry,
        paths: MeasuredPaths,
        forecast: LiveForecast | None,
        statuses: dict[str, InstanceStatus],
        on_registered: Callable[[], None],
        *,
        roles_move: bool,
    ) -> None:
        self._requests, self._cluster, self._registry = requests, cluster, registry
        self._health, self._telemetry = requests.health, telemetry
        self._paths, self._forecast, self._on_registered = paths, forecast, on_registered
        self._statuses, self._roles_move = statuses, roles_move
        self._reports: dict[str, int] = {}  # number of the last status report
        self._registered: dict[str, Registered] = {}  # registered, but not in the cluster yet

    def register(self, message: Registered) -> None:
        """Register a worker that is ready, unless it is incompatible with the service."""
        if not self._registry.register(message, time.monotonic()):
            return
        instance = message.peer.memory.instance
        self._reports[instance] = 0
        self._paths.registered(message)
        self._registered[instance] = message
        if self._registry.complete:
            self._add_registered()
        self._on_registered()
        self._requests.place_waiting()

    def _add_registered(self) -> None:
        # In the order of the configuration, because routers break ties by it.
        for instance, member in self._registry.members.items():
            message = self._registered.pop(instance, None)
            if message is None:
                continue
            memory, host = message.peer.memory, message.peer.host
            tokens = memory.num_blocks * memory.layout.block_size
            self._cluster.add_instance(instance, member.role, tokens, cell=host)
            load = self._cluster.pools.get(instance)
            if self._forecast is not None and load is not None:
                self._forecast.joined(load, host)
            self._telemetry.instances.role(instance, member.role)
            self._health.publish(instance)
            self._update(instance, message.status)

    def status(self, message: Status) -> None:
        """Record a worker's status report, unless a newer report has already arrived."""
        instance = message.instance
        if self._registry.is_current(instance, message.epoch) and message.number > self._reports[instance]:
            self._reports[instance] = message.number
            self._update(instance, message.status)

    def _update(self, instance: str, status: InstanceStatus) -> None:
        self._statuses[instance] = status
        self._telemetry.instances.status(instance, status)
        if self._roles_move:
            self._cluster.set_queued(instance, status.waiting)

    def retire(self, instance: str) -> None:
        """Take a worker out of service: route no new requests to it, and shut it down once it is idle."""
        self._health.withdraw(instance)
        self._registry.retire(instance)

    def unretire(self, instance: str, role: Role) -> None:
        """Put a retired worker back into service with the role `role`."""
        self._registry.unretire(instance, role, time.monotonic())
        if self._cluster.pools.get(instance) is not None:
            self._cluster.set_role(instance, role)
            if self._health.resume(instance):
                self._requests.place_waiting()

    def sweep(self, now: float) -> None:
        """Kill faulty workers, restart exited workers, and shut down idle retired workers."""
        lost, restarted = self._registry.sweep(now)
        for instance in lost:
            self._lose(instance)
            self._registry.broadcast(InstanceFenced(instance=instance))
        for instance in restarted:
            self._telemetry.instances.restarted(instance)
        for instance in self._registry.retiring():
            load = self._cluster.pools.get(instance)
            if load is not None and not load.requests:
                self._registry.send(instance, Shutdown())

    def exited(self, instance: str) -> None:
        """Record the exit of a worker, and notify the other workers."""
        if self._registry.exited(instance, time.monotonic()):
            if self._registry.members[instance].retired:
                log.info("%s has retired", instance)
            else:
                log.error("%s has ended", instance)
            self._lose(instance)
        # The worker no longer writes KV into the blocks of the others.
        self._registry.broadcast(InstanceLost(instance=instance))
        self._requests.place_waiting()

    def _lose(self, instance: str) -> None:
        """Remove a lost worker from the cluster, and retry its requests on other workers."""
        self._telemetry.instances.remove(instance)
        self._statuses.pop(instance, None)
        self._registered.pop(instance, None)
        if self._forecast is not None:
            self._forecast.lost(instance)
        for attempt_id in self._cluster.remove_instance(instance):
            self._requests.replay(attempt_id, instance, f"{instance} was lost")
