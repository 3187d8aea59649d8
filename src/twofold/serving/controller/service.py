"""Base class of services, which run the gateway's requests."""

import msgspec

from twofold.errors import RequestError
from twofold.instance import InstanceLoad, Role
from twofold.request import FinishReason, Generation
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.health import Worker, WorkerGroup
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.telemetry.snapshot import PoolMember, ServiceHistory, ServiceSnapshot
from twofold.serving.telemetry.telemetry import Telemetry


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the served model. `created` is in Unix seconds; `adapters` has directories by name, of LoRA."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int
    adapters: dict[str, str] = {}
    returns_ids: bool = True  # whether it knows the token ids of its outputs


class Service:
    """Generates tokens for concurrent requests on one event loop. Base class of `Controller` and `RouteService`."""

    def __init__(
        self,
        cluster: ClusterScheduler,
        workers: WorkerGroup,
        requests: LiveRequests,
        telemetry: Telemetry,
        *,
        roles_move: bool,
        model: ServedModel | None = None,
        forecast: ClusterForecast | None = None,
    ) -> None:
        self._cluster, self._workers, self._requests, self._telemetry = cluster, workers, requests, telemetry
        self._roles_move, self._model = roles_move, model
        self.statuses: dict[str, InstanceStatus] = {}
        cluster.on_role_change = telemetry.instances.role
        if forecast is not None:
            cluster.pools.forecast = forecast
            telemetry.forecast(cluster.pools, forecast)

    @property
    def _able(self) -> bool:
        """Whether the service has workers for both phases."""
        pools = self._cluster.pools
        prefill, decode, mixed = len(pools.prefill), len(pools.decode), len(pools.mixed)
        return (prefill + decode + mixed if self._roles_move else prefill * decode + mixed) > 0

    @property
    def model(self) -> ServedModel:
        """The served model. Raises RequestError (503) during start-up, until the model has been read."""
        if self._model is None:
            raise RequestError("the service is starting", status=503, code="not_ready")
        return self._model

    @property
    def takes_text(self) -> bool:
        """Whether prompts may be text, which servers tokenize."""
        return False

    def submit(self, generation: Generation, sink: OutputSink) -> None:
        """Run a request. `sink` gets its tokens in order, or an error after repeated failures. Raises RequestError."""
        self._requests.submit(generation, sink)

    def stop(self, request_id: str) -> None:
        """End a request as complete, for example because its output contains a stop string."""
        self._requests.stop(request_id, FinishReason.STOP)

    def abort(self, request_id: str) -> None:
        """End a request on all workers, unless it has ended."""
        self._requests.stop(request_id, FinishReason.ABORT)

    def ready(self) -> bool:
        """Return whether the service admits requests and both phases have a worker."""
        return self._requests.admitting and self._able

    async def wait_ready(self) -> None:
        """Wait until the service admits requests."""
        await self._requests.opened.wait()

    @property
    def live(self) -> int:
        """Number of requests that have not ended."""
        return self._requests.live

    async def drain(self) -> None:
        """Stop admitting requests, and wait until all live requests have ended."""
        await self._requests.drain()

    def fail_all(self, reason: str) -> None:
        """Stop admitting requests, and fail all live requests with `reason`."""
        self._requests.fail_all(reason)

    def pools(self) -> list[PoolMember]:
        """Return every worker with its current role and last reported status."""
        pools = self._cluster.pools
        return [
            _pool_member(worker, pools.get(instance), self.statuses.get(instance))
            for instance, worker in self._workers.members.items()
        ]

    def set_role(self, instance: str, role: Role) -> None:
        """Change the role of a worker for new requests. Raises RequestError if the change is not possible."""
        load = self._cluster.pools.get(instance)
        if load is None:
            raise RequestError(f"no worker {instance!r} is up", status=404, code="unknown_instance")
        if not self._roles_move:
            raise RequestError(
                "the workers of this service have fixed roles: serve with --router splitwise to move them",
                status=409,
                code="roles_fixed",
            )
        roles = [role, *(one.role for one in self._cluster.pools if one is not load)]
        if not (any(each.prefills for each in roles) and any(each.decodes for each in roles)):
            raise RequestError(
                f"{instance} is the last worker of its phase and cannot change to {role.value}",
                status=409,
                code="last_of_its_phase",
            )
        self._cluster.set_role(instance, role)
        self._workers.members[instance].role = role
        self._requests.place_waiting()

    def replans(self) -> list[str]:
        """Return the latest re-planning decisions as sentences, oldest first."""
        return []

    def snapshot(self) -> ServiceSnapshot:
        """Return the current state and recent history of the service for the dashboard."""
        return self._telemetry.snapshot(self._requests.recorder.live)

    def history(self) -> ServiceHistory:
        """Return the series of the last hours for the dashboard."""
        return self._telemetry.history(self._requests.recorder.live)

    def metrics(self) -> bytes:
        """Return the service's metrics in the Prometheus text format."""
        return self._telemetry.exposition()


def _pool_member(worker: Worker, load: InstanceLoad | None, status: InstanceStatus | None) -> PoolMember:
    role = worker.role if load is None else load.role
    return PoolMember(
        instance=worker.instance,
        role=role,
        home=role if load is None else load.home,
        state="retired" if worker.retired else worker.state.value,
        circuit_breaker=worker.breaker.state.value,
        restarts=worker.restarts,
        waiting=0 if status is None else status.waiting,
        running=0 if status is None else status.running,
        blocks_total=0 if status is None else status.blocks_total,
        blocks_free=0 if status is None else status.blocks_free,
    )
