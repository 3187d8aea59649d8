"""The fleet: which workers there are, whether they live, and what is done about those that do not.

    starting ── registered ──▶ up ── silent, hung ──▶ fenced ── exited ──▶ down ── its time comes ──▶ starting
                               └────────────────── exited ────────────────▶ ┘

A worker that is silent is killed before anything else is done: from then on it can neither answer nor write.
"""

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from twofold.errors import ConfigurationError, StaleEpochError
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import LONGEST_S, Breaker
from twofold.security.network import HOME
from twofold.serving.controller.heartbeat import ClockOffset
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import Alive, HeartbeatAck, Message, Peer, Peers, Registered

log = logging.getLogger(__name__)


class ProcessControl(Protocol):
    """Who starts and kills workers, and frees what is kept for one that has retired."""

    def start_worker(self, instance: str) -> None: ...

    def kill_worker(self, instance: str) -> None: ...

    def release_worker(self, instance: str) -> None: ...


class HealthTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker may be silent, and how long one batch may take, before it counts as hung (seconds).

    Workers say that they live every `ALIVE_S`. If nobody looked for longer than `STALL_S`, it is this process, or
    the machine, that stood still, and every worker is given its time anew. One that fails again and again is left
    alone for `restart_s` at most before it is started again.
    """

    silence_s: float = 1.5
    batch_s: float = 300.0
    restart_s: float = LONGEST_S


ALIVE_S = 0.2
STALL_S = 0.6


class WorkerState(StrEnum):
    STARTING = "starting"
    UP = "up"
    FENCED = "fenced"
    DOWN = "down"


class RegisteredWorker:
    """One worker of the service, in whichever of its lives."""

    def __init__(self, instance: str, role: Role, restart_s: float) -> None:
        self.instance = instance
        self.role = role  # the one it was started for, or was given since
        self.state = WorkerState.STARTING
        self.breaker = Breaker(restart_s)
        self.peer: Peer | None = None
        self.clock: ClockOffset | None = None  # None where it is ours
        self.heard_s = 0.0
        self.hung = False  # it lives, and its batch does not end
        self.missed = False  # something that it said did not come
        self.start_s = 0.0  # when it is to be started again
        self.retired = (
            False  # it is not wanted now: it ends when it has nothing left, and is not started again
        )
        self.restarts = 0

    @property
    def inbox(self) -> str | None:
        """Where the controller reaches it."""
        return None if self.peer is None else self.peer.inbox_from(HOME)


class SweepResult(NamedTuple):
    """What a look at the fleet led to, by instance."""

    lost: list[str]
    restarted: list[str]


class WorkerRegistry:
    """Knows every worker that the service should have, and sends to those that are up.

    `expected` are those that are there from the start on; others may come with their hosts, and go with them.
    """

    def __init__(
        self, expected: Mapping[str, Role], outbox: Outbox, orders: ProcessControl, patience: HealthTimeouts
    ) -> None:
        self.members = {
            instance: RegisteredWorker(instance, role, patience.restart_s)
            for instance, role in expected.items()
        }
        self._outbox = outbox
        self._orders = orders
        self._patience = patience
        self._model: tuple[str, object] | None = None
        self._looked_s: float | None = None
        self._first = list(self.members.values())
        # Whether every worker that is there from the start on has been up once.
        self.complete = not self._first

    @property
    def model(self) -> str | None:
        """What the workers compute, as far as one has said so."""
        return None if self._model is None else self._model[0]

    def expect(self, instance: str, role: Role) -> None:
        """A worker is being started on another host, perhaps not for the first time."""
        joined = RegisteredWorker(instance, role, self._patience.restart_s)
        self.members.setdefault(instance, joined).state = WorkerState.STARTING

    def dismiss(self, instance: str) -> None:
        """A worker that has ended will not be started again."""
        del self.members[instance]

    def retire(self, instance: str) -> None:
        """A worker is not wanted any more; it is told to end by whoever knows that it has nothing left."""
        self.members[instance].retired = True

    def want(self, instance: str, role: Role, now: float) -> None:
        """A worker that was retired is wanted again: it is started at the next look, or goes on if it has not ended."""
        member = self.members[instance]
        member.retired, member.role, member.start_s = False, role, now

    def retiring(self) -> list[str]:
        """Those that are retired and have not ended yet."""
        return [member.instance for member in self._up() if member.retired]

    def retired(self) -> list[str]:
        """Those that are retired and have ended."""
        members = self.members.values()
        return [each.instance for each in members if each.retired and each.state is WorkerState.DOWN]

    def up(self, instance: str) -> bool:
        member = self.members.get(instance)
        return member is not None and member.state is WorkerState.UP

    def breaker(self, instance: str) -> Breaker:
        return self.members[instance].breaker

    def heard_s(self, instance: str) -> float:
        """When it last said that it lives."""
        return self.members[instance].heard_s

    def ours(self, instance: str, moment_s: float) -> float:
        """A moment of its monotonic clock on ours."""
        clock = self.members[instance].clock if instance in self.members else None
        return moment_s if clock is None else clock.ours(moment_s)

    def is_current(self, instance: str, epoch: int) -> bool:
        """Whether this is said by the life of the instance that is up now."""
        peer = self.members[instance].peer if self.up(instance) else None
        return peer is not None and peer.memory.epoch == epoch

    # -- what workers say -------------------------------------------------------------------------------------------

    def register(self, message: Registered, now: float) -> None:
        """A worker is there.

        Raises ConfigurationError where it cannot work with the others, and StaleEpochError where it was given up.
        """
        instance, model = message.peer.memory.instance, (message.model, message.peer.memory.layout)
        member = self.members.get(instance)
        if member is None:
            raise ConfigurationError(f"this service has no place for a worker called {instance!r}")
        if member.state in {WorkerState.FENCED, WorkerState.DOWN}:
            raise StaleEpochError(f"this life of {instance} is over")
        if self._model is not None and model != self._model:
            what = "another model" if message.model != self._model[0] else "its KV cache laid out otherwise"
            raise ConfigurationError(
                f"{instance} has {what} than the workers that are here, so no request could move between them"
            )
        self._model = model
        member.peer, member.state, member.heard_s, member.hung = message.peer, WorkerState.UP, now, False
        member.missed = False
        member.clock = None if message.peer.host == HOME else ClockOffset(message.now_s, now)
        member.breaker.back(now)
        self.complete = self.complete or all(one.peer is not None for one in self._first)
        if self.complete:
            self.tell_all(Peers(peers=[one.peer for one in self._up() if one.peer is not None]))

    def refuse(self, message: Registered, answer: Message) -> None:
        """Answer a worker that is not, and will not be, one of us."""
        self._outbox.send(message.peer.inbox_from(HOME), answer)

    def heard(self, message: Alive, now: float) -> None:
        """Whoever is on another host is told so, because it must end when it is not (see `Tether`)."""
        if self.is_current(message.instance, message.epoch):
            member = self.members[message.instance]
            member.heard_s, member.hung = now, message.batch_s > self._patience.batch_s
            if member.clock is not None:
                member.clock.heard(message.now_s, now)
                self.send(member.instance, HeartbeatAck(said_s=message.said_s))

    def missed(self, instance: str) -> None:
        """A worker said something that did not come: nobody knows what it has and what it has not."""
        if self.up(instance):
            self.members[instance].missed = True

    # -- what is done about them --------------------------------------------------------------------------------------

    def look(self, now: float) -> "SweepResult":
        """To be called every `ALIVE_S`: kills what is silent, starts what is due."""
        if self._looked_s is not None and now - self._looked_s > STALL_S:
            for member in self._up():
                member.heard_s = now
        self._looked_s = now
        patience_s = self._patience.silence_s
        silent = [
            member
            for member in self._up()
            if member.hung or member.missed or now - member.heard_s > patience_s
        ]
        for member in silent:
            log.error("%s %s; it is ended", member.instance, _complaint(member))
            self._gone(member, now)
            member.state = WorkerState.FENCED
            self._orders.kill_worker(member.instance)
        due = [
            member
            for member in self.members.values()
            if member.state is WorkerState.DOWN and not member.retired and now >= member.start_s
        ]
        for member in due:
            member.state = WorkerState.STARTING
            member.restarts += 1
            self._orders.start_worker(member.instance)
        return SweepResult([member.instance for member in silent], [member.instance for member in due])

    def exited(self, instance: str, now: float) -> bool:
        """Its process has ended; True if it was up until now, so that nobody knows yet."""
        member = self.members[instance]
        was_up = member.state is WorkerState.UP
        if was_up or member.state is WorkerState.STARTING:
            self._gone(member, now)
        member.state = WorkerState.DOWN
        if member.retired:
            self._orders.release_worker(instance)
        return was_up

    def send(self, instance: str, message: Message) -> None:
        """Nothing is sent to a worker that is not up."""
        member = self.members[instance]
        if member.state is WorkerState.UP and member.inbox is not None:
            self._outbox.send(member.inbox, message)

    def tell_all(self, message: Message) -> None:
        for member in self._up():
            self.send(member.instance, message)

    def close(self) -> None:
        """Send what is still to be sent, and no more."""
        self._outbox.close(linger_s=1.0)

    def _gone(self, member: RegisteredWorker, now: float) -> None:
        if not member.retired:  # one that ends as it was told to has not failed
            member.start_s = member.breaker.fail(now)
        if member.inbox is not None:
            self._outbox.forget(member.inbox)

    def _up(self) -> list[RegisteredWorker]:
        return [member for member in self.members.values() if member.state is WorkerState.UP]


def _complaint(member: RegisteredWorker) -> str:
    if member.missed:
        return "said something that did not come"
    return "hangs" if member.hung else "does not answer"
