"""Which workers are given requests: all that are up, but for those that retire or have yet to show that they work."""

from twofold.scheduling.breaker import BreakerState
from twofold.scheduling.cluster import ClusterScheduler
from twofold.serving.controller.workers import Workers
from twofold.serving.snapshot import InstanceState
from twofold.serving.telemetry import Telemetry


class Trust:
    """Asks the circuit breaker of each worker, and takes it out of the cluster's pools and back.

    Methods that may bring a worker back say whether they did: those that wait may have somebody then.
    """

    def __init__(self, cluster: ClusterScheduler, fleet: Workers, telemetry: Telemetry) -> None:
        self._cluster, self._fleet, self._telemetry = cluster, fleet, telemetry

    def try_out(self, instance: str, attempt_id: str) -> None:
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
