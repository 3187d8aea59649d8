"""The controller: the service that runs requests on Twofold's workers."""

import asyncio
import time
from collections.abc import Collection

from twofold.instance import Role
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.serving import messages
from twofold.serving.config import ReplanConfig
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.heartbeat import ALIVE_S
from twofold.serving.controller.mailbox import Inbox
from twofold.serving.controller.membership import Membership
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.remote import Hosts, RemoteWorkers
from twofold.serving.controller.replanning import DegradedMode, LiveReplanning
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import ServedModel, Service
from twofold.serving.telemetry.telemetry import Telemetry


class Controller(Service):
    """Service that runs requests on its own workers, processes their messages and checks their health."""

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: ClusterScheduler,
        requests: LiveRequests,
        registry: WorkerRegistry,
        hosts: Hosts,
        inbox: Inbox[messages.ToController],
        telemetry: Telemetry,
        paths: MeasuredPaths,
        roles_move: bool,  # workers may change roles
        replan: ReplanConfig | None,
        forecast: LiveForecast | None,  # of a router that considers cached prefixes
    ) -> None:
        router_forecast = None if forecast is None else forecast.forecast
        super().__init__(
            cluster, registry, requests, telemetry, roles_move=roles_move, model=model, forecast=router_forecast
        )
        self._registry, self._hosts, self._inbox = registry, hosts, inbox
        self._paths, self._forecast = paths, forecast
        self._monitor: asyncio.Task[None] | None = None
        self._degraded = DegradedMode(self, roles_move=roles_move)
        self._replanning: LiveReplanning | None = None
        if replan is not None:
            self._replanning = LiveReplanning(replan, cluster.pools, self, requests.recorder)
            requests.events.subscribe(self._replanning)
        self._membership = Membership(
            requests, cluster, registry, telemetry, paths, forecast, self.statuses, self._open, roles_move=roles_move
        )
        self._remote = RemoteWorkers(hosts, registry, self._membership, forecast)

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start receiving messages. Requires a running event loop."""
        self._open()
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain_inbox)
        self._drain_inbox()

    @property
    def restarts_workers(self) -> bool:
        """Whether ended workers are restarted: True once all expected workers have registered."""
        return self._monitor is not None

    def _open(self) -> None:
        """If enough workers have registered, start health checks and admit requests."""
        if self._registry.complete:
            if self._monitor is None:
                self._monitor = asyncio.create_task(self._monitor_health())
            if self._able:
                self._requests.opened.set()

    async def _monitor_health(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._drain_inbox()  # heartbeats that arrived while this process was busy
            if self._hosts.joined:
                self._remote.sweep(time.monotonic())
            self._membership.sweep(time.monotonic())
            self._requests.check_waiting()

    def exited(self, instance: str) -> None:
        """Record that the worker process of `instance` has exited."""
        self._remote.exited(instance)

    def workers_waiting(self, instances: Collection[str]) -> None:
        """Re-plan the service without the workers named in `instances`, for which the cluster has no free
        resources. If `instances` is empty, restore the original plan.
        """
        self._degraded.update(instances)  # if none waits, restores all workers and roles

    def shutdown(self) -> None:
        """Shut down all workers and stop receiving messages."""
        if self._monitor is not None:
            self._monitor.cancel()
        if self._replanning is not None:
            self._replanning.close()
        self._registry.broadcast(messages.Shutdown())
        self._hosts.finish()
        self._registry.close()
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        for message in self._inbox.drain():
            self.handle(message)

    def handle(self, message: messages.ToController) -> None:  # noqa: C901, PLR0912  (one flat match over the message types)
        match message:
            case messages.StepDone():
                self._membership.status(message)
                self._requests.stepped(message)
            case messages.Alive():
                self._registry.heartbeat(message, time.monotonic())
            case messages.PrefillStarted(request_id=attempt_id):
                self._requests.announced(attempt_id)
            case messages.LeaseGranted(lease=lease):
                self._requests.leased(lease)
            case messages.Status():
                self._membership.status(message)
            case messages.BlocksChanged():
                if self._forecast is not None and self._registry.is_current(message.instance, message.epoch):
                    self._forecast.blocks_changed(message)
            case messages.StoreChanged() if self._forecast is not None:
                self._forecast.stores.changed(message)
            case messages.StoreStatus():
                self._telemetry.stores.status(message)
            case messages.HandoffReport():
                self._requests.reported_handoff(message)
            case messages.RequestFailed(instance=instance, request_id=attempt_id, reason=reason):
                self._requests.replay(attempt_id, instance, reason)
                self._requests.place_waiting()
            case messages.Registered():
                self._membership.register(message)
            case messages.LinkMeasured():
                self._paths.measured(message)
                self._telemetry.links.show(message, self._paths)
            case messages.HostJoins() | messages.HostAlive() | messages.HostFailed():
                self._remote.handle(message, time.monotonic())

    # -- roles ------------------------------------------------------------------------------------------------------

    def replans(self) -> list[str]:
        """Return the latest re-planning decisions, one sentence each."""
        decisions = [] if self._replanning is None else self._replanning.messages(time.monotonic())
        return decisions + self._degraded.messages  # and changes due to missing workers

    def retire(self, instance: str) -> None:
        self._membership.retire(instance)

    def unretire(self, instance: str, role: Role) -> None:
        self._membership.unretire(instance, role)

    def retired(self) -> list[str]:
        return self._registry.retired()

    def replanned(self, decision: ReplanDecision) -> None:
        self._telemetry.replanned(decision)
