"""The service seam: what the gateway asks of whatever generates tokens behind it."""

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from twofold.instance import Role
from twofold.request import Generation, TokenOutput
from twofold.serving.telemetry.snapshot import ServiceSnapshot


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The one model a service serves: its public name, where it lies and its sizes in tokens.

    `max_model_len` bounds prompt and output together; `created` is in unix seconds.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in its pool. `home` is the role it was started for or was given.

    `state` is its life (see `Fleet`), or `retired`; `trusted` is the state of its circuit breaker; blocks count those
    of its KV cache.
    """

    instance: str
    role: Role
    home: Role
    state: str
    trusted: str
    restarts: int
    waiting: int
    running: int
    blocks_total: int
    blocks_free: int


class Service(Protocol):
    """Generates tokens for many requests at once, on one event loop."""

    @property
    def model(self) -> ServedModel: ...

    def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield the output tokens in order; the last one, and only it, has a finish reason.

        Raises RequestError where the request is refused and InstanceLostError where it cannot be finished.
        Closing the generator, or cancelling the task that waits on it, aborts the request everywhere at once;
        closing it after the last token has no effect.
        """
        ...

    def stop(self, request_id: str) -> None:
        """The answer is complete although the model would go on (a stop string): end it as finished.

        Without this, closing the generator early counts as an abort.
        """
        ...

    def ready(self) -> bool:
        """Whether a request that came now would be served."""
        ...

    def pools(self) -> list[PoolMember]:
        """Every worker, with the role that it plays now."""
        ...

    def set_role(self, instance: str, role: Role) -> None:
        """Let a worker play another role from the next request on; raises RequestError where it cannot."""
        ...

    def replans(self) -> list[str]:
        """What re-planning has decided lately, a sentence each, the last one last; nothing where there is none."""
        ...

    def snapshot(self) -> ServiceSnapshot:
        """The service now and lately, for the dashboard."""
        ...

    def metrics(self) -> bytes:
        """The Prometheus text exposition of everything measured behind the gateway."""
        ...
