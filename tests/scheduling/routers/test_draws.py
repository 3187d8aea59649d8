"""Numbers to draw by."""

from collections import Counter

import pytest

from support.routed import load, pools, request
from twofold.scheduling.routers.draws import drawn, scrambled, two_of


def test_a_request_draws_the_same_number_wherever_it_is_routed():
    """And another request another one."""
    assert drawn(request("a")) == drawn(request("a", prompt=5))
    assert len({drawn(request(str(number))) for number in range(1000)}) == 1000


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_two_are_drawn_evenly_and_are_two(size):
    """Every member as often as the others, and never one beside itself where there are two."""
    pool = pools(*(load(f"p{number}") for number in range(size))).prefill
    pairs = [two_of(pool, scrambled(turn)) for turn in range(1, 2001)]
    assert all(len({first.id, second.id}) == min(size, 2) for first, second in pairs)
    for place in (0, 1):
        counts = Counter(pair[place].id for pair in pairs)
        assert len(counts) == size
        assert min(counts.values()) > 0.7 * 2000 / size


def test_nobody_is_drawn_where_there_is_nobody():
    """None, not an error."""
    assert two_of(pools().prefill, 7) is None
