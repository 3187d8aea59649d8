"""Interface of simulation observers, which produce tables, traces, logs and charts."""

import msgspec

from twofold.events import RequestSubscriber
from twofold.instance import Role
from twofold.timeline import Timeline


class IterationRun(msgspec.Struct, frozen=True):
    """One or more consecutive iterations of the same batch on an instance.

    With pipeline parallelism, the number of iterations is 1, and start and end are times on the last pipeline stage.
    """

    instance: str
    start_ps: int
    end_ps: int
    iterations: int
    prefill_tokens: int
    prefill_sequences: int
    decode_sequences: int
    context_tokens: int
    watts: float


class KvTransfer(msgspec.Struct, frozen=True):
    """A completed KV transfer of one request."""

    request_id: str
    source: str
    target: str
    start_ps: int
    end_ps: int
    bytes: int


class Observer(RequestSubscriber):
    """Base class of observers of a simulation. A subclass overrides the methods of the events that it needs."""

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        """The request was rejected. The default implementation calls `ended`."""
        self.ended(timeline, now)

    def run(self, run: IterationRun) -> None:
        """Called when an instance has completed one or more consecutive iterations with the same sequences."""

    def transfer(self, transfer: KvTransfer) -> None:
        """The KV transfer of a hand-off ended."""

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """An instance joined the pool of a role, at the start or by a role change."""

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """Handle a log entry about an instance failure, an instance restart or a re-planning decision."""

    def close(self, at_ps: int) -> None:
        """The simulation ended."""
