"""What the workers of a service did, read from their decision journals: iterations, and hand-offs that landed."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from twofold.batch import Batch
from twofold.performance.packed import COLD_AFTER_S
from twofold.performance.packed_fit import Iteration
from twofold.request import Phase
from twofold.serving.journal import Entry, read_journal

_SOON_S = 0.005  # an iteration that begins this soon after another came right after it


class Ran(msgspec.Struct, frozen=True):
    """An iteration and when it ran (monotonic seconds). `requests` are the attempts whose prompts it completed.

    Before it its worker had nothing to run for `idle_s`.
    """

    start_s: float
    end_s: float
    iteration: Iteration
    requests: tuple[str, ...]
    idle_s: float

    @property
    def cold(self) -> bool:
        return self.idle_s > COLD_AFTER_S


class WorkerLog:
    """All that one worker ran, in order, from its journal."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.ran = list(_iterations(entries))
        self.landed = {str(entry.args["request_id"]): entry.at for entry in entries if entry.call == "landed"}
        self._starts = [one.start_s for one in self.ran]

    @classmethod
    def read(cls, path: Path) -> "WorkerLog":
        """That of a journal file."""
        return cls(read_journal(path))

    def busy_share(self, start_s: float, end_s: float) -> float:
        """How much of the time between two moments this worker was running something."""
        first = max(bisect_right(self._starts, start_s) - 1, 0)
        busy = 0.0
        for one in self.ran[first : bisect_right(self._starts, end_s)]:
            busy += max(0.0, min(one.end_s, end_s) - max(one.start_s, start_s))
        return busy / (end_s - start_s)

    def between(self, start_s: float, end_s: float) -> Sequence[Ran]:
        """What began in a span of time."""
        return self.ran[bisect_right(self._starts, start_s) : bisect_right(self._starts, end_s)]


def read_workers(directory: Path) -> dict[str, WorkerLog]:
    """Those of a service that was told to keep its journal there, by worker."""
    return {path.stem: WorkerLog.read(path) for path in sorted(directory.glob("*-*.jsonl"))}


def _iterations(entries: Iterable[Entry]) -> Iterator[Ran]:
    """An iteration takes until the next can begin: what a worker does between two of them belongs to the first."""
    spans = list(_spans(entries))
    pauses = [after - end for (_, end, _), (after, _, _) in pairwise(spans) if after - end < _SOON_S]
    pause = median(pauses) if pauses else 0.0
    before = -math.inf
    for start, end, batch in spans:
        prompts = [item for item in batch.items if item.phase is Phase.PREFILL]
        decodes = [item for item in batch.items if item.phase is not Phase.PREFILL]
        iteration = Iteration(
            tokens=sum(item.num_tokens for item in prompts),
            squares=sum(item.num_tokens * (item.num_tokens + 2 * item.context_tokens) for item in prompts),
            sequences=len(decodes),
            context=sum(item.context_tokens for item in decodes),
            seconds=end + pause - start,
        )
        completed = tuple(item.request_id for item in prompts if item.samples)
        yield Ran(start, end, iteration, completed, start - before)
        before = end


def _spans(entries: Iterable[Entry]) -> Iterator[tuple[float, float, Batch]]:
    """(start, end, batch) of every batch that was completed."""
    start, batch = 0.0, None
    for entry in entries:
        if entry.call == "next_batch":
            start, batch = entry.at, msgspec.convert(entry.result, Batch)
        elif entry.call == "complete" and batch is not None:
            yield start, entry.at, batch
            batch = None
