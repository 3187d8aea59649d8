"""Latency metrics of a simulation, their percentiles, and the errors of the performance models used."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec

from twofold.instance import Role
from twofold.performance.cost import ModelAccuracy
from twofold.request import Phase
from twofold.simulation.histogram import Histogram
from twofold.simulation.result import PoolResult, SimulationResult

PERCENTILES: Final = (50, 90, 95, 99)


class LatencyMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A latency metric of a simulation, and the phases that determine it."""

    label: str
    field: str  # of `SimulationResult`, with the histogram
    phases: tuple[Phase, ...]

    def of(self, result: SimulationResult) -> Histogram | None:
        """Return the histogram of this metric; None if the simulation did not measure it."""
        histogram: Histogram | None = getattr(result, self.field)
        return histogram


_PREFILL, _DECODE, _BOTH = (Phase.PREFILL,), (Phase.DECODE,), (Phase.PREFILL, Phase.DECODE)

LATENCIES: Final = (
    LatencyMetric(label="TTFT", field="ttft_s", phases=_PREFILL),
    LatencyMetric(label="TPOT", field="tpot_s", phases=_DECODE),
    LatencyMetric(label="ITL", field="itl_s", phases=_DECODE),
    LatencyMetric(label="E2E", field="e2e_s", phases=_BOTH),
    LatencyMetric(label="Queue", field="queue_s", phases=_BOTH),
    LatencyMetric(label="KV transfer", field="transfer_s", phases=()),
    LatencyMetric(label="KV transfer visible", field="visible_transfer_s", phases=()),
)
SLOWDOWNS: Final = (
    LatencyMetric(label="TTFT slowdown", field="ttft_slowdown", phases=_PREFILL),
    LatencyMetric(label="TPOT slowdown", field="tpot_slowdown", phases=_DECODE),
    LatencyMetric(label="E2E slowdown", field="e2e_slowdown", phases=_BOTH),
)


class DistributionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Count, mean, extremes and percentiles of a distribution.

    Latencies are in seconds. Slowdowns are multiples of the uncontended latency on a reference machine.
    Prediction errors are fractions of the actual value.
    """

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, histogram: Histogram | None) -> "DistributionSummary | None":
        """Return the statistics of a histogram; None for an empty or missing histogram."""
        if histogram is None or histogram.count == 0:
            return None
        quantiles = {f"p{percentile}": _known(histogram.percentile(percentile)) for percentile in PERCENTILES}
        return cls(
            count=histogram.count,
            mean=_known(histogram.mean),
            min=_known(histogram.minimum),
            max=_known(histogram.maximum),
            **quantiles,
        )


def _known(value: float | None) -> float:
    if value is None:
        raise TypeError("a histogram that is not empty has no such statistic")
    return value


UNKNOWN = "error unknown"


def describe(error: ModelAccuracy) -> str:
    """Return a performance model's errors and the data it is based on: `±10% prefill, ±2% decode: fitted to …`."""
    known = ", ".join(
        f"{percent(value)} {phase}"
        for phase, value in ((Phase.PREFILL, error.prefill), (Phase.DECODE, error.decode))
        if value is not None
    )
    if error.estimated:
        where = f" ({known} on pairs that were measured)" if known else ""
        return f"estimated{where}: {error.basis}"
    return f"{known or UNKNOWN}: {error.basis}"


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Largest held-out error of prefill and of decode, over the performance models of a simulation."""

    prefill: float | None  # None if unknown or irrelevant
    decode: float | None
    estimated: bool  # a model was not fitted to measurements of its LLM on its machine


def worst(pools: Sequence[PoolResult], phases: Sequence[Phase], reference: ModelAccuracy | None = None) -> Accuracy:
    """Return the largest errors of the pools' performance models for the given phases.

    If a mixed pool runs one of the given phases, return the errors for prefill and decode. The error for a
    phase is None if the error of any model is unknown.
    """
    # `reference` is the error of the performance model that slowdowns are relative to.
    errors = {phase: _errors(pools, phase, reference) for phase in _all_phases(pools, phases)}
    return Accuracy(
        prefill=_worst(errors.get(Phase.PREFILL, []), Phase.PREFILL),
        decode=_worst(errors.get(Phase.DECODE, []), Phase.DECODE),
        estimated=any(error.estimated for of in errors.values() for error in of),
    )


def accuracy(pools: Sequence[PoolResult], phases: Sequence[Phase], reference: ModelAccuracy | None = None) -> str:
    """Describe the largest errors of the performance models, such as `±10% prefill, ±2% decode`."""
    resting = _all_phases(pools, phases)
    if not resting:
        return ""
    known = worst(pools, phases, reference)
    of = {Phase.PREFILL: known.prefill, Phase.DECODE: known.decode}
    texts = {phase: UNKNOWN if (value := of[phase]) is None else percent(value) for phase in resting}
    text = ", ".join(f"{value} {phase}" if len(resting) > 1 else value for phase, value in texts.items())
    if set(texts.values()) == {UNKNOWN}:
        text = UNKNOWN
    return _qualified(text, estimated=known.estimated)


def phase_accuracy(pools: Sequence[PoolResult], phase: Phase) -> str:
    """Return a text such as `±10%` with the largest error of the performance models in a phase."""
    errors = _errors(pools, phase, None)
    value = _worst(errors, phase)
    text = UNKNOWN if value is None else percent(value)
    return _qualified(text, estimated=any(error.estimated for error in errors))


def _qualified(text: str, *, estimated: bool) -> str:
    if not estimated:
        return text
    return "estimated" if text == UNKNOWN else f"estimated, {text}"


def percent(error: float) -> str:
    """Format a relative error as a percentage, with one decimal below 1%."""
    return f"±{error:.0%}" if error >= 0.01 else f"±{error:.1%}"


def _running(pools: Sequence[PoolResult], phase: Phase) -> Sequence[PoolResult]:
    roles = {pool.role: Role(pool.role) for pool in pools}
    prefills = phase is Phase.PREFILL
    running = [p for p in pools if (roles[p.role].prefills if prefills else roles[p.role].decodes)]
    return running or pools  # roles may change


def _all_phases(pools: Sequence[PoolResult], phases: Sequence[Phase]) -> tuple[Phase, ...]:
    # On mixed instances, both phases delay each other.
    if any(Role(pool.role) is Role.MIXED for phase in phases for pool in _running(pools, phase)):
        return tuple(Phase)
    return tuple(phases)


def _errors(pools: Sequence[PoolResult], phase: Phase, reference: ModelAccuracy | None) -> list[ModelAccuracy]:
    errors = [pool.error for pool in _running(pools, phase)]
    return errors if reference is None else [*errors, reference]


def _worst(errors: Sequence[ModelAccuracy], phase: Phase) -> float | None:
    """Return the largest prediction error of the performance models in a phase; None if the error of any is unknown."""
    values = [error.prefill if phase is Phase.PREFILL else error.decode for error in errors]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def extrapolations(pools: Iterable[PoolResult], longest_prompt: int) -> list[str]:
    """Describe the prompts and batches of a simulation that are larger than its performance models were fitted to."""
    return list(dict.fromkeys(chain.from_iterable(_extrapolations(pool, longest_prompt) for pool in pools)))


def _extrapolations(pool: PoolResult, longest: int) -> Iterator[str]:
    measured, batch = pool.error.measured, pool.mean_batch or 0.0
    if measured is None:
        return
    if pool.role != Role.DECODE and longest > measured.prompt_tokens:
        yield f"prompts of up to {longest:,} tokens; measured up to {measured.prompt_tokens:,} on {pool.machine}"
    if pool.role != Role.PREFILL and batch > measured.sequences:
        yield f"batches of {batch:.0f} in the mean; measured up to {measured.sequences:,} on {pool.machine}"
