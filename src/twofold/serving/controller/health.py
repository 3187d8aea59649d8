"""The seam between the life of a request and those who do its work: workers of ours, or servers of somebody else.

Which workers are given requests: all that are up, but for those that retire or have yet to show that they work.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from twofold.instance import Role
from twofold.scheduling.cluster.breaker import Breaker, BreakerState
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.messages import Message
from twofold.serving.telemetry.snapshot import InstanceState
from twofold.serving.telemetry.telemetry import Telemetry


class Worker(Protocol):
    """One of them, as far as requests and operators ask about it; `role` is the one it has or was given."""

    role: Role

    @property
    def instance(self) -> str: ...

    @property
    def state(self) -> StrEnum:
        """Where it is in its life."""
        ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def retired(self) -> bool:
        """It is given nothing new although it works."""
        ...

    @property
    def restarts(self) -> int: ...


class WorkerGroup(Protocol):
    """All of them, by the names that routes have for them."""

    @property
    def members(self) -> Mapping[str, Worker]: ...

    def breaker(self, instance: str) -> Breaker: ...

    def send(self, instance: str, message: Message) -> None:
        """What a request needs of a worker now: Prefill, Reserve, Abort. It is lost where the worker is not up."""
        ...

    def ours(self, instance: str, moment_s: float) -> float:
        """A moment of its monotonic clock on ours."""
        ...


class WorkerHealth:
    """Asks the circuit breaker of each worker, and takes it out of the cluster's pools and back.

    Methods that may bring a worker back say whether they did: those that wait may have somebody then.
    """

    def __init__(self, cluster: ClusterScheduler, fleet: WorkerGroup, telemetry: Telemetry) -> None:
        self._cluster, self._fleet, self._telemetry = cluster, fleet, telemetry

    def begin_trial(self, instance: str, attempt_id: str) -> None:
        """An attempt was placed on a worker; if it is to show that that works, nothing else is until it has."""
        if self._fleet.breaker(instance).begin(attempt_id):
            self._cluster.pause(instance)

    def works(self, instance: str, attempt_id: str, now: float) -> bool:
        """A worker has made a token of an attempt."""
        return self._fleet.breaker(instance).succeed(attempt_id, now) and self.resume(instance)

    def release(self, instance: str, attempt_id: str) -> bool:
        """An attempt is over, and has perhaps shown nothing: another one may."""
        return self._fleet.breaker(instance).release(attempt_id) and self.resume(instance)

    def withdraw(self, instance: str) -> None:
        """A worker is given nothing new."""
        self._cluster.pause(instance)
        self._telemetry.state(instance, InstanceState.DRAINING)

    def resume(self, instance: str) -> bool:
        """A worker is given requests again, unless it is retired."""
        if self._fleet.members[instance].retired:
            return False
        self.tell(instance)
        self._cluster.resume(instance)
        return True

    def tell(self, instance: str) -> None:
        """Show how much a worker is trusted."""
        half_open = self._fleet.breaker(instance).state is BreakerState.HALF_OPEN
        self._telemetry.state(instance, InstanceState.HALF_OPEN if half_open else InstanceState.UP)
