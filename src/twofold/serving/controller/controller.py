"""The controller as the gateway sees it, and as the service that it is part of starts and ends it."""

import time
from collections.abc import AsyncGenerator, Collection

from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission import Admission
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.overload.control import OverloadControl
from twofold.scheduling.replan_log import Decision
from twofold.serving.config import ReplanConfig
from twofold.serving.controller.elsewhere import Elsewhere
from twofold.serving.controller.incoming import Incoming
from twofold.serving.controller.members import Members
from twofold.serving.controller.progress import Progress
from twofold.serving.controller.requests import Requests
from twofold.serving.controller.shortage import Shortage
from twofold.serving.controller.trust import Trust
from twofold.serving.controller.watch import Watch
from twofold.serving.fleet import Fleet
from twofold.serving.hosts import Hosts
from twofold.serving.live_forecast import LiveForecast
from twofold.serving.mailbox import Inbox
from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import Shutdown, ToController
from twofold.serving.prompt_keys import PromptKeys
from twofold.serving.replanning import LiveReplanning
from twofold.serving.roles import Roles
from twofold.serving.service import PoolMember, ServedModel
from twofold.serving.snapshot import ServiceSnapshot
from twofold.serving.telemetry import Telemetry
from twofold.timeline import Recorder


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
        fleet: Fleet,
        inbox: Inbox[ToController],
        telemetry: Telemetry,
        paths: MeasuredPaths,
        overload: OverloadControl | None = None,
        hosts: Hosts | None = None,
        roles_move: bool = False,
        recomputes: bool = False,
        replan: ReplanConfig | None = None,
        prompt_keys: PromptKeys | None = None,
        forecast: LiveForecast | None = None,
    ) -> None:
        self.model = model
        self._fleet, self._hosts, self._telemetry = fleet, hosts, telemetry
        self._roles = Roles(cluster, fleet, move=roles_move)
        self._replanning = None if replan is None else LiveReplanning(replan, cluster.pools, self)
        self._shortage = Shortage(self, roles_move=roles_move)
        watches = () if self._replanning is None else (self._replanning.observe,)
        self._recorder = recorder = Recorder(sinks=(telemetry.observe, *watches))
        trust = Trust(cluster, fleet, telemetry)
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
        self._members = Members(
            self._requests, cluster, fleet, self._roles, trust, telemetry, paths, hosts, forecast, self._met
        )
        elsewhere = None if hosts is None else Elsewhere(hosts, fleet, self._members, forecast)
        self._elsewhere = elsewhere
        self._incoming = Incoming(
            inbox, self._requests, progress, self._members, elsewhere, fleet, telemetry, paths, forecast
        )
        self._watch = Watch(self._incoming, self._requests, self._members, elsewhere)
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

    def without_room(self, instances: Collection[str]) -> None:
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

    def replanned(self, decision: Decision) -> None:
        """Re-planning has decided something, and done it."""
        self._telemetry.replanned(decision)

    def replans(self) -> list[str]:
        """What re-planning has decided lately, a sentence each, and what was done about shortages."""
        decided = [] if self._replanning is None else self._replanning.said(time.monotonic())
        return decided + self._shortage.said
