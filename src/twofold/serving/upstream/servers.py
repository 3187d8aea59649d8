"""The configured servers and their states.

starting ── healthy ──▶ up ── failure ──▶ down ── healthy after a delay ──▶ up, circuit breaker half-open
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from twofold.scheduling.cluster.breaker import Breaker
from twofold.serving.controller.registry import WorkerState
from twofold.serving.messages import Abort, Message, Prefill
from twofold.serving.upstream.client import ServerModel, VllmClient
from twofold.serving.upstream.config import ServerConfig

log = logging.getLogger(__name__)


class AttemptRunner(Protocol):
    """Runs attempts on servers."""

    def begin(self, message: Prefill, prefill: str) -> None: ...

    def abort(self, attempt_id: str) -> None: ...


class Server:
    """One server, presented to the controller as a worker. It is never started or retired here."""

    retired = False

    def __init__(self, config: ServerConfig, client: VllmClient, longest_s: float) -> None:
        self.instance, self.role, self.config, self.client = config.instance, config.role, config, client
        self.state = WorkerState.STARTING
        self.breaker = Breaker(longest_s)
        self.card: ServerModel | None = None  # None until first healthy
        self.restarts = 0  # number of recoveries
        self.start_s = 0.0  # earliest time of the next probe

    @property
    def up(self) -> bool:
        return self.state is WorkerState.UP

    @property
    def model(self) -> str:
        """Name of the model on this server."""
        return "" if self.card is None else self.card.id


class ServerRegistry:
    """All servers; implements `Workers` by passing messages to the `runner`."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.members = {server.instance: server for server in servers}
        self.runner: AttemptRunner | None = None

    def breaker(self, instance: str) -> Breaker:
        return self.members[instance].breaker

    def ours(self, instance: str, moment_s: float) -> float:  # noqa: ARG002
        """All times are measured in this process, so no conversion is needed."""
        return moment_s

    def send(self, instance: str, message: Message) -> None:
        """Begin or abort attempts; other messages, such as reservations, are ignored."""
        if self.runner is None:
            return
        if isinstance(message, Prefill):
            self.runner.begin(message, instance)
        elif isinstance(message, Abort):
            self.runner.abort(message.request_id)

    def came(self, instance: str, card: ServerModel) -> bool:
        """Mark a healthy server as up; False if it recovered and is on trial."""
        server = self.members[instance]
        first = server.card is None
        server.card, server.state = card, WorkerState.UP
        server.restarts += not first
        server.breaker.back(time.monotonic())
        return first

    def went(self, instance: str, reason: str) -> bool:
        """Mark a server as down; False if it already was."""
        server = self.members[instance]
        if server.state is not WorkerState.UP:
            return False
        log.error("%s is unavailable: %s", instance, reason)
        server.state = WorkerState.DOWN
        server.start_s = server.breaker.fail(time.monotonic())
        return True

    @property
    def card(self) -> ServerModel | None:
        """Model card of any server; None before the first has responded."""
        return next((server.card for server in self.members.values() if server.card is not None), None)
