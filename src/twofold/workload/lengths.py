"""Length distributions: how long the prompts and outputs of a service are, by quantiles of its trace.

Prompt and output lengths are drawn independently, because in the traces at hand they are close to
uncorrelated (Azure 2023: Pearson's r is 0.00 for code and -0.11 for conversation).
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import msgspec
import numpy as np

from twofold.workload.seeds import Stream, generator

_UNIFORM = re.compile(r"([1-9]\d{0,6})\+([1-9]\d{0,6})")
_CHUNK = 1024  # requests drawn at once; the numbers are the same whatever it is


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
        prompts, outputs = generator(seed, Stream.PROMPTS), generator(seed, Stream.OUTPUTS)

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
