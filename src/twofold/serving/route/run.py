"""A gateway in front of servers, from start to end."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import aiohttp
import zmq.asyncio

from twofold.handoff import HandoffMode
from twofold.scheduling.admission import Admission
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.handoffs import FixedHandoff
from twofold.scheduling.routers import FORECASTING_ROUTERS, ROUTERS
from twofold.serving.gateway.app import create_app
from twofold.serving.gateway.server import HttpServer
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.local_service import READ_GRACE_S, STOP_GRACE_S, HttpConfig
from twofold.serving.route.client import VllmClient
from twofold.serving.route.config import RouteConfig
from twofold.serving.route.early_rejection import EarlyRejection
from twofold.serving.route.names import SharedNames
from twofold.serving.route.route_forecast import RouteForecast
from twofold.serving.route.servers import Server, Servers
from twofold.serving.route.service import RouteService
from twofold.serving.telemetry import Telemetry


class RoutedGateway:
    """Runs until it is told to stop. `on_progress` is called with what is happening at start-up."""

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
        """End it; safe to call from a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`; raises a UserError when it cannot start."""
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(self._config.model))
        key = self._config.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connector = aiohttp.TCPConnector(limit=0)
        context = zmq.asyncio.Context()
        try:
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                service = self._make_service(session, context)
                service.start()
                try:
                    if await self._ready(service):
                        app = create_app(service, tokenizer, keys=self._http.keys, limits=self._http.limits)
                        grace_s = READ_GRACE_S
                        await self._serve(
                            service,
                            HttpServer(app, self._listener, grace_s=grace_s, limits=self._http.limits),
                        )
                finally:
                    await service.close()
        finally:
            context.destroy(linger=0)
            self._listener.close()
            await asyncio.to_thread(self._telemetry.close)

    def _make_service(self, session: aiohttp.ClientSession, context: "zmq.asyncio.Context") -> RouteService:
        config = self._config
        # The decode server reads the KV from the prefill server once it is whole: that is what NixlConnector does.
        cluster = ClusterScheduler(ROUTERS[config.router](), FixedHandoff(HandoffMode.PULL))
        servers = Servers(
            [
                Server(each, VllmClient(session, each.url), config.max_restart_delay_s)
                for each in config.servers
            ]
        )
        limits, ttft_s = self._http.admission, config.early_ttft_s
        admission = Admission(limits) if ttft_s is None else EarlyRejection(limits, cluster, ttft_s)
        names = SharedNames()
        return RouteService(
            config,
            self._http.served_model_name,
            servers,
            cluster,
            admission,
            self._telemetry,
            names,
            RouteForecast(context, names) if config.router in FORECASTING_ROUTERS else None,
        )

    async def _ready(self, service: RouteService) -> bool:
        """Wait for servers; False if it is to stop first."""
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
            service.fail_all("the service was told to end before the answer did")
        await server.stop()
