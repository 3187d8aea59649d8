"""Hosts that join the service over the network, and their workers.

Each joined host regularly reports the state of its workers. The controller repeats a command until a report shows its
effect. Workers exit by themselves if their host loses contact with the service.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.security.network import HOME
from twofold.serving import messages
from twofold.serving.config import ServiceConfig
from twofold.serving.controller.forecast import LiveForecast
from twofold.serving.controller.heartbeat import presumed_dead
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.controller.membership import Membership
from twofold.serving.controller.registry import ProcessControl, WorkerRegistry

log = logging.getLogger(__name__)


class RemoteWorker:
    """Role of a worker on another host, its number of starts, and whether it should run."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.life = 1  # number of starts
        self.over = 0  # the last life that has ended
        self.unwanted = False  # whether the current process is to be killed

    def differs(self, found: messages.WorkerLife) -> bool:
        """Return whether the reported state `found` differs from the desired state."""
        return found.life < self.life or (found.runs and self.unwanted)


class RemoteHost:
    """A host that has joined the service, and its workers."""

    def __init__(self, name: str, life: int, inbox: str, workers: dict[str, RemoteWorker], now: float) -> None:
        self.name, self.life, self.inbox, self.workers = name, life, inbox, workers
        self.heard_s = now
        self.present = True  # until its workers are presumed dead
        self.replaced = False  # the launcher starts its worker on another host instead
        self.rival: tuple[int, float] | None = None  # another launcher of this name, and when it first asked

    def check_rival(self, life: int, now: float) -> None:
        """Raise ConfigurationError if two running hosts use the same name."""
        if self.rival is None or self.rival[0] != life:
            self.rival = life, now
        elif self.heard_s > self.rival[1]:
            raise ConfigurationError(f"a host called {self.name} has joined already: give this one another --name")


class JoinResult(msgspec.Struct, frozen=True):
    """Workers to add (`workers`) and old workers to remove (`gone`) when a host joins or rejoins the service."""

    workers: Mapping[str, Role] = {}
    gone: Collection[str] = ()


class Hosts(ProcessControl):
    """Starts and kills workers, on this machine and on hosts that joined the service.

    `own` names the workers that run on Ray. `model` is the fingerprint of the model that hosts must serve.
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
        self.joined: dict[str, RemoteHost] = {}  # by name
        self._names = {worker.instance for worker in config.workers}  # all names ever used

    # -- commands ---------------------------------------------------------------------------------------------------

    def start_worker(self, instance: str) -> None:
        """Start a worker on its host. If the host is unreachable, the start is delayed."""
        host = self.host_of(instance)
        if host is None or (instance in self.own and not host.present):
            if host is not None:
                host.replaced = True
            self._local.start_worker(instance)
            return
        worker = host.workers[instance]
        worker.life, worker.unwanted = worker.life + 1, False
        self._command(host, instance)

    def kill_worker(self, instance: str) -> None:
        host = self.host_of(instance)
        if host is None:
            self._local.kill_worker(instance)
            return
        host.workers[instance].unwanted = True
        self._command(host, instance)

    def release_worker(self, instance: str) -> None:
        """Release the resources of a retired worker."""
        if instance in self.own or self.host_of(instance) is None:
            self._local.release_worker(instance)

    def refuse_worker(self, instance: str, reason: str) -> None:
        """Notify a worker's host that the service cannot use the worker."""
        host = self.host_of(instance)
        if host is not None:
            self._outbox.send(host.inbox, messages.HostRefused(life=host.life, reason=reason))

    def finish(self) -> None:
        """Notify all joined hosts that the service has ended."""
        for host in self.joined.values():
            if host.present:
                self._outbox.send(host.inbox, messages.HostFinish())

    # -- reports of hosts -------------------------------------------------------------------------------------------

    def joins(self, message: messages.HostJoins, now: float) -> JoinResult:
        """Process a host's request to join the service."""
        known = self.joined.get(message.host)
        try:
            self._check(message)
            if known is not None and known.life != message.life and known.present:
                known.check_rival(message.life, now)  # waits until the known host is presumed dead
                return JoinResult()
        except ConfigurationError as error:
            log.error("host %s was refused: %s", message.host, error)  # noqa: TRY400  (an error of that host)
            self._outbox.send(message.inbox, messages.HostRefused(life=message.life, reason=str(error)))
            return JoinResult()
        if known is not None and known.life == message.life:
            self._welcome(known)
            return JoinResult()
        before = {} if known is None else known.workers
        workers = {name: RemoteWorker(role) for name, role in self._assign_names(message, before)}
        if known is not None:
            self._outbox.forget(known.inbox)
        host = self.joined[message.host] = RemoteHost(message.host, message.life, message.inbox, workers, now)
        log.info("host %s has joined with %s", host.name, ", ".join(workers))
        self._welcome(host)
        return JoinResult({name: each.role for name, each in workers.items()}, before.keys() - workers.keys())

    def alive(self, message: messages.HostAlive, now: float) -> list[str]:
        """Record a host's heartbeat; return its workers that have exited since its last heartbeat."""
        host = self.joined.get(message.host)
        if host is None or host.life != message.life:
            self._outbox.send(message.inbox, messages.HostUnknown(life=message.life))
            return []
        if host.replaced:
            reason = f"{message.host} was silent for so long that another host replaced it"
            self._outbox.send(message.inbox, messages.HostRefused(life=message.life, reason=reason))
            return []
        if not host.present:
            log.warning("host %s is back", host.name)
        host.heard_s, host.present = now, True
        self._outbox.send(host.inbox, messages.HeartbeatAck(said_s=message.said_s))
        ended = []
        for instance, found in message.workers.items():
            worker = host.workers.get(instance)
            if worker is None:
                continue
            if found.life == worker.life and not found.runs and worker.over < worker.life:
                worker.over = worker.life
                ended.append(instance)
            elif worker.differs(found):
                self._command(host, instance, found)
        return ended

    def leaves(self, name: str, life: int) -> list[str]:
        """Remove a host that leaves the service; return the names of its lost workers."""
        host = self.joined.get(name)
        if host is None or host.life != life:
            return []
        log.warning("host %s has left", name)
        self._outbox.forget(host.inbox)
        del self.joined[name]
        return [] if host.replaced else list(host.workers)

    def sweep(self, now: float, heard_s: Callable[[str], float]) -> list[str]:
        """Return the names of workers that are now presumed dead, because their host no longer responds."""
        ended = []
        for host in self.joined.values():
            last_s = max(host.heard_s, *map(heard_s, host.workers))
            if host.present and presumed_dead(last_s, now):
                log.error("host %s is silent: its workers are presumed dead", host.name)
                host.present = False
                self._outbox.forget(host.inbox)
                for instance, worker in host.workers.items():
                    if worker.over < worker.life:
                        worker.over = worker.life
                        ended.append(instance)
        return ended

    def host_of(self, instance: str) -> RemoteHost | None:
        """Return the remote host of a worker, or None if the worker is on no remote host."""
        return next((host for host in self.joined.values() if instance in host.workers), None)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self, message: messages.HostJoins) -> None:
        terms, host = self._config.terms, message.host
        require(host != HOME, "a host that joins needs a name")
        require(
            message.version == self._version,
            f"{host} runs Twofold {message.version} and the service {self._version}: both must be the same",
        )
        require(message.model == self._model, f"{host} has another model than the service")
        require(
            self._config.transport != "shared_memory",
            f"the service moves KV through shared_memory, which {host} does not share: "
            "serve with --transport curve, nixl or mooncake",
        )
        for role, count in message.workers.items():
            kind = "colocated" if terms is not None and Role.MIXED in terms.batchers else "split"
            require(
                terms is not None and (not count or role in terms.batchers),
                f"the service cannot use a {role.value} worker: it is {kind}",
            )

    def _assign_names(self, message: messages.HostJoins, before: Mapping[str, RemoteWorker]) -> list[tuple[str, Role]]:
        if message.host in self.own:
            return [(message.host, role) for role in message.workers]
        assigned = []
        for role, count in message.workers.items():
            # A host that joins again keeps its names.
            names = [name for name, worker in before.items() if worker.role is role][:count]
            number = 0
            while len(names) < count:
                if (name := f"{role.value}-{number}") not in self._names:
                    self._names.add(name)
                    names.append(name)
                number += 1
            assigned += [(name, role) for name in names]
        return assigned

    def _welcome(self, host: RemoteHost) -> None:
        terms = self._config.terms
        assert terms is not None  # noqa: S101  (no host joins without terms)
        workers = tuple(terms.worker(name, worker.role) for name, worker in host.workers.items())
        config = msgspec.structs.replace(
            self._config, workers=workers, run_dir="", journal_dir=None, network=None, terms=None
        )
        self._outbox.send(host.inbox, messages.HostWelcome(life=host.life, config=config))

    def _command(self, host: RemoteHost, instance: str, found: messages.WorkerLife | None = None) -> None:
        worker = host.workers[instance]
        ends, life = (worker.unwanted, worker.life) if found is None else (found.runs, found.life)
        if not host.present:
            return
        if ends:
            self._outbox.send(host.inbox, messages.KillWorker(instance=instance, life=life))
        else:
            self._outbox.send(host.inbox, messages.StartWorker(instance=instance, life=worker.life))


class RemoteWorkers:
    """Adds the workers of joining hosts to the service, and removes the workers of hosts that leave or are lost."""

    def __init__(
        self, hosts: Hosts, registry: WorkerRegistry, membership: Membership, forecast: LiveForecast | None
    ) -> None:
        self._hosts, self._registry = hosts, registry
        self._membership, self._forecast = membership, forecast

    def handle(self, message: messages.HostJoins | messages.HostAlive | messages.HostFailed, now: float) -> None:
        """Process a host's message: a request to join, a heartbeat or a failure."""
        hosts = self._hosts
        if isinstance(message, messages.HostJoins):
            joined = hosts.joins(message, now)
            self._remove(joined.gone)
            for instance, role in joined.workers.items():
                self._registry.expect(instance, role)
        elif isinstance(message, messages.HostFailed) or message.leaves:
            if isinstance(message, messages.HostFailed):
                log.error("host %s: %s", message.host, message.reason)
            gone = hosts.leaves(message.host, message.life)
            if gone:
                self._store_lost(message.host)
            self._remove(gone)
        else:
            for instance in hosts.alive(message, now):
                self._membership.exited(instance)

    def exited(self, instance: str) -> None:
        """Process the launcher's report that a worker has exited."""
        host = self._hosts.host_of(instance)
        # A joined host on Ray reports the exit of its worker itself.
        if instance not in self._hosts.own or host is None or not host.present:
            self._membership.exited(instance)

    def sweep(self, now: float) -> None:
        """Record the exit of workers that are presumed dead."""
        for instance in self._hosts.sweep(now, self._registry.heard_s):
            host = self._hosts.host_of(instance)
            if host is not None:
                self._store_lost(host.name)
            self._membership.exited(instance)

    def _store_lost(self, host: str) -> None:
        if self._forecast is not None:
            self._forecast.stores.lost(host)

    def _remove(self, instances: Iterable[str]) -> None:
        for instance in instances:
            self._membership.exited(instance)
            if instance not in self._hosts.own:
                self._registry.remove(instance)
