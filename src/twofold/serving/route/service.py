"""The service that the gateway sees: requests run on the servers of somebody else."""

import asyncio
import time
from collections.abc import AsyncGenerator

from twofold.errors import RequestError
from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.scheduling.admission import Admission
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.serving.controller.progress import Progress
from twofold.serving.controller.requests import Requests
from twofold.serving.controller.trust import Trust
from twofold.serving.roles import Roles
from twofold.serving.route.config import RouteConfig
from twofold.serving.route.exchanges import Exchanges
from twofold.serving.route.exposition import Readings
from twofold.serving.route.look import Look
from twofold.serving.route.names import SharedNames
from twofold.serving.route.route_forecast import RouteForecast
from twofold.serving.route.servers import Server, Servers
from twofold.serving.service import PoolMember, ServedModel
from twofold.serving.snapshot import ServiceSnapshot
from twofold.serving.telemetry import Telemetry
from twofold.timeline import Recorder

TICK_S = 0.2


class RouteService:
    """Implements `Service` with the parts of the controller that know requests, and servers for workers.

    The context of the model, called `name` here, is the shortest that a server has.
    """

    def __init__(
        self,
        config: RouteConfig,
        name: str,
        servers: Servers,
        cluster: ClusterScheduler,
        admission: Admission,
        telemetry: Telemetry,
        names: SharedNames,
        forecast: RouteForecast | None,
    ) -> None:
        self._config, self._name = config, name
        self._cluster, self._forecast = cluster, forecast
        self._servers, self._telemetry = servers, telemetry
        self._recorder = recorder = Recorder(sinks=(telemetry.observe,))
        self._roles = Roles(cluster, servers, move=config.router not in FIXED_ROLE_ROUTERS)
        trust = Trust(cluster, servers, telemetry)
        self._requests = Requests(
            cluster,
            admission,
            servers,
            trust,
            telemetry,
            recorder,
            announces=True,  # room for the KV is the servers' business
            recomputes=False,
            overload=None,
            replanning=None,
            prompt_keys=names,
            forecast=None,
        )
        progress = Progress(
            self._requests, cluster, servers, trust, telemetry, recorder, overload=None, reuses=False
        )
        self._look = Look(
            servers,
            cluster,
            trust,
            telemetry,
            timeout_s=config.probe_timeout_s,
            on_come=self._come,
            on_read=self._read,
            on_lost=self._lost,
        )
        self._exchanges = Exchanges(servers, self._requests, progress, self._look.trouble)
        servers.runner = self._exchanges
        cluster.on_move = telemetry.role
        telemetry.admission(admission)
        if forecast is not None:
            cluster.pools.forecast = forecast.forecast
            telemetry.forecast(cluster.pools, forecast.forecast)
        self._ticking: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for servers; to be called inside the running event loop."""
        self._look.start()
        self._ticking = asyncio.create_task(self._tick())

    async def wait_ready(self) -> None:
        """Wait until there are servers for both phases."""
        await self._requests.opened()

    def fail_all(self, reason: str) -> None:
        """The service cannot go on."""
        self._requests.fail_all(reason)

    async def drain(self) -> None:
        """Take no more requests, and wait until those that are here have ended."""
        await self._requests.drain()

    async def close(self) -> None:
        """Ask nobody anything any more."""
        self._look.stop()
        if self._forecast is not None:
            self._forecast.close()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._exchanges.close()

    def _come(self, server: Server, readings: Readings) -> None:
        load = self._cluster.pools.get(server.instance)
        if self._forecast is not None and load is not None:
            self._forecast.joined(server.config, load, readings)
        self._requests.place_waiting()

    def _read(self, instance: str, readings: Readings) -> None:
        if self._forecast is not None:
            self._forecast.read(instance, readings)

    def _lost(self, instance: str, reason: str) -> None:
        self._exchanges.lost(instance, reason)
        self._requests.place_waiting()

    async def _tick(self) -> None:
        while True:
            if self._look.model is None and self._roles.able and self._look.seen_all:
                self._look.model = self._served_model()
                self._requests.open()
            self._requests.look()
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

    # -- Service, for the gateway ------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """What is served; known from when the service is ready on."""
        if self._look.model is None:
            raise RequestError("the service is starting", status=503, code="not_ready")
        return self._look.model

    def ready(self) -> bool:
        """Whether a request would be placed at once: there are servers for both phases."""
        return self._requests.taking and self._roles.able

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every server."""
        return self._requests.generate(generation)

    def stop(self, request_id: str) -> None:
        """The client has all it asked for, found in the text: end the request as finished, not as aborted."""
        self._requests.stop(request_id)

    def pools(self) -> list[PoolMember]:
        """Every server, with the role that it plays now."""
        return self._roles.members(self._look.statuses)

    def set_role(self, instance: str, role: Role) -> None:
        """Let a server play another role from the next request on."""
        self._roles.set(instance, role)
        self._requests.place_waiting()

    def replans(self) -> list[str]:
        """Nobody re-plans servers that are somebody else's."""
        return []

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        """The service now and lately."""
        return self._telemetry.snapshot(self._recorder.live)
