"""What a simulation tells those who want more than its result: tables, traces, logs and pictures."""

from typing import Protocol

import msgspec

from twofold.instance import Role
from twofold.timeline import Timeline


class IterationRun(msgspec.Struct, frozen=True):
    """`iterations` iterations of one batch, one after the other, on one instance; times are in picoseconds.

    Of a pipeline it is one iteration on the last stage, which is where its tokens come from.
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
    """The KV cache of one request on its way."""

    request_id: str
    source: str
    target: str
    start_ps: int
    end_ps: int
    bytes: int


class Observer(Protocol):
    """Told of everything in the order in which it ends; `close` ends the run."""

    def run(self, run: IterationRun) -> None: ...

    def transfer(self, transfer: KvTransfer) -> None: ...

    def ended(self, timeline: Timeline) -> None:
        """A request completed, failed or was refused (see its finish reason)."""
        ...

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """An instance joined a pool, at the start or when a pool policy moved it."""
        ...

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """Anything else worth a line in a log: a placement, a pre-emption, a failure."""
        ...

    def close(self, at_ps: int) -> None: ...


class QuietObserver:
    """Takes no notice: for observers that want some of it."""

    def run(self, run: IterationRun) -> None:
        """Nothing."""

    def transfer(self, transfer: KvTransfer) -> None:
        """Nothing."""

    def ended(self, timeline: Timeline) -> None:
        """Nothing."""

    def role(self, instance: str, role: Role, at_ps: int) -> None:
        """Nothing."""

    def note(self, at_ps: int, kind: str, subject: str, detail: str) -> None:
        """Nothing."""

    def close(self, at_ps: int) -> None:
        """Nothing."""
