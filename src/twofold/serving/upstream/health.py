"""Periodic health probes of every server: availability, recovery and load."""

import asyncio
import logging
import time
from collections.abc import Callable

from twofold.errors import ConfigurationError
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.health import WorkerHealth
from twofold.serving.controller.service import ServedModel
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.serving.upstream.client import ServerModel, UnavailableError
from twofold.serving.upstream.metrics import ExternalLoads, ServerMetrics, read_metrics
from twofold.serving.upstream.servers import Server, ServerRegistry

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class HealthProbe:
    """One probe task per server, from `start` to `stop`.

    `on_come` is called when a server becomes usable, `on_read` with its metrics, and `on_lost` with the reason when it
    fails a probe. Once `model` is set, servers that cannot serve it are skipped.
    """

    def __init__(
        self,
        servers: ServerRegistry,
        cluster: ClusterScheduler,
        trust: WorkerHealth,
        telemetry: Telemetry,
        *,
        timeout_s: float,
        on_come: Callable[[Server, ServerMetrics], None],
        on_read: Callable[[str, ServerMetrics], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._servers, self._cluster, self._trust, self._telemetry = servers, cluster, trust, telemetry
        self._timeout_s, self._on_come, self._on_read, self._on_lost = timeout_s, on_come, on_read, on_lost
        self._others = ExternalLoads(cluster.pools)
        self._refused: dict[str, str] = {}
        self._unseen = set(servers.members)
        self.model: ServedModel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.statuses: dict[str, InstanceStatus] = {}

    def start(self) -> None:
        """Call inside the running event loop."""
        self._tasks = [asyncio.create_task(self._watch(each)) for each in self._servers.members.values()]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def seen_all(self) -> bool:
        """Whether every server has been probed once."""
        return not self._unseen

    def trouble(self, instance: str, reason: str) -> bool:
        """Mark a failing server as down for a while; False if it already was."""
        if not self._servers.went(instance, reason):
            return False
        self._others.forget(instance)
        self._cluster.pause(instance)
        self.statuses.pop(instance, None)
        self._telemetry.remove(instance)
        return True

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                await self._look_at(server)
            except UnavailableError as error:
                self.trouble(server.instance, str(error))
                self._on_lost(server.instance, str(error))  # attempts may have started meanwhile
            self._unseen.discard(server.instance)
            left_s = server.start_s - time.monotonic()
            await asyncio.sleep(left_s if 0 < left_s < PERIOD_S else PERIOD_S)

    async def _look_at(self, server: Server) -> None:
        if not server.up and time.monotonic() < server.start_s:
            return
        client, timeout_s = server.client, self._timeout_s
        await client.check_health(timeout_s)
        readings = read_metrics(await client.metrics(timeout_s))
        if not server.up:
            self._come(server, await client.card(timeout_s), readings)
        if server.up:
            self.statuses[server.instance] = readings.status
            self._telemetry.status(server.instance, readings.status)
            self._cluster.waits(server.instance, readings.waiting)
            self._others.read(server.instance, readings)
            self._on_read(server.instance, readings)

    def _come(self, server: Server, card: ServerModel, readings: ServerMetrics) -> None:
        instance = server.instance
        try:
            check(server.instance, card, self._servers.card, self.model)
        except ConfigurationError as error:
            if self._refused.get(instance) != str(error):  # logged once
                self._refused[instance] = str(error)
                log.error("%s", error)  # noqa: TRY400  (a server's configuration, no traceback needed)
            return
        if self._servers.came(instance, card):
            log.info("%s is up at %s", instance, server.config.url)
            self._cluster.add_instance(instance, server.role, readings.capacity_tokens)
            self._telemetry.role(instance, server.role)
            self._trust.publish(instance)
        else:
            self._telemetry.restarted(instance)
            self._trust.resume(instance)
        self._on_come(server, readings)


def check(instance: str, card: ServerModel, other: ServerModel | None, model: ServedModel | None) -> None:
    """Raise ConfigurationError if a server has another model than `other`, or too short a context."""
    if other is not None and card.id != other.id:
        raise ConfigurationError(
            f"{instance} serves {card.id!r} and others serve {other.id!r}: start all servers with the same model "
            "and --served-model-name"
        )
    if model is not None and card.max_model_len < model.max_model_len:
        raise ConfigurationError(
            f"{instance} has a context of {card.max_model_len} tokens, less than this service's "
            f"{model.max_model_len}: restart it with a longer one, or restart twofold route"
        )
