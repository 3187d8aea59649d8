"""Decision journals: every input of a scheduler, with its time, and every decision it took.

A journal lets the same scheduling code be driven again by a virtual clock and its decisions be compared with
those of the live run. One JSON object a line: {"at": seconds, "call": name, "args": {…}, "result": …}.
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
from twofold.request import Request
from twofold.scheduling.cluster import ClusterScheduler, Placement
from twofold.scheduling.instance import InstanceScheduler, Outcome
from twofold.scheduling.route import Move, Route

log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True):
    """One call of a scheduler: what it was given (`args`) and what it decided (`result`)."""

    at: float
    call: str
    args: dict[str, object]
    result: object = None


def plain(decision: object) -> dict[str, object]:
    """The decisions that are no structs of msgspec, so that they compile, by their fields."""
    match decision:
        case Placement(route=route, mode=mode):
            return {"route": route, "mode": mode}
        case Route(prefill=prefill, decode=decode, moves=moves):
            return {"prefill": prefill, "decode": decode, "moves": moves}
        case Move(instance=instance, role=role):
            return {"instance": instance, "role": role}
    raise NotImplementedError(f"a journal cannot hold {type(decision).__name__}")


ENCODER = msgspec.json.Encoder(enc_hook=plain)


class Journal:
    """Appends entries to a file of its process in `directory`."""

    def __init__(self, directory: str, name: str) -> None:
        self._file: BinaryIO = (Path(directory) / f"{name}.jsonl").open("wb", buffering=0)
        self._name = name

    def write(
        self, call: str, args: dict[str, object], result: object = None, at: float | None = None
    ) -> None:
        """Append an entry. A disk that is full, or gone, ends the journal and not the service."""
        if self._file.closed:
            return
        entry = Entry(time.monotonic() if at is None else at, call, args, result)
        try:
            self._file.write(ENCODER.encode(entry) + b"\n")
        except OSError as error:
            log.error("the journal of %s ends here: %s", self._name, error.strerror)  # noqa: TRY400  (one sentence)
            self._file.close()


def read_journal(path: Path) -> list[Entry]:
    """All entries of a journal in order."""
    decoder = msgspec.json.Decoder(Entry)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


class JournaledInstance(InstanceScheduler):
    """An instance scheduler that writes down what it is told and what it decides."""

    journal: Journal

    def submit(self, request: Request, *, decodes_here: bool) -> None:
        super().submit(request, decodes_here=decodes_here)
        self.journal.write("submit", {"request": request, "decodes_here": decodes_here})

    def reserve(self, request: Request, source: str) -> None:
        super().reserve(request, source)
        self.journal.write("reserve", {"request": request, "source": source})

    def grant(self, now: float) -> list[Lease]:
        leases = super().grant(now)
        if leases:
            self.journal.write("grant", {}, leases, now)
        return leases

    def landed(self, request_id: str, epoch: int) -> bool:
        decodes = super().landed(request_id, epoch)
        self.journal.write("landed", {"request_id": request_id, "epoch": epoch}, decodes)
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

    def lose_source(self, source: str) -> list[str]:
        requests = super().lose_source(source)
        self.journal.write("lose_source", {"source": source}, requests)
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

    def complete(self, batch: Batch, stopped: Collection[str] = ()) -> list[Outcome]:
        outcomes = super().complete(batch, stopped)
        self.journal.write("complete", {"stopped": sorted(stopped)}, outcomes)
        return outcomes


class JournaledCluster(ClusterScheduler):
    """A cluster scheduler that writes down what it is told and what it decides."""

    journal: Journal

    def add_instance(self, instance_id: str, role: Role, capacity_tokens: int | None = None) -> None:
        super().add_instance(instance_id, role, capacity_tokens)
        args: dict[str, object] = {
            "instance_id": instance_id,
            "role": role,
            "capacity_tokens": capacity_tokens,
        }
        self.journal.write("add_instance", args)

    def remove_instance(self, instance_id: str) -> list[str]:
        requests = super().remove_instance(instance_id)
        self.journal.write("remove_instance", {"instance_id": instance_id}, requests)
        return requests

    def waits(self, instance_id: str, sequences: int) -> None:
        super().waits(instance_id, sequences)
        self.journal.write("waits", {"instance_id": instance_id, "sequences": sequences})

    def pause(self, instance_id: str) -> None:
        super().pause(instance_id)
        self.journal.write("pause", {"instance_id": instance_id})

    def resume(self, instance_id: str) -> None:
        super().resume(instance_id)
        self.journal.write("resume", {"instance_id": instance_id})

    def set_role(self, instance_id: str, role: Role) -> None:
        super().set_role(instance_id, role)
        self.journal.write("set_role", {"instance_id": instance_id, "role": role})

    def arrive(self, request: Request, now: float) -> Placement | None:
        placement = super().arrive(request, now)
        self.journal.write("arrive", {"request": request}, placement, now)
        return placement

    def prefilled(self, request_id: str) -> None:
        super().prefilled(request_id)
        self.journal.write("prefilled", {"request_id": request_id})

    def handed_off(self, request_id: str) -> None:
        super().handed_off(request_id)
        self.journal.write("handed_off", {"request_id": request_id})

    def ended(self, request_id: str) -> None:
        super().ended(request_id)
        self.journal.write("ended", {"request_id": request_id})
