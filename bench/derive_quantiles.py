"""Compute the prompt and output length quantiles of a trace of the Azure Public Dataset of 2023, and write them as a
named workload to src/twofold/workload/data/NAME.json.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from twofold.workload.distributions import LengthDistribution
from twofold.workload.rescale import mean_rate
from twofold.workload.trace import open_trace

DATA = Path(__file__).parents[1] / "src" / "twofold" / "workload" / "data"
CITATION = (
    "Pratyush Patel, Esha Choukse, Chaojie Zhang, Aashaka Shah, Inigo Goiri, Saeed Maleki, "
    "Ricardo Bianchini: Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024"
)


def grid() -> npt.NDArray[np.float64]:
    """Return the probabilities at which quantiles are computed."""
    tail = 1 - np.geomspace(1e-2, 1e-4, 61)
    return np.unique(np.round(np.concatenate([np.linspace(0, 1, 401), tail]), 6))


def derive(trace: Path, name: str) -> LengthDistribution:
    """Return the distribution of prompt and output lengths of a trace file. `name` is the name of the distribution."""
    requests = list(open_trace(trace))
    shares = grid()

    def quantiles(lengths: list[int]) -> list[float]:
        values: list[float] = np.round(np.quantile(lengths, shares), 1).tolist()
        return values

    return LengthDistribution(
        name=name,
        source=f"Azure Public Dataset, Azure LLM inference trace 2023, {trace.name}",
        citation=CITATION,
        licence="CC-BY",
        recorded="2023-11-16",
        derived=f"{datetime.now(UTC):%Y-%m-%d}",
        requests=len(requests),
        requests_per_s=round(mean_rate(requests) or 0.0, 4),
        probabilities=shares.tolist(),
        prompt_tokens=quantiles([request.prompt_tokens for request in requests]),
        output_tokens=quantiles([request.output_tokens for request in requests]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("name")
    arguments = parser.parse_args()
    distribution = derive(arguments.trace, arguments.name)
    # One line per field keeps diffs small.
    fields = (
        f'  "{key}": {msgspec.json.encode(value).decode()}' for key, value in msgspec.to_builtins(distribution).items()
    )
    path = DATA / f"{arguments.name}.json"
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")
    print(f"{path}: {len(distribution.probabilities)} quantiles of {distribution.requests:,} requests")


if __name__ == "__main__":
    main()
