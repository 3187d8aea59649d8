"""Arrival processes and length distributions of generated workloads.

Prompt and output lengths are independent, because they are hardly correlated in the Azure 2023 traces (Pearson's r is
0.00 for code and -0.11 for conversation).
"""

import math
import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from importlib.resources import files
from itertools import count

import msgspec
import numpy as np
from numpy.random import PCG64, Generator

from twofold.errors import require


class RandomStream(IntEnum):
    """Independent random number streams: for arrival times, prompt lengths, output lengths, and turns of sessions."""

    # The numbers are part of seeds: a changed number would change all workloads.
    ARRIVALS = 0
    PROMPTS = 1
    OUTPUTS = 2
    SESSIONS = 3


def generator(seed: int, stream: RandomStream) -> Generator:
    """Create a random generator for a seed. Raises ConfigurationError for a negative seed."""
    require(seed >= 0, f"the seed must be at least 0, not {seed}")
    return Generator(PCG64((seed, stream)))


REPLAY = "trace"
_CHUNK = 1024  # samples drawn at once; does not affect the values


def constant(rate: float) -> Iterator[float]:
    """Return arrival times at intervals of 1/`rate` seconds, starting at 0."""
    # A running sum would drift.
    return (index / rate for index in count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Return the arrival times of a Poisson process with `rate` requests per second."""
    return _sums(seed, lambda random: random.exponential(1 / rate, _CHUNK).tolist())


def gamma(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Return arrival times with gamma-distributed gaps: mean 1/`rate` seconds, shape `burstiness` (as in vLLM)."""
    scale = 1 / (rate * burstiness)
    return _sums(seed, lambda random: random.gamma(burstiness, scale, _CHUNK).tolist())


# By rate, burstiness and seed.
ARRIVALS: dict[str, Callable[[float, float, int], Iterator[float]]] = {
    "poisson": lambda rate, _, seed: poisson(rate, seed),
    "gamma": gamma,
    "constant": lambda rate, _, __: constant(rate),
}


def arrival_times(name: str, rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Return an endless iterator of arrival times in seconds. `name` is a key of `ARRIVALS`.

    `rate` is in requests per second. Raises ConfigurationError for invalid arguments.
    """
    require(name in ARRIVALS, f"arrival process {name!r} is not one of {', '.join(ARRIVALS)}")
    positive = rate > 0 and math.isfinite(rate)
    require(positive, f"the rate must be a positive number of requests per second, not {rate:g}")
    require_positive("burstiness", burstiness)
    matches = burstiness == 1 or name == "gamma"
    require(matches, f"a burstiness of {burstiness:g} needs gamma arrivals, not {name}")
    return ARRIVALS[name](rate, burstiness, seed)


def require_positive(name: str, value: float) -> None:
    """Raise ConfigurationError unless `value` is finite and above 0."""
    require(value > 0 and math.isfinite(value), f"the {name} must be a positive number, not {value:g}")


def _sums(seed: int, draw: Callable[[Generator], list[float]]) -> Iterator[float]:
    random = generator(seed, RandomStream.ARRIVALS)

    def times() -> Iterator[float]:
        now = 0.0
        while True:
            for gap in draw(random):
                now += gap
                yield now

    return times()


_UNIFORM = re.compile(r"([1-9]\d{0,6})\+([1-9]\d{0,6})")


class LengthDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of the prompt and output lengths of a trace, as quantiles.

    `prompt_tokens[i]` and `output_tokens[i]` are the quantiles for `probabilities[i]`. `requests` is the number of
    requests in the trace.
    """

    name: str
    source: str
    citation: str
    licence: str
    recorded: str
    derived: str
    requests: int
    requests_per_s: float
    probabilities: list[float]
    prompt_tokens: list[float]
    output_tokens: list[float]

    def sample(self, seed: int) -> Iterator[tuple[int, int]]:
        """Return an endless iterator of random pairs (prompt tokens, output tokens)."""
        prompts, outputs = generator(seed, RandomStream.PROMPTS), generator(seed, RandomStream.OUTPUTS)

        def pairs() -> Iterator[tuple[int, int]]:
            while True:
                yield from zip(
                    self._draw(prompts, self.prompt_tokens), self._draw(outputs, self.output_tokens), strict=True
                )

        return pairs()

    def _draw(self, random: np.random.Generator, quantiles: list[float]) -> list[int]:
        drawn = np.interp(random.random(_CHUNK), self.probabilities, quantiles)
        lengths: list[int] = np.rint(drawn).astype(np.int64).tolist()
        return lengths


def uniform_lengths(spec: str) -> LengthDistribution | None:
    """Parse fixed prompt and output lengths such as `512+64`. Return None for any other text."""
    found = _UNIFORM.fullmatch(spec)
    if found is None:
        return None
    prompt, output = (float(group) for group in found.groups())
    return LengthDistribution(
        name=spec,
        source="made up",
        citation="",
        licence="",
        recorded="",
        derived="",
        requests=0,
        requests_per_s=1.0,
        probabilities=[0.0, 1.0],
        prompt_tokens=[prompt, prompt],
        output_tokens=[output, output],
    )


@cache
def load_lengths(name: str) -> LengthDistribution:
    """Load a distribution of prompt and output lengths by name; `512+64` means 512 prompt and 64 output tokens."""
    data = files("twofold.workload").joinpath("data", f"{name}.json")
    return uniform_lengths(name) or msgspec.json.decode(data.read_bytes(), type=LengthDistribution)
