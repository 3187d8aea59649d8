"""A complete service: gateway and controller run in this process, and the launcher starts the workers."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from twofold import __version__
from twofold.cluster.layout import gateway_cores
from twofold.cluster.overload import overload_control
from twofold.cluster.paths import paths_of
from twofold.cluster.profiles import instance_profiles
from twofold.engine.registry import package_version
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.limits import AdmissionLimits
from twofold.scheduling.admission.overload import OverloadAdmission, OverloadControl
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES, ClusterScheduler, TransferPaths
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.serving.config import CONTROLLER, EngineConfig, ServiceConfig
from twofold.serving.controller.controller import Controller
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.mailbox import Inbox, Outbox, new_context
from twofold.serving.controller.prompt_keys import PromptKeys
from twofold.serving.controller.registry import HealthTimeouts, WorkerRegistry
from twofold.serving.controller.remote import Hosts
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import ServedModel, Service
from twofold.serving.fronts.door import open_door, prepare_door
from twofold.serving.fronts.process import DoorConfig
from twofold.serving.gateway.app import GatewaySettings, create_app
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.child_process import Report
from twofold.serving.launch.launcher import Launcher, LocalLauncher
from twofold.serving.launch.model_source import ModelFacts
from twofold.serving.launch.worker_plan import available_cores
from twofold.serving.messages import ToController
from twofold.serving.store.disk import load_or_create_secret
from twofold.serving.telemetry.journal import Journal, JournaledCluster
from twofold.serving.telemetry.telemetry import Telemetry

MEASURE_S = 10.0  # the service becomes ready after this time even if some links are not measured
STOP_GRACE_S = 10  # for running requests at shutdown
WORKERS_GRACE_S = 2.0  # then for workers to exit
USER_ERROR = 2  # exit status after a configuration error


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP settings of a service: its model name, those of its gateway, limits of admission, and processes."""

    served_model_name: str
    gateway: GatewaySettings = GatewaySettings()
    admission: AdmissionLimits = AdmissionLimits()
    processes: int = 1  # that serve HTTP


T = TypeVar("T")
OnProgress = Callable[[str], None]


class LocalService:
    """A complete service: gateway, controller and workers. `on_progress` receives messages about its start-up."""

    def __init__(
        self,
        config: ServiceConfig,
        http: HttpConfig,
        listener: socket.socket,
        on_progress: OnProgress,
        telemetry: Telemetry | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._config, self._http, self._listener = config, http, listener
        self._on_progress = on_progress
        self._telemetry = telemetry or Telemetry(http.served_model_name)
        self._launcher = launcher or LocalLauncher(config)
        self._paths = MeasuredPaths()
        self._facts: asyncio.Future[ModelFacts] = asyncio.get_running_loop().create_future()
        self._controller: Controller | None = None
        self._registry: WorkerRegistry | None = None
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self._was_ready = False
        self._failure: str | None = None

    def stop(self) -> None:
        """Stop once running requests have ended; at the second call at once. Safe in a signal handler of the loop."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def run(self) -> None:
        """Run the service until `stop` is called; raises UserError if the service cannot start or continue."""
        context = new_context()
        network = self._config.network
        guard = None if network is None else Guard(context, read_key(Path(network.key_file)))
        reports: asyncio.Task[None] | None = None
        try:
            inbox: Inbox[ToController] = Inbox(
                context,
                self._config.inbox(CONTROLLER),
                ToController,
                guard=guard,
                outside=None if network is None else network.controller,
                on_lost=self._message_lost,
            )
            await self._launcher.start()
            reports = asyncio.create_task(self._follow_reports())
            await self._bring_up_and_serve(Outbox(context, guard, CONTROLLER), inbox)
        finally:
            self.stop()
            if self._controller is not None:
                self._controller.shutdown()
            # Workers that are still starting do not listen yet.
            await self._launcher.stop(grace_s=WORKERS_GRACE_S if self._was_ready else 0.1)
            if reports is not None:
                await reports
            if guard is not None:
                guard.close()
            context.destroy(linger=0)
            self._listener.close()
            await asyncio.to_thread(self._telemetry.close)
        if self._failure is not None:
            raise ConfigurationError(self._failure)

    async def _bring_up_and_serve(self, outbox: Outbox, inbox: Inbox[ToController]) -> None:
        prepare_door(self._http.processes)
        tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, _tokenizer_of(self._config.engine)))
        if not await unless_set(self._stop, self._facts):
            await asyncio.wait((tokenizer,))
            return
        controller = self._controller = self._make_controller(self._facts.result(), outbox, inbox)
        controller.start()
        if self._config.network is not None:
            self._on_progress(f"workers may join at {self._config.network.controller}")
        http = self._http
        settings = msgspec.structs.replace(http.gateway, constrains=self._config.engine.engine != "emulated")
        app = create_app(controller, await tokenizer, settings)
        if await unless_set(self._stop, asyncio.create_task(controller.wait_ready())):
            self._was_ready = True
            await unless_set(self._stop, asyncio.create_task(self._wait_measured()))
            door = DoorConfig(
                settings=settings,
                processes=http.processes,
                tokenizer=_tokenizer_of(self._config.engine),
                log_format=self._config.log_format,
            )
            async with open_door(controller, app, self._listener, door):
                await self._serve(controller)

    async def _serve(self, controller: Controller) -> None:
        workers = ((worker.role, worker.cores) for worker in self._config.workers)
        os.sched_setaffinity(0, gateway_cores(available_cores(), workers))
        device = self._facts.result().device
        known = (f"device: {device}" if device else "", self._paths.summary())
        self._on_progress(ready_line(self._listener, "; ".join(filter(None, known))))
        await self._stop.wait()
        await end_requests(controller, self._on_progress, self._stop_now)

    async def _wait_measured(self) -> None:
        with suppress(TimeoutError):  # a lost worker never reports
            await asyncio.wait_for(self._paths.known(self._config.measured_pairs()), MEASURE_S)

    # -- assembly ---------------------------------------------------------------------------------------------------

    def _make_controller(self, facts: ModelFacts, outbox: Outbox, inbox: Inbox[ToController]) -> Controller:
        config, launcher, limits = self._config, self._launcher, self._http.admission
        model = ServedModel(
            name=self._http.served_model_name,
            path=config.engine.model,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            created=int(time.time()),
            adapters=config.engine.adapters,
        )
        self._telemetry.configuration = shown_configuration(config, facts)
        cluster = self._make_cluster()
        overload = self._make_overload(cluster)
        workers = {worker.instance: worker.role for worker in config.workers}
        engine = msgspec.structs.replace(config.engine, max_model_len=facts.max_model_len)
        joined_config = msgspec.structs.replace(config, engine=engine)
        own = list(workers) if launcher.joins else []
        hosts = Hosts(joined_config, facts.fingerprint, __version__, launcher, outbox, own)
        # Workers on hosts that join register one by one, and the first one makes the service ready.
        timeouts = HealthTimeouts(restart_s=config.max_restart_delay_s)
        registry = self._registry = WorkerRegistry({} if own else workers, outbox, hosts, timeouts)
        for instance in own:
            registry.expect(instance, workers[instance])
        forecast = None
        if config.forecast is not None:
            forecast = LiveForecast(config.forecast, config.engine.block_size, self._paths)
        prompt_keys, roles_move = self._prompt_keys(), config.router not in FIXED_ROLE_ROUTERS
        requests = LiveRequests(
            cluster,
            Admission(limits) if overload is None else OverloadAdmission(limits, cluster, overload),
            registry,
            self._telemetry,
            # Workers that may change roles reserve decode blocks when the prefill starts (docs/decisions/0007).
            announces=roles_move,
            recomputes=config.engine.traits.recomputes,
            reuses=prompt_keys is not None,
            overload=overload,
            name_blocks=None if prompt_keys is None else prompt_keys.name,
            forecast=forecast,
        )
        return Controller(
            model=model,
            cluster=cluster,
            requests=requests,
            registry=registry,
            hosts=hosts,
            inbox=inbox,
            telemetry=self._telemetry,
            paths=self._paths,
            roles_move=roles_move,
            replan=config.replan,
            forecast=forecast,
        )

    def _prompt_keys(self) -> PromptKeys | None:
        engine, store = self._config.engine, self._config.store
        if not engine.prefix_caching:
            return None
        directory = None if store is None else store.disk_dir
        return PromptKeys(engine.block_size, None if directory is None else load_or_create_secret(Path(directory)))

    def _make_cluster(self) -> ClusterScheduler:
        router = ROUTERS[self._config.router]()
        handoffs = HANDOFF_POLICIES[self._config.handoff].build(self._transfer_paths())
        if self._config.journal_dir is None:
            return ClusterScheduler(router, handoffs)
        cluster = JournaledCluster(router, handoffs)
        cluster.journal = Journal(self._config.journal_dir, CONTROLLER)
        return cluster

    def _make_overload(self, cluster: ClusterScheduler) -> OverloadControl | None:
        config = self._config.overload
        if config is None:
            return None
        profiles = instance_profiles(config.cluster, load_catalog(config.catalog))
        return overload_control(config.rule, config.cluster, profiles, config.slo, cluster.pools)

    def _transfer_paths(self) -> TransferPaths:
        spec = self._config.cluster
        if self._config.engine.engine != "emulated" or spec is None:
            return self._paths
        catalog = load_catalog(self._config.catalog)
        return paths_of(spec, catalog.model(spec.model), instance_profiles(spec, catalog))

    # -- reports and failures ---------------------------------------------------------------------------------------

    def _message_lost(self, sender: str) -> None:
        if self._registry is not None:
            self._registry.message_lost(sender)

    async def _follow_reports(self) -> None:
        try:
            async for report in self._launcher.reports():
                self._follow(report)
        except msgspec.MsgspecError as error:
            self._fail(f"the process that starts the workers sent an invalid report: {error}")
        self._fail("the process that starts the workers has ended")

    def _follow(self, report: Report) -> None:
        if report.stage is not None:
            self._on_progress(report.stage)
        if report.facts is not None and not self._facts.done():
            self._facts.set_result(report.facts)
        if report.failure is not None:
            self._fail(report.failure)
        if report.waiting is not None and self._controller is not None:
            self._controller.workers_waiting(report.waiting)
        if report.exited is not None:
            self._worker_exited(report.exited, report.code, report.why)

    def _worker_exited(self, instance: str, code: int | None, why: str | None) -> None:
        if self._stop.is_set():
            return
        # A launched host that failed with a configuration error would fail again, unless the service was ready before.
        hopeless = self._launcher.joins and code == USER_ERROR and not self._was_ready
        if self._controller is not None and self._controller.restarts_workers and not hopeless:
            self._controller.exited(instance)
        else:
            reason = f": {why}" if why else ""
            self._fail(f"{instance} ended with code {code} before the service was ready{reason}")

    def _fail(self, reason: str) -> None:
        if not self._stop.is_set():  # only the first reason is reported
            self._failure = reason
            if self._controller is not None:
                self._controller.fail_all(reason)
        self.stop()


def shown_configuration(config: ServiceConfig, facts: ModelFacts) -> dict[str, str]:
    """Return the configuration of a service for the dashboard."""
    engine, package = config.engine, config.engine.traits.package
    found = package and package_version(package)  # vLLM's wheel for CPUs has another name
    named = f"{engine.engine} {found}" if found else engine.engine
    shown = {"Router": config.router, "Hand-off": config.handoff, "Transport": config.transport, "Engine": named}
    shown |= {"Device": facts.device or "none", "Data type": engine.dtype, "KV eviction": engine.eviction}
    return shown | {"Prefix caching": "yes" if engine.prefix_caching else "no"}


def ready_line(listener: socket.socket, measured: str | None = None) -> str:
    """Return the message that a service is ready, with its addresses."""
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    more = f" ({measured})" if measured else ""
    return f"ready on {url}{more}: API at /v1 and /docs, {url}/dashboard, {url}/metrics"


async def end_requests(service: Service, on_progress: Callable[[str], None], now: asyncio.Event) -> None:
    """Wait until the requests have ended, at most STOP_GRACE_S or until `now` is set, and fail the rest."""
    # The health endpoint reports "not ready" while the running streams end.
    if service.live:
        requests = "request" if service.live == 1 else "requests"
        on_progress(f"draining {service.live} {requests} ({STOP_GRACE_S} s); Ctrl-C again to stop now")
    drained = asyncio.wait_for(service.drain(), STOP_GRACE_S)
    with suppress(TimeoutError):
        await unless_set(now, asyncio.create_task(drained))
    service.fail_all("the service was stopped before the answer was complete")


async def unless_set(stop: asyncio.Event, event: asyncio.Future[T]) -> bool:
    """Wait for `event` and return True, or return False if `stop` is set first."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((event, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not event.done():
        event.cancel()
    return event.done() and not stop.is_set()


def _tokenizer_of(engine: EngineConfig) -> Path | None:
    if engine.tokenizer is not None:
        return Path(engine.tokenizer)
    return None if engine.engine == "emulated" else Path(engine.model)
