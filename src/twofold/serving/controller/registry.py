"""Registry of workers: registration, failure detection and restarts.

    starting ── worker registered ──▶ up
    starting or up ── fault detected ──▶ fenced
    starting, up or fenced ── process exited ──▶ down
    down ── restart due ──▶ starting

The process of a fenced worker is being killed. The worker restarts only after the process has exited, so the old
process no longer answers or writes KV.
"""

import logging
import math
from collections.abc import Mapping
from typing import Protocol

import msgspec

from twofold.errors import ConfigurationError, StaleEpochError
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import LONGEST_S
from twofold.security.network import HOME
from twofold.serving.controller.health import Worker, WorkerGroup, WorkerState
from twofold.serving.controller.heartbeat import ClockOffset
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import Alive, HeartbeatAck, Message, Peer, Peers, Registered, WorkerRefused

log = logging.getLogger(__name__)

STALL_S = 0.6  # between two sweeps; beyond it, the controller itself stalled, and silence is counted anew
# A restart may take this many times as long as the longest start so far, and at least `MIN_START_LIMIT_S`.
START_LIMIT_FACTOR, MIN_START_LIMIT_S = 10.0, 10.0


class ProcessControl(Protocol):
    """Interface through which the controller starts and ends the processes of workers."""

    def start_worker(self, instance: str) -> None: ...

    def kill_worker(self, instance: str) -> None: ...

    def release_worker(self, instance: str) -> None:
        """Release the resources of a retired worker after its process has exited."""
        ...

    def refuse_worker(self, instance: str, reason: str) -> None:
        """Notify a worker's host that the service cannot use the worker."""
        ...


class HealthTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds for heartbeats and batches, and the delay before a restart."""

    silence_s: float = 1.5
    batch_s: float = 300.0
    restart_s: float = LONGEST_S


class RegisteredWorker(Worker):
    """State of one worker: addresses, clock offset and heartbeats of its current process."""

    def __init__(self, instance: str, role: Role, restart_s: float) -> None:
        super().__init__(instance, role, restart_s)
        self.peer: Peer | None = None
        self.clock: ClockOffset | None = None  # None for workers on this host
        self.started_s: float | None = None  # when its process was started; None before the first sweep after that
        self.start_limit_s = math.inf  # unknown until it has registered once
        self.heard_s = 0.0
        self.batch_s = 0.0  # how long its current batch has run
        self.lost_message = False

    @property
    def inbox(self) -> str | None:
        """Address of the worker's inbox; None before registration."""
        return None if self.peer is None else self.peer.inbox_from(HOME)


class WorkerRegistry(WorkerGroup):
    """Registry of all workers. Also sends the controller's messages to workers."""

    def __init__(
        self, expected: Mapping[str, Role], outbox: Outbox, processes: ProcessControl, timeouts: HealthTimeouts
    ) -> None:
        self.members: dict[str, RegisteredWorker] = {
            name: RegisteredWorker(name, role, timeouts.restart_s) for name, role in expected.items()
        }
        self._outbox, self._processes, self._timeouts = outbox, processes, timeouts
        self._model: tuple[str, object] | None = None
        self._swept_s: float | None = None
        self._first = list(self.members.values())
        self.complete = not self._first

    # -- membership -------------------------------------------------------------------------------------------------

    def expect(self, instance: str, role: Role) -> None:
        """Add a worker that is about to start on a host that has joined the service."""
        joined = RegisteredWorker(instance, role, self._timeouts.restart_s)
        member = self.members.setdefault(instance, joined)
        member.state, member.started_s = WorkerState.STARTING, None

    def remove(self, instance: str) -> None:
        """Remove a worker that has exited and will not be restarted."""
        del self.members[instance]

    def retire(self, instance: str) -> None:
        """Mark a worker as retired, so that it is not restarted."""
        self.members[instance].retired = True

    def unretire(self, instance: str, role: Role, now: float) -> None:
        """Put a retired worker back into service with the role `role`."""
        member = self.members[instance]
        member.retired, member.role, member.start_s = False, role, now

    def retiring(self) -> list[str]:
        """Return the retired workers that are still running."""
        return [member.instance for member in self._up() if member.retired]

    def retired(self) -> list[str]:
        """Return the retired workers that have exited."""
        members = self.members.values()
        return [each.instance for each in members if each.retired and each.state is WorkerState.DOWN]

    def up(self, instance: str) -> bool:
        member = self.members.get(instance)
        return member is not None and member.state is WorkerState.UP

    def heard_s(self, instance: str) -> float:
        """Return the time of a worker's last heartbeat, in seconds on the controller's clock."""
        return self.members[instance].heard_s

    def to_local_time(self, instance: str, moment_s: float) -> float:
        clock = self.members[instance].clock if instance in self.members else None
        return moment_s if clock is None else clock.to_local(moment_s)

    def is_current(self, instance: str, epoch: int) -> bool:
        """Return whether an instance is up and still in the epoch `epoch`."""
        peer = self.members[instance].peer if self.up(instance) else None
        return peer is not None and peer.memory.epoch == epoch

    # -- messages of workers ----------------------------------------------------------------------------------------

    def register(self, message: Registered, now: float) -> bool:
        """Register a worker that is ready, or refuse it and return False."""
        instance = message.peer.memory.instance
        try:
            self._check(message)
        except (ConfigurationError, StaleEpochError) as error:
            log.error("%s", error)  # noqa: TRY400  (a configuration error of the worker, no fault here)
            self._outbox.send(message.peer.inbox_from(HOME), WorkerRefused(reason=str(error)))
            if isinstance(error, ConfigurationError):
                self._processes.refuse_worker(instance, str(error))
            return False
        member = self.members[instance]
        took_s = 0.0 if member.started_s is None else now - member.started_s
        # Not of the last start alone: after some losses a host must load the model again.
        least_s = MIN_START_LIMIT_S if math.isinf(member.start_limit_s) else member.start_limit_s
        member.start_limit_s = max(least_s, START_LIMIT_FACTOR * took_s)
        self._model = (message.model, message.peer.memory.layout)
        member.peer, member.state, member.heard_s, member.batch_s = message.peer, WorkerState.UP, now, 0.0
        member.lost_message = False
        member.clock = None if message.peer.host == HOME else ClockOffset(message.now_s, now)
        member.breaker.back(now)
        self.complete = self.complete or all(one.peer is not None for one in self._first)
        if self.complete:
            self.broadcast(Peers(peers=[one.peer for one in self._up() if one.peer is not None]))
        return True

    def _check(self, message: Registered) -> None:
        """Raise an error if a worker may not register."""
        instance, model = message.peer.memory.instance, (message.model, message.peer.memory.layout)
        member = self.members.get(instance)
        if member is None:
            raise ConfigurationError(f"this service has no worker called {instance!r}")
        if member.state in {WorkerState.FENCED, WorkerState.DOWN}:
            raise StaleEpochError(f"this process of {instance} was given up")
        if self._model is not None and model != self._model:
            what = "another model" if message.model != self._model[0] else "another KV cache layout"
            raise ConfigurationError(
                f"{instance} has {what} than the registered workers, so requests could not move between them"
            )

    def heartbeat(self, message: Alive, now: float) -> None:
        """Record a worker's heartbeat. If the worker runs on another host, acknowledge the heartbeat."""
        if self.is_current(message.instance, message.epoch):
            member = self.members[message.instance]
            member.heard_s, member.batch_s = now, message.batch_s
            if member.clock is not None:
                member.clock.update(message.now_s, now)
                self.send(member.instance, HeartbeatAck(said_s=message.said_s))

    def message_lost(self, instance: str) -> None:
        """Record that a message from a worker was lost. The next `sweep` kills the worker."""
        if self.up(instance):
            self.members[instance].lost_message = True

    # -- failures and restarts --------------------------------------------------------------------------------------

    def sweep(self, now: float) -> tuple[list[str], list[str]]:
        """Kill faulty workers, restart exited ones when due. Return the killed that were up, and the restarted."""
        if self._swept_s is not None and now - self._swept_s > STALL_S:
            for member in self.members.values():
                if member.state is WorkerState.UP:
                    member.heard_s = now
                else:
                    member.started_s = now
        self._swept_s = now
        lost, restarted = [], []
        for member in self.members.values():
            if member.started_s is None:
                member.started_s = now
            if fault := self._fault(member, now):
                log.error("%s %s: killing it", member.instance, fault)
                self._mark_failed(member, now)
                if member.state is WorkerState.UP:
                    lost.append(member.instance)
                else:
                    member.start_limit_s *= 2  # the machine may have become slower
                member.state = WorkerState.FENCED
                self._processes.kill_worker(member.instance)
            elif member.state is WorkerState.DOWN and not member.retired and now >= member.start_s:
                member.state, member.started_s = WorkerState.STARTING, now
                member.restarts += 1
                self._processes.start_worker(member.instance)
                restarted.append(member.instance)
        return lost, restarted

    def exited(self, instance: str, now: float) -> bool:
        """Record that a worker's process has exited; return whether the worker was up until then."""
        member = self.members[instance]
        was_up = member.state is WorkerState.UP
        if was_up or member.state is WorkerState.STARTING:
            self._mark_failed(member, now)
        member.state = WorkerState.DOWN
        if member.retired:
            self._processes.release_worker(instance)
        return was_up

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, instance: str, message: Message) -> None:
        """Send a message to a worker. The message is dropped if the worker is not up."""
        member = self.members[instance]
        if member.state is WorkerState.UP and member.inbox is not None:
            self._outbox.send(member.inbox, message)

    def broadcast(self, message: Message) -> None:
        for member in self._up():
            self.send(member.instance, message)

    def close(self) -> None:
        """Close all connections; queued messages are sent for up to one more second."""
        self._outbox.close(linger_s=1.0)

    def _fault(self, member: RegisteredWorker, now: float) -> str:
        if member.state is WorkerState.STARTING and member.started_s is not None:
            late = now - member.started_s > member.start_limit_s
            return f"has not started within {member.start_limit_s:.0f} s" if late else ""
        if member.state is not WorkerState.UP:
            return ""
        if member.lost_message:
            return "sent a message that was lost"
        if member.batch_s > self._timeouts.batch_s:
            return "hangs in a batch"
        return "does not answer" if now - member.heard_s > self._timeouts.silence_s else ""

    def _mark_failed(self, member: RegisteredWorker, now: float) -> None:
        if not member.retired:  # a retired worker ends on request
            member.start_s = member.breaker.fail(now)
        if member.inbox is not None:
            self._outbox.forget(member.inbox)

    def _up(self) -> list[RegisteredWorker]:
        return [member for member in self.members.values() if member.state is WorkerState.UP]
