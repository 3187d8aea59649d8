"""How long outputs are when some of them have not ended yet.

Those that have ended first are the short ones; to go by them alone would be to plan for shorter outputs than there
are, most of all when a service is slow because they are long. What still runs says that its output is longer than what
there is of it. The product-limit estimate (Kaplan and Meier, 1958) uses both.
"""

from collections.abc import Sequence
from math import log


def lengths(ended: Sequence[int], running: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` output lengths in tokens, evenly spaced over the distribution that these outputs come from.

    `ended` are whole outputs, at least one; `running` the tokens so far of those that go on. Beyond what has been seen
    of any, outputs are taken to go on ending at the rate, per token, of the second half of what has.
    """
    steps, left = _survivors(sorted(ended), sorted(running))
    longest = max(steps[-1][0], max(running, default=0))
    ends_per_token = (
        _ending(ended, running, longest // 2) or _ending(ended, running, 0) or 1.0 / (longest + 1)
    )
    found: list[int] = []
    place = 0
    for number in range(count):
        share = 1.0 - (number + 0.5) / count  # of outputs that are longer than the one to be found
        while place < len(steps) and steps[place][1] > share:
            place += 1
        if place < len(steps):
            found.append(steps[place][0])
        else:
            found.append(longest + round(log(left / share) / ends_per_token))
    return tuple(found)


def _ending(ended: Sequence[int], running: Sequence[int], beyond: int) -> float:
    """Ends per token, of the tokens that come after so many."""
    made = sum(max(0, tokens - beyond) for tokens in (*ended, *running))
    return sum(tokens > beyond for tokens in ended) / made if made else 0.0


def _survivors(ended: list[int], running: list[int]) -> tuple[list[tuple[int, float]], float]:
    """The share of outputs that are longer than each length that one of them has, and than the longest of these."""
    steps: list[tuple[int, float]] = []
    left, at_risk, going, place = 1.0, len(ended) + len(running), 0, 0
    while place < len(ended):
        length, first = ended[place], place
        while going < len(running) and running[going] < length:
            going += 1
        while place < len(ended) and ended[place] == length:
            place += 1
        left *= 1.0 - (place - first) / (at_risk - first - going)
        steps.append((length, left))
    return steps, left
