"""Arrival processes: when requests arrive, as endless streams of seconds from 0 on, drawn as they are needed.

A replayed trace has times of its own and needs no process; its name among the processes is `trace`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from numpy.random import Generator

from twofold.errors import ConfigurationError
from twofold.workload.seeds import Stream, generator

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
    random = generator(seed, Stream.ARRIVALS)

    def times() -> Iterator[float]:
        now = 0.0
        while True:
            for gap in draw(random):
                now += gap
                yield now

    return times()
