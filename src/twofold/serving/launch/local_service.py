"""A whole service, from start to end: controller and gateway on this host, and the workers that its launcher starts."""

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
from twofold.cluster.cores import gateway_cores
from twofold.cluster.overload import overload_control
from twofold.cluster.paths import paths_of
from twofold.cluster.profiles import instance_profiles
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.limits import AdmissionLimits
from twofold.scheduling.admission.overload import OverloadAdmission, OverloadControl
from twofold.scheduling.cluster.handoff_policy import HANDOFF_POLICIES, TransferPaths
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.serving.config import CONTROLLER, EngineConfig, ServiceConfig
from twofold.serving.controller.controller import Controller
from twofold.serving.controller.forecast import LiveForecast, MeasuredPaths
from twofold.serving.controller.mailbox import Inbox, Outbox, new_context
from twofold.serving.controller.prompt_keys import PromptKeys
from twofold.serving.controller.registry import HealthTimeouts, WorkerRegistry
from twofold.serving.controller.remote import RemoteHosts
from twofold.serving.controller.service import ServedModel
from twofold.serving.gateway.app import create_app
from twofold.serving.gateway.gateway import RequestLimits
from twofold.serving.gateway.keys import KeyRing
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.tokenizer import TextTokenizer, load_tokenizer
from twofold.serving.launch.child_process import Report
from twofold.serving.launch.launcher import Launcher, LocalLauncher
from twofold.serving.launch.worker_plan import available_cores
from twofold.serving.messages import ToController
from twofold.serving.store.disk import load_or_create_secret
from twofold.serving.telemetry.journal import Journal, JournaledCluster
from twofold.serving.telemetry.telemetry import Telemetry

MEET_S = 10.0  # workers get this long to measure their links before the service is ready all the same
STOP_GRACE_S = 10  # answers that run when the service is told to stop get this long to end
READ_GRACE_S = 2  # then clients get this long to read what was said last
USER_ERROR = 2  # exit status of what cannot do as it was told
WORKERS_GRACE_S = 2.0  # and the workers after them: nothing that they still do is of use to anybody


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The outside of a service: its name for the model, who may use it and how much of it."""

    served_model_name: str
    keys: KeyRing | None = None
    limits: RequestLimits = RequestLimits()
    admission: AdmissionLimits = AdmissionLimits()


T = TypeVar("T")
OnProgress = Callable[[str], None]


class LocalService:
    """Runs a service until it is told to stop. `on_progress` is called with what is happening at start-up."""

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
        self._facts: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._controller: Controller | None = None
        self._fleet: WorkerRegistry | None = None
        self._stop = asyncio.Event()
        self._was_ready = False
        self._failure: str | None = None

    def stop(self) -> None:
        """End the service; safe to call from a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`; raises a UserError when the service cannot start, or cannot go on."""
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
                on_lost=self._fleet_missed,
            )
            await self._launcher.start()
            reports = asyncio.create_task(self._follow_reports())
            await self._bring_up_and_serve(Outbox(context, guard, CONTROLLER), inbox)
        finally:
            self.stop()
            if self._controller is not None:
                self._controller.shutdown()
            # Workers that are still starting do not listen yet, so there is nothing to wait for.
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
        loading = asyncio.to_thread(_load_tokenizer, self._config.engine)
        tokenizer = asyncio.create_task(loading)
        if not await self._unless_stopped(self._facts):
            await asyncio.wait((tokenizer,))
            return
        controller = self._controller = self._make_controller(self._facts.result(), outbox, inbox)
        controller.start()
        if self._config.network is not None:
            self._on_progress(f"workers may join at {self._config.network.controller}")
        app = create_app(controller, await tokenizer, keys=self._http.keys, limits=self._http.limits)
        if await self._unless_stopped(asyncio.create_task(controller.wait_ready())):
            self._was_ready = True
            await self._unless_stopped(asyncio.create_task(self._meet()))
            await self._serve(HttpServer(app, self._listener, grace_s=READ_GRACE_S, limits=self._http.limits))

    async def _serve(self, server: HttpServer) -> None:
        workers = ((worker.role, worker.cores) for worker in self._config.workers)
        os.sched_setaffinity(0, gateway_cores(available_cores(), workers))
        await server.start()
        host, port = self._listener.getsockname()[:2]
        measured = self._paths.summary()
        self._on_progress(f"ready on http://{host}:{port}" + (f" ({measured})" if measured else ""))
        await self._stop.wait()
        if self._controller is not None:
            # Health says that no more is taken while the streams that run come to their ends.
            try:
                await asyncio.wait_for(self._controller.drain(), STOP_GRACE_S)
            except TimeoutError:
                self._controller.fail_all("the service was told to end before the answer did")
        await server.stop()

    async def _unless_stopped(self, event: asyncio.Future[T]) -> bool:
        """Wait for `event`; False if the service is stopped first."""
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((event, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not event.done():
            event.cancel()
        return event.done() and not self._stop.is_set()

    def _make_controller(self, facts: Report, outbox: Outbox, inbox: Inbox[ToController]) -> Controller:
        assert facts.max_model_len is not None  # noqa: S101  (these facts come together)
        assert facts.vocab_size is not None  # noqa: S101
        model = ServedModel(
            name=self._http.served_model_name,
            path=self._config.engine.model,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            created=int(time.time()),
        )
        cluster = self._make_cluster()
        overload, limits = self._make_overload(cluster), self._http.admission
        hosts = self._make_hosts(facts, outbox)
        workers = {worker.instance: worker.role for worker in self._config.workers}
        # Those that join from hosts of their own come one after the other, and the service begins with the first.
        self._fleet = WorkerRegistry(
            {} if self._launcher.joins else workers,
            outbox,
            hosts or self._launcher,
            HealthTimeouts(restart_s=self._config.max_restart_delay_s),
        )
        for instance in self._own:
            self._fleet.expect(instance, workers[instance])
        return Controller(
            model=model,
            cluster=cluster,
            admission=Admission(limits) if overload is None else OverloadAdmission(limits, cluster, overload),
            overload=overload,
            fleet=self._fleet,
            hosts=hosts,
            inbox=inbox,
            telemetry=self._telemetry,
            paths=self._paths,
            roles_move=self._config.router not in FIXED_ROLE_ROUTERS,
            recomputes=self._config.engine.recomputes,
            replan=self._config.replan,
            prompt_keys=self._prompt_keys(),
            forecast=self._make_forecast(),
        )

    def _prompt_keys(self) -> PromptKeys | None:
        engine, store = self._config.engine, self._config.store
        if not engine.prefix_caching:
            return None
        directory = None if store is None else store.disk_dir
        return PromptKeys(
            engine.block_size, None if directory is None else load_or_create_secret(Path(directory))
        )

    def _make_hosts(self, facts: Report, outbox: Outbox) -> RemoteHosts | None:
        config = self._config
        if config.network is None:
            return None
        assert facts.model is not None  # noqa: S101  (as above)
        engine = msgspec.structs.replace(config.engine, max_model_len=facts.max_model_len)
        config = msgspec.structs.replace(config, engine=engine)
        return RemoteHosts(config, facts.model, __version__, self._launcher, outbox, self._own)

    @property
    def _own(self) -> list[str]:
        """The workers that join from hosts which the launcher starts."""
        return [worker.instance for worker in self._config.workers] if self._launcher.joins else []

    def _fleet_missed(self, sender: str) -> None:
        if self._fleet is not None:
            self._fleet.missed(sender)

    def _make_cluster(self) -> ClusterScheduler:
        router = ROUTERS[self._config.router]()
        handoffs = HANDOFF_POLICIES[self._config.handoff](self._policy_paths())
        if self._config.journal_dir is None:
            return ClusterScheduler(router, handoffs)
        cluster = JournaledCluster(router, handoffs)
        cluster.journal = Journal(self._config.journal_dir, CONTROLLER)
        return cluster

    def _make_overload(self, cluster: ClusterScheduler) -> OverloadControl | None:
        config = self._config.overload
        if config is None:
            return None
        kinds = instance_profiles(config.cluster, load_catalog([Path(file) for file in config.catalog]))
        return overload_control(config.rule, config.cluster, kinds, config.slo, cluster.pools)

    def _make_forecast(self) -> LiveForecast | None:
        config = self._config.forecast
        return None if config is None else LiveForecast(config, self._config.engine.block_size, self._paths)

    def _policy_paths(self) -> TransferPaths:
        """What was measured, or what the machines have that are emulated."""
        spec = self._config.cluster
        if self._config.engine.engine != "emulated" or spec is None:
            return self._paths
        catalog = load_catalog([Path(file) for file in self._config.catalog])
        return paths_of(spec, catalog.model(spec.model), instance_profiles(spec, catalog))

    async def _meet(self) -> None:
        """Wait until the links are measured; one that cannot be, because its end is lost, is not waited for."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._paths.known(self._config.measured_pairs()), MEET_S)

    async def _follow_reports(self) -> None:
        try:
            async for report in self._launcher.reports():
                self._follow(report)
        except msgspec.MsgspecError as error:
            self._fail(f"the process that starts the workers said something else than a report: {error}")
        self._fail("the process that starts the workers has ended")

    def _follow(self, report: Report) -> None:
        if report.stage is not None:
            self._on_progress(report.stage)
        if report.max_model_len is not None and not self._facts.done():
            self._facts.set_result(report)
        if report.failure is not None:
            self._fail(report.failure)
        if report.waiting is not None and self._controller is not None:
            self._controller.workers_waiting(report.waiting)
        if report.exited is not None:
            self._worker_ended(report.exited, report.code, report.why)

    def _worker_ended(self, instance: str, code: int | None, why: str | None) -> None:
        if self._stop.is_set():
            return  # as it was told to
        # A host that cannot do as it was told will not be able to next time either, unless others could.
        hopeless = self._launcher.joins and code == USER_ERROR and not self._was_ready
        if self._controller is not None and self._controller.watches and not hopeless:
            self._controller.exited(instance)
        else:
            self._fail(
                f"{instance} ended with code {code} before the service was ready"
                + (f": {why}" if why else "")
            )

    def _fail(self, reason: str) -> None:
        """The service cannot go on: streams are told first, then it stops. The first reason counts."""
        if not self._stop.is_set():
            self._failure = reason
            if self._controller is not None:
                self._controller.fail_all(reason)
        self.stop()


def _load_tokenizer(engine: EngineConfig) -> TextTokenizer | None:
    """That of the flag, else the model's own; an emulated model has none."""
    if engine.tokenizer is not None:
        return load_tokenizer(Path(engine.tokenizer))
    return None if engine.engine == "emulated" else load_tokenizer(Path(engine.model))
