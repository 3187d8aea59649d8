"""Write length distributions of DistServe's three applications as workload files.

The paper (OSDI'24, figure 7) gives mean prompt and output lengths of ShareGPT (chat), HumanEval (code) and
LongBench (summaries). This script writes log-normal distributions with the paper's means and an assumed
coefficient of variation. Lengths are clipped to 2,048 tokens, the context length of the paper's OPT models.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np

from twofold.request import Request
from twofold.workload.distributions import LengthDistribution

DATA = Path(__file__).parents[2] / "src" / "twofold" / "workload" / "data"
LONGEST = 2048
STEPS = 400
REQUESTS = 20_000  # of a trace with another spread


class Application(msgspec.Struct, frozen=True):
    """One application of DistServe; `prompt` and `output` are (mean, coefficient of variation) of token counts."""

    name: str
    data_set: str
    prompt: tuple[float, float]
    output: tuple[float, float]


APPLICATIONS = (
    Application("distserve-chat", "ShareGPT", (755.5, 0.9), (200.3, 0.9)),
    Application("distserve-code", "HumanEval", (171.3, 0.45), (98.2, 0.8)),
    Application("distserve-summaries", "LongBench", (1738.3, 0.2), (90.7, 1.0)),
)


def quantiles(mean: float, variation: float, shares: list[float]) -> list[float]:
    """Return quantiles of a log-normal distribution clipped to `LONGEST` tokens. The mean after clipping is `mean`."""
    low, high = 0.1 * mean, 10.0 * mean
    for _ in range(60):
        middle = (low + high) / 2
        values = _cut(middle, variation, shares)
        average = sum((a + b) / 2 for a, b in pairwise(values)) / (len(values) - 1)
        low, high = (middle, high) if average < mean else (low, middle)
    return _cut(low, variation, shares)


def _cut(mean: float, variation: float, shares: list[float]) -> list[float]:
    spread = math.sqrt(math.log1p(variation * variation))
    normal = NormalDist(math.log(mean) - spread * spread / 2, spread)
    inner = [normal.inv_cdf(min(max(share, 0.5 / STEPS), 1.0 - 0.5 / STEPS)) for share in shares]
    return [round(min(max(math.exp(each), 1.0), LONGEST), 1) for each in inner]


def with_spread(name: str, variation: float) -> Iterator[Request]:
    """Yield requests of an application, one a second, with the given coefficient of variation of the prompts."""
    (one,) = (each for each in APPLICATIONS if each.name == name)
    shares = [step / STEPS for step in range(STEPS + 1)]
    prompts, outputs = quantiles(one.prompt[0], variation, shares), quantiles(*one.output, shares)
    random = np.random.default_rng(0)
    for number, (prompt, output) in enumerate(random.random((REQUESTS, 2))):
        yield Request(
            id=str(number),
            arrival_s=float(number),
            prompt_tokens=max(1, round(np.interp(prompt, shares, prompts))),
            output_tokens=max(1, round(np.interp(output, shares, outputs))),
        )


def main() -> None:
    shares = [step / STEPS for step in range(STEPS + 1)]
    for one in APPLICATIONS:
        distribution = LengthDistribution(
            name=one.name,
            source=f"log-normal with the means of {one.data_set} in figure 7 of the paper; spread assumed",
            citation="Yinmin Zhong et al.: DistServe, OSDI 2024 (arXiv 2401.09670)",
            licence="none needed: only means were used",
            recorded="2024",
            derived="2026-11-22",
            requests=0,
            requests_per_s=1.0,
            probabilities=shares,
            prompt_tokens=quantiles(*one.prompt, shares),
            output_tokens=quantiles(*one.output, shares),
        )
        fields = (
            f'  "{name}": {msgspec.json.encode(value).decode()}'
            for name, value in msgspec.to_builtins(distribution).items()
        )
        (DATA / f"{one.name}.json").write_text("{\n" + ",\n".join(fields) + "\n}\n")


if __name__ == "__main__":
    main()
