"""A host that joins a service and runs workers for its controller."""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from twofold import __version__
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.security.guard import Guard
from twofold.security.key import read_key
from twofold.security.network import HostNetwork
from twofold.serving import messages
from twofold.serving.config import ServiceConfig
from twofold.serving.controller.heartbeat import ALIVE_S, WATCHDOG_S, ParentWatchdog, watchdog_clock
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.launch.child_process import Report
from twofold.serving.launch.launcher import LocalLauncher

log = logging.getLogger(__name__)

ASK_S = 1.0  # between two join requests
STOP_GRACE_S = 10.0

Adapt = Callable[[ServiceConfig], ServiceConfig]


class HostOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of a joining host: numbers of workers by role, and the fingerprint of its model."""

    model: str
    workers: dict[Role, int]


class JoinedHost:
    """Runs this host's workers until the service ends. `adapt` adapts the service's configuration to this host."""

    def __init__(
        self, network: HostNetwork, offer: HostOffer, adapt: Adapt, on_progress: Callable[[str], None]
    ) -> None:
        self.network, self.offer, self.adapt, self.on_progress = network, offer, adapt, on_progress
        self.stopped = asyncio.Event()

    def stop(self) -> None:
        """Stop the workers and leave the service. Safe to call in a signal handler of the event loop."""
        self.stopped.set()

    async def run(self, run_dir: str) -> None:
        """Join the service and run workers. Raises ConfigurationError if the host is refused or its workers fail."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        guard = Guard(context, read_key(Path(self.network.key_file)))
        inbox: Inbox[messages.ToHost] = Inbox(
            context,
            f"ipc://{run_dir}/host.sock",
            messages.ToHost,
            guard=guard,
            outside=f"tcp://{self.network.address}:*",
        )
        outbox = Outbox(context, guard, f"host {self.network.host}")
        try:
            again = True
            while again and not self.stopped.is_set():
                again = await JoinSession(self, inbox, outbox).run(Path(run_dir))
        finally:
            outbox.close(linger_s=1.0)
            inbox.close()
            guard.close()
            context.term()


class JoinSession:
    """One membership of a host in a service. It begins with a request to join."""

    def __init__(self, host: JoinedHost, inbox: Inbox[messages.ToHost], outbox: Outbox) -> None:
        self._network, self._offer, self._inbox, self._outbox = host.network, host.offer, inbox, outbox
        self._adapt, self._on_progress, self._stop = host.adapt, host.on_progress, host.stopped
        self._life = secrets.randbits(53)
        self._over = asyncio.Event()
        self._again = False
        self._refusal: str | None = None
        self._welcome: asyncio.Future[ServiceConfig] = asyncio.get_running_loop().create_future()
        self._launcher: LocalLauncher | None = None
        self._workers: dict[str, messages.WorkerLife] = {}
        self._watchdog = ParentWatchdog(watchdog_clock())
        self._was_heard = False

    async def run(self, run_dir: Path) -> bool:
        """Join the service, run workers, and return whether the host should join again.

        Raise ConfigurationError if the service refuses the host, or if the process that starts the workers fails.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fileno(), self._drain)
        self._drain()
        try:
            if await self._join():
                sockets = run_dir / str(self._life)  # removed by the fork server
                sockets.mkdir()
                await self._work(msgspec.structs.replace(self._adapt(self._welcome.result()), run_dir=str(sockets)))
        finally:
            loop.remove_reader(self._inbox.fileno())
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        return self._again

    # -- joining ----------------------------------------------------------------------------------------------------

    async def _join(self) -> bool:
        network = self._network
        message = messages.HostJoins(
            host=network.host,
            life=self._life,
            inbox=self._own_inbox,
            version=__version__,
            model=self._offer.model,
            workers=self._offer.workers,
        )
        self._on_progress(f"asking to join the service at {network.controller}")
        while not (self._welcome.done() or self._ended):
            self._send(message)
            await self._wait(self._welcome, ASK_S)
        return self._welcome.done() and not self._ended

    @property
    def _own_inbox(self) -> str:
        assert self._inbox.outside is not None  # noqa: S101  (set in `JoinedHost.run`)
        return self._inbox.outside

    @property
    def _ended(self) -> bool:
        return self._stop.is_set() or self._over.is_set()

    async def _wait(self, event: asyncio.Future[ServiceConfig] | asyncio.Task[None], seconds: float) -> None:
        ends = [asyncio.create_task(each.wait()) for each in (self._stop, self._over)]
        await asyncio.wait((event, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    # -- working ----------------------------------------------------------------------------------------------------

    async def _work(self, config: ServiceConfig) -> None:
        self._workers = {worker.instance: messages.WorkerLife(1, runs=True) for worker in config.workers}
        self._watchdog = ParentWatchdog(watchdog_clock())
        launcher = self._launcher = LocalLauncher(config)
        await launcher.start()
        following = asyncio.create_task(self._follow(launcher))
        while not (self._ended or following.done()):
            self._send_alive()
            self._check_watchdog()
            await self._wait(following, ALIVE_S)
        await launcher.stop(STOP_GRACE_S if self._over.is_set() and not self._again else 0.1)
        await following
        if self._refusal is not None:
            self._send(messages.HostFailed(host=self._network.host, life=self._life, reason=self._refusal))
        self._send_alive(leaves=True)

    def _send_alive(self, *, leaves: bool = False) -> None:
        self._send(
            messages.HostAlive(
                host=self._network.host,
                life=self._life,
                inbox=self._own_inbox,
                said_s=watchdog_clock(),
                workers=self._workers,
                leaves=leaves,
            )
        )

    def _check_watchdog(self) -> None:
        holds = self._watchdog.left_s(watchdog_clock()) > 0
        if self._was_heard and not holds:
            log.error("no contact with the service for %.0f s: killing its workers", WATCHDOG_S)
            for instance in self._workers:
                self._kill(instance)
        self._was_heard = holds

    async def _follow(self, launcher: LocalLauncher) -> None:
        with suppress(msgspec.MsgspecError):
            async for report in launcher.reports():
                self._reported(report)
        if not self._ended:
            self._end("the process that starts the workers has ended")

    def _reported(self, report: Report) -> None:
        if report.stage is not None:
            self._on_progress(report.stage)
        if report.failure is not None and not self._ended:
            self._end(report.failure)
        if report.exited is not None:
            by_watchdog = report.code == -signal.SIGALRM
            why = f"by its watchdog after {WATCHDOG_S:.0f} s" if by_watchdog else f"with code {report.code}"
            log.log(logging.INFO if self._ended else logging.ERROR, "%s ended %s", report.exited, why)
            self._workers[report.exited] = messages.WorkerLife(self._workers[report.exited].life, runs=False)
            self._send_alive()

    def _kill(self, instance: str) -> None:
        if self._workers[instance].runs and self._launcher is not None:
            self._launcher.kill_worker(instance)

    def _end(self, reason: str) -> None:
        self._refusal = self._refusal or reason
        self._over.set()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send(self, message: messages.HostJoins | messages.HostAlive | messages.HostFailed) -> None:
        self._outbox.send(self._network.controller, message)

    def _drain(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)

    def _handle(self, message: messages.ToHost) -> None:  # noqa: C901  (one flat match over the message types)
        match message:
            case messages.HeartbeatAck(said_s=said_s):
                self._watchdog.acknowledged(said_s)
            case messages.HostWelcome(life=self._life, config=config):
                if not self._welcome.done():
                    self._welcome.set_result(config)
            case messages.HostRefused(life=self._life, reason=reason):
                self._end(f"the service refused this host: {reason}")
            case messages.HostUnknown(life=self._life):
                self._again = True
                self._over.set()
            case messages.StartWorker(instance=instance, life=life):
                known = self._workers.get(instance)
                if known is not None and self._launcher is not None and not known.runs and life > known.life:
                    self._workers[instance] = messages.WorkerLife(life, runs=True)
                    self._launcher.start_worker(instance)
            case messages.KillWorker(instance=instance, life=life):
                if instance in self._workers and life == self._workers[instance].life:
                    self._kill(instance)
            case messages.HostFinish():
                self._on_progress("the service has ended")
                self._over.set()
