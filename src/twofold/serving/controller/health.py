"""Health of workers: circuit breakers and availability, for this service's workers and for external servers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum

from twofold.events import PlacedRequest, RequestSubscriber, Route
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import Breaker, BreakerState
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.messages import Message
from twofold.serving.telemetry.snapshot import InstanceState
from twofold.serving.telemetry.telemetry import Telemetry


class WorkerState(StrEnum):
    STARTING = "starting"
    UP = "up"
    FENCED = "fenced"
    DOWN = "down"


class Worker:
    """Health of one worker of this service or one external server."""

    def __init__(self, instance: str, role: Role, restart_s: float) -> None:
        # Kept across restarts.
        self.instance, self.role = instance, role  # at first the configured role
        self.state = WorkerState.STARTING
        self.breaker = Breaker(restart_s)
        self.restarts = 0
        self.start_s = 0.0  # earliest time of the next restart (worker) or health probe (server)
        self.retired = False  # not restarted when it has ended


class WorkerGroup(ABC):
    """Interface to all workers of a service."""

    members: Mapping[str, Worker]  # by instance

    def breaker(self, instance: str) -> Breaker:
        return self.members[instance].breaker

    @abstractmethod
    def send(self, instance: str, message: Message) -> None:
        """Send a Prefill, Reserve or Abort message to a worker; drop it if the worker is not up."""

    def to_local_time(self, instance: str, moment_s: float) -> float:
        """Convert a time on a worker's monotonic clock to the local clock."""
        return moment_s


class WorkerHealth(RequestSubscriber):
    """Stops routing to workers that fail or retire, and resumes it when they recover or return."""

    def __init__(self, cluster: ClusterScheduler, workers: WorkerGroup, telemetry: Telemetry) -> None:
        self._cluster, self._workers, self._telemetry = cluster, workers, telemetry
        # A worker with a half-open breaker receives one request as a trial, and no other until it has succeeded or
        # ended.
        self._trials: dict[str, Route] = {}  # by attempt
        self._resumed = False

    def take_resumed(self) -> bool:
        """Return True if a circuit breaker has readmitted a worker since the previous call."""
        resumed, self._resumed = self._resumed, False
        return resumed

    def placed(self, placed: PlacedRequest, now: float) -> None:
        for instance in {placed.route.prefill, placed.route.decode}:
            if self._workers.breaker(instance).begin(placed.id):
                self._cluster.pause(instance)
                self._trials[placed.id] = placed.route

    def first_token(self, request_id: str, now: float) -> None:
        route = self._trials.get(request_id)
        if route is not None:
            self._succeed(route.prefill, request_id, now)

    def decode_started(self, request_id: str, now: float) -> None:
        route = self._trials.get(request_id)
        if route is not None:
            self._succeed(route.decode, request_id, now)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        self._end_trial(request_id)

    def aborted(self, request_id: str, now: float) -> None:
        self._end_trial(request_id)

    def _succeed(self, instance: str, request_id: str, now: float) -> None:
        if self._workers.breaker(instance).succeed(request_id, now) and self.resume(instance):
            self._resumed = True

    def _end_trial(self, request_id: str) -> None:
        route = self._trials.pop(request_id, None)
        if route is None:
            return
        # Workers that generated no token of the request become available for another trial.
        for instance in {route.prefill, route.decode}:
            if self._workers.breaker(instance).release(request_id) and self.resume(instance):
                self._resumed = True

    def withdraw(self, instance: str) -> None:
        """Stop routing requests to a worker that is about to retire."""
        self._cluster.pause(instance)
        self._telemetry.instances.state(instance, InstanceState.DRAINING)

    def resume(self, instance: str) -> bool:
        """Route requests to a worker again; return False if it is retired."""
        if self._workers.members[instance].retired:
            return False
        self.publish(instance)
        self._cluster.resume(instance)
        return True

    def publish(self, instance: str) -> None:
        """Report a worker to telemetry as up or, if its circuit breaker is half-open, as half-open."""
        half_open = self._workers.breaker(instance).state is BreakerState.HALF_OPEN
        self._telemetry.instances.state(instance, InstanceState.HALF_OPEN if half_open else InstanceState.UP)
