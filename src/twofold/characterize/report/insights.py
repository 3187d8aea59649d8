"""The seven insights of Splitwise (section III), checked against the measurements of an instance."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from statistics import fmean, median
from typing import Final

import msgspec

from twofold.characterize.analysis import Characterization
from twofold.characterize.report.activity import LOADS, Activity
from twofold.request import Request

FEW_TOKENS: Final = 20  # active tokens of a small batch (section III-B)
_DIFFERENT: Final = 2.0  # ratio of medians from which two workloads differ
_GROWING: Final = 1.1  # throughput ratio from which twice the batch pays
_EXTRAPOLATED: Final = 2  # times the largest batch measured
_UNUSED: Final = 0.85  # share of the power of prefill below which decode leaves power unused
_BATCH: Final = 16  # sequences of the comparison of two machines
_MID_LOAD: Final = LOADS[1]


class Finding(StrEnum):
    """Verdict on whether an insight holds for an instance."""

    HOLDS = "holds"
    FAILS = "does not hold here"
    UNKNOWN = "not measured"

    @classmethod
    def of(cls, holds: bool) -> "Finding":
        return cls.HOLDS if holds else cls.FAILS


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """One insight: its claim, the verdict on the claim, the evidence, and the id of the chart that shows it."""

    number: int
    claim: str
    verdict: Finding
    evidence: str
    chart: str


Workloads = Mapping[str, Sequence[Request]]


def insights(
    found: Characterization, workloads: Workloads, activity: Sequence[Activity], others: Sequence[Characterization]
) -> list[Insight]:
    """Return a verdict on each insight of the Splitwise paper (section III) for one measured instance.

    Two of the insights compare the instance with the measured instances in `others`.
    """
    return [
        _distributions(workloads),
        _few_active(activity),
        _decode_dominates(found, workloads),
        _batching(found),
        _bounds(found, workloads),
        _power(found, others),
        _cheaper_decode(found, others),
    ]


def _distributions(workloads: Workloads) -> Insight:
    sizes = {name: _medians(requests) for name, requests in workloads.items()}
    ratios = [
        max(one[part], other[part]) / max(1, min(one[part], other[part]))
        for one, other in combinations(sizes.values(), 2)
        for part in (0, 1)
    ]
    texts = (f"{name}: {prompt:,.0f} and {output:,.0f}" for name, (prompt, output) in sizes.items())
    return Insight(
        number=1,
        claim="Services have different prompt and output lengths.",
        verdict=Finding.of(max(ratios) >= _DIFFERENT) if ratios else Finding.UNKNOWN,
        evidence=f"median prompt and output tokens of {'; '.join(texts)}",
        chart="workloads",
    )


def _medians(requests: Iterable[Request]) -> tuple[float, float]:
    prompts, outputs = zip(*((request.prompt_tokens, request.output_tokens) for request in requests), strict=True)
    return median(prompts), median(outputs)


def _few_active(activity: Sequence[Activity]) -> Insight:
    shares = {each.workload: each.share(FEW_TOKENS) for each in activity if each.load == _MID_LOAD}
    texts = (f"{share:.0%} of the time with {name}" for name, share in shares.items())
    return Insight(
        number=2,
        claim=f"A colocated instance spends most of its time with few active tokens (at most {FEW_TOKENS}).",
        verdict=Finding.of(max(shares.values()) > 0.5) if shares else Finding.UNKNOWN,
        evidence=f"simulated at {_MID_LOAD:.0%} of its highest throughput: {'; '.join(texts)}" if shares else "",
        chart="active",
    )


def _decode_dominates(found: Characterization, workloads: Workloads) -> Insight:
    shares = {
        name: fmean(_mostly_decode(found, request) for request in requests) for name, requests in workloads.items()
    }
    texts = (f"{share:.0%} of the requests of {name}" for name, share in shares.items())
    return Insight(
        number=3,
        claim="Most requests spend most of their time in decode.",
        verdict=Finding.of(min(shares.values()) > 0.5) if shares else Finding.UNKNOWN,
        evidence=f"alone on the instance: {'; '.join(texts)}",
        chart="latency",
    )


def _mostly_decode(found: Characterization, request: Request) -> bool:
    context = request.prompt_tokens + request.output_tokens // 2
    decode_s = (request.output_tokens - 1) * found.times.seconds(0, 0, 1, context)
    return decode_s > found.ttft_s(request.prompt_tokens)


def _batching(found: Characterization) -> Insight:
    knee, longest, batch = found.prefill_knee(), found.longest_prefill, found.largest_batch
    growth = found.decode_rate(batch, 512) / found.decode_rate(max(1, batch // 2), 512)
    slower = found.decode_rate(1, 512) * batch / found.decode_rate(batch, 512)
    return Insight(
        number=4,
        claim="Prefill batches should be limited; decode batches should be as large as possible.",
        verdict=Finding.of(knee * _GROWING < longest and growth >= _GROWING),
        evidence=(
            f"prefill throughput saturates at {knee:,} of {longest:,} tokens; decode throughput still grows by "
            f"{growth - 1:.0%} from batch {max(1, batch // 2)} to {batch}, with {slower:.1f} times the TBT of batch 1"
        ),
        chart="throughput",
    )


def _bounds(found: Characterization, workloads: Workloads) -> Insight:
    requests = [request for each in workloads.values() for request in each]
    claim = "Prefill is limited by compute, decode by memory capacity."
    if not requests:
        return Insight(number=5, claim=claim, verdict=Finding.UNKNOWN, evidence="no workload", chart="memory")
    context = round(fmean(request.prompt_tokens + request.output_tokens for request in requests))
    capacity = found.profile.kv_capacity_tokens
    most = max(1, capacity // context)
    beyond = most > _EXTRAPOLATED * found.largest_batch
    growth = found.decode_rate(most, context) / found.decode_rate(max(1, most // 2), context)
    told = f"far more than the {found.largest_batch} measured" if beyond else f"{growth - 1:+.0%} from half the batch"
    knee = found.prefill_knee()
    holds = knee < capacity and growth >= _GROWING
    return Insight(
        number=5,
        claim=claim,
        verdict=Finding.UNKNOWN if beyond else Finding.of(holds),
        evidence=(
            f"prefill saturates at {knee:,} of {capacity:,} KV tokens; {most:,} sequences of {context:,} tokens fill "
            f"the KV memory: {told}"
        ),
        chart="memory",
    )


def _power(found: Characterization, others: Sequence[Characterization]) -> Insight:
    texts, checks = list[str](), list[bool]()
    power = found.profile.power
    if power is not None:
        texts.append(f"prefill draws up to {power.prefill_share:.0%} of TDP, decode {power.decode_share:.0%}")
        checks.append(power.decode_share < _UNUSED * power.prefill_share)
    for other in (other for other in others if is_capped(other, found)):
        prefill, decode = slowdown(found, other)
        texts.append(f"{other.profile.machine} takes {prefill:.2f} times the TTFT and {decode:.2f} times the TBT")
        checks.append(decode < prefill)
    return Insight(
        number=6,
        claim="Prefill uses the power budget, decode does not.",
        verdict=Finding.of(all(checks)) if checks else Finding.UNKNOWN,
        evidence="; ".join(texts) or "no power readings, no profile under a power cap",
        chart="power",
    )


def is_capped(other: Characterization, found: Characterization) -> bool:
    """Return whether `other` has the same model and hardware as `found`, plus a power cap."""
    # The hardware name of a capped instance has a hyphen and a suffix.
    mine, its = found.profile, other.profile
    same = (mine.model.name, mine.tensor_parallel) == (its.model.name, its.tensor_parallel)
    return same and its.machine.startswith(f"{mine.machine}-")


def slowdown(found: Characterization, other: Characterization) -> tuple[float, float]:
    """Return the TTFT and the TBT of `other` as ratios to those of `found`."""
    # TTFT of a prompt of 1,500 tokens, TBT of a batch of 16 sequences.
    decodes = [each.times.seconds(0, 0, _BATCH, _BATCH * 1024) for each in (other, found)]
    return other.ttft_s(1500) / found.ttft_s(1500), decodes[0] / decodes[1]


def _cheaper_decode(found: Characterization, others: Sequence[Characterization]) -> Insight:
    claim = "Decode runs at less cost or power on less capable hardware."
    mine = found.profile
    same_model = [each for each in others if each.profile.model.name == mine.model.name]
    slower = [
        each for each in same_model if each.ttft_s(1500) > 1.1 * found.ttft_s(1500) and not is_capped(each, found)
    ]
    texts, holds = list[str](), False
    for other in slower:
        prefill, decode = slowdown(found, other)
        for name, unit in (("price_per_h", "$"), ("tdp_w", "W")):
            costs = getattr(mine.costs, name), getattr(other.profile.costs, name)
            if all(costs):
                cheaper = costs[0] / costs[1]
                holds = holds or cheaper > decode
                texts.append(
                    f"per {unit}, {other.profile.machine} decodes {cheaper / decode:.2f} and prefills "
                    f"{cheaper / prefill:.2f} times as much as {mine.machine}"
                )
    verdict = Finding.of(holds) if texts else Finding.UNKNOWN
    evidence = "; ".join(texts) or "needs a profile of slower hardware with price or power (--against)"
    return Insight(number=7, claim=claim, verdict=verdict, evidence=evidence, chart="comparison")
