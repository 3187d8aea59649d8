"""Measure by how much the instances of a service slow each other down, as they do on the cores of one host."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import Final

from twofold.characterize.rows import steps_together
from twofold.characterize.target import ProbeStream, Target
from twofold.instance import Role
from twofold.performance.profile import MeasuredProfile

_PROMPTS: Final = (199, 499, 907)  # tokens
_CONTEXT: Final = 61  # tokens
_GAPS: Final = 32  # decode iterations of a measurement
_SETTLE: Final = 8  # decode iterations before and after a prompt
_LONGER: Final = 1.5  # a prefill beside decodes takes at most this many times as long as alone
_STREAMS: Final = 1  # on each decode instance, busy then; with more, gateway and client take much of the cores
_ROUNDS: Final = 6


# Factors by which iterations with prompts, and iterations without, take longer while all instances are busy.
Contention = tuple[float, float]


def with_contention(profile: MeasuredProfile, target: Target, counts: Mapping[Role, int]) -> MeasuredProfile:
    """Measure the contention between the instances of an idle service, and return a profile that includes it.

    `counts` has the number of instances of each role. A profile that has a shared host already is returned unchanged.
    Requests that arrive together must be spread evenly over the instances of a role. Raises TargetError if a probe
    fails.
    """
    instances, colocated = sum(counts.values()), counts.get(Role.MIXED, 0)
    if instances < 2 or profile.host is not None:
        return profile
    rounds = [
        ratios
        for _ in range(_ROUNDS)
        for ratios in (_colocated(target, colocated) if colocated else _disaggregated(target, counts))
    ]
    prompts, decodes = (max(1.0, geometric_mean(factors)) for factors in zip(*rounds, strict=True))
    return profile.contending(instances, prompts, decodes)


def _colocated(target: Target, instances: int) -> Iterator[Contention]:
    """Compare prompts and decodes on one instance with as many as there are instances; one ratio for each prompt.

    The other instances decode, or one of them computes a prompt: their mean slows the decodes of a service under load.
    """
    for tokens in _prompts(target):
        # Close in time, because the speed of a shared host changes within seconds.
        one_s, every_s = (_ttft_s(target, tokens, count) for count in (1, instances))
        one, every = (_gap_s(target, count) for count in (1, instances))
        _, gaps = _together(target, tokens, 1, instances, one_s, one)
        # The decode on the instance that computes the prompt waits for the prompt.
        _, *others = sorted(gaps, key=len)
        yield every_s / one_s, geometric_mean((every, _mean_gap(others, every))) / one


def _disaggregated(target: Target, counts: Mapping[Role, int]) -> Iterator[Contention]:
    """Compare prompts and decodes alone with prompts that are sent while other requests decode."""
    streams = _STREAMS * counts[Role.DECODE]
    for tokens in _prompts(target):
        ttft_s, gap_s = _ttft_s(target, tokens, 1), _gap_s(target, streams)
        together_s, gaps = _together(target, tokens, counts[Role.PREFILL], streams, ttft_s, gap_s)
        yield together_s / ttft_s, _mean_gap(gaps, gap_s) / gap_s


def _together(
    target: Target, tokens: int, prompts: int, streams: int, ttft_s: float, gap_s: float
) -> tuple[float, list[list[float]]]:
    """Return the mean TTFT of prompts that are sent while other requests decode, and the gaps of each of these then."""
    outputs = 3 * _SETTLE + math.ceil(_LONGER * ttft_s / gap_s)
    running = (_decode(min(outputs, target.limits.max_model_len - 2 * _CONTEXT)),) * streams
    prompt = ProbeStream(prompt_tokens=tokens, output_tokens=1, after_tokens=_SETTLE)
    times = target.run(running + (prompt,) * prompts)
    decodes, computed = times[:streams], times[streams:]
    began, ended = max(each.sent_s for each in computed), min(each.token_times_s[0] for each in computed)
    steps = (pairwise(each.token_times_s) for each in decodes)
    gaps = [[after - before for before, after in each if began <= before and after <= ended] for each in steps]
    return fmean(each.ttft_s for each in computed), gaps


def _mean_gap(gaps: Sequence[Sequence[float]], default: float) -> float:
    found = [gap for each in gaps for gap in each]
    return fmean(found) if found else default


def _prompts(target: Target) -> list[int]:
    return [tokens for tokens in _PROMPTS if tokens + _CONTEXT <= target.limits.max_model_len]


def _decode(outputs: int) -> ProbeStream:
    return ProbeStream(prompt_tokens=_CONTEXT, output_tokens=outputs)


def _ttft_s(target: Target, tokens: int, count: int) -> float:
    return fmean(each.ttft_s for each in target.run((ProbeStream(prompt_tokens=tokens, output_tokens=1),) * count))


def _gap_s(target: Target, streams: int) -> float:
    times = target.run((_decode(_GAPS),) * streams)
    return fmean(after - before for before, after in steps_together(times))
