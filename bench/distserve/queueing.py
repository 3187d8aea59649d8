"""Check the simulated mean TTFT of tensor and pipeline parallelism against queueing formulas.

Prompts of equal length arrive at random at one prefill instance. The instance has one accelerator, a pipeline
of two equal stages, or two accelerators with tensor parallelism. With tensor parallelism, a prefill is
`--speedup` times faster than on one accelerator.

Twofold's simulator and Lindley's recursion estimate the mean TTFT. The estimates are compared with the
formulas of twofold.performance.queueing. Finally, bisection finds the rate at which tensor and pipeline
parallelism have the same mean TTFT.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.hardware.specs import Machine, Model
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.cost import DecodeCost, ModelAccuracy
from twofold.performance.queueing import crossing_rate, mean_ttft_s
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.request import Request
from twofold.simulation.simulate import simulate

PROMPT = 512
RATES = (2.0, 5.0, 8.0, 10.0)
SHAPES = {"one instance": (1, 1), "pipeline of 2": (1, 2), "tensor of 2": (2, 1)}
PARTS = 64  # independent parts of the recursion; a part's mean has eight times the standard error of the total
WITHIN = 0.005
COLUMNS = (
    "instance", "requests/s", "formula", "simulator", "recursion", "on all", "± s.e.", "simulator on all", "error",
)  # fmt: skip
_NAME = "constant"

Gaps = npt.NDArray[np.float64]
Means = Callable[[tuple[int, int], float], float]


class Constant(PerformanceModel):
    """Performance model in which every iteration takes the same time."""

    def __init__(self, prefill_s: float) -> None:
        self.name = f"{prefill_s * 1e3:g} ms"
        self.error = ModelAccuracy(prefill=None, decode=None, basis="given")
        self._prefill_s = prefill_s

    def prefill_s(self, tokens: int, squares: int) -> float:
        return self._prefill_s

    def decode_cost(self, sequences: int) -> DecodeCost:
        return DecodeCost(self._prefill_s, 0.0)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:
        return self._prefill_s

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        return self._prefill_s, self._prefill_s

    @property
    def idle_w(self) -> float:
        return 0.0

    def prefill_w(self, tokens: int) -> float:
        return 0.0

    def decode_w(self, sequences: int) -> float:
        return 0.0


class Simulator:
    """Twofold's simulator as an estimator of an instance's mean TTFT."""

    def __init__(self, prefill_s: float, speedup: float, gaps: Gaps) -> None:
        def constant(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:  # noqa: ARG001
            return Constant(prefill_s / (speedup if tensor_parallel == 2 else 1.0))

        PERFORMANCE_MODELS[_NAME] = constant
        self._gaps = gaps

    def mean_s(self, shape: tuple[int, int], rate: float) -> float:
        tensor, stages = shape
        pools = (
            PoolSpec(
                machines=1,
                machine="dgx-a100",
                role=Role.PREFILL,
                tensor_parallel=tensor,
                pipeline_parallel=stages,
                instances=1,
            ),
            PoolSpec(machines=1, machine="dgx-a100", role=Role.DECODE),
        )
        spec = ClusterSpec(pools=pools, model="opt-13b", performance=_NAME, router="jsq", max_num_batched_tokens=PROMPT)
        result = simulate(spec, self._arrivals(rate), catalog=load_catalog(), series=False)
        mean_s = result.ttft_s.mean
        assert mean_s is not None  # noqa: S101  (requests were made; for the type checker)
        return mean_s

    def _arrivals(self, rate: float) -> Iterator[Request]:
        at_s = 0.0
        for number, gap in enumerate(self._gaps):
            at_s += float(gap) / rate
            yield Request(id=str(number), arrival_s=at_s, prompt_tokens=PROMPT, output_tokens=1)


class Recursion:
    """Estimator of an instance's mean TTFT by Lindley's recursion at each pipeline stage."""

    def __init__(self, prefill_s: float, speedup: float, gaps: Gaps) -> None:
        self._prefill_s, self._speedup, self._gaps = prefill_s, speedup, gaps

    def mean_s(self, shape: tuple[int, int], rate: float) -> float:
        tensor, stages = shape
        stage_s = self._prefill_s / (self._speedup if tensor == 2 else 1.0) / stages
        gaps, total_s = self._gaps / rate, 0.0
        for _ in range(stages):
            waits = waiting_s(gaps, stage_s)
            total_s += float(waits.mean()) + stage_s
            gaps = gaps + np.diff(waits, prepend=0.0)  # gaps between completions of this stage
        return total_s


def waiting_s(gaps: Gaps, service_s: float) -> Gaps:
    """Return each request's waiting time in seconds by Lindley's recursion: W' = max(0, W + service − gap)."""
    walk = np.cumsum(service_s - gaps)
    return walk - np.minimum.accumulate(walk)


def arrivals(generator: np.random.Generator, requests: int) -> Gaps:
    """Return the gaps between Poisson arrivals, scaled to a mean of exactly 1."""
    gaps = generator.exponential(size=requests)
    found: Gaps = gaps / gaps.mean()
    return found


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean of independent estimates and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))


def crossover(mean_s: Means, low: float, high: float) -> float:
    """Return the rate between `low` and `high` at which tensor and pipeline parallelism have equal mean TTFT."""
    while high - low > 1e-3:
        rate = (low + high) / 2
        if mean_s(SHAPES["tensor of 2"], rate) < mean_s(SHAPES["pipeline of 2"], rate):
            low = rate
        else:
            high = rate
    return (low + high) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--recursion", type=int, default=200_000 * PARTS)
    parser.add_argument("--prefill-ms", type=float, default=72.149)
    parser.add_argument("--speedup", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prefill_s: float = args.prefill_ms / 1e3
    speedup: float = args.speedup
    # Seconds in all stages and in the slowest: equations 1 to 3 of DistServe.
    times = {
        "one instance": (prefill_s, prefill_s),
        "pipeline of 2": (prefill_s, prefill_s / 2),
        "tensor of 2": (prefill_s / speedup, prefill_s / speedup),
    }
    generator = np.random.default_rng(args.seed)
    few = arrivals(generator, args.requests)
    simulator, same = Simulator(prefill_s, speedup, few), Recursion(prefill_s, speedup, few)
    parts = [Recursion(prefill_s, speedup, arrivals(generator, args.recursion // PARTS)) for _ in range(PARTS)]
    table = Table(
        title=f"mean TTFT in ms, D = {args.prefill_ms:g} ms: simulator and recursion on the same {args.requests:,} "
        f"arrivals, recursion on {args.recursion:,}"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "instance" else "right")
    worst = apart = 0.0
    for name, (latency_s, stage_s) in times.items():
        for rate in RATES:
            shape = SHAPES[name]
            expected_s = mean_ttft_s(rate, latency_s, stage_s)
            found_s, same_s = simulator.mean_s(shape, rate), same.mean_s(shape, rate)
            all_s, error_s = mean_and_error([each.mean_s(shape, rate) for each in parts])
            corrected_s = found_s + (all_s - same_s)
            off = corrected_s / expected_s - 1
            worst, apart = max(worst, abs(off)), max(apart, abs(found_s - same_s))
            table.add_row(
                name,
                f"{rate:g}",
                *(f"{value * 1e3:.3f}" for value in (expected_s, found_s, same_s, all_s, error_s, corrected_s)),
                f"{off:+.3%}",
            )
    console = Console(width=150)
    console.print(table)
    console.print(f"simulator and recursion are at most {apart * 1e6:.1f} µs apart on equal arrivals")
    verdict = "within" if worst <= WITHIN else "NOT within"
    console.print(f"largest difference from the formulas {worst:.3%} ({verdict} {WITHIN:.1%})")
    expected = crossing_rate(times["tensor of 2"], times["pipeline of 2"])
    if expected:
        low, high = 0.8 * expected, min(1.2 * expected, 0.999 * speedup / prefill_s)
        rate, error = mean_and_error([crossover(each.mean_s, low, high) for each in parts])
        console.print(
            f"crossover of tensor and pipeline: formula {expected:.3f} requests/s, recursion {rate:.3f} ± {error:.3f} "
            f"({rate / expected - 1:+.2%}); on the same {args.requests:,} arrivals simulator "
            f"{crossover(simulator.mean_s, low, high):.3f}, recursion {crossover(same.mean_s, low, high):.3f}"
        )


if __name__ == "__main__":
    main()
