"""The controller's inbox: what workers, stores and hosts say, and who is told of it.

What is looked after when nobody says anything: who is silent, who has retired, and who has waited for too long.

The controller as the gateway sees it, and as the service that it is part of starts and ends it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection

from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.serving.config import ReplanConfig
from twofold.serving.controller.elsewhere import RemoteWorkers
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.health import WorkerHealth
from twofold.serving.controller.mailbox import Inbox
from twofold.serving.controller.membership import Membership, WorkerRoles
from twofold.serving.controller.progress import Progress
from twofold.serving.controller.prompt_keys import PromptKeys
from twofold.serving.controller.registry import ALIVE_S, WorkerRegistry
from twofold.serving.controller.remote import RemoteHosts
from twofold.serving.controller.replanning import DegradedMode, LiveReplanning
from twofold.serving.controller.requests import Requests
from twofold.serving.controller.service import PoolMember, ServedModel
from twofold.serving.messages import (
    Alive,
    BlocksChanged,
    HandoffReport,
    HostAlive,
    HostFailed,
    HostJoins,
    LeaseGranted,
    LinkMeasured,
    PrefillStarted,
    Registered,
    RequestFailed,
    Shutdown,
    Status,
    StepDone,
    StoreChanged,
    StoreStatus,
    ToController,
)
from twofold.serving.telemetry.snapshot import ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.timeline import Recorder


class MessageDispatcher:
    """Reads messages in the event loop, in the order in which they came."""

    def __init__(
        self,
        inbox: Inbox[ToController],
        requests: Requests,
        progress: Progress,
        members: Membership,
        elsewhere: RemoteWorkers | None,
        fleet: WorkerRegistry,
        telemetry: Telemetry,
        paths: MeasuredPaths,
        forecast: LiveForecast | None,
    ) -> None:
        self._inbox = inbox
        self._requests, self._progress, self._members, self._elsewhere = (
            requests,
            progress,
            members,
            elsewhere,
        )
        self._fleet, self._telemetry, self._paths = fleet, telemetry, paths
        self._forecast = forecast

    def start(self) -> None:
        """Begin to receive; to be called inside the running event loop."""
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self.drain)
        self.drain()

    def close(self) -> None:
        """Receive no more."""
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()

    def drain(self) -> None:
        """Handle what has come."""
        for message in self._inbox.drain():
            self.handle(message)

    def handle(self, message: ToController) -> None:  # noqa: C901, PLR0912  (one flat match over the kinds of messages)
        """Tell whoever is concerned."""
        match message:
            case StepDone():
                self._members.status(message)
                self._progress.stepped(message)
            case Alive():
                self._fleet.heard(message, time.monotonic())
            case PrefillStarted(request_id=attempt_id):
                self._progress.prefill_started(attempt_id)
            case LeaseGranted(lease=lease):
                self._progress.leased(lease)
            case Status():
                self._members.status(message)
            case BlocksChanged():
                if self._forecast is not None and self._fleet.is_current(message.instance, message.epoch):
                    self._forecast.blocks_changed(message)
            case StoreChanged():
                if self._forecast is not None:
                    self._forecast.store_changed(message)
            case StoreStatus():
                self._telemetry.store(message)
            case HandoffReport():
                self._progress.handed_off(message)
            case RequestFailed(instance=instance, request_id=attempt_id, reason=reason):
                self._requests.replay(attempt_id, instance, reason)
                self._requests.place_waiting()
            case Registered():
                self._members.register(message)
            case LinkMeasured():
                self._paths.measured(message)
                self._telemetry.link(message, self._paths)
            case HostJoins() | HostAlive() | HostFailed():
                if self._elsewhere is not None:
                    self._elsewhere.said(message, time.monotonic())


class HealthMonitor:
    """Looks around every `ALIVE_S` from `start` until `stop`."""

    def __init__(
        self,
        incoming: MessageDispatcher,
        requests: Requests,
        members: Membership,
        elsewhere: RemoteWorkers | None,
    ) -> None:
        self._incoming, self._requests = incoming, requests
        self._members, self._elsewhere = members, elsewhere
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """To be called inside the running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._incoming.drain()  # what they said while this process had no time is heard before they are judged
            if self._elsewhere is not None:
                self._elsewhere.look(time.monotonic())
            self._members.look(time.monotonic())
            self._requests.look()


class Controller:
    """Implements `Service` for the gateway over the workers of one service.

    With `roles_move`, or a pulled hand-off, room on the decode instance is asked for when a prefill starts
    (docs/decisions/0007). With `recomputes` that instance is given the prompt as well.
    With `prompt_keys` workers keep what they have computed of prompts, and say what they have; with a `forecast` the
    cluster's router goes by that.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: ClusterScheduler,
        admission: Admission,
        fleet: WorkerRegistry,
        inbox: Inbox[ToController],
        telemetry: Telemetry,
        paths: MeasuredPaths,
        overload: OverloadControl | None = None,
        hosts: RemoteHosts | None = None,
        roles_move: bool = False,
        recomputes: bool = False,
        replan: ReplanConfig | None = None,
        prompt_keys: PromptKeys | None = None,
        forecast: LiveForecast | None = None,
    ) -> None:
        self.model = model
        self._fleet, self._hosts, self._telemetry = fleet, hosts, telemetry
        self._roles = WorkerRoles(cluster, fleet, move=roles_move)
        self._replanning = None if replan is None else LiveReplanning(replan, cluster.pools, self)
        self._shortage = DegradedMode(self, roles_move=roles_move)
        watches = () if self._replanning is None else (self._replanning.observe,)
        self._recorder = recorder = Recorder(sinks=(telemetry.observe, *watches))
        trust = WorkerHealth(cluster, fleet, telemetry)
        self._requests = Requests(
            cluster,
            admission,
            fleet,
            trust,
            telemetry,
            recorder,
            announces=roles_move,
            recomputes=recomputes,
            overload=overload,
            replanning=self._replanning,
            prompt_keys=prompt_keys,
            forecast=forecast,
        )
        progress = Progress(
            self._requests,
            cluster,
            fleet,
            trust,
            telemetry,
            recorder,
            overload=overload,
            reuses=prompt_keys is not None,
        )
        self._members = Membership(
            self._requests, cluster, fleet, self._roles, trust, telemetry, paths, hosts, forecast, self._met
        )
        elsewhere = None if hosts is None else RemoteWorkers(hosts, fleet, self._members, forecast)
        self._elsewhere = elsewhere
        self._incoming = MessageDispatcher(
            inbox, self._requests, progress, self._members, elsewhere, fleet, telemetry, paths, forecast
        )
        self._watch = HealthMonitor(self._incoming, self._requests, self._members, elsewhere)
        cluster.on_move = telemetry.role
        telemetry.admission(admission)
        if forecast is not None:
            cluster.pools.forecast = forecast.forecast
            telemetry.forecast(cluster.pools, forecast.forecast)
        if overload is not None:
            telemetry.overload(overload.ledger)

    # -- life of the controller ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; to be called inside the running event loop."""
        self._met()
        self._incoming.start()

    @property
    def watches(self) -> bool:
        """Whether a worker that ends is started again: not before all that are there from the start on were up."""
        return self._watch.runs

    def _met(self) -> None:
        """When all have come that are there from the start on they are watched, and serve if that is enough."""
        if self._fleet.complete:
            self._watch.start()
            if self._roles.able:
                self._requests.open()

    async def wait_ready(self) -> None:
        """Wait until every expected worker has registered, and there are some for both phases."""
        await self._requests.opened()

    def exited(self, instance: str) -> None:
        """A worker's process has ended, says the launcher: it writes no more, and its peers are told so."""
        if self._elsewhere is not None and self._hosts is not None and instance in self._hosts.own:
            self._elsewhere.ended(instance)
        else:
            self._members.exited(instance)

    def workers_waiting(self, instances: Collection[str]) -> None:
        """For these workers the launcher has no room now, and it has for all others."""
        self._shortage.waiting(instances)

    def fail_all(self, reason: str) -> None:
        """The service cannot go on."""
        self._requests.fail_all(reason)

    async def drain(self) -> None:
        """Take no more requests, and wait until those that are here have ended."""
        await self._requests.drain()

    def shutdown(self) -> None:
        """Tell every worker to end, and stop receiving."""
        self._watch.stop()
        if self._replanning is not None:
            self._replanning.close()
        self._fleet.tell_all(Shutdown())
        if self._hosts is not None:
            self._hosts.finish()
        self._fleet.close()
        self._incoming.close()

    # -- Service, for the gateway -----------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would be placed at once: both phases have a worker that may be given one."""
        return self._requests.taking and self._roles.able

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every worker."""
        return self._requests.generate(generation)

    def stop(self, request_id: str) -> None:
        """The client has all it asked for, found in the text: end the request as finished, not as aborted."""
        self._requests.stop(request_id)

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        """The service now and lately."""
        return self._telemetry.snapshot(self._recorder.live)

    # -- roles, for operators and re-planning -------------------------------------------------------------------------

    def pools(self) -> list[PoolMember]:
        """Every worker, with the role that it plays now."""
        return self._members.pools()

    def set_role(self, instance: str, role: Role) -> None:
        """Let a worker play another role from the next request on. What it has goes on as it began."""
        self._members.set_role(instance, role)

    def retire(self, instance: str) -> None:
        """Give a worker nothing new, and end it when it has ended what it has."""
        self._members.retire(instance)

    def want(self, instance: str, role: Role) -> None:
        """Start a worker that was retired, in this role; one that has not ended yet goes on."""
        self._members.want(instance, role)

    def retired(self) -> list[str]:
        """The workers that have retired and may be started again."""
        return self._fleet.retired()

    def replanned(self, decision: ReplanDecision) -> None:
        """Re-planning has decided something, and done it."""
        self._telemetry.replanned(decision)

    def replans(self) -> list[str]:
        """What re-planning has decided lately, a sentence each, and what was done about shortages."""
        decided = [] if self._replanning is None else self._replanning.said(time.monotonic())
        return decided + self._shortage.said
