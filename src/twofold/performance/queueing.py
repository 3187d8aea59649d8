"""How long prompts wait for a prefill instance: the queueing formulas of DistServe (section 3.1).

They hold for prompts of one length that arrive at random (Poisson) at R per second and are served first come first
served, one to a batch: an M/D/1 queue. With s the seconds that the slowest stage takes for a prompt, and t what all
stages take, the mean time to first token is

    t + R·s² / (2·(1 − R·s))

because in a line of stages with fixed times a prompt waits as long in all as it would before the slowest stage alone.
From it follow the paper's, for an instance that takes D:

    one instance                               D + R·D² / (2·(1 − R·D))              equation 1
    pipeline of n stages, s = D/n, t = D       D + R·D² / (2·n·(n − R·D))            equation 2 for n = 2
    tensor parallelism, speed-up K             D/K + R·D² / (2·K·(K − R·D))          equation 3

Lengths that differ, batches of several prompts and stages that are not equal make a pipeline's bubbles, of which only
the last is in the first formula: simulate for more. Times are seconds, rates are per second.

How long a prompt must be to keep an instance busy: L_m of DistServe (sections 3.1 and 4.3).
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from twofold.errors import ConfigurationError
from twofold.performance.base import PerformanceModel


def mean_ttft_s(rate: float, latency_s: float, stage_s: float) -> float:
    """Mean TTFT where all stages take `latency_s` and the slowest `stage_s`; infinite where that cannot keep up.

    Raises ConfigurationError for a rate below 0, times that are not above 0, and a stage slower than all together.
    """
    if not (rate >= 0 and 0 < stage_s <= latency_s < math.inf):
        raise ConfigurationError(
            f"no queue has a rate of {rate:g} per second, {latency_s:g} s in all and {stage_s:g} s in its slowest stage"
        )
    load = rate * stage_s
    return latency_s + load * stage_s / (2 * (1 - load)) if load < 1 else math.inf


def one_instance_s(rate: float, prefill_s: float) -> float:
    """Mean TTFT of an instance without parallelism (equation 1)."""
    return mean_ttft_s(rate, prefill_s, prefill_s)


def pipeline_s(rate: float, prefill_s: float, stages: int = 2) -> float:
    """Mean TTFT of a pipeline of equal stages, which together take `prefill_s` (equation 2)."""
    if stages < 1:
        raise ConfigurationError(f"pipeline parallelism must be at least 1, not {stages}")
    return mean_ttft_s(rate, prefill_s, prefill_s / stages)


def tensor_s(rate: float, prefill_s: float, speedup: float) -> float:
    """Mean TTFT under tensor parallelism that makes a prefill so many times quicker (equation 3)."""
    if not speedup > 0:
        raise ConfigurationError(f"a speed-up is more than 0, not {speedup:g}")
    return mean_ttft_s(rate, prefill_s / speedup, prefill_s / speedup)


def crossover_rate(prefill_s: float, speedup: float, stages: int = 2) -> float | None:
    """The rate above which a pipeline of `stages` has a lower mean TTFT than tensor parallelism of that speed-up.

    0 where tensor parallelism is no quicker than one accelerator; None where it is at least as quick as there are
    stages, and so better at every rate.
    """
    pipeline_s(0.0, prefill_s, stages)  # what cannot be is refused there
    tensor_s(0.0, prefill_s, speedup)
    quick_s = prefill_s / speedup
    return crossing_rate((quick_s, quick_s), (prefill_s, prefill_s / stages))


def crossing_rate(quick: tuple[float, float], other: tuple[float, float]) -> float | None:
    """The rate above which `other` has a lower mean TTFT than `quick`, each (all stages, the slowest stage) in seconds.

    0 where it has at any rate; None where it never has, because its slowest stage is no shorter. With t and s the two
    times of each, the means are equal where

        (1 − R·s₁)·(1 − R·s₂) = (s₁ − s₂) / (2·(t₂ − t₁) + s₁ − s₂)

    of which the smaller root is below 1/s₁, where both queues are stable.
    """
    (first_s, slow_s), (second_s, fast_s) = quick, other
    for times in (quick, other):
        mean_ttft_s(0.0, *times)  # what cannot be is refused there
    if fast_s >= slow_s:
        return None
    later_s = second_s - first_s
    if later_s <= 0:
        return 0.0
    both_s = slow_s + fast_s
    share = 2 * later_s / (2 * later_s + slow_s - fast_s)
    return 2 * share / (both_s + math.sqrt(both_s * both_s - 4 * slow_s * fast_s * share))


def highest_rate(ttft_s: float, latency_s: float, stage_s: float) -> float:
    """The rate up to which the mean TTFT is at most `ttft_s`; 0 where it is more without any queue."""
    mean_ttft_s(0.0, latency_s, stage_s)  # what cannot be is refused there
    wait_s = ttft_s - latency_s
    return 2 * wait_s / (stage_s * (stage_s + 2 * wait_s)) if wait_s > 0 else 0.0


def stage_times(model: PerformanceModel, prompt_tokens: int) -> tuple[float, float]:
    """(all stages, the slowest stage) in seconds, for a prompt that is alone in its batch: what the formulas take."""
    size = prompt_tokens, prompt_tokens * prompt_tokens
    slowest_s = max(model.first_stage.prefill_s(*size), model.later_stage.prefill_s(*size))
    return model.prefill_s(*size), slowest_s


def quickest_by_rate(times: Mapping[str, tuple[float, float]]) -> list[tuple[float, str]]:
    """Which has the lowest mean TTFT from which rate on: the first from 0, each later one from where it is better.

    `times` are (all stages, the slowest stage) in seconds by name.
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
_STEP: Final = (
    1.02  # lengths that are tried first grow by so much; between two of them the rate is taken to rise
)


def saturating_tokens(prefill_s: Callable[[int], float], most: int, share: float = SHARE) -> int:
    """The shortest prompt, in tokens, that is computed at `share` of the best rate (tokens/s) or faster.

    A batch of prompts that is shorter takes hardly longer for one prompt more; of one that is longer the prompts only
    wait for each other. `prefill_s` is the seconds that a prompt of so many tokens takes alone, and the best rate is
    that of any prompt of up to `most` tokens.
    """
    if most < 1 or not 0.0 < share <= 1.0:
        raise ValueError(
            f"there is no length of up to {most} tokens with a share of {share:g} of the best rate"
        )
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
