"""Arrival processes and length distributions of generated workloads.

Each random quantity has its own stream, so that another arrival process leaves the lengths of a seed unchanged.
Prompt and output lengths are drawn independently: in the Azure 2023 traces Pearson's r is 0.00 for code and -0.11
for conversation.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Protocol

import msgspec
import numpy as np
from numpy.random import PCG64, Generator

from twofold.errors import ConfigurationError


class RandomStream(IntEnum):
    """Random quantities of a workload. The values are part of a seed's meaning and must not change."""

    ARRIVALS = 0
    PROMPTS = 1
    OUTPUTS = 2


def generator(seed: int, stream: RandomStream) -> Generator:
    """Create the random generator of one stream; raises ConfigurationError for a negative seed."""
    if seed < 0:
        raise ConfigurationError(f"the seed must be at least 0, not {seed}")
    return Generator(PCG64((seed, stream)))


REPLAY = "trace"
_CHUNK = 1024  # samples drawn at once; does not affect the values


class ArrivalProcess(Protocol):
    """Generates arrival times."""

    def times(self, seed: int) -> Iterator[float]:
        """Infinite non-decreasing arrival times in seconds; equal seeds give equal times."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/`rate` seconds, the first at 0."""

    rate: float

    def times(self, seed: int) -> Iterator[float]:
        # A running sum would drift.
        return (index / self.rate for index in count())


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent, exponentially distributed gaps with a mean of 1/`rate` seconds."""

    rate: float

    def times(self, seed: int) -> Iterator[float]:
        return _sums(seed, lambda random: random.exponential(1 / self.rate, _CHUNK).tolist())


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma distributed gaps with a mean of 1/`rate` seconds and the shape `burstiness`.

    1 is Poisson, smaller values are burstier; the coefficient of variation of the gaps is 1/sqrt(burstiness). Same as
    `--burstiness` of vLLM's serving benchmark.
    """

    rate: float
    burstiness: float

    def times(self, seed: int) -> Iterator[float]:
        scale = 1 / (self.rate * self.burstiness)
        return _sums(seed, lambda random: random.gamma(self.burstiness, scale, _CHUNK).tolist())


ARRIVALS: dict[str, Callable[[float, float], ArrivalProcess]] = {
    "poisson": lambda rate, _: Poisson(rate),
    "gamma": Gamma,
    "constant": lambda rate, _: Constant(rate),
}


def arrival_process(name: str, rate: float, burstiness: float = 1.0) -> ArrivalProcess:
    """Create the process of that name at `rate` requests per second; raises ConfigurationError."""
    if name not in ARRIVALS:
        raise ConfigurationError(f"arrival process {name!r} is not one of {', '.join(ARRIVALS)}")
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigurationError(f"the rate must be a positive number of requests per second, not {rate:g}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ConfigurationError(f"the burstiness must be a positive number, not {burstiness:g}")
    if burstiness != 1 and name != "gamma":
        raise ConfigurationError(f"a burstiness of {burstiness:g} needs gamma arrivals, not {name}")
    return ARRIVALS[name](rate, burstiness)


def _sums(seed: int, draw: Callable[[Generator], list[float]]) -> Iterator[float]:
    """Cumulative sums of gaps, drawn in chunks. A bad seed raises immediately, not at the first gap."""
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
    """Quantiles of the prompt and output lengths of a trace, and their source.

    A share `probabilities[i]` of the trace's requests is at most `prompt_tokens[i]` long, likewise for outputs; the
    first and last values are the minimum and the maximum. `requests` and `requests_per_s` describe the trace.
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
        """Infinite pairs (prompt tokens, output tokens); equal seeds give equal pairs."""
        prompts, outputs = generator(seed, RandomStream.PROMPTS), generator(seed, RandomStream.OUTPUTS)

        def pairs() -> Iterator[tuple[int, int]]:
            while True:
                yield from zip(
                    self._draw(prompts, self.prompt_tokens), self._draw(outputs, self.output_tokens), strict=True
                )

        return pairs()

    def _draw(self, random: np.random.Generator, quantiles: list[float]) -> list[int]:
        """Sample by inverse transform with linear interpolation between quantiles."""
        drawn = np.interp(random.random(_CHUNK), self.probabilities, quantiles)
        lengths: list[int] = np.rint(drawn).astype(np.int64).tolist()
        return lengths


def uniform_lengths(spec: str) -> LengthDistribution | None:
    """Parse fixed lengths such as `512+64` (prompt and output tokens); None if `spec` has another form."""
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
    """Load a distribution of the package by name, or parse fixed lengths."""
    uniform = uniform_lengths(name)
    if uniform is not None:
        return uniform
    data = files("twofold.workload").joinpath("data", f"{name}.json").read_bytes()
    return msgspec.json.decode(data, type=LengthDistribution)
