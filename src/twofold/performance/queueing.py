"""Queueing delay of prefill instances, and the prompt length that saturates one: DistServe, sections 3.1 and 4.3.

The formulas hold for prompts of one length with Poisson arrivals at rate R per second, served first come first served,
one per batch: an M/D/1 queue. With s the seconds of a prompt in the slowest stage, and t those in all stages, the mean
time to first token is

    t + R·s² / (2·(1 − R·s))

because in a series of stages with fixed times a prompt waits as long in all as it would before the slowest stage alone.
The paper's equations follow for an instance that takes D:

    one instance                               D + R·D² / (2·(1 − R·D))              equation 1
    pipeline of n stages, s = D/n, t = D       D + R·D² / (2·n·(n − R·D))            equation 2 for n = 2
    tensor parallelism, speed-up K             D/K + R·D² / (2·K·(K − R·D))          equation 3

Different lengths, batches of several prompts and unequal stages cause pipeline bubbles. The first formula covers only
unequal stages; simulate for the others. Times are seconds, rates are per second.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from twofold.errors import ConfigurationError
from twofold.performance.base import PerformanceModel


def mean_ttft_s(rate: float, latency_s: float, stage_s: float) -> float:
    """Mean TTFT with `latency_s` in all stages and `stage_s` in the slowest; infinite beyond the stable rate.

    Raises ConfigurationError for a negative rate, times ≤ 0, and a stage slower than all together.
    """
    if not (rate >= 0 and 0 < stage_s <= latency_s < math.inf):
        raise ConfigurationError(
            f"invalid queue: rate {rate:g}/s, {latency_s:g} s in all stages, {stage_s:g} s in the slowest"
        )
    load = rate * stage_s
    return latency_s + load * stage_s / (2 * (1 - load)) if load < 1 else math.inf


def crossing_rate(quick: tuple[float, float], other: tuple[float, float]) -> float | None:
    """The rate above which `other` has a lower mean TTFT than `quick`, each (all stages, slowest stage) in seconds.

    0 if that holds at every rate; None if it never does, because the slowest stage of `other` is no shorter. With t
    and s the two times of each, the means are equal where

        (1 − R·s₁)·(1 − R·s₂) = (s₁ − s₂) / (2·(t₂ − t₁) + s₁ − s₂)

    The smaller root is below 1/s₁, where both queues are stable.
    """
    (first_s, slow_s), (second_s, fast_s) = quick, other
    for times in (quick, other):
        mean_ttft_s(0.0, *times)  # validates the arguments
    if fast_s >= slow_s:
        return None
    later_s = second_s - first_s
    if later_s <= 0:
        return 0.0
    both_s = slow_s + fast_s
    share = 2 * later_s / (2 * later_s + slow_s - fast_s)
    return 2 * share / (both_s + math.sqrt(both_s * both_s - 4 * slow_s * fast_s * share))


def highest_rate(ttft_s: float, latency_s: float, stage_s: float) -> float:
    """The highest rate with a mean TTFT of at most `ttft_s`; 0 if even an empty queue exceeds it."""
    mean_ttft_s(0.0, latency_s, stage_s)  # validates the arguments
    wait_s = ttft_s - latency_s
    return 2 * wait_s / (stage_s * (stage_s + 2 * wait_s)) if wait_s > 0 else 0.0


def stage_times(model: PerformanceModel, prompt_tokens: int) -> tuple[float, float]:
    """(all stages, slowest stage) in seconds for a prompt alone in its batch."""
    size = prompt_tokens, prompt_tokens * prompt_tokens
    slowest_s = max(model.first_stage.prefill_s(*size), model.later_stage.prefill_s(*size))
    return model.prefill_s(*size), slowest_s


def quickest_by_rate(times: Mapping[str, tuple[float, float]]) -> list[tuple[float, str]]:
    """The option with the lowest mean TTFT by rate: (lowest rate, name), starting at rate 0.

    `times` are (all stages, slowest stage) in seconds by name.
    """
    now = min(times, key=lambda name: times[name])
    found = [(0.0, now)]
    while True:
        crossings = ((crossing_rate(times[now], times[name]), name) for name in times)
        later = [(rate, times[name][1], name) for rate, name in crossings if rate is not None]
        if not later:
            return found
        rate, _, now = min(later)
        found.append((rate, now))


SHARE: Final = 0.9
_STEP: Final = 1.02  # growth of the lengths tried first; the rate is assumed to rise between two of them


def saturating_tokens(prefill_s: Callable[[int], float], most: int, share: float = SHARE) -> int:
    """The shortest prompt, in tokens, that prefills at `share` of the best rate (tokens/s) or faster.

    A batch of shorter prompts takes hardly longer with one more prompt; longer prompts only wait for each other.
    `prefill_s` returns the seconds of a prompt alone. The best rate is taken over prompts of up to `most` tokens.
    """
    if most < 1 or not 0.0 < share <= 1.0:
        raise ValueError(f"need at least 1 token and a share in (0, 1], not {most} and {share:g}")
    lengths = _lengths(most)
    rates = [tokens / prefill_s(tokens) for tokens in lengths]
    enough = share * max(rates)
    place = next(place for place, rate in enumerate(rates) if rate >= enough)
    low, high = lengths[place - 1] + 1 if place else 1, lengths[place]
    while low < high:
        middle = (low + high) // 2
        if middle / prefill_s(middle) >= enough:
            high = middle
        else:
            low = middle + 1
    return high


def _lengths(most: int) -> list[int]:
    lengths, length = [], 1
    while length < most:
        lengths.append(length)
        length = max(length + 1, int(length * _STEP))
    return [*lengths, most]
