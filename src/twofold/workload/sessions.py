"""The workload `agent`: sessions of many turns.

It has the distributions that NVIDIA publishes with AIPerf's generator of coding agents
(`agentic_code_gen/configs/default.json`, AIPerf 0.13): every session begins with the same instructions and tools and
with its own files, each turn adds the output of tools or a message of the user, and a session ends with its context.
Lengths are lognormal, given by mean and median, up to a maximum.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import repeat
from math import inf, log, sqrt
from typing import Final, NamedTuple

from numpy.random import Generator

from twofold.request import Request
from twofold.workload.distributions import RandomStream, generator


class Lognormal(NamedTuple):
    """Lognormal distribution, cut off at `most`."""

    mean: float
    median: float
    most: float = inf

    def draw(self, random: Generator) -> float:
        while True:
            drawn = random.lognormal(log(self.median), sqrt(2 * log(self.mean / self.median)))
            if drawn <= self.most:
                return float(drawn)


SHARED_TOKENS: Final = 32_000  # instructions and tools
FILES: Final = Lognormal(15_000, 5_000, 30_000)  # tokens at the beginning of a session
NEW: Final = Lognormal(6_000, 6_000, 10_000)  # tokens of a turn
OUTPUT: Final = Lognormal(1_000, 1_000, 1_500)  # tokens
TOOL_SHARE: Final = 0.7  # of the turns that a tool answers, not the user
TOOL_S: Final = Lognormal(2.5, 1.8, 10.0)
USER_S: Final = Lognormal(40.0, 25.0, 120.0)
CONTEXT: Final = 167_000  # tokens of the longest prompt
_SAMPLED: Final = 1000  # sessions


def agent_turns(starts_s: Iterable[float], seed: int) -> Iterator[Request]:
    """Yield the turns of agents' sessions, session by session; `starts_s` are the arrivals of their first turns."""
    random = generator(seed, RandomStream.SESSIONS)
    for number, start_s in enumerate(starts_s):
        yield from _turns(f"session-{number}", start_s, random)


@cache
def mean_turns() -> float:
    """Return the mean number of turns of an agent's session."""
    return sum(1 for _ in agent_turns(repeat(0.0, _SAMPLED), 0)) / _SAMPLED


def _turns(session: str, start_s: float, random: Generator) -> Iterator[Request]:
    prompt, turn, think_s = SHARED_TOKENS + round(FILES.draw(random) + NEW.draw(random)), 0, 0.0
    while prompt <= CONTEXT:
        output = round(OUTPUT.draw(random))
        yield Request(
            id=f"{session}-{turn}",
            arrival_s=start_s,
            prompt_tokens=prompt,
            output_tokens=output,
            session=session,
            think_s=think_s,
            shared_tokens=SHARED_TOKENS,
        )
        prompt, turn = prompt + output + round(NEW.draw(random)), turn + 1
        think_s = (TOOL_S if random.random() < TOOL_SHARE else USER_S).draw(random)
