"""The interface between the gateway and the service that generates tokens."""

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.serving.telemetry.snapshot import ServiceSnapshot


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a service: public name, path, and sizes in tokens.

    `max_model_len` bounds prompt and output together; `created` is in Unix seconds.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in its pool.

    `home` is the configured role, or the one an operator set. `state` is a WorkerState or `retired`.
    `circuit_breaker` is closed, open or half-open. Blocks are those of its KV cache.
    """

    instance: str
    role: Role
    home: Role
    state: str
    circuit_breaker: str
    restarts: int
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int


class Service(Protocol):
    """Generates tokens for concurrent requests on one event loop."""

    @property
    def model(self) -> ServedModel: ...

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield the output tokens in order; the last one has a finish reason.

        Raises RequestError for a rejected request, and InstanceLostError after repeated failures. Closing the
        generator, or cancelling the task that waits on it, aborts the request at once. Closing it after the last token
        has no effect.
        """
        ...

    def stop(self, request_id: str) -> None:
        """End a request as finished, for example at a stop string. Closing the generator counts as an abort
        otherwise.
        """
        ...

    def ready(self) -> bool:
        """Return whether a new request would be served."""
        ...

    def pools(self) -> list[PoolMember]:
        """Return every worker with its current role."""
        ...

    def set_role(self, instance: str, role: Role) -> None:
        """Change the role of a worker for new requests; raises RequestError where that is not possible."""
        ...

    def replans(self) -> list[str]:
        """Return the latest re-planning decisions, one sentence each, oldest first."""
        ...

    def snapshot(self) -> ServiceSnapshot:
        """Return current and recent state for the dashboard."""
        ...

    def metrics(self) -> bytes:
        """Return the metrics behind the gateway in Prometheus text format."""
        ...
