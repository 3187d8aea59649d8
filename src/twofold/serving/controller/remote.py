"""The other hosts of a service, as the controller sees them: what they run, and how that is started and ended.

A host's launcher says five times a second which life of each of its workers runs. Orders are repeated until that shows
what they were for, so none of them may be lost for good. A host that is silent can be told nothing; its workers end
themselves then (see `tether.py`), and when they must have, they are taken for ended.
"""

import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.security.network import HOME
from twofold.serving.config import ServiceConfig
from twofold.serving.controller.heartbeat import presumed_dead
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.controller.registry import ProcessControl
from twofold.serving.messages import (
    HeartbeatAck,
    HostAlive,
    HostFinish,
    HostJoins,
    HostRefused,
    HostUnknown,
    HostWelcome,
    KillWorker,
    StartWorker,
    WorkerLife,
)

log = logging.getLogger(__name__)


class RemoteWorker:
    """A worker of a host: `life` counts how often it was to be started, and `over` is the last life that has ended."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.life = 1
        self.over = 0
        self.unwanted = False  # this life is to be killed


class RemoteHost:
    """A host that has joined; `life` is that of its launcher. It is `present` until its workers must have ended."""

    def __init__(self, name: str, life: int, inbox: str, seats: dict[str, RemoteWorker], now: float) -> None:
        self.name, self.life, self.inbox, self.seats = name, life, inbox, seats
        self.heard_s = now
        self.present = True
        self.replaced = (
            False  # its worker is the launcher's to start on another host: this one is too late if it is back
        )
        self.rival: tuple[int, float] | None = None  # another launcher of this name, and when it first came


class JoinResult(msgspec.Struct, frozen=True):
    """What comes of a host that joins: workers to expect, and those that it had and has no more."""

    workers: Mapping[str, Role] = {}
    gone: Collection[str] = ()


class RemoteHosts(ProcessControl):
    """Knows every host but the service's own, and passes orders on: to them, or to the `local` launcher.

    `config` is the service's, with the context length and the `model` that it serves. `own` are workers that the
    launcher starts on hosts of their own, which join under the worker's name: those it is told to start anew when their
    host is gone, and they stay part of the service meanwhile.
    """

    def __init__(
        self,
        config: ServiceConfig,
        model: str,
        version: str,
        local: ProcessControl,
        outbox: Outbox,
        own: Collection[str] = (),
    ) -> None:
        self._config, self._model, self._version = config, model, version
        self.own = frozenset(own)
        self._local, self._outbox = local, outbox
        self._hosts: dict[str, RemoteHost] = {}
        self._names = {worker.instance for worker in config.workers}  # all that were ever given

    # -- orders -----------------------------------------------------------------------------------------------------

    def start_worker(self, instance: str) -> None:
        """At once, or when its host is back."""
        host = self.host_of(instance)
        if host is None or (instance in self.own and not host.present):
            if host is not None:
                host.replaced = True
            self._local.start_worker(instance)
            return
        seat = host.seats[instance]
        seat.life, seat.unwanted = seat.life + 1, False
        self._order(host, instance)

    def kill_worker(self, instance: str) -> None:
        host = self.host_of(instance)
        if host is None:
            self._local.kill_worker(instance)
            return
        host.seats[instance].unwanted = True
        self._order(host, instance)

    def release_worker(self, instance: str) -> None:
        """Of what other hosts keep for workers nothing is wanted back."""
        if instance in self.own or self.host_of(instance) is None:
            self._local.release_worker(instance)

    def refuse_worker(self, instance: str, reason: str) -> None:
        """A worker cannot be part of the service, and the next life of it could not either: its host is told."""
        host = self.host_of(instance)
        if host is not None:
            self._outbox.send(host.inbox, HostRefused(life=host.life, reason=reason))

    def finish(self) -> None:
        """The service ends."""
        for host in self._hosts.values():
            if host.present:
                self._outbox.send(host.inbox, HostFinish())

    # -- what hosts say ---------------------------------------------------------------------------------------------

    def joins(self, message: HostJoins, now: float) -> JoinResult:
        """A host offers workers. One that cannot be taken is told why; one that must wait is not answered."""
        known = self._hosts.get(message.host)
        try:
            self._check(message)
            if known is not None and known.life != message.life and known.present:
                _check_rival(known, message, now)
                return JoinResult()
        except ConfigurationError as error:
            log.error("host %s was refused: %s", message.host, error)  # noqa: TRY400  (one sentence about another)
            self._outbox.send(message.inbox, HostRefused(life=message.life, reason=str(error)))
            return JoinResult()
        if known is not None and known.life == message.life:
            self._welcome(known)
            return JoinResult()
        before = {} if known is None else known.seats
        seats = {name: RemoteWorker(role) for name, role in self._seats(message, before)}
        if known is not None:
            self._outbox.forget(known.inbox)
        host = self._hosts[message.host] = RemoteHost(message.host, message.life, message.inbox, seats, now)
        log.info("host %s has joined with %s", host.name, ", ".join(seats))
        self._welcome(host)
        return JoinResult({name: seat.role for name, seat in seats.items()}, before.keys() - seats.keys())

    def alive(self, message: HostAlive, now: float) -> list[str]:
        """The workers that have ended since it was last heard."""
        host = self._hosts.get(message.host)
        if host is None or host.life != message.life:
            self._outbox.send(message.inbox, HostUnknown(life=message.life))
            return []
        if host.replaced:
            reason = f"{message.host} was silent for so long that another host was started in its place"
            self._outbox.send(message.inbox, HostRefused(life=message.life, reason=reason))
            return []
        if not host.present:
            log.warning("host %s is back", host.name)
        host.heard_s, host.present = now, True
        self._outbox.send(host.inbox, HeartbeatAck(said_s=message.said_s))
        ended = []
        for instance, found in message.seats.items():
            seat = host.seats.get(instance)
            if seat is None:
                continue
            if found.life == seat.life and not found.runs and seat.over < seat.life:
                seat.over = seat.life
                ended.append(instance)
            elif _differs(seat, found):
                self._order(host, instance, found)
        return ended

    def leaves(self, name: str, life: int) -> list[str]:
        """A host is gone for good, and so are its workers, whose names are returned if they have no other host now."""
        host = self._hosts.get(name)
        if host is None or host.life != life:
            return []
        log.warning("host %s has left", name)
        self._outbox.forget(host.inbox)
        del self._hosts[name]
        return [] if host.replaced else list(host.seats)

    def look(self, now: float, heard_s: Callable[[str], float]) -> list[str]:
        """The workers that must have ended by now, with those hosts that nobody heard of for too long.

        `heard_s` tells when a worker was last heard itself.
        """
        ended = []
        for host in self._hosts.values():
            last_s = max(host.heard_s, *map(heard_s, host.seats))
            if host.present and presumed_dead(last_s, now):
                log.error("host %s is silent: its workers must have ended", host.name)
                host.present = False
                self._outbox.forget(host.inbox)
                for instance, seat in host.seats.items():
                    if seat.over < seat.life:
                        seat.over = seat.life
                        ended.append(instance)
        return ended

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self, message: HostJoins) -> None:
        terms = self._config.terms
        if message.host == HOME:
            raise ConfigurationError("a host that joins needs a name")
        if message.version != self._version:
            raise ConfigurationError(
                f"{message.host} runs Twofold {message.version} and the service {self._version}: both must be the same"
            )
        if message.model != self._model:
            raise ConfigurationError(f"{message.host} has another model than the service")
        if self._config.transport == "shared_memory":
            raise ConfigurationError(
                f"the service moves KV through shared_memory, which {message.host} does not share: "
                "serve with --transport curve, nixl or mooncake"
            )
        for role, count in message.workers.items():
            if terms is None or (count and role not in terms.batchers):
                raise ConfigurationError(
                    f"the service has no use for a {role.value} worker: it is "
                    + ("colocated" if terms is not None and Role.MIXED in terms.batchers else "split")
                )

    def _seats(self, message: HostJoins, before: Mapping[str, RemoteWorker]) -> list[tuple[str, Role]]:
        """Names for its workers: those that it had, as far as they go, and then new ones."""
        if message.host in self.own:
            return [(message.host, role) for role in message.workers]
        seats = []
        for role, count in message.workers.items():
            names = [name for name, seat in before.items() if seat.role is role][:count]
            number = 0
            while len(names) < count:
                if (name := f"{role.value}-{number}") not in self._names:
                    self._names.add(name)
                    names.append(name)
                number += 1
            seats += [(name, role) for name in names]
        return seats

    def _welcome(self, host: RemoteHost) -> None:
        terms = self._config.terms
        assert terms is not None  # noqa: S101  (without them nobody joins; tells the type checker)
        workers = tuple(terms.worker(name, seat.role) for name, seat in host.seats.items())
        config = msgspec.structs.replace(
            self._config, workers=workers, run_dir="", journal_dir=None, network=None, terms=None
        )
        self._outbox.send(host.inbox, HostWelcome(life=host.life, config=config))

    def host_of(self, instance: str) -> RemoteHost | None:
        """The host that a worker is on; None where that is the service's own."""
        return next((host for host in self._hosts.values() if instance in host.seats), None)

    def _order(self, host: RemoteHost, instance: str, found: WorkerLife | None = None) -> None:
        """What brings a worker from how it was `found` (if it was) to how it is to be.

        A life that is not wanted any more before it has begun begins all the same: its end is waited for.
        """
        seat = host.seats[instance]
        ends, life = (seat.unwanted, seat.life) if found is None else (found.runs, found.life)
        if not host.present:
            return
        if ends:
            self._outbox.send(host.inbox, KillWorker(instance=instance, life=life))
        else:
            self._outbox.send(host.inbox, StartWorker(instance=instance, life=seat.life))


def _differs(seat: RemoteWorker, found: WorkerLife) -> bool:
    return found.life < seat.life or (found.runs and seat.unwanted)


def _check_rival(known: RemoteHost, message: HostJoins, now: float) -> None:
    """Another launcher of this name waits until the one before must have ended; if that lives, it waits in vain."""
    if known.rival is None or known.rival[0] != message.life:
        known.rival = message.life, now
    elif known.heard_s > known.rival[1]:
        raise ConfigurationError(
            f"a host called {message.host} has joined already: give this one another --name"
        )
