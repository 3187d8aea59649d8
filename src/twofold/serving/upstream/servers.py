"""Configured vLLM servers, and the health probes that mark them as starting, up or down."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from twofold.errors import ConfigurationError, RequestError
from twofold.instance import Role
from twofold.request import Generation
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.health import Worker, WorkerGroup, WorkerHealth, WorkerState
from twofold.serving.controller.service import ServedModel
from twofold.serving.messages import Abort, Message, Prefill
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.serving.upstream.client import ServerModel, UnavailableError, VllmClient
from twofold.serving.upstream.config import ServerConfig
from twofold.serving.upstream.metrics import ExternalLoads, ServerMetrics
from twofold.serving.upstream.openai import OpenAIKind
from twofold.serving.upstream.sglang import SglangKind
from twofold.serving.upstream.vllm import VllmKind

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# By the owner of the model that a server lists. Twofold's services, and servers that name none, have vLLM's API.
KINDS = {"": (VLLM := VllmKind()), "vllm": VLLM, "twofold": VLLM, "sglang": SglangKind()}
OTHER = OpenAIKind()
# URLs, IPv4 and IPv6 addresses
_ADDRESS = (
    r"\b[a-z][\w+.-]{0,15}://[^\s\"'<>\\]+",
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?",
    r"\[[\da-f]*:[\da-f]*:[\da-f:.]*\](?::\d+)?",
)


class AttemptRunner(Protocol):
    """Interface to start and abort requests on external servers."""

    def begin(self, message: Prefill, prefill: str) -> None: ...

    def abort(self, attempt_id: str) -> None: ...


class Server(Worker):
    """External vLLM server, which this service cannot start or stop."""

    def __init__(self, config: ServerConfig, client: VllmClient, longest_s: float) -> None:
        super().__init__(config.instance, config.role, longest_s)
        self.config, self.client = config, client
        self.kind: VllmKind = VLLM
        self.handshake: Mapping[str, object] = {}  # fields by which a decode server finds this prefill server
        self.card: ServerModel | None = None  # None until first healthy
        self.heard_s = 0.0  # time of its latest token

    @property
    def up(self) -> bool:
        return self.state is WorkerState.UP

    @property
    def model(self) -> str:
        """Name of the model on this server."""
        return "" if self.card is None else self.card.id

    def body(self, generation: Generation, seed: int, more: Mapping[str, object]) -> bytes:
        """Return the body of a completion request, with further fields. Raises RejectedError."""
        return msgspec.json.encode({**self.kind.fields(generation, self.model, seed), **more})


class ServerRegistry(WorkerGroup):
    """All external servers, by instance name."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.members: dict[str, Server] = {server.instance: server for server in servers}
        self.runner: AttemptRunner | None = None
        hosts = {server.config.url.split("/")[2].rpartition("@")[2].split(":")[0] for server in servers}
        # A short name may be a word, too: it is an address if a port follows.
        names = [re.escape(host) + (r"(?::\d+)?" if "." in host else r":\d+") for host in sorted(hosts)]
        self._address = re.compile("|".join([*_ADDRESS, *(rf"\b{name}\b" for name in names)]), re.IGNORECASE)

    def send(self, instance: str, message: Message) -> None:
        """Send a message to a server. Only messages that start or abort a request have an effect."""
        if self.runner is None:
            return
        if isinstance(message, Prefill):
            self.runner.begin(message, instance)
        elif isinstance(message, Abort):
            self.runner.abort(message.request_id)

    def hide_addresses(self, text: str) -> str:
        """Return an error message of a server without the addresses of servers, for clients."""
        return self._address.sub("[address]", text)

    def mark_up(self, instance: str, card: ServerModel) -> bool:
        """Mark a server as up; return whether this is the first time."""
        server = self.members[instance]
        first = server.card is None
        server.card, server.state = card, WorkerState.UP
        server.restarts += not first
        server.breaker.back(time.monotonic())
        return first

    def mark_down(self, instance: str, reason: str) -> bool:
        """Mark a server as down; return False if the server was not up."""
        server = self.members[instance]
        if server.state is not WorkerState.UP:
            return False
        log.error("%s is unavailable: %s", instance, reason)
        server.state = WorkerState.DOWN
        server.start_s = server.breaker.fail(time.monotonic())
        return True

    @property
    def card(self) -> ServerModel | None:
        """Description of the servers' model; None before the first response of a server."""
        return next((server.card for server in self.members.values() if server.card is not None), None)


class HealthProbe:
    """Health probes of all servers, at regular intervals. They call `on_up` when a server becomes usable, `on_metrics`
    after each successful probe, and `on_lost` after each failed one.
    """

    def __init__(
        self,
        servers: ServerRegistry,
        cluster: ClusterScheduler,
        health: WorkerHealth,
        telemetry: Telemetry,
        statuses: dict[str, InstanceStatus],
        *,
        timeout_s: float,
        on_up: Callable[[Server, ServerMetrics], None],
        on_metrics: Callable[[str, ServerMetrics], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._servers, self._cluster, self._health, self._telemetry = servers, cluster, health, telemetry
        self._statuses = statuses
        self._timeout_s, self._on_up, self._on_metrics, self._on_lost = timeout_s, on_up, on_metrics, on_lost
        self._external = ExternalLoads(cluster.pools)
        self._rejected: dict[str, str] = {}
        self._unprobed = set(servers.members)
        self.model: ServedModel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the probe tasks. Requires a running event loop."""
        self._tasks = [asyncio.create_task(self._watch(each)) for each in self._servers.members.values()]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def probed_all(self) -> bool:
        """Whether each server has been probed at least once."""
        return not self._unprobed

    def mark_down(self, instance: str, reason: str) -> bool:
        """Mark a failed server as down and stop routing to it; return False if it was not up."""
        if not self._servers.mark_down(instance, reason):
            return False
        self._external.forget(instance)
        self._cluster.pause(instance)
        self._statuses.pop(instance, None)
        self._telemetry.instances.remove(instance)
        return True

    async def _watch(self, server: Server) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self._probe(server)
            except UnavailableError as error:
                late = isinstance(error.__cause__, TimeoutError)
                if not (late and server.heard_s > began_s):  # a busy server may answer late
                    self.mark_down(server.instance, str(error))
                    self._on_lost(server.instance, str(error))  # attempts may have started meanwhile
            self._unprobed.discard(server.instance)
            left_s = server.start_s - time.monotonic()
            await asyncio.sleep(left_s if 0 < left_s < PERIOD_S else PERIOD_S)

    async def _probe(self, server: Server) -> None:
        if not server.up and time.monotonic() < server.start_s:
            return
        client, timeout_s = server.client, self._timeout_s
        card = server.card
        if not server.up or card is None:
            card = await client.card(timeout_s)
            server.kind = KINDS.get(card.owned_by, OTHER)
        metrics = await server.kind.metrics(client, timeout_s)
        if not server.up:
            server.handshake = await server.kind.handshake(client, timeout_s)
            self._bring_up(server, card, metrics)
        if server.up:
            self._statuses[server.instance] = metrics.status
            self._telemetry.instances.status(server.instance, metrics.status)
            self._cluster.set_queued(server.instance, metrics.waiting)
            self._external.update(server.instance, metrics)
            self._on_metrics(server.instance, metrics)

    def _bring_up(self, server: Server, card: ServerModel, metrics: ServerMetrics) -> None:
        instance = server.instance
        try:
            check(server.instance, card, self._servers.card, self.model)
            check_kind(server, self.model)
        except ConfigurationError as error:
            if self._rejected.get(instance) != str(error):  # logged once
                self._rejected[instance] = str(error)
                log.error("%s", error)  # noqa: TRY400  (a server's configuration, no traceback needed)
            return
        if self._servers.mark_up(instance, card):
            log.info("%s is up at %s", instance, server.config.url)
            self._cluster.add_instance(instance, server.role, metrics.capacity_tokens)
            self._telemetry.instances.role(instance, server.role)
            self._health.publish(instance)
        else:
            self._telemetry.instances.restarted(instance)
            self._health.resume(instance)
        self._on_up(server, metrics)


def check(instance: str, card: ServerModel, other: ServerModel | None, model: ServedModel | None) -> None:
    """Raise ConfigurationError if a server cannot join the service.

    A server must serve the same model as the other servers, with at least the context length of the service.
    """
    if other is not None and card.id != other.id:
        raise ConfigurationError(
            f"{instance} serves {card.id!r} and others serve {other.id!r}: start all servers with the same model "
            "and --served-model-name"
        )
    if model is not None and card.max_model_len is not None and card.max_model_len < model.max_model_len:
        raise ConfigurationError(
            f"{instance} has a context of {card.max_model_len} tokens, less than this service's "
            f"{model.max_model_len}: restart it with a longer one, or restart twofold route"
        )


def check_kind(server: Server, model: ServedModel | None) -> None:
    """Raise ConfigurationError if a server is of the wrong kind for its role, or for requests of this service."""
    if server.role is not Role.MIXED and not server.kind.splits:
        raise ConfigurationError(f"{server.instance} is neither vLLM nor SGLang: give its address as --colocated")
    if server.role is Role.PREFILL and server.kind.concurrent and not server.handshake:
        raise ConfigurationError(f"{server.instance} has no bootstrap server: use --disaggregation-mode prefill")
    if model is not None and model.returns_ids and not server.kind.returns_ids:
        raise ConfigurationError(f"{server.instance} returns no token ids, unlike the others: restart twofold route")


def refusal_error(instance: str, status: int) -> RequestError:
    """Return the error of a client whose request a server refused with this HTTP status."""
    if status == 429:
        return RequestError(f"{instance} is full; try again later", status=429, code="server_full")
    if status == 503:
        return RequestError(f"{instance} takes no requests; try again later", status=503, code="server_not_ready")
    return RequestError(f"{instance} failed to run the request", status=502, code="server_failed")
