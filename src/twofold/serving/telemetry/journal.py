"""Journals of scheduler decisions. Each line is one method call as JSON: {"at": seconds, "call": name, "args": {…},
"result": …}. Replaying the calls under a virtual clock reproduces the decisions of the live service.
"""

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import msgspec

from twofold.batch import Batch
from twofold.events import PlacedRequest
from twofold.handoff import Lease
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.queues import StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler

log = logging.getLogger(__name__)


class JournalEntry(msgspec.Struct, frozen=True):
    """Recorded call of a scheduler's method: time in monotonic seconds, method name, arguments and result."""

    at: float
    call: str
    args: dict[str, object]
    result: object = None


def _fields(decision: object) -> dict[str, object]:
    match decision:
        case PlacedRequest(route=route):
            # Journals without prefix reuse have no fields for it.
            names = ["prefill", "decode", "moves"]
            if route.reused_tokens or route.fetch is not None:
                names += ["reused_tokens", "fetch"]
            return {"route": {name: getattr(route, name) for name in names}, "mode": decision.mode}
        case StepResult():
            return {name: getattr(decision, name) for name in ("request_id", "index", "finish_reason", "hands_off")}
        case _:
            raise NotImplementedError(f"a journal cannot hold a {type(decision).__name__}")


ENCODER = msgspec.json.Encoder(enc_hook=_fields)


class Journal:
    """Journal of a scheduler's decisions: the file `name`.jsonl in `directory`."""

    def __init__(self, directory: str, name: str) -> None:
        self._file: BinaryIO = (Path(directory) / f"{name}.jsonl").open("wb", buffering=0)
        self._name = name

    def write(self, call: str, args: dict[str, object], result: object = None, at: float | None = None) -> None:
        """Append an entry; `at` None means now. A write error is logged and ends the journal."""
        if self._file.closed:
            return
        entry = JournalEntry(time.monotonic() if at is None else at, call, args, result)
        try:
            self._file.write(ENCODER.encode(entry) + b"\n")
        except OSError as error:
            log.error("the journal of %s ends here: %s", self._name, error.strerror)  # noqa: TRY400  (one sentence)
            self._file.close()


def read_journal(path: Path) -> list[JournalEntry]:
    """Read all entries of a journal in order."""
    decoder = msgspec.json.Decoder(JournalEntry)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


P = ParamSpec("P")
T = TypeVar("T")


def _journaled(method: Callable[P, T], *names: str, **defaults: object) -> Callable[P, T]:
    # `names` are required parameters of the method, `defaults` optional ones.
    order = (*names, *defaults)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result = method(*args, **kwargs)
        scheduler, *values = args
        given = defaults | dict(zip(order, values, strict=False)) | kwargs
        recorded = {name: given[name] for name in order}
        scheduler.journal.write(method.__name__, recorded, result)  # type: ignore[attr-defined]
        return result

    return call


class JournaledInstance(InstanceScheduler):
    """Instance scheduler that records its calls and decisions in a journal."""

    journal: Journal
    fetched = _journaled(InstanceScheduler.fetched, "request_id", reused_tokens=None)
    reserve = _journaled(InstanceScheduler.reserve, "request", "source")
    kv_received = _journaled(InstanceScheduler.kv_received, "request_id", "epoch")
    end_lease = _journaled(InstanceScheduler.end_lease, "request_id", "epoch")
    read_started = _journaled(InstanceScheduler.read_started, "request_id", "epoch")
    read_ended = _journaled(InstanceScheduler.read_ended, "request_id", "complete")
    peer_lost = _journaled(InstanceScheduler.peer_lost, "source")
    handed_off = _journaled(InstanceScheduler.handed_off, "request_id")
    abort = _journaled(InstanceScheduler.abort, "request_id")
    filled = _journaled(InstanceScheduler.filled, "request_id", "position", "key")

    def submit(self, request: Request, *, decodes_here: bool, reused_tokens: int = 0, fetching: bool = False) -> None:
        super().submit(request, decodes_here=decodes_here, reused_tokens=reused_tokens, fetching=fetching)
        args: dict[str, object] = {"request": request, "decodes_here": decodes_here}
        if reused_tokens or fetching:
            args |= {"reused_tokens": reused_tokens, "fetching": fetching}
        self.journal.write("submit", args)

    def grant(self, now: float) -> list[Lease]:
        leases = super().grant(now)
        if leases:
            self.journal.write("grant", {}, leases, now)
        return leases

    def next_batch(self, now: float) -> Batch | None:
        batch = super().next_batch(now)
        if batch is not None:
            self.journal.write("next_batch", {}, batch, now)
        return batch

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[StepResult]:
        outcomes = super().complete(batch, stopped)
        self.journal.write("complete", {"stopped": sorted(stopped)}, outcomes)
        return outcomes


class JournaledCluster(ClusterScheduler):
    """Cluster scheduler that records its calls and decisions in a journal."""

    journal: Journal
    add_instance = _journaled(ClusterScheduler.add_instance, "instance_id", "role", capacity_tokens=None, cell="")
    remove_instance = _journaled(ClusterScheduler.remove_instance, "instance_id")
    set_queued = _journaled(ClusterScheduler.set_queued, "instance_id", "sequences")
    pause = _journaled(ClusterScheduler.pause, "instance_id")
    resume = _journaled(ClusterScheduler.resume, "instance_id")
    set_role = _journaled(ClusterScheduler.set_role, "instance_id", "role")
    withdraw = _journaled(ClusterScheduler.withdraw, "request_id")

    def place(self, request: Request, now: float) -> PlacedRequest | None:
        placed = super().place(request, now)
        self.journal.write("place", {"request": request}, placed, now)
        return placed

    def first_token(self, request_id: str, now: float) -> None:
        super().first_token(request_id, now)
        self.journal.write("first_token", {"request_id": request_id})

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        super().handed_off(request_id, started, now)
        self.journal.write("handed_off", {"request_id": request_id})
