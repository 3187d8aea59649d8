"""How long a prompt must be to keep an instance busy: L_m of DistServe (sections 3.1 and 4.3)."""

from collections.abc import Callable
from typing import Final

SHARE: Final = 0.9
_STEP: Final = (
    1.02  # lengths that are tried first grow by so much; between two of them the rate is taken to rise
)


def saturating_tokens(prefill_s: Callable[[int], float], most: int, share: float = SHARE) -> int:
    """The shortest prompt, in tokens, that is computed at `share` of the best rate (tokens/s) or faster.

    A batch of prompts that is shorter takes hardly longer for one prompt more; of one that is longer the prompts only
    wait for each other. `prefill_s` is the seconds that a prompt of so many tokens takes alone, and the best rate is
    that of any prompt of up to `most` tokens.
    """
    if most < 1 or not 0.0 < share <= 1.0:
        raise ValueError(
            f"there is no length of up to {most} tokens with a share of {share:g} of the best rate"
        )
    lengths = _lengths(most)
    rates = [tokens / prefill_s(tokens) for tokens in lengths]
    enough = share * max(rates)
    place = next(place for place, rate in enumerate(rates) if rate >= enough)
    low, high = lengths[place - 1] + 1 if place else 1, lengths[place]
    while low < high:
        middle = (low + high) // 2
        if middle / prefill_s(middle) >= enough:
            high = middle
        else:
            low = middle + 1
    return high


def _lengths(most: int) -> list[int]:
    lengths, length = [], 1
    while length < most:
        lengths.append(length)
        length = max(length + 1, int(length * _STEP))
    return [*lengths, most]
