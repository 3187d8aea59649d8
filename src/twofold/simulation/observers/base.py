"""The observer interface of a simulation: tables, traces, logs and charts are built on it."""

import msgspec

from twofold.events import RequestSubscriber
from twofold.instance import Role
from twofold.timeline import Timeline


class IterationRun(msgspec.Struct, frozen=True):
    """Consecutive iterations of one batch on one instance; times are in picoseconds.

    For a pipeline, one iteration on its last stage.
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
    """The completed transfer of the KV cache of one request."""

    request_id: str
    source: str
    target: str
    start_ps: int
    end_ps: int
    bytes: int


class Observer(RequestSubscriber):
    """A subscriber to request events that also sees iterations, transfers, roles and log notes.

    Override the events of interest. Each is reported when it ends, in that order.
    """

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        """A rejected request counts as ended, with `FinishReason.ERROR`."""
        self.ended(timeline, now)

    def run(self, run: IterationRun) -> None:
        """Iterations of an instance ended."""

    def transfer(self, transfer: KvTransfer) -> None:
        """A hand-off ended."""

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """An instance joined a pool, at the start or in a role change."""

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """An event for a log: a failure or a re-planning decision."""

    def close(self, at_ps: int) -> None:
        """The simulation ended."""
