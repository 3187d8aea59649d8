"""Results of a simulation as labels and formatted values, with the errors of the performance models."""

from collections.abc import Iterator

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.reporting.output import same_fields
from twofold.reporting.simulation.statistics import DistributionSummary, accuracy, describe, extrapolations
from twofold.reporting.summary import NOTHING, bounds, rate_text, ratio, seconds
from twofold.request import Phase
from twofold.simulation.overload import DECODE, PREFILL
from twofold.simulation.result import Check, PoolResult, SimulationResult
from twofold.simulation.reuse import ReuseResult
from twofold.slo import Slo, SlowdownSlo


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse in a simulation."""

    caches: int
    blocks: int
    hits: dict[str, float]  # hit rates by tier
    fetched: float  # share of blocks fetched from other caches
    hit_rate: float
    prompt_tokens: int
    reused_tokens: int
    requests: dict[str, int]  # numbers of prompts by instance
    largest_share: float
    hottest: list[tuple[int, int]]  # numbers of uses and of caches of the most used blocks
    ttft_error: DistributionSummary | None  # relative error of the router's predicted TTFT

    @classmethod
    def of(cls, result: ReuseResult) -> "ReuseReport":
        blocks = max(1, result.blocks)
        return cls(
            hits={tier: count / blocks for tier, count in result.hits.items()},
            fetched=result.fetched / blocks,
            hottest=[(block.uses, block.caches) for block in result.hottest],
            ttft_error=DistributionSummary.of(result.ttft_error),
            **same_fields(cls, result, without=("hits", "fetched", "hottest", "ttft_error")),
        )


def reuse_lines(result: ReuseResult) -> Iterator[tuple[str, str]]:
    """Describe the prefix reuse of a simulation in (label, text) pairs."""
    report = ReuseReport.of(result)
    tiers = ", ".join(f"{share:.1%} in {tier}" for tier, share in report.hits.items())
    yield "Prefix hit rate", f"{report.hit_rate:.1%}: {tiers}, {report.fetched:.1%} from other caches"
    share = report.reused_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    yield "Prompt tokens reused", f"{report.reused_tokens:,} ({share:.1%})"
    yield ("Largest instance share of prompts", f"{report.largest_share:.1%} ({len(report.requests)} instances)")
    yield "Caches with the hottest blocks", f"{result.spread * result.caches:.1f} of {result.caches}"
    error = report.ttft_error
    if error is not None:
        yield "TTFT prediction error", f"{error.p50:.1%} (median)"


_J_PER_KWH = 3.6e6
_ATTAINMENT = 0.9  # share of requests, as in DistServe


class Fact(msgspec.Struct, frozen=True):
    """Entry of a report: label, value, and errors of the models behind it, such as `±10% prefill, ±2% decode`."""

    label: str
    value: str
    accuracy: str = ""  # empty without performance models


def facts(result: SimulationResult) -> list[Fact]:
    """Return the results of a simulation: counts, rates, energy, cost and CPU time."""
    return [*_counts(result), *_refusals(result), *_rates(result), *_costs(result), *_effort(result)]


def design(result: SimulationResult) -> list[Fact]:
    """Describe a simulated cluster: LLM, pools, policies and performance models."""
    spec, chunk = result.spec, result.spec.pipeline_chunk
    return [
        Fact("Model", spec.model),
        *(Fact(f"Pool {pool.role}", pool_text(pool)) for pool in result.pools),
        Fact("Router, hand-off", f"{spec.router}, {spec.handoff}"),
        Fact("Batches", f"{_budget(spec)}, {spec.max_num_seqs:,} sequences"),
        *([] if chunk is None else [Fact("Chunks", f"at most {chunk:,} tokens in pipelined prefill")]),
        Fact("Transfers", "share link bandwidth" if spec.contention else "without contention"),
        Fact("Rules", spec.rules),
        *(Fact(f"Failure of {lost.instance}", _failure(lost.at_s, lost.back_s)) for lost in spec.failures),
        *(Fact(f"Performance model of {pool.role}", describe(pool.error)) for pool in result.pools),
    ]


def pool_text(pool: PoolResult) -> str:
    """Describe a pool, such as `35 × dgx-h100, 35 instances`."""
    return f"{pool.machines:,} × {pool.machine}, {pool.instances:,} instance{'s'[: pool.instances != 1]}"


def _budget(spec: ClusterSpec) -> str:
    budget = spec.max_num_batched_tokens
    return f"at most {budget:,} prompt tokens" if isinstance(budget, int) else "saturating prompt tokens"


def slo_text(slo: Slo | SlowdownSlo) -> str:
    """Format the bounds of an SLO in one line."""
    if isinstance(slo, Slo):
        return ", ".join(f"{name} ≤ {bound}" for name, bound in bounds(slo))
    multiples = (("TTFT", slo.ttft), ("TPOT", slo.tpot), ("E2E", slo.e2e))
    return "; ".join(
        f"{name} {', '.join(f'P{at} ≤ {bound:g}×' for at, bound in sorted(of.items()))}" for name, of in multiples if of
    )


def check_text(check: Check) -> tuple[str, str]:
    """Format the value and the bound of an SLO check: percentages for attainment, factors for slowdowns."""
    if check.at_least:
        return (NOTHING if check.value is None else f"{check.value:.2%}"), f"≥ {check.bound:.2%}"
    return (NOTHING if check.value is None else f"{check.value:.3f}×"), f"≤ {check.bound:g}×"


def rate(count: float, over_s: float, unit: str) -> str:
    value = ratio(count, over_s)
    return NOTHING if value is None else f"{rate_text(value)} {unit}"


def _counts(result: SimulationResult) -> Iterator[Fact]:
    yield Fact("Requests arrived", f"{result.arrived:,}")
    yield Fact("Completed", f"{result.completed:,}")
    for label, count in (("Rejected", result.rejected), ("Failed", result.failed), ("Unfinished", result.unfinished)):
        if count:
            yield Fact(label, f"{count:,}")
    context, longest = result.max_context, result.longest_request
    if context is not None and longest > context:
        yield Fact("Longest request", f"{longest:,} tokens, beyond the context of {result.spec.model} ({context:,})")
    for text in extrapolations(result.pools, result.longest_prompt):
        yield Fact("Extrapolated", text)
    yield Fact("Simulated time", seconds(result.duration_s), _rests_on_all(result))


def _refusals(result: SimulationResult) -> Iterator[Fact]:
    overload, both = result.overload, _rests_on_all(result)
    if overload is None:
        return
    refused = ", ".join(f"{count:,} {reason}" for reason, count in overload.refusals.items())
    yield Fact("Overload control", f"{overload.rule}: {refused or 'none'} rejected", both)
    yield Fact("Wasted prefill", f"{overload.wasted_prefill_tokens:,} tokens", both)
    prefill, decode = (result.series[name].mean() for name in (PREFILL, DECODE))
    together = overload.load_correlation
    correlated = NOTHING if together is None else f"{together:+.2f}"
    yield Fact("Load of prefill and decode", f"{prefill:.2f} and {decode:.2f}, correlation {correlated}", both)


def _rates(result: SimulationResult) -> Iterator[Fact]:
    both = _rests_on_all(result)
    yield Fact("Arrivals", rate(result.arrived - 1, result.arrival_s, "requests/s"))
    steady = result.steady
    yield Fact("Throughput", rate(result.completed, result.duration_s, "requests/s"), both)
    yield Fact("Output", rate(result.output_tokens, result.duration_s, "tokens/s"), both)
    if steady is not None:
        yield Fact("Throughput in steady state", f"{rate_text(steady.requests_per_s)} requests/s", both)
        yield Fact("Output in steady state", f"{rate_text(steady.output_tokens_per_s)} tokens/s", both)
    if result.slo_met is not None:
        share = f"{result.slo_met / result.arrived:.2%} of requests" if result.arrived else NOTHING
        yield Fact("Within the SLO", share, both)
        yield Fact("Goodput", rate(result.slo_met, result.duration_s, "requests/s"), both)
        if steady is not None and steady.goodput_per_s is not None:
            yield Fact("Goodput in steady state", f"{rate_text(steady.goodput_per_s)} requests/s", both)
        scale = result.tightest_scale(_ATTAINMENT)
        yield Fact(f"SLO scale for {_ATTAINMENT:.0%}", NOTHING if scale is None else f"{scale:.3g}×", both)
    yield Fact("Hand-offs", f"{result.handoffs:,}")
    yield Fact("Preemptions", f"{result.preemptions:,}", both)
    if result.reuse is not None:
        yield from (Fact(label, text, both) for label, text in reuse_lines(result.reuse))
    if result.spec.swap_space_bytes is not None:
        yield Fact("Swap-outs", f"{result.swaps:,}, {result.swap_bytes / 1e9:,.1f} GB copied", both)


def _costs(result: SimulationResult) -> Iterator[Fact]:
    both, tokens = _rests_on_all(result), result.output_tokens
    if all(pool.energy_j for pool in result.pools):  # else a performance model has no power
        yield Fact("Energy", f"{result.energy_j / _J_PER_KWH:,.3f} kWh", both)
        yield Fact("Energy per output token", f"{result.energy_j / tokens:,.2f} J" if tokens else NOTHING, both)
        yield Fact("Power", f"{result.mean_power_w / 1e3:,.1f} kW mean", both)
    yield Fact("Provisioned power", f"{result.tdp_w / 1e3:,.1f} kW" if result.tdp_w else NOTHING)
    yield Fact("Price", f"${result.price_per_h:,.2f} per hour" if result.price_per_h else NOTHING)
    pace = ratio(tokens, result.duration_s) if result.steady is None else result.steady.output_tokens_per_s
    per_million = f"${result.price_per_h / 3600 / pace * 1e6:,.2f}" if pace and result.price_per_h else NOTHING
    yield Fact("Price per million output tokens", per_million, both)


def _effort(result: SimulationResult) -> Iterator[Fact]:
    yield Fact("Iterations simulated", f"{result.iterations:,} in {result.events:,} events")
    speed = f", {result.duration_s / result.cpu_s:,.0f}× real time" if result.cpu_s > 0 else ""
    yield Fact("Simulator CPU time", f"{seconds(result.cpu_s)}{speed}")


def _rests_on_all(result: SimulationResult) -> str:
    return accuracy(result.pools, (Phase.PREFILL, Phase.DECODE))


def _failure(at_s: float, back_s: float | None) -> str:
    back = "permanent" if back_s is None else f"back at {seconds(back_s)}"
    return f"at {seconds(at_s)}, {back}"
