"""Decision journals: every input of a scheduler with its time, and every decision.

Replaying a journal under a virtual clock reproduces the live decisions. Each line is one JSON object:
{"at": seconds, "call": name, "args": {…}, "result": …}.
"""

import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

import msgspec

from twofold.batch import Batch
from twofold.handoff import Lease
from twofold.instance import Role
from twofold.placement import PlacedRequest, PrefixFetch, RoleMove, Route
from twofold.request import Request
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.batch import StepResult
from twofold.scheduling.instance.scheduler import InstanceScheduler

log = logging.getLogger(__name__)


class JournalEntry(msgspec.Struct, frozen=True):
    """One call of a scheduler: arguments and result."""

    at: float
    call: str
    args: dict[str, object]
    result: object = None


def _fields(decision: object) -> dict[str, object]:
    """Return the fields of decisions that are compiled classes instead of structs."""
    match decision:
        case PlacedRequest():
            return {"route": decision.route, "mode": decision.mode}
        case Route():
            return _route_fields(decision)
        case PrefixFetch():
            return {"source": decision.source, "blocks": decision.blocks}
        case StepResult():
            return {
                "request_id": decision.request_id,
                "index": decision.index,
                "finish_reason": decision.finish_reason,
                "hands_off": decision.hands_off,
            }
        case RoleMove():
            return {"instance": decision.instance, "role": decision.role}
        case _:
            raise NotImplementedError(f"a journal cannot hold a {type(decision).__name__}")


def _route_fields(route: Route) -> dict[str, object]:
    fields: dict[str, object] = {"prefill": route.prefill, "decode": route.decode, "moves": route.moves}
    if route.reused_tokens or route.fetch is not None:
        fields |= {"reused_tokens": route.reused_tokens, "fetch": route.fetch}
    return fields


ENCODER = msgspec.json.Encoder(enc_hook=_fields)


class Journal:
    """Appends entries to the file of this process in `directory`."""

    def __init__(self, directory: str, name: str) -> None:
        self._file: BinaryIO = (Path(directory) / f"{name}.jsonl").open("wb", buffering=0)
        self._name = name

    def write(
        self, call: str, args: dict[str, object], result: object = None, at: float | None = None
    ) -> None:
        """Append an entry. A full or missing disk ends the journal, not the service."""
        if self._file.closed:
            return
        entry = JournalEntry(time.monotonic() if at is None else at, call, args, result)
        try:
            self._file.write(ENCODER.encode(entry) + b"\n")
        except OSError as error:
            log.error("the journal of %s ends here: %s", self._name, error.strerror)  # noqa: TRY400  (one sentence)
            self._file.close()


def read_journal(path: Path) -> list[JournalEntry]:
    """Return all entries of a journal in order."""
    decoder = msgspec.json.Decoder(JournalEntry)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


class JournaledInstance(InstanceScheduler):
    """An instance scheduler that writes a journal."""

    journal: Journal

    def submit(
        self, request: Request, *, decodes_here: bool, reused_tokens: int = 0, fetching: bool = False
    ) -> None:
        super().submit(request, decodes_here=decodes_here, reused_tokens=reused_tokens, fetching=fetching)
        args: dict[str, object] = {"request": request, "decodes_here": decodes_here}
        if reused_tokens or fetching:
            args |= {"reused_tokens": reused_tokens, "fetching": fetching}
        self.journal.write("submit", args)

    def fetched(self, request_id: str, reused_tokens: int | None = None) -> None:
        super().fetched(request_id, reused_tokens)
        self.journal.write("fetched", {"request_id": request_id, "reused_tokens": reused_tokens})

    def reserve(self, request: Request, source: str) -> None:
        super().reserve(request, source)
        self.journal.write("reserve", {"request": request, "source": source})

    def grant(self, now: float) -> list[Lease]:
        leases = super().grant(now)
        if leases:
            self.journal.write("grant", {}, leases, now)
        return leases

    def kv_received(self, request_id: str, epoch: int) -> bool:
        decodes = super().kv_received(request_id, epoch)
        self.journal.write("kv_received", {"request_id": request_id, "epoch": epoch}, decodes)
        return decodes

    def end_lease(self, request_id: str, epoch: int) -> None:
        super().end_lease(request_id, epoch)
        self.journal.write("end_lease", {"request_id": request_id, "epoch": epoch})

    def read_started(self, request_id: str, epoch: int) -> bool:
        reads = super().read_started(request_id, epoch)
        self.journal.write("read_started", {"request_id": request_id, "epoch": epoch}, reads)
        return reads

    def read_ended(self, request_id: str, *, complete: bool) -> bool:
        decodes = super().read_ended(request_id, complete=complete)
        self.journal.write("read_ended", {"request_id": request_id, "complete": complete}, decodes)
        return decodes

    def peer_lost(self, source: str) -> list[str]:
        requests = super().peer_lost(source)
        self.journal.write("peer_lost", {"source": source}, requests)
        return requests

    def handed_off(self, request_id: str) -> None:
        super().handed_off(request_id)
        self.journal.write("handed_off", {"request_id": request_id})

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.journal.write("abort", {"request_id": request_id})

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
    """A cluster scheduler that writes a journal."""

    journal: Journal

    def add_instance(
        self, instance_id: str, role: Role, capacity_tokens: int | None = None, cell: str = ""
    ) -> None:
        super().add_instance(instance_id, role, capacity_tokens, cell)
        args: dict[str, object] = {
            "instance_id": instance_id,
            "role": role,
            "capacity_tokens": capacity_tokens,
            "cell": cell,
        }
        self.journal.write("add_instance", args)

    def remove_instance(self, instance_id: str) -> list[str]:
        requests = super().remove_instance(instance_id)
        self.journal.write("remove_instance", {"instance_id": instance_id}, requests)
        return requests

    def set_queued(self, instance_id: str, sequences: int) -> None:
        super().set_queued(instance_id, sequences)
        self.journal.write("set_queued", {"instance_id": instance_id, "sequences": sequences})

    def pause(self, instance_id: str) -> None:
        super().pause(instance_id)
        self.journal.write("pause", {"instance_id": instance_id})

    def resume(self, instance_id: str) -> None:
        super().resume(instance_id)
        self.journal.write("resume", {"instance_id": instance_id})

    def set_role(self, instance_id: str, role: Role) -> None:
        super().set_role(instance_id, role)
        self.journal.write("set_role", {"instance_id": instance_id, "role": role})

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

    def withdraw(self, request_id: str) -> None:
        super().withdraw(request_id)
        self.journal.write("withdraw", {"request_id": request_id})
