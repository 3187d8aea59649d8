"""Circuit breakers and availability of workers, for requests that run on this service's workers or on other servers."""

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
    """A worker of this service or an upstream server. `role` is the configured role, or the one set since."""

    role: Role

    @property
    def instance(self) -> str: ...

    @property
    def state(self) -> StrEnum: ...

    @property
    def breaker(self) -> Breaker: ...

    @property
    def retired(self) -> bool: ...

    @property
    def restarts(self) -> int: ...


class WorkerGroup(Protocol):
    """The workers of a service by instance name."""

    @property
    def members(self) -> Mapping[str, Worker]: ...

    def breaker(self, instance: str) -> Breaker: ...

    def send(self, instance: str, message: Message) -> None:
        """Send a Prefill, Reserve or Abort. The message is dropped if the worker is not up."""
        ...

    def ours(self, instance: str, moment_s: float) -> float:
        """Convert a time of the worker's monotonic clock to the local one."""
        ...


class WorkerHealth:
    """Pauses and resumes workers in the cluster's pools as their circuit breakers and retirements require.

    Methods that return a bool tell whether the worker was resumed, so that waiting requests may be placed.
    """

    def __init__(self, cluster: ClusterScheduler, workers: WorkerGroup, telemetry: Telemetry) -> None:
        self._cluster, self._workers, self._telemetry = cluster, workers, telemetry

    def begin_trial(self, instance: str, attempt_id: str) -> None:
        """Record the placement of an attempt; pause a half-open worker until this trial ends."""
        if self._workers.breaker(instance).begin(attempt_id):
            self._cluster.pause(instance)

    def works(self, instance: str, attempt_id: str, now: float) -> bool:
        """Record a token of an attempt, which closes a half-open breaker."""
        return self._workers.breaker(instance).succeed(attempt_id, now) and self.resume(instance)

    def release(self, instance: str, attempt_id: str) -> bool:
        """Record the end of an attempt; an undecided trial may be repeated by another one."""
        return self._workers.breaker(instance).release(attempt_id) and self.resume(instance)

    def withdraw(self, instance: str) -> None:
        """Stop placing requests on a worker."""
        self._cluster.pause(instance)
        self._telemetry.state(instance, InstanceState.DRAINING)

    def resume(self, instance: str) -> bool:
        """Place requests on a worker again, unless it is retired."""
        if self._workers.members[instance].retired:
            return False
        self.publish(instance)
        self._cluster.resume(instance)
        return True

    def publish(self, instance: str) -> None:
        """Report the state of a worker's circuit breaker to telemetry."""
        half_open = self._workers.breaker(instance).state is BreakerState.HALF_OPEN
        self._telemetry.state(instance, InstanceState.HALF_OPEN if half_open else InstanceState.UP)
