"""A host that runs workers of a service elsewhere: joins it, and starts and ends workers as its controller says."""

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
from twofold.security.network import HostNetwork
from twofold.serving.config import ServiceConfig
from twofold.serving.controller.heartbeat import WATCHDOG_S, ParentWatchdog, watchdog_clock
from twofold.serving.controller.mailbox import Inbox, Outbox
from twofold.serving.controller.registry import ALIVE_S
from twofold.serving.launch.child_process import Report
from twofold.serving.launch.launcher import LocalLauncher
from twofold.serving.messages import (
    HeartbeatAck,
    HostAlive,
    HostFailed,
    HostFinish,
    HostJoins,
    HostRefused,
    HostUnknown,
    HostWelcome,
    KillWorker,
    StartWorker,
    ToHost,
    WorkerLife,
)

log = logging.getLogger(__name__)

ASK_S = 1.0  # between two times that it asks to be taken
STOP_GRACE_S = 10.0

Adapt = Callable[[ServiceConfig], ServiceConfig]


class HostOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host brings: so many workers of each role, for this model (see `model_name`)."""

    model: str
    workers: dict[Role, int]


class JoinedHost:
    """Runs the workers of this host until the service ends, or it is told to stop.

    `adapt` makes of the service's configuration that of this host: where the model lies, its device, its cores. When
    the service is lost the workers end, and the host asks to be taken again, by the same service or its next.
    """

    def __init__(
        self,
        network: HostNetwork,
        guard_of: Callable[[zmq.Context[zmq.Socket[bytes]]], Guard],
        offer: HostOffer,
        adapt: Adapt,
        on_progress: Callable[[str], None],
    ) -> None:
        self._network, self._offer, self._adapt, self._on_progress = network, offer, adapt, on_progress
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = guard_of(self._context)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End the workers, and leave; safe to call from a signal handler of the loop."""
        self._stop.set()

    async def run(self, run_dir: str) -> None:
        """Raises ConfigurationError when the service refuses this host, or its workers cannot be run."""
        inbox: Inbox[ToHost] = Inbox(
            self._context,
            f"ipc://{run_dir}/host.sock",
            ToHost,
            guard=self._guard,
            outside=f"tcp://{self._network.address}:*",
        )
        outbox = Outbox(self._context, self._guard, f"host {self._network.host}")
        try:
            again = True
            while again and not self._stop.is_set():
                stay = JoinSession(self._network, self._offer, inbox, outbox, self._stop, self._on_progress)
                again = await stay.run(self._adapt, Path(run_dir))
        finally:
            outbox.close(linger_s=1.0)
            inbox.close()
            self._guard.close()
            self._context.term()


class JoinSession:
    """One time that a host is part of a service, from asking to the end of its last worker."""

    def __init__(
        self,
        network: HostNetwork,
        offer: HostOffer,
        inbox: Inbox[ToHost],
        outbox: Outbox,
        stop: asyncio.Event,
        on_progress: Callable[[str], None],
    ) -> None:
        self._network, self._offer, self._inbox, self._outbox = network, offer, inbox, outbox
        self._on_progress = on_progress
        self._life = secrets.randbits(53)
        self._stop = stop
        self._over = asyncio.Event()
        self._again = False
        self._refusal: str | None = None
        self._welcome: asyncio.Future[ServiceConfig] = asyncio.get_running_loop().create_future()
        self._launcher: LocalLauncher | None = None
        self._seats: dict[str, WorkerLife] = {}
        self._tether = ParentWatchdog(watchdog_clock())
        self._was_heard = False

    async def run(self, adapt: Adapt, run_dir: Path) -> bool:
        """Whether to ask again, because the service is lost; raises ConfigurationError where that is of no use."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.fileno(), self._drain)
        self._drain()
        try:
            if await self._join():
                sockets = run_dir / str(
                    self._life
                )  # the process that starts the workers removes it in the end
                sockets.mkdir()
                await self._work(msgspec.structs.replace(adapt(self._welcome.result()), run_dir=str(sockets)))
        finally:
            loop.remove_reader(self._inbox.fileno())
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        return self._again

    # -- joining ----------------------------------------------------------------------------------------------------

    async def _join(self) -> bool:
        """Ask until the service answers; False if there is an end before."""
        network = self._network
        message = HostJoins(
            host=network.host,
            life=self._life,
            inbox=self._own_inbox,
            version=__version__,
            model=self._offer.model,
            workers=self._offer.workers,
        )
        self._on_progress(f"asking {network.controller} to be taken")
        while not (self._welcome.done() or self._ended):
            self._tell(message)
            await self._wait(self._welcome, ASK_S)
        return self._welcome.done() and not self._ended

    @property
    def _own_inbox(self) -> str:
        assert self._inbox.outside is not None  # noqa: S101  (it is made with one; tells the type checker)
        return self._inbox.outside

    @property
    def _ended(self) -> bool:
        return self._stop.is_set() or self._over.is_set()

    async def _wait(self, event: asyncio.Future[ServiceConfig] | asyncio.Task[None], seconds: float) -> None:
        """Until then, or one of the ends, or for so long."""
        ends = [asyncio.create_task(each.wait()) for each in (self._stop, self._over)]
        await asyncio.wait((event, *ends), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()

    # -- working ----------------------------------------------------------------------------------------------------

    async def _work(self, config: ServiceConfig) -> None:
        self._seats = {worker.instance: WorkerLife(1, runs=True) for worker in config.workers}
        self._tether = ParentWatchdog(watchdog_clock())
        launcher = self._launcher = LocalLauncher(config)
        await launcher.start()
        following = asyncio.create_task(self._follow(launcher))
        while not (self._ended or following.done()):
            self._say_alive()
            self._keep_tether()
            await self._wait(following, ALIVE_S)
        await launcher.stop(STOP_GRACE_S if self._over.is_set() and not self._again else 0.1)
        await following
        if self._refusal is not None:
            self._tell(HostFailed(host=self._network.host, life=self._life, reason=self._refusal))
        self._say_alive(leaves=True)

    def _say_alive(self, *, leaves: bool = False) -> None:
        self._tell(
            HostAlive(
                host=self._network.host,
                life=self._life,
                inbox=self._own_inbox,
                said_s=watchdog_clock(),
                seats=self._seats,
                leaves=leaves,
            )
        )

    def _keep_tether(self) -> None:
        """When the service is not heard its workers end: by themselves (see `Deadline`), or by us where they start."""
        holds = self._tether.left_s(watchdog_clock()) > 0
        if self._was_heard and not holds:
            log.error("the service has not been heard for %.0f s: its workers are ended", WATCHDOG_S)
            for instance in self._seats:
                self._kill(instance)
        self._was_heard = holds

    async def _follow(self, launcher: LocalLauncher) -> None:
        with suppress(msgspec.MsgspecError):
            async for report in launcher.reports():
                self._reported(report)
        if not self._ended:
            self._refuse("the process that starts the workers has ended")

    def _reported(self, report: Report) -> None:
        if report.stage is not None:
            self._on_progress(report.stage)
        if report.failure is not None and not self._ended:
            self._refuse(report.failure)
        if report.exited is not None:
            alone = report.code == -signal.SIGALRM
            why = (
                f"as it had not heard the service for {WATCHDOG_S:.0f} s"
                if alone
                else f"with code {report.code}"
            )
            log.log(logging.INFO if self._ended else logging.ERROR, "%s ended %s", report.exited, why)
            self._seats[report.exited] = WorkerLife(self._seats[report.exited].life, runs=False)
            self._say_alive()

    def _kill(self, instance: str) -> None:
        if self._seats[instance].runs and self._launcher is not None:
            self._launcher.kill_worker(instance)

    def _refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason
        self._over.set()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _tell(self, message: HostJoins | HostAlive | HostFailed) -> None:
        self._outbox.send(self._network.controller, message)

    def _drain(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)

    def _handle(self, message: ToHost) -> None:  # noqa: C901  (one flat match over the kinds of messages)
        match message:
            case HeartbeatAck(said_s=said_s):
                self._tether.heard(said_s)
            case HostWelcome(life=life, config=config):
                if life == self._life and not self._welcome.done():
                    self._welcome.set_result(config)
            case HostRefused(life=life, reason=reason):
                if life == self._life:
                    self._refuse(f"the service refused this host: {reason}")
            case HostUnknown(life=life):
                if life == self._life:
                    self._again = True
                    self._over.set()
            case StartWorker(instance=instance, life=life):
                seat = self._seats.get(instance)
                if seat is not None and self._launcher is not None and not seat.runs and life > seat.life:
                    self._seats[instance] = WorkerLife(life, runs=True)
                    self._launcher.start_worker(instance)
            case KillWorker(instance=instance, life=life):
                if instance in self._seats and life == self._seats[instance].life:
                    self._kill(instance)
            case HostFinish():
                self._on_progress("the service has ended")
                self._over.set()
