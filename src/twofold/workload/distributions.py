"""Randomness of generated workloads: one independent stream for each thing that is drawn.

Apart, they do not disturb each other: another arrival process leaves the lengths of a seed as they are.

Arrival processes: when requests arrive, as endless streams of seconds from 0 on, drawn as they are needed.

A replayed trace has times of its own and needs no process; its name among the processes is `trace`.

Length distributions: how long the prompts and outputs of a service are, by quantiles of its trace.

Prompt and output lengths are drawn independently, because in the traces at hand they are close to
uncorrelated (Azure 2023: Pearson's r is 0.00 for code and -0.11 for conversation).
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
    """What is drawn; the values are part of what a seed means and do not change."""

    ARRIVALS = 0
    PROMPTS = 1
    OUTPUTS = 2


def generator(seed: int, stream: RandomStream) -> Generator:
    """The random numbers of one stream of a seed; raises ConfigurationError for a negative seed."""
    if seed < 0:
        raise ConfigurationError(f"the seed is {seed}, and seeds are whole numbers from 0 on")
    return Generator(PCG64((seed, stream)))


REPLAY = "trace"
_CHUNK = 1024  # gaps drawn at once; the numbers are the same whatever it is


class ArrivalProcess(Protocol):
    """Says when requests arrive."""

    def times(self, seed: int) -> Iterator[float]:
        """Arrival times in seconds, never decreasing, without end; the same seed gives the same times."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1/`rate` seconds, the first at 0; nothing is drawn."""

    rate: float

    def times(self, seed: int) -> Iterator[float]:  # noqa: ARG002 - a process takes a seed, also this one
        # Divided anew each time: a running sum would drift.
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

    1 is Poisson, less is burstier, more is steadier; the gaps vary by CV = 1/sqrt(burstiness). This is the
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
    """The process of that name at `rate` requests per second; raises ConfigurationError."""
    if name not in ARRIVALS:
        raise ConfigurationError(f"arrival process {name!r} is not one of {', '.join(ARRIVALS)}")
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigurationError(
            f"the rate is {rate:g}, and it takes a positive number of requests per second"
        )
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ConfigurationError(f"the burstiness is {burstiness:g}, and it takes a positive number")
    if burstiness != 1 and name != "gamma":
        raise ConfigurationError(f"a burstiness of {burstiness:g} needs gamma arrivals, not {name}")
    return ARRIVALS[name](rate, burstiness)


def _sums(seed: int, draw: Callable[[Generator], list[float]]) -> Iterator[float]:
    """Running sums of gaps, drawn a chunk at a time. The seed is checked now, not at the first gap."""
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
    """Quantiles of the prompt and output lengths of a trace, and where they come from.

    A share `probabilities[i]` of the trace's requests is at most `prompt_tokens[i]` long, and likewise for
    outputs; the first and last values are the shortest and the longest. `requests` and `requests_per_s`
    describe the trace.
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
        """Pairs (prompt tokens, output tokens) without end; the same seed gives the same pairs."""
        prompts, outputs = generator(seed, RandomStream.PROMPTS), generator(seed, RandomStream.OUTPUTS)

        def pairs() -> Iterator[tuple[int, int]]:
            while True:
                yield from zip(
                    self._draw(prompts, self.prompt_tokens),
                    self._draw(outputs, self.output_tokens),
                    strict=True,
                )

        return pairs()

    def _draw(self, random: np.random.Generator, quantiles: list[float]) -> list[int]:
        """Lengths by the inverse of the distribution, linear between the quantiles."""
        drawn = np.interp(random.random(_CHUNK), self.probabilities, quantiles)
        lengths: list[int] = np.rint(drawn).astype(np.int64).tolist()
        return lengths


def uniform_lengths(spec: str) -> LengthDistribution | None:
    """`512+64`: every prompt has 512 tokens and every output 64. None for what is not written so."""
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
    """The distribution that is kept under this name in the package, or that the name describes."""
    uniform = uniform_lengths(name)
    if uniform is not None:
        return uniform
    data = files("twofold.workload").joinpath("data", f"{name}.json").read_bytes()
    return msgspec.json.decode(data, type=LengthDistribution)
