"""Numbers to draw by."""

from collections import Counter

import pytest

from support.routed import load, pools, request
from twofold.scheduling.routers.draws import drawn, scrambled, two_of


def test_draws_depend_on_the_request_only():
    assert drawn(request("a")) == drawn(request("a", prompt=5))
    assert len({drawn(request(str(number))) for number in range(1000)}) == 1000


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_draws_two_distinct_members_evenly(size):
    pool = pools(*(load(f"p{number}") for number in range(size))).prefill
    pairs = [two_of(pool, scrambled(turn)) for turn in range(1, 2001)]
    assert all(len({first.id, second.id}) == min(size, 2) for first, second in pairs)
    for place in (0, 1):
        counts = Counter(pair[place].id for pair in pairs)
        assert len(counts) == size
        assert min(counts.values()) > 0.7 * 2000 / size


def test_draws_nothing_from_an_empty_pool():
    assert two_of(pools().prefill, 7) is None
