"""Measure single requests, choose the request rate and SLO of the demo, and compare split and colocated serving."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from twofold.errors import ConfigurationError
from twofold.reporting.summary import LatencyDistribution, Summary
from twofold.request import Request
from twofold.slo import Slo
from twofold.timeline import Timeline

PROBES = 4
# Target utilisation of the split design's prefill worker. Both designs get the same rate.
PREFILL_UTILISATION = 0.4
# Slowdowns over an unloaded service that Splitwise's SLO allows at P99 (section 5.3): 6x TTFT and 5x TBT. Here they
# bound the TTFT and TPOT of every request.
TTFT_SLOWDOWN = 6.0
TPOT_SLOWDOWN = 5.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """Request rate and SLO of the demo, and the latencies of an unloaded service."""

    rate: float
    slo: Slo
    ttft_s: float
    tpot_s: float

    def describe(self) -> str:
        return (
            f"an average request alone: TTFT {self.ttft_s * 1e3:.0f} ms, TPOT {self.tpot_s * 1e3:.1f} ms; "
            f"so the load is {self.rate:.2f} requests/s and the SLO TTFT ≤ {self.slo.ttft_s:.2f} s, "
            f"TPOT ≤ {(self.slo.tpot_s or 0) * 1e3:.0f} ms"
        )


def probe_requests(sample: Sequence[Request]) -> list[Request]:
    """Return requests with the mean prompt and output lengths of `sample`."""
    prompt = round(fmean(request.prompt_tokens for request in sample))
    output = max(8, round(fmean(request.output_tokens for request in sample)))
    return [Request(id=f"probe-{i}", arrival_s=0.0, prompt_tokens=prompt, output_tokens=output) for i in range(PROBES)]


def objectives(alone: Sequence[Timeline]) -> Objectives:
    """Derive the demo's request rate and SLO from the timelines of sequential requests."""
    if not any(timeline.output_tokens > 1 for timeline in alone):
        raise ConfigurationError("no probe request succeeded, so rate and SLO cannot be derived: see the service's log")
    ttft_s = median(t.ttft_s for t in alone if t.ttft_s is not None)
    tpot_s = median(t.tpot_s for t in alone if t.tpot_s is not None)
    return Objectives(
        rate=PREFILL_UTILISATION / ttft_s,  # prefill time is nearly linear in length, so the mean suffices
        slo=Slo(ttft_s=ttft_s * TTFT_SLOWDOWN, tpot_s=tpot_s * TPOT_SLOWDOWN),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


SAME = 0.05  # attainments closer than this count as equal


def verdict(split: tuple[str, Summary], colocated: tuple[str, Summary]) -> str:
    """Return one sentence that compares split and colocated serving by SLO attainment, P99 ITL and P99 TTFT."""
    (split_name, one), (other_name, two) = split, colocated
    if not one.completed or not two.completed:
        return "No verdict: a design completed no requests."
    ours, theirs = one.slo_attainment or 0.0, two.slo_attainment or 0.0
    if abs(ours - theirs) < SAME:
        judgement = f"{split_name} and {other_name} meet the SLO equally well ({ours:.0%} and {theirs:.0%})"
    else:
        better, worse = (split_name, other_name) if ours > theirs else (other_name, split_name)
        high, low = max(ours, theirs), min(ours, theirs)
        judgement = f"{better} meets the SLO better than {worse} ({high:.0%} against {low:.0%})"
    return (
        f"Verdict: {judgement}; split has {_ratio(one.itl_s, two.itl_s)} the P99 gap between tokens "
        f"and {_ratio(one.ttft_s, two.ttft_s)} the P99 time to the first token."
    )


def _ratio(ours: LatencyDistribution | None, theirs: LatencyDistribution | None) -> str:
    if ours is None or theirs is None or theirs.p99 == 0:
        return "?×"
    return f"{ours.p99 / theirs.p99:.2f}×"
