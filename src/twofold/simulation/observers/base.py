"""The observer interface of a simulation: tables, traces, logs and charts are built on it."""

import msgspec

from twofold.events import RequestSubscriber
from twofold.instance import Role
from twofold.timeline import Timeline


class IterationRun(msgspec.Struct, frozen=True):
    """Consecutive iterations of one batch on one instance; times are in picoseconds.

    For a pipeline, a run is one iteration on the last stage.
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
    """The KV transfer of one request, which is complete."""

    request_id: str
    source: str
    target: str
    start_ps: int
    end_ps: int
    bytes: int


class Observer(RequestSubscriber):
    """A subscriber to request events that also sees iterations, transfers, roles and log notes.

    A subclass overrides the methods of the events it needs. Each event is reported when it ends, in order of these
    ends.
    """

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        """A rejected request counts as ended, with `FinishReason.ERROR`."""
        self.ended(timeline, now)

    def run(self, run: IterationRun) -> None:
        """A run of iterations of one batch ended."""

    def transfer(self, transfer: KvTransfer) -> None:
        """A hand-off ended."""

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """An instance joined the pool of a role, at the start or in a role change."""

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """An event for a log: a failure or a re-planning decision."""

    def close(self, at_ps: int) -> None:
        """The simulation ended."""
