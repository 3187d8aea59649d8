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
"""

import math

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
    stages, and so better at every rate. Equations 2 and 3 are equal where x = R·D is a root of

        (n − K + 2n(K − 1))·x² − (n² − K² + 2n(K − 1)(K + n))·x + 2n²K(K − 1) = 0

    of which the smaller one is below K, where both queues are stable.
    """
    n, k = stages, speedup
    pipeline_s(0.0, prefill_s, n)  # what cannot be is refused there
    tensor_s(0.0, prefill_s, k)
    if k >= n:
        return None
    if k <= 1:
        return 0.0
    a = n - k + 2 * n * (k - 1)
    b = n * n - k * k + 2 * n * (k - 1) * (k + n)
    c = 2 * n * n * k * (k - 1)
    return (b - math.sqrt(b * b - 4 * a * c)) / (2 * a) / prefill_s


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


def why(rate: float, choices: dict[str, PerformanceModel], prompt_tokens: int) -> str:
    """Which of some instances has the lowest mean TTFT at a rate, as a sentence for people."""
    mean: dict[str, float] = {
        name: mean_ttft_s(rate, *stage_times(model, prompt_tokens)) for name, model in choices.items()
    }
    best = min(mean, key=mean.__getitem__)
    words = ", ".join(f"{name} {_milliseconds(value)}" for name, value in mean.items())
    return f"at {rate:g} requests/s of {prompt_tokens:,} tokens {best}: mean TTFT is {words}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < math.inf else "without bound"
