"""Registration, status reports, retirement and loss of the workers in the cluster."""

import logging
import time
from collections.abc import Callable

from twofold.instance import Role
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.messages import InstanceFenced, InstanceLost, Registered, Shutdown, Status, StepDone
from twofold.serving.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


class Membership:
    """Adds workers to the cluster and removes them.

    The function `on_registered` is called after each registration. The mapping `statuses` receives the last report of
    each worker. With `roles_move`, the scheduler is informed of waiting requests.
    """

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
        """Add a worker that is ready. An incompatible worker is refused."""
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
        """Add the registered workers in the order of the plan, because routers break ties by this order."""
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

    def status(self, message: Status | StepDone) -> None:
        """Record a status report, unless a newer report of the same worker has arrived before."""
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
        """Stop placing requests on a worker, and shut it down once it is idle."""
        self._health.withdraw(instance)
        self._registry.retire(instance)

    def unretire(self, instance: str, role: Role) -> None:
        """Keep a retired worker if it still runs, otherwise restart it. The worker's role becomes `role`."""
        self._registry.unretire(instance, role, time.monotonic())
        if self._cluster.pools.get(instance) is not None:
            self._cluster.set_role(instance, role)
            if self._health.resume(instance):
                self._requests.place_waiting()

    def sweep(self, now: float) -> None:
        """Fence faulty workers, and shut down retired workers that are idle. Call this every `ALIVE_S` seconds."""
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
        """Record the exit of a worker's process, and inform the other workers that the exited worker writes no more."""
        if self._registry.exited(instance, time.monotonic()):
            if self._registry.members[instance].retired:
                log.info("%s has retired", instance)
            else:
                log.error("%s has ended", instance)
            self._lose(instance)
        self._registry.broadcast(InstanceLost(instance=instance))
        self._requests.place_waiting()

    def _lose(self, instance: str) -> None:
        """Remove a worker from the cluster and replay the requests that ran on the worker."""
        self._telemetry.instances.remove(instance)
        self._statuses.pop(instance, None)
        self._registered.pop(instance, None)
        if self._forecast is not None:
            self._forecast.lost(instance)
        for attempt_id in self._cluster.remove_instance(instance):
            self._requests.replay(attempt_id, instance, f"{instance} was lost")
