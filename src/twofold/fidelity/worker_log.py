"""Read the iterations of workers from journals, and compare measured with predicted iteration times."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from twofold.batch import Batch
from twofold.cluster.layout import gateway_cores
from twofold.performance.fitting.iterations import IterationWork, Measurement
from twofold.performance.profile import COLD_AFTER_S, ContentionFactors, GatewayTimes, MeasuredProfile
from twofold.request import Phase
from twofold.serving.config import WorkerConfig
from twofold.serving.launch.worker_plan import available_cores
from twofold.serving.telemetry.journal import JournalEntry, read_journal
from twofold.timeline import Moment, Timeline

_SOON_S = 0.005  # iterations with a shorter gap are consecutive


class TimedIteration(msgspec.Struct, frozen=True):
    """A measured iteration of a worker."""

    start_s: float
    end_s: float
    iteration: Measurement
    requests: tuple[str, ...]  # whose prefills it completed
    idle_s: float  # before the iteration

    @property
    def cold(self) -> bool:
        return self.idle_s > COLD_AFTER_S


class WorkerLog:
    """Iterations of one worker, and the times at which KV caches arrived at the worker."""

    def __init__(self, entries: Sequence[JournalEntry]) -> None:
        self.ran = list(_iterations(entries))
        # Arrival times of KV by request id.
        self.landed = {str(entry.args["request_id"]): entry.at for entry in entries if entry.call == "kv_received"}
        self._starts = [one.start_s for one in self.ran]

    def busy_share(self, start_s: float, end_s: float) -> float:
        """Return the fraction of the time from `start_s` to `end_s` in which the worker ran iterations."""
        first = max(bisect_right(self._starts, start_s) - 1, 0)
        busy = 0.0
        for one in self.ran[first : bisect_right(self._starts, end_s)]:
            busy += max(0.0, min(one.end_s, end_s) - max(one.start_s, start_s))
        return busy / (end_s - start_s)

    def between(self, start_s: float, end_s: float) -> Sequence[TimedIteration]:
        """Return the iterations whose start time is after `start_s` and at or before `end_s`."""
        return self.ran[bisect_right(self._starts, start_s) : bisect_right(self._starts, end_s)]


def read_workers(directory: Path) -> dict[str, WorkerLog]:
    """Read the log of each worker from a service's `--journal` directory, by worker name."""
    return {path.stem: WorkerLog(read_journal(path)) for path in sorted(directory.glob("*-*.jsonl"))}


def _iterations(entries: Iterable[JournalEntry]) -> Iterator[TimedIteration]:
    """Yield the iterations in a journal."""
    spans = list(_spans(entries))
    pauses = [after - end for (_, end, _), (after, _, _) in pairwise(spans) if after - end < _SOON_S]
    pause = median(pauses) if pauses else 0.0  # added to the duration of each iteration
    before = -math.inf
    for start, end, batch in spans:
        prompts = [item for item in batch.items if item.phase is Phase.PREFILL]
        decodes = [item for item in batch.items if item.phase is not Phase.PREFILL]
        work = IterationWork(
            tokens=sum(item.num_tokens for item in prompts),
            squares=sum(item.num_tokens * (item.num_tokens + 2 * item.context_tokens) for item in prompts),
            sequences=len(decodes),
            context=sum(item.context_tokens for item in decodes),
        )
        iteration = Measurement(work=(work,), seconds=end + pause - start)
        completed = tuple(item.request_id for item in prompts if item.samples)
        yield TimedIteration(start, end, iteration, completed, start - before)
        before = end


def _spans(entries: Iterable[JournalEntry]) -> Iterator[tuple[float, float, Batch]]:
    """Yield (start, end, batch) of every completed batch in a journal."""
    start, batch = 0.0, None
    for entry in entries:
        if entry.call == "next_batch":
            start, batch = entry.at, msgspec.convert(entry.result, Batch)
        elif entry.call == "complete" and batch is not None:
            yield start, entry.at, batch
            batch = None


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Start, end, requests and output tokens of a period of traffic, in seconds of the monotonic clock."""

    start_s: float  # first arrival
    end_s: float  # last token
    requests: int
    tokens: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> "LoadSpan":
        """Create a LoadSpan from the timelines of completed requests."""
        return cls(
            start_s=min(timeline.moments[Moment.ARRIVED] for timeline in timelines),
            end_s=max(timeline.moments[Moment.LAST_TOKEN] for timeline in timelines),
            requests=len(timelines),
            tokens=sum(timeline.output_tokens for timeline in timelines),
        )


class Slowness(NamedTuple):
    """Slowdown of a host relative to its calibration, in iterations with prompts and in iterations without."""

    prompts: float
    decodes: float


AS_CALIBRATED = Slowness(1.0, 1.0)


# The speed of a shared host changes from minute to minute, but a profile contains only the speed at its measurement.
# Other tenants slow down prefill (limited by compute) and decode (by memory bandwidth) differently. The slowdown is
# therefore one factor per phase and time span: measured time of iterations divided by predicted time, which includes
# contention between the workers and the gateway.


def slowness(
    profile: MeasuredProfile, workers: Sequence[WorkerConfig], logs: Mapping[str, WorkerLog], span: LoadSpan
) -> Slowness:
    """Return the slowdown factors of a host during the period `span`: measured iteration times divided by
    the times predicted from the host's calibration.
    """
    cores = available_cores()
    shared = gateway_cores(cores, ((worker.role, worker.cores) for worker in workers))
    front = _front_share(profile.shared_host.front, logs, span) / len(shared)
    took, expected = [0.0, 0.0], [0.0, 0.0]  # with prompts, decodes alone
    for worker in workers:
        turns = [each for each in workers if each is not worker and _meet(each, worker)]
        beside = [each for each in workers if not _meet(each, worker)]
        away = len(cores) - len(worker.cores)
        weight = len(worker.cores) / away if away else 0.0
        taken = front * len(set(shared) & set(worker.cores)) / len(worker.cores)
        for one in logs[worker.instance].between(span.start_s, span.end_s):
            crowd = min(1.0, sum(_busy(one, logs[each.instance]) for each in beside) * weight)
            kind = 0 if one.iteration.tokens else 1
            took[kind] += one.iteration.seconds
            met = [(_busy(one, logs[each.instance]), each.role is not worker.role) for each in turns]
            pace = _pace(profile, one, met)
            slower = 1.0 + (_slowdowns(profile, one).crowded - 1.0) * crowd
            alone_s = one.iteration.predicted_s(profile.times) + profile.times.cold_start_s(one.idle_s)
            expected[kind] += alone_s * slower / pace / (1.0 - taken)
    prompts, decodes = (one / other if other else None for one, other in zip(took, expected, strict=True))
    usual = prompts or decodes or 1.0  # for a kind of iteration that did not run
    return Slowness(prompts or usual, decodes or usual)


def _slowdowns(profile: MeasuredProfile, one: TimedIteration) -> ContentionFactors:
    return profile.shared_host.prefill if one.iteration.tokens else profile.shared_host.decode


def _pace(profile: MeasuredProfile, one: TimedIteration, turns: Sequence[tuple[float, bool]]) -> float:
    """Return the speed of an iteration on a shared CPU core, as a fraction of the speed on an unshared core."""
    # `turns` has, for each other worker on the core, its busy fraction of the iteration, and whether it runs the other
    # phase (prefill or decode).
    if not turns:
        return 1.0
    # Approximation: shared with all of them for the fraction `met` of the time, with none for the rest.
    met = sum(busy for busy, _ in turns) / len(turns)
    other = sum(busy for busy, unlike in turns if unlike) / (met * len(turns)) if met else 0.0
    shared = 1.0 + (_slowdowns(profile, one).shared - 1.0) * other
    return 1.0 - met + met / (1.0 + len(turns)) / shared


def _busy(one: TimedIteration, log: WorkerLog) -> float:
    return log.busy_share(one.start_s, one.end_s)


def _meet(one: WorkerConfig, other: WorkerConfig) -> bool:
    return bool(set(one.cores) & set(other.cores))


def _front_share(front: GatewayTimes, logs: Mapping[str, WorkerLog], span: LoadSpan) -> float:
    """Return the predicted mean number of CPU cores that gateway and clients use."""
    steps = sum(len(log.between(span.start_s, span.end_s)) for log in logs.values())
    spent = front.request_s * span.requests + front.step_s * steps + front.token_s * span.tokens
    return spent / span.seconds
