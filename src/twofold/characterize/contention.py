"""Measure by how much the instances of a service slow each other down, as they do on the cores of one host."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import Final, NamedTuple

from twofold.characterize.target import ProbeStream, StreamTimes, Target
from twofold.performance.profile import MeasuredProfile

_PROMPTS: Final = (200, 500, 900)  # tokens
_CONTEXT: Final = 64  # tokens
_GAPS: Final = 32  # decode iterations of a measurement
_SETTLE: Final = 8  # decode iterations before and after a prompt
_LONGER: Final = 1.5  # a prefill beside decodes takes at most this many times as long as alone
_ROUNDS: Final = 4


class Contention(NamedTuple):
    """Factors by which iterations with prompts, and iterations without, take longer while all instances are busy."""

    prompts: float
    decodes: float


def with_contention(
    profile: MeasuredProfile, target: Target, *, prefill: int = 0, decode: int = 0, colocated: int = 0
) -> MeasuredProfile:
    """Measure the contention between the instances of an idle service, and return a profile that includes it.

    `profile` is of one instance that runs alone. `prefill`, `decode` and `colocated` are numbers of instances.
    Requests that arrive together must be spread evenly over the instances of a role. Raises TargetError if a probe
    fails.
    """
    instances = prefill + decode + colocated
    if instances < 2:
        return profile
    rounds = [
        ratios
        for _ in range(_ROUNDS)
        for ratios in (_colocated(target, colocated) if colocated else _disaggregated(target, prefill, decode))
    ]
    prompts, decodes = (max(1.0, geometric_mean(factors)) for factors in zip(*rounds, strict=True))
    return profile.contending(instances, prompts, decodes)


def _colocated(target: Target, instances: int) -> Iterator[Contention]:
    """Compare prompts and decodes on one instance with as many as there are instances; one ratio for each prompt."""
    for tokens in _prompts(target):
        # Close in time, because the speed of a shared host changes within seconds.
        one_s, every_s = (_ttft_s(target, tokens, count) for count in (1, instances))
        one, every = (fmean(_gaps(target.run((_decode(_GAPS),) * count))) for count in (1, instances))
        yield Contention(every_s / one_s, every / one)


def _disaggregated(target: Target, prefill: int, decode: int) -> Iterator[Contention]:
    """Compare prompts and decodes alone with prompts that are sent while other requests decode."""
    for tokens in _prompts(target):
        ttft_s, gaps = _ttft_s(target, tokens, 1), _gaps(target.run((_decode(_GAPS),)))
        outputs = 2 * _SETTLE + math.ceil(_LONGER * ttft_s / fmean(gaps))
        running = (_decode(min(outputs, target.limits.max_model_len - 2 * _CONTEXT)),) * decode
        prompt = ProbeStream(prompt_tokens=tokens, output_tokens=1, after_tokens=_SETTLE)
        times = target.run(running + (prompt,) * prefill)
        decodes, prompts = times[:decode], times[decode:]
        began, ended = max(each.sent_s for each in prompts), min(each.token_times_s[0] for each in prompts)
        beside = [after - before for before, after in _steps(decodes) if began <= before and after <= ended]
        yield Contention(
            fmean(each.ttft_s for each in prompts) / ttft_s, fmean(beside) / fmean(gaps) if beside else 1.0
        )


def _prompts(target: Target) -> list[int]:
    return [tokens for tokens in _PROMPTS if tokens + _CONTEXT <= target.limits.max_model_len]


def _decode(outputs: int) -> ProbeStream:
    return ProbeStream(prompt_tokens=_CONTEXT, output_tokens=outputs)


def _ttft_s(target: Target, tokens: int, count: int) -> float:
    return fmean(each.ttft_s for each in target.run((ProbeStream(prompt_tokens=tokens, output_tokens=1),) * count))


def _gaps(times: Sequence[StreamTimes]) -> list[float]:
    return [after - before for before, after in _steps(times)]


def _steps(times: Sequence[StreamTimes]) -> list[tuple[float, float]]:
    """Return the arrival times of consecutive tokens, from when all streams have started until the first has ended."""
    began, ended = max(each.token_times_s[0] for each in times), min(each.token_times_s[-1] for each in times)
    steps = (step for each in times for step in pairwise(each.token_times_s))
    return [(before, after) for before, after in steps if began <= before and after <= ended]
