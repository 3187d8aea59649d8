"""Products of large integers."""

from typing import Final

_HALF: Final = 30
_LOW: Final = (1 << _HALF) - 1


def product(large: int, small: int) -> int:
    """`large * small`, both ≥ 0, exactly.

    Compiled code multiplies at the speed of the machine as long as both factors are below 2³⁰, which picoseconds
    are not: so they are taken in two halves.
    """
    return ((large >> _HALF) * small << _HALF) + (large & _LOW) * small
