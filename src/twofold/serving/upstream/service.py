"""`twofold route`: the gateway and the service in front of external vLLM servers."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import aiohttp
import zmq.asyncio

from twofold.errors import RequestError
from twofold.events import Recorder, RequestEvents
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS, ROUTERS
from twofold.serving.controller.health import WorkerHealth
from twofold.serving.controller.membership import WorkerRoles
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import PoolMember, ServedModel
from twofold.serving.gateway.app import create_app
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.local_service import READ_GRACE_S, STOP_GRACE_S, HttpConfig
from twofold.serving.telemetry.snapshot import ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.serving.upstream.client import VllmClient
from twofold.serving.upstream.config import RouteConfig
from twofold.serving.upstream.forecast import TtftAdmission, UpstreamForecast, UpstreamPromptKeys
from twofold.serving.upstream.metrics import ServerMetrics
from twofold.serving.upstream.requests import UpstreamRequests
from twofold.serving.upstream.servers import HealthProbe, Server, ServerRegistry

TICK_S = 0.2


class RouteService:
    """Implements `Service` with the controller's request handling and servers as workers.

    The context length is the minimum over the servers.
    """

    def __init__(
        self,
        config: RouteConfig,
        http: HttpConfig,
        session: aiohttp.ClientSession,
        context: "zmq.asyncio.Context",
        telemetry: Telemetry,
    ) -> None:
        self._config, self._name, self._telemetry = config, http.served_model_name, telemetry
        # NixlConnector: the decode server pulls the KV after the prefill has finished.
        self._cluster = cluster = ClusterScheduler(ROUTERS[config.router](), FixedHandoff(HandoffMode.PULL))
        self._servers = servers = ServerRegistry(
            [Server(each, VllmClient(session, each.url), config.max_restart_delay_s) for each in config.servers]
        )
        limits, ttft_s = http.admission, config.early_ttft_s
        admission = Admission(limits) if ttft_s is None else TtftAdmission(limits, cluster, ttft_s)
        prompt_keys = UpstreamPromptKeys()
        self._forecast = UpstreamForecast(context, prompt_keys) if config.router in FORECASTING_ROUTERS else None
        self._recorder = recorder = Recorder()
        self._roles = WorkerRoles(cluster, servers, move=config.router not in FIXED_ROLE_ROUTERS)
        health = WorkerHealth(cluster, servers, telemetry)
        events = RequestEvents((cluster, recorder, health, telemetry, admission))
        self._requests = LiveRequests(
            cluster,
            admission,
            servers,
            health,
            telemetry,
            events,
            recorder,
            announces=True,  # servers allocate KV memory themselves
            recomputes=False,
            reuses=False,
            prompt_keys=prompt_keys,
        )
        self._probe = HealthProbe(
            servers,
            cluster,
            health,
            telemetry,
            timeout_s=config.probe_timeout_s,
            on_up=self._up,
            on_metrics=self._measured,
            on_lost=self._lost,
        )
        self._attempts = UpstreamRequests(servers, self._requests, self._probe.mark_down)
        servers.runner = self._attempts
        cluster.on_role_change = telemetry.instances.role
        telemetry.admission(admission)
        if self._forecast is not None:
            cluster.pools.forecast = self._forecast.forecast
            telemetry.forecast(cluster.pools, self._forecast.forecast)
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start probing servers; call inside the running event loop."""
        self._probe.start()
        self._ticking = asyncio.create_task(self._tick())

    async def wait_ready(self) -> None:
        """Wait until there are servers for both phases."""
        await self._requests.opened()

    def fail_all(self, reason: str) -> None:
        """Fail all requests."""
        self._requests.fail_all(reason)

    async def drain(self) -> None:
        """Reject new requests and wait for running ones."""
        await self._requests.drain()

    async def close(self) -> None:
        """Stop probes, event feeds and attempts."""
        self._probe.stop()
        if self._forecast is not None:
            self._forecast.close()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._attempts.close()

    def _up(self, server: Server, metrics: ServerMetrics) -> None:
        load = self._cluster.pools.get(server.instance)
        if self._forecast is not None and load is not None:
            self._forecast.joined(server.config, load, metrics)
        self._requests.place_waiting()

    def _measured(self, instance: str, metrics: ServerMetrics) -> None:
        if self._forecast is not None:
            self._forecast.read(instance, metrics)

    def _lost(self, instance: str, reason: str) -> None:
        self._attempts.lost(instance, reason)
        self._requests.place_waiting()

    async def _tick(self) -> None:
        while True:
            if self._probe.model is None and self._roles.able and self._probe.probed_all:
                self._probe.model = self._served_model()
                self._requests.open()
            self._requests.check_waiting()
            await asyncio.sleep(TICK_S)

    def _served_model(self) -> ServedModel:
        cards = [server.card for server in self._servers.members.values() if server.card is not None]
        return ServedModel(
            name=self._name,
            path=self._config.model,
            max_model_len=min(card.max_model_len for card in cards),
            vocab_size=self._config.vocab_size,
            created=int(time.time()),
        )

    @property
    def model(self) -> ServedModel:
        """The served model; raises RequestError (503) until the service is ready."""
        if self._probe.model is None:
            raise RequestError("the service is starting", status=503, code="not_ready")
        return self._probe.model

    def ready(self) -> bool:
        """Whether there are servers for both phases."""
        return self._requests.admitting and self._roles.able

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every server."""
        return self._requests.generate(generation)

    def stop(self, request_id: str) -> None:
        """End a request as finished after the gateway found a stop string."""
        self._requests.stop(request_id)

    def pools(self) -> list[PoolMember]:
        """All servers with their current roles."""
        return self._roles.members(self._probe.statuses)

    def set_role(self, instance: str, role: Role) -> None:
        """Change a server's role for future requests."""
        self._roles.set(instance, role)
        self._requests.place_waiting()

    def replans(self) -> list[str]:
        """Return nothing: external servers are not re-planned."""
        return []

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        """Snapshot for the dashboard."""
        return self._telemetry.snapshot(self._recorder.live)


class RoutedGateway:
    """Runs the route service behind a gateway until stopped. `on_progress` receives startup messages."""

    def __init__(
        self,
        config: RouteConfig,
        http: HttpConfig,
        listener: socket.socket,
        on_progress: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        self._config, self._http, self._listener = config, http, listener
        self._on_progress, self._telemetry = on_progress, telemetry
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Request shutdown; safe in a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`; raises UserError if startup fails."""
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(self._config.model))
        key = self._config.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connector = aiohttp.TCPConnector(limit=0)
        context = zmq.asyncio.Context()
        try:
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                service = RouteService(self._config, self._http, session, context, self._telemetry)
                service.start()
                try:
                    if await self._ready(service):
                        keys, limits = self._http.keys, self._http.limits
                        app = create_app(service, tokenizer, keys=keys, limits=limits)
                        server = HttpServer(app, self._listener, grace_s=READ_GRACE_S, limits=limits)
                        await self._serve(service, server)
                finally:
                    await service.close()
        finally:
            context.destroy(linger=0)
            self._listener.close()
            await asyncio.to_thread(self._telemetry.close)

    async def _ready(self, service: RouteService) -> bool:
        """Wait for servers; False if stopped first."""
        self._on_progress("waiting for the servers")
        ready = asyncio.create_task(service.wait_ready())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        stopped.cancel()
        return not self._stop.is_set()

    async def _serve(self, service: RouteService, server: HttpServer) -> None:
        await server.start()
        host, port = self._listener.getsockname()[:2]
        self._on_progress(f"ready on http://{host}:{port}")
        await self._stop.wait()
        try:
            await asyncio.wait_for(service.drain(), STOP_GRACE_S)
        except TimeoutError:
            service.fail_all("the service is shutting down")
        await server.stop()
