"""Lengths of the requests of the silicon sample's benchmarks; peers.py has only the standard library to read them."""

import random
from collections.abc import Iterator

SHORTEST = 0.8  # of the length that the benchmark names: it draws lengths uniformly from there
ROUNDS = 10  # requests of each client in the benchmark
SIMULATED_ROUNDS = 4  # of which the middle ones stand for all between the first and the last


def rounds(clients: int, most: int) -> int:
    """Return the rounds to simulate: all, or fewer if they have more than `most` requests."""
    return ROUNDS if ROUNDS * clients <= most else SIMULATED_ROUNDS


def drawn_lengths(row_id: str, isl: int, osl: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the prompt and output tokens of `count` requests."""
    stream = random.Random(row_id)
    for _ in range(count):
        prompt, output = (stream.randint(max(1, round(SHORTEST * most)), most) for most in (isl, osl))
        yield prompt, output
