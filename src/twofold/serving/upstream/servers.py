"""The servers that there are, and whether they work.

starting ── answers ──▶ up ── in trouble ──▶ down ── its time comes, and it answers ──▶ up, on trial
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
    """Who runs attempts on servers."""

    def begin(self, message: Prefill, prefill: str) -> None: ...

    def abort(self, attempt_id: str) -> None: ...


class Server:
    """One of them: a `Worker` to the controller's parts. Nobody here starts or retires it."""

    retired = False

    def __init__(self, config: ServerConfig, client: VllmClient, longest_s: float) -> None:
        self.instance, self.role, self.config, self.client = config.instance, config.role, config, client
        self.state = WorkerState.STARTING
        self.breaker = Breaker(longest_s)
        self.card: ServerModel | None = None  # known once it was up
        self.restarts = 0  # how often it came back
        self.start_s = 0.0  # it is left alone until then

    @property
    def up(self) -> bool:
        return self.state is WorkerState.UP

    @property
    def model(self) -> str:
        """What it calls the model."""
        return "" if self.card is None else self.card.id


class ServerRegistry:
    """Implements `Workers`: what they are sent goes to the `runner`, which is given when there is one."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.members = {server.instance: server for server in servers}
        self.runner: AttemptRunner | None = None

    def breaker(self, instance: str) -> Breaker:
        return self.members[instance].breaker

    def ours(self, instance: str, moment_s: float) -> float:  # noqa: ARG002
        """All times are taken here."""
        return moment_s

    def send(self, instance: str, message: Message) -> None:
        """An attempt begins where it is prefilled, and is aborted wherever that is said; nobody asks for room."""
        if self.runner is None:
            return
        if isinstance(message, Prefill):
            self.runner.begin(message, instance)
        elif isinstance(message, Abort):
            self.runner.abort(message.request_id)

    def came(self, instance: str, card: ServerModel) -> bool:
        """A server answers, and may be given requests; False if it was there before and is on trial now."""
        server = self.members[instance]
        first = server.card is None
        server.card, server.state = card, WorkerState.UP
        server.restarts += not first
        server.breaker.back(time.monotonic())
        return first

    def went(self, instance: str, reason: str) -> bool:
        """A server is in trouble; False if that was known."""
        server = self.members[instance]
        if server.state is not WorkerState.UP:
            return False
        log.error("%s is given nothing for now: %s", instance, reason)
        server.state = WorkerState.DOWN
        server.start_s = server.breaker.fail(time.monotonic())
        return True

    @property
    def card(self) -> ServerModel | None:
        """What one of them serves; None before any has answered."""
        return next((server.card for server in self.members.values() if server.card is not None), None)
