"""Service of the command `twofold route`: a gateway in front of external vLLM servers."""

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq.asyncio

from twofold.handoff import HandoffMode
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS, ROUTERS
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import ServedModel, Service
from twofold.serving.fronts.door import open_door, prepare_door
from twofold.serving.fronts.process import DoorConfig
from twofold.serving.gateway.app import create_app
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.local_service import HttpConfig, end_requests, ready_line, unless_set
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.serving.upstream.client import VllmClient
from twofold.serving.upstream.config import RouteConfig
from twofold.serving.upstream.forecast import TtftAdmission, UpstreamForecast, UpstreamPromptKeys
from twofold.serving.upstream.forwarder import ServerForwarder
from twofold.serving.upstream.metrics import ServerMetrics
from twofold.serving.upstream.requests import UpstreamRequests
from twofold.serving.upstream.servers import HealthProbe, Server, ServerRegistry

TICK_S = 0.2


class RouteService(Service):
    """Service of `twofold route`, with external vLLM servers as workers."""

    def __init__(
        self, config: RouteConfig, http: HttpConfig, context: "zmq.asyncio.Context", telemetry: Telemetry
    ) -> None:
        self._config, self._name = config, http.served_model_name
        # NixlConnector: the decode server pulls the KV after the prefill has finished.
        cluster = ClusterScheduler(ROUTERS[config.router](), FixedHandoff(HandoffMode.PULL))
        self._servers = servers = ServerRegistry(
            [Server(each, VllmClient(each.url, config.api_key), config.max_restart_delay_s) for each in config.servers]
        )
        limits, ttft_s = http.admission, config.early_ttft_s
        telemetry.configuration = {"Router": config.router, "Engine": "running servers"}
        prompt_keys = self._prompt_keys = UpstreamPromptKeys()
        self._forecast = UpstreamForecast(context, prompt_keys) if config.router in FORECASTING_ROUTERS else None
        requests = LiveRequests(
            cluster,
            Admission(limits) if ttft_s is None else TtftAdmission(limits, cluster, ttft_s),
            servers,
            telemetry,
            announces=True,  # servers allocate KV memory themselves
            recomputes=False,
            reuses=False,
            name_blocks=prompt_keys.name,
        )
        super().__init__(
            cluster,
            servers,
            requests,
            telemetry,
            roles_move=config.router not in FIXED_ROLE_ROUTERS,
            forecast=None if self._forecast is None else self._forecast.forecast,
        )
        self._probe = HealthProbe(
            servers,
            cluster,
            requests.health,
            telemetry,
            self.statuses,
            timeout_s=config.probe_timeout_s,
            on_up=self._up,
            on_metrics=self._measured,
            on_lost=self._lost,
        )
        self._attempts = UpstreamRequests(servers, self._requests, self._probe.mark_down)
        servers.runner = self._attempts
        self._ticking: asyncio.Task[None] | None = None

    @property
    def takes_text(self) -> bool:
        """Whether servers tokenize prompts: not if predictions of TTFT need their lengths and blocks."""
        return self._forecast is None and self._config.early_ttft_s is None

    def forwarder(self, timeout_s: float) -> ServerForwarder:
        """Return the forwarder of requests that a server must run alone."""
        return ServerForwarder(
            self._requests,
            self._cluster,
            self._servers,
            self._prompt_keys,
            self._probe.mark_down,
            model=self._name,
            timeout_s=timeout_s,
        )

    def start(self) -> None:
        """Start probing the servers. Requires a running event loop."""
        self._probe.start()
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop the health probes, the KV event feeds and all running requests."""
        self._probe.stop()
        if self._forecast is not None:
            self._forecast.close()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._attempts.close()
        for server in self._servers.members.values():
            server.client.close()

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
            if self._model is None and self._able and self._probe.probed_all:
                self._model = self._probe.model = self._served_model()
                self._requests.opened.set()
            self._requests.check_waiting()
            await asyncio.sleep(TICK_S)

    def _served_model(self) -> ServedModel:
        known = [(server.kind, server.card) for server in self._servers.members.values() if server.card is not None]
        return ServedModel(
            name=self._name,
            path=self._config.model,
            max_model_len=min(card.max_model_len or self._config.context for _, card in known),
            vocab_size=self._config.vocab_size,
            created=int(time.time()),
            returns_ids=all(kind.returns_ids for kind, _ in known),
        )


class RoutedGateway:
    """Application of `twofold route`: an HTTP gateway that forwards requests to external vLLM servers."""

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
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Make `run` stop once running requests have ended, or at the second call at once."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def run(self) -> None:
        """Serve requests until `stop` is called. Raises UserError if the service cannot start."""
        prepare_door(self._http.processes)
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(self._config.model))
        context = zmq.asyncio.Context()
        try:
            service = RouteService(self._config, self._http, context, self._telemetry)
            service.start()
            try:
                self._on_progress("waiting for the servers")
                if await unless_set(self._stop, asyncio.create_task(service.wait_ready())):
                    http = self._http
                    settings = msgspec.structs.replace(http.gateway, checks_constraints=False)
                    app = create_app(service, tokenizer, settings, service.forwarder(settings.limits.timeout_s))
                    door = DoorConfig(
                        settings=settings,
                        processes=http.processes,
                        tokenizer=Path(self._config.model),
                        forwards=True,
                        files_per_connection=2,  # a request may have a connection to a server, too
                        log_format=self._config.log_format,
                    )
                    async with open_door(service, app, self._listener, door):
                        self._on_progress(ready_line(self._listener))
                        await self._stop.wait()
                        await end_requests(service, self._on_progress, self._stop_now)
            finally:
                await service.close()
        finally:
            context.destroy(linger=0)
            self._listener.close()
            await asyncio.to_thread(self._telemetry.close)
