"""Do long simulations agree with the queueing formulas, and where do tensor and pipeline parallelism cross?

    python bench/distserve/queueing.py [--requests 300000] [--prefill-ms 72.149] [--speedup 1.5] [--seed 0]

Prompts of one length arrive at random at one prefill instance that takes `--prefill-ms` for each: alone, as a
pipeline of two equal stages, or with two accelerators in tensor parallelism that make it `--speedup` times quicker.
The first table compares mean TTFT with the formulas of twofold.performance.queueing, and says how far chance alone
may move it. The crossover is searched by bisection over the rate, with the same arrivals on both sides of each
comparison."""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from twofold.hardware.catalog import load_catalog
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model
from twofold.instance import Role
from twofold.performance.base import DecodeCost, ModelError, PerformanceModel
from twofold.performance.queueing import crossover_rate, one_instance_s, pipeline_s, tensor_s
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.request import Request
from twofold.simulation.simulate import simulate
from twofold.simulation.spec import ClusterSpec, PoolSpec

PROMPT = 512
RATES = (2.0, 5.0, 8.0, 10.0)
SHAPES = {"one instance": (1, 1), "pipeline of 2": (1, 2), "tensor of 2": (2, 1)}
_NAME = "constant"


class Constant(PerformanceModel):
    """A prompt takes what it takes; nothing is decoded."""

    def __init__(self, prefill_s: float) -> None:
        self.name = f"{prefill_s * 1e3:g} ms"
        self.error = ModelError(prefill=None, decode=None, basis="given")
        self._prefill_s = prefill_s

    def prefill_s(self, tokens: int, squares: int) -> float:  # noqa: ARG002
        return self._prefill_s

    def decode_cost(self, sequences: int) -> DecodeCost:  # noqa: ARG002
        return DecodeCost(self._prefill_s, 0.0)

    def mixed_s(self, tokens: int, squares: int, sequences: int, context: int) -> float:  # noqa: ARG002
        return self._prefill_s

    def uncontended(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:  # noqa: ARG002
        return self._prefill_s, self._prefill_s

    @property
    def idle_w(self) -> float:
        return 0.0

    def prefill_w(self, tokens: int) -> float:  # noqa: ARG002
        return 0.0

    def decode_w(self, sequences: int) -> float:  # noqa: ARG002
        return 0.0


class Queue:
    """One prefill instance; `mean_s` is what its requests wait for their first token on average."""

    def __init__(self, prefill_s: float, speedup: float, requests: int, seed: int) -> None:
        def constant(model: Model, machine: Machine, tensor_parallel: int) -> PerformanceModel:  # noqa: ARG001
            return Constant(prefill_s / (speedup if tensor_parallel == 2 else 1.0))

        PERFORMANCE_MODELS[_NAME] = constant
        gaps = np.random.default_rng(seed).exponential(size=requests)
        self._gaps = gaps / gaps.mean()  # so that the rate is what it is said to be

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
        spec = ClusterSpec(pools=pools, model="opt-13b", performance=_NAME, router="jsq", token_budget=PROMPT)
        result = simulate(spec, self._arrivals(rate), catalog=load_catalog(), series=False)
        mean_s = result.ttft_s.mean
        assert mean_s is not None  # noqa: S101  (requests were made; tells the type checker)
        return mean_s

    def _arrivals(self, rate: float) -> Iterator[Request]:
        at_s = 0.0
        for number, gap in enumerate(self._gaps):
            at_s += float(gap) / rate
            yield Request(id=str(number), arrival_s=at_s, prompt_tokens=PROMPT, output_tokens=1)


def chance(rate: float, stage_s: float, mean_s: float, requests: int) -> float:
    """Relative standard error of a mean TTFT over so many requests of an M/D/1 queue, whose rate is off by chance too.

    Waits that follow each other are alike: in heavy traffic (reflected Brownian motion) their mean has the variance of
    one wait times 1 / (1 − load)² / requests.
    """
    load = rate * stage_s
    wait_s = load * stage_s / (2 * (1 - load))
    variance = wait_s**2 + rate * stage_s**3 / (3 * (1 - load))
    return math.sqrt(variance / requests) / (1 - load) / mean_s


def crossover(queue: Queue, low: float, high: float) -> float:
    """The rate at which pipeline and tensor parallelism have the same mean TTFT."""
    while high - low > 1e-3:
        rate = (low + high) / 2
        if queue.mean_s(SHAPES["tensor of 2"], rate) < queue.mean_s(SHAPES["pipeline of 2"], rate):
            low = rate
        else:
            high = rate
    return (low + high) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--prefill-ms", type=float, default=72.149)
    parser.add_argument("--speedup", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prefill_s: float = args.prefill_ms / 1e3
    speedup: float = args.speedup
    formulas: dict[str, tuple[Callable[[float], float], float]] = {
        "one instance": (lambda rate: one_instance_s(rate, prefill_s), prefill_s),
        "pipeline of 2": (lambda rate: pipeline_s(rate, prefill_s), prefill_s / 2),
        "tensor of 2": (lambda rate: tensor_s(rate, prefill_s, speedup), prefill_s / speedup),
    }
    queue = Queue(prefill_s, speedup, args.requests, args.seed)
    table = Table(title=f"mean TTFT, D = {args.prefill_ms:g} ms, {args.requests:,} requests")
    for column in ("instance", "requests/s", "formula ms", "simulated ms", "difference", "chance up to"):
        table.add_column(column, justify="left" if column == "instance" else "right")
    worst = 0.0
    for name, (formula, stage_s) in formulas.items():
        for rate in RATES:
            expected_s, found_s = formula(rate), queue.mean_s(SHAPES[name], rate)
            off = found_s / expected_s - 1
            worst = max(worst, abs(off))
            table.add_row(
                name,
                f"{rate:g}",
                f"{expected_s * 1e3:.3f}",
                f"{found_s * 1e3:.3f}",
                f"{off:+.3%}",
                f"{chance(rate, stage_s, expected_s, args.requests):.2%}",
            )
    console = Console()
    console.print(table)
    console.print(f"largest difference {worst:.3%}")
    expected = crossover_rate(prefill_s, speedup)
    if expected:
        few = Queue(prefill_s, speedup, args.requests // 3, args.seed)
        found = crossover(few, 0.8 * expected, 1.2 * expected)
        console.print(
            f"crossover of tensor and pipeline: formula {expected:.3f} requests/s, simulated {found:.3f} "
            f"({found / expected - 1:+.2%})"
        )


if __name__ == "__main__":
    main()
