"""JSON report of a simulation, and the table of re-planning decisions."""

from collections.abc import Sequence

import msgspec
from rich.markup import escape
from rich.table import Table

from twofold.cluster.spec import ClusterSpec
from twofold.performance.cost import ModelAccuracy
from twofold.reporting.output import JsonReport, same_fields, table
from twofold.reporting.simulation.facts import ReuseReport
from twofold.reporting.simulation.statistics import LATENCIES, SLOWDOWNS, Accuracy, DistributionSummary, worst
from twofold.reporting.summary import ratio, seconds
from twofold.request import Phase
from twofold.scheduling.replan.replanner import ReplanDecision
from twofold.simulation.overload import OverloadResult
from twofold.simulation.result import PoolResult, SimulationResult, SteadyState, Verdict
from twofold.slo import Slo, SlowdownSlo


class ReplanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A re-planning decision, with its description in words."""

    text: str
    decision: ReplanDecision


def replan_table(log: Sequence[ReplanDecision]) -> Table:
    """Return a table of the re-planning decisions in order of time."""
    rows = [(seconds(decision.at_s), escape(str(decision))) for decision in log]
    drawn = table("Re-planning", ("", ""), (0,), rows or [("", "no change of traffic detected")], show_header=False)
    drawn.columns[0].no_wrap = True
    return drawn


# Figures that depend on the duration of the run or on the SLO.
_OF_THE_WHOLE_RUN = (
    *("duration_s", "slo_met", "preemptions", "swaps", "swap_bytes"),
    *("requests_per_s", "output_tokens_per_s", "goodput_per_s", "energy_j", "mean_power_w"),
)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests, tokens and events in a simulation."""

    arrived: int  # sum of the next four
    completed: int
    rejected: int
    failed: int
    unfinished: int
    slo_met: int | None
    preemptions: int
    swaps: int
    swap_bytes: int
    handoffs: int
    prompt_tokens: int
    output_tokens: int
    iterations: int
    events: int


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals, completed requests, output tokens and goodput of a simulation, per second."""

    arrivals_per_s: float | None  # up to the last arrival; the next three cover the whole run, with its drain
    requests_per_s: float | None
    output_tokens_per_s: float | None
    goodput_per_s: float | None
    steady: SteadyState | None  # in the second half of the arrivals


class SeriesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Time-weighted mean and maximum of a time series."""

    mean: float
    max: float


class SimulationReport(JsonReport, frozen=True, kw_only=True):
    """JSON output of `twofold simulate --json`. Units: seconds, joules, watts, US dollars."""

    workload: dict[str, str | int | float | None]
    seed: int
    spec: ClusterSpec
    reference: str | None
    slo: Slo | SlowdownSlo | None
    verdict: Verdict | None
    counts: Counts
    duration_s: float
    arrival_s: float
    rates: Rates
    latencies_s: dict[str, DistributionSummary | None]  # None without measurements
    slowdowns: dict[str, DistributionSummary | None]
    model_errors: dict[str, Accuracy]  # held-out errors of the performance models behind each figure
    pools: tuple[PoolResult, ...]
    series: dict[str, SeriesSummary]
    energy_j: float
    mean_power_w: float
    tdp_w: float
    price_per_h: float
    cpu_s: float
    overload: OverloadResult | msgspec.UnsetType = msgspec.UNSET  # with --overload
    reuse: ReuseReport | msgspec.UnsetType = msgspec.UNSET  # with prefix caches
    replanning: tuple[ReplanEntry, ...] | msgspec.UnsetType = msgspec.UNSET  # with --replan

    @classmethod
    def of(
        cls,
        result: SimulationResult,
        *,
        workload: dict[str, str | int | float | None],
        seed: int,
        reference: str | None = None,
        reference_error: ModelAccuracy | None = None,
        slo: Slo | SlowdownSlo | None = None,
        judged: Verdict | None = None,
        replans: Sequence[ReplanDecision] | None = None,
    ) -> "SimulationReport":
        entries = None if replans is None else tuple(ReplanEntry(text=str(each), decision=each) for each in replans)
        return cls(
            workload=workload,
            seed=seed,
            reference=reference,
            slo=slo,
            verdict=judged,
            counts=Counts(**same_fields(Counts, result)),
            rates=_rates(result),
            latencies_s={known.field: DistributionSummary.of(known.of(result)) for known in LATENCIES},
            slowdowns={known.field: DistributionSummary.of(known.of(result)) for known in SLOWDOWNS},
            model_errors=_model_errors(result, reference_error),
            series={
                name: SeriesSummary(mean=series.mean(), max=series.maximum())
                for name, series in sorted(result.series.items())
            },
            overload=msgspec.UNSET if result.overload is None else result.overload,
            reuse=msgspec.UNSET if result.reuse is None else ReuseReport.of(result.reuse),
            replanning=msgspec.UNSET if entries is None else entries,
            **same_fields(cls, result, without=("series", "overload", "reuse")),
        )


def _model_errors(result: SimulationResult, reference: ModelAccuracy | None) -> dict[str, Accuracy]:
    latencies = {known.field: worst(result.pools, known.phases) for known in LATENCIES if known.phases}
    slowdowns = {known.field: worst(result.pools, known.phases, reference) for known in SLOWDOWNS}
    whole = worst(result.pools, tuple(Phase))
    return {**latencies, **slowdowns, **dict.fromkeys(_OF_THE_WHOLE_RUN, whole)}


def _rates(result: SimulationResult) -> Rates:
    good = result.slo_met
    return Rates(
        arrivals_per_s=ratio(result.arrived - 1, result.arrival_s),
        requests_per_s=ratio(result.completed, result.duration_s),
        output_tokens_per_s=ratio(result.output_tokens, result.duration_s),
        goodput_per_s=None if good is None else ratio(good, result.duration_s),
        steady=result.steady,
    )
