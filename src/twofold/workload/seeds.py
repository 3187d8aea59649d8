"""Randomness of generated workloads: one independent stream for each thing that is drawn.

Apart, they do not disturb each other: another arrival process leaves the lengths of a seed as they are.
"""

from enum import IntEnum

from numpy.random import PCG64, Generator

from twofold.errors import ConfigurationError


class Stream(IntEnum):
    """What is drawn; the values are part of what a seed means and do not change."""

    ARRIVALS = 0
    PROMPTS = 1
    OUTPUTS = 2


def generator(seed: int, stream: Stream) -> Generator:
    """The random numbers of one stream of a seed; raises ConfigurationError for a negative seed."""
    if seed < 0:
        raise ConfigurationError(f"the seed is {seed}, and seeds are whole numbers from 0 on")
    return Generator(PCG64((seed, stream)))
