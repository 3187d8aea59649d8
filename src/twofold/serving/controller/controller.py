"""The controller: the service behind the gateway, on top of this service's workers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection

from twofold.events import Recorder, RequestEvents
from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.serving import messages
from twofold.serving.config import ReplanConfig
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.health import WorkerHealth
from twofold.serving.controller.heartbeat import ALIVE_S
from twofold.serving.controller.mailbox import Inbox
from twofold.serving.controller.membership import Membership, WorkerRoles
from twofold.serving.controller.prompt_keys import PromptKeys
from twofold.serving.controller.registry import WorkerRegistry
from twofold.serving.controller.remote import Hosts, RemoteWorkers
from twofold.serving.controller.replanning import DegradedMode, LiveReplanning
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import PoolMember, ServedModel
from twofold.serving.telemetry.snapshot import ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry


class Controller:
    """Implements `Service` and `RoleControl`: receives the messages of workers, stores and hosts, and checks their
    health.

    With `roles_move`, or a pulled hand-off, room on the decode instance is requested when a prefill starts
    (docs/decisions/0007). With `recomputes` the decode instance gets the prompt as well. With `prompt_keys` workers
    reuse cached prefixes and report them; with a `forecast` the cluster's router uses these reports.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: ClusterScheduler,
        admission: Admission,
        registry: WorkerRegistry,
        hosts: Hosts,
        inbox: Inbox[messages.ToController],
        telemetry: Telemetry,
        paths: MeasuredPaths,
        overload: OverloadControl | None = None,
        roles_move: bool = False,
        recomputes: bool = False,
        replan: ReplanConfig | None = None,
        prompt_keys: PromptKeys | None = None,
        forecast: LiveForecast | None = None,
    ) -> None:
        self.model = model
        self._registry, self._hosts, self._inbox = registry, hosts, inbox
        self._telemetry, self._paths, self._forecast = telemetry, paths, forecast
        self._monitor: asyncio.Task[None] | None = None
        self._roles = WorkerRoles(cluster, registry, move=roles_move)
        self._recorder = recorder = Recorder()
        self._replanning = None if replan is None else LiveReplanning(replan, cluster.pools, self, recorder)
        self._degraded = DegradedMode(self, roles_move=roles_move)
        health = WorkerHealth(cluster, registry, telemetry)
        ledger = None if overload is None else overload.ledger
        subscribers = (cluster, ledger, recorder, health, self._replanning, telemetry, admission)
        events = RequestEvents(each for each in subscribers if each is not None)
        self._requests = LiveRequests(
            cluster,
            admission,
            registry,
            health,
            telemetry,
            events,
            recorder,
            announces=roles_move,
            recomputes=recomputes,
            reuses=prompt_keys is not None,
            overload=overload,
            prompt_keys=prompt_keys,
            forecast=forecast,
        )
        self._membership = Membership(
            self._requests, cluster, registry, self._roles, health, telemetry, paths, forecast, self._open
        )
        self._remote = RemoteWorkers(hosts, registry, self._membership, forecast)
        cluster.on_role_change = telemetry.instances.role
        telemetry.admission(admission)
        if forecast is not None:
            cluster.pools.forecast = forecast.forecast
            telemetry.forecast(cluster.pools, forecast.forecast)
        if ledger is not None:
            telemetry.overload(ledger)

    # -- lifecycle --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to receive messages. Needs a running event loop."""
        self._open()
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain_inbox)
        self._drain_inbox()

    @property
    def restarts_workers(self) -> bool:
        """Whether workers are restarted: only after all expected workers have registered once."""
        return self._monitor is not None

    def _open(self) -> None:
        """Start monitoring once all expected workers have registered, and admit requests if both phases have one."""
        if self._registry.complete:
            if self._monitor is None:
                self._monitor = asyncio.create_task(self._monitor_health())
            if self._roles.able:
                self._requests.open()

    async def _monitor_health(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._drain_inbox()  # heartbeats that arrived while this process was busy
            if self._hosts.joined:
                self._remote.sweep(time.monotonic())
            self._membership.sweep(time.monotonic())
            self._requests.check_waiting()

    async def wait_ready(self) -> None:
        """Wait until every expected worker has registered and both phases have a worker."""
        await self._requests.opened()

    def exited(self, instance: str) -> None:
        """Record the exit of a worker's process that the launcher reports."""
        self._remote.exited(instance)

    def workers_waiting(self, instances: Collection[str]) -> None:
        """Adapt roles to the workers that the launcher has no room for."""
        self._degraded.update(instances)

    def fail_all(self, reason: str) -> None:
        """Fail all requests and admit no more."""
        self._requests.fail_all(reason)

    async def drain(self) -> None:
        """Admit no more requests, and wait until the live ones have ended."""
        await self._requests.drain()

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
            case messages.StoreChanged():
                if self._forecast is not None:
                    self._forecast.store_changed(message)
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

    # -- Service ----------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether a new request would be placed at once."""
        return self._requests.admitting and self._roles.able

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every worker."""
        return self._requests.generate(generation)

    def stop(self, request_id: str) -> None:
        self._requests.stop(request_id)

    def metrics(self) -> bytes:
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        return self._telemetry.snapshot(self._recorder.live)

    def replans(self) -> list[str]:
        """Return the latest re-planning decisions and degraded plans, one sentence each."""
        decisions = [] if self._replanning is None else self._replanning.messages(time.monotonic())
        return decisions + self._degraded.messages

    # -- RoleControl ------------------------------------------------------------------------------------------------

    def pools(self) -> list[PoolMember]:
        return self._membership.pools()

    def set_role(self, instance: str, role: Role) -> None:
        self._membership.set_role(instance, role)

    def retire(self, instance: str) -> None:
        self._membership.retire(instance)

    def unretire(self, instance: str, role: Role) -> None:
        self._membership.unretire(instance, role)

    def retired(self) -> list[str]:
        return self._registry.retired()

    def replanned(self, decision: ReplanDecision) -> None:
        self._telemetry.replanned(decision)
