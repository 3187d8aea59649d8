"""Queueing delay of prefill instances, and the prompt length that saturates them: DistServe, sections 3.1 and 4.3.

In an M/D/1 queue, prompts of one length arrive as a Poisson process at R per second. If a prompt takes s seconds in the
slowest pipeline stage and t seconds in all stages together, the mean TTFT in seconds is

    t + R·s² / (2·(1 − R·s))

The paper's equations 1 to 3 are special cases of this formula.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

from twofold.errors import ConfigurationError
from twofold.performance.base import PerformanceModel


# Stages with fixed times cause as much waiting as the slowest stage alone. The paper's equations, where D is the
# prefill time on one accelerator:
#
#     one instance                               D + R·D² / (2·(1 − R·D))              equation 1
#     pipeline of n stages, s = D/n, t = D       D + R·D² / (2·n·(n − R·D))            equation 2 for n = 2
#     tensor parallelism, speed-up K             D/K + R·D² / (2·K·(K − R·D))          equation 3
#
# Pipeline bubbles have three causes: different prompt lengths, batches of several prompts, and unequal stages. The
# formula covers unequal stages; the other two causes need a simulation.
def mean_ttft_s(rate: float, latency_s: float, stage_s: float) -> float:
    """Return the mean TTFT in seconds at `rate` prompts per second, or infinity for an overloaded instance.

    Raises ConfigurationError for a negative rate or invalid stage times.
    """
    if not (rate >= 0 and 0 < stage_s <= latency_s < math.inf):
        raise ConfigurationError(
            f"invalid queue: rate {rate:g}/s, {latency_s:g} s in all stages, {stage_s:g} s in the slowest"
        )
    load = rate * stage_s
    return latency_s + load * stage_s / (2 * (1 - load)) if load < 1 else math.inf


def crossing_rate(quick: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Return the rate in prompts/s above which instance `other` has a lower mean TTFT than instance `quick`.

    Each argument is a pair of prefill times in seconds: the total time of all pipeline stages, and the time of the
    slowest stage. Return None if there is no such rate. Raise ConfigurationError for invalid times.
    """
    # Each argument is a pair (seconds in all stages, seconds in the slowest stage). If `quick` is (t₁, s₁) and `other`
    # is (t₂, s₂), the result is the smaller root R of
    #     (1 − R·s₁)·(1 − R·s₂) = (s₁ − s₂) / (2·(t₂ − t₁) + s₁ − s₂)
    (first_s, slow_s), (second_s, fast_s) = quick, other
    for times in (quick, other):
        mean_ttft_s(0.0, *times)  # validates the arguments
    if fast_s >= slow_s:
        return None
    later_s = second_s - first_s
    if later_s <= 0:  # better at every rate
        return 0.0
    both_s = slow_s + fast_s
    share = 2 * later_s / (2 * later_s + slow_s - fast_s)
    return 2 * share / (both_s + math.sqrt(both_s * both_s - 4 * slow_s * fast_s * share))


def stage_times(model: PerformanceModel, prompt_tokens: int) -> tuple[float, float]:
    """Return the prefill seconds of a single prompt, in all pipeline stages together and in the slowest stage."""
    size = prompt_tokens, prompt_tokens * prompt_tokens
    slowest_s = max(model.first_stage.prefill_s(*size), model.later_stage.prefill_s(*size))
    return model.prefill_s(*size), slowest_s


def quickest_by_rate(times: Mapping[str, tuple[float, float]]) -> list[tuple[float, str]]:
    """Return which option has the lowest mean TTFT at each request rate.

    The result is a list of pairs (rate in prompts/s, name of the option) by ascending rate. An option is best from its
    rate up to the rate of the next pair.
    """
    # `times` has (seconds in all stages, seconds in the slowest stage) of each option.
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
    """Return the shortest prompt, in tokens, with at least `share` of the maximum prefill throughput."""
    if most < 1 or not 0.0 < share <= 1.0:
        raise ValueError(f"need at least 1 token and a share in (0, 1], not {most} and {share:g}")
    # Batching prompts longer than the result only delays them.
    lengths = _lengths(most)
    rates = [tokens / prefill_s(tokens) for tokens in lengths]
    enough = share * max(rates)
    place = next(place for place, rate in enumerate(rates) if rate >= enough)
    left = range(lengths[place - 1] + 1 if place else 1, lengths[place])
    return left.start + bisect_left(left, True, key=lambda tokens: tokens / prefill_s(tokens) >= enough)


def _lengths(most: int) -> list[int]:
    lengths, length = [], 1
    while length < most:
        lengths.append(length)
        length = max(length + 1, int(length * _STEP))
    return [*lengths, most]
