"""CPU seconds, and a plain loop to hold them against: machines differ, and its turns are what they have in common."""

import time
from collections.abc import Callable

TURNS = 1_000_000


def cpu_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def loop() -> int:
    """A million turns of a plain loop."""
    total = 0
    for number in range(TURNS):
        total += number & 7
    return total
