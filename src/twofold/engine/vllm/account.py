"""vLLM's own account of its blocks."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """How many there are for requests, and how many of them nobody holds, whatever is cached in them."""

    total: int
    free: int
