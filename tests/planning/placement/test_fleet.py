"""Division of machines of several types between prefill and decode."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from support.analytic_placement import kind
from twofold.instance import Role
from twofold.planning.placement.candidates import PhaseGoodput, divided
from twofold.request import Phase

RATES = st.floats(0.5, 9.0)
SLOW, FAST = (kind(1, name="slow"), kind(2, name="slow")), (kind(1, name="fast"), kind(2, name="fast"))


def goodputs(phase, rates):
    return [PhaseGoodput(kind=one, phase=phase, rate=rate) for one, rate in zip(SLOW + FAST, rates, strict=True)]


def fits(ways, stock):
    return ways[0] + 2 * ways[1] + ways[2] + 2 * ways[3] <= stock


def taken(rates, chosen):
    return sum(rate * count for rate, count in zip(rates, chosen, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(RATES, min_size=4, max_size=4),
    st.lists(RATES, min_size=4, max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_division_is_optimal(prefill, decode, slow, fast):
    # Numbers of (prefill TP1, TP2, decode TP1, TP2) instances that fit on the accelerators of each machine type.
    of_slow, of_fast = (
        [ways for ways in product(range(5), range(3), range(5), range(3)) if fits(ways, stock)]
        for stock in (slow, fast)
    )
    best = max(
        min(taken(prefill, one[:2] + other[:2]), taken(decode, one[2:] + other[2:]))
        for one in of_slow
        for other in of_fast
    )
    found = divided({"slow": slow, "fast": fast}, goodputs(Phase.PREFILL, prefill), goodputs(Phase.DECODE, decode), 4)
    assert abs(found[0].rate - best) < 1e-6
    for candidate in found:
        used = {"slow": 0, "fast": 0}
        for part, count in candidate.design.parts():
            used[part.name] += part.accelerators * count
        assert used["slow"] <= slow
        assert used["fast"] <= fast


def test_assigns_accelerators_to_their_better_phase():
    found = divided(
        {"slow": 2, "fast": 2},
        goodputs(Phase.PREFILL, (1.0, 1.0, 4.0, 4.0)),
        goodputs(Phase.DECODE, (4.0, 4.0, 4.0, 4.0)),
        1,
    )
    design = found[0].design
    assert [part.name for part, _ in design.parts_of(Role.PREFILL)] == ["fast"]
    assert [part.name for part, _ in design.parts_of(Role.DECODE)] == ["slow"]
    assert found[0].rate == 8.0


def test_is_empty_without_decode_instances():
    assert divided({"slow": 4}, goodputs(Phase.PREFILL, (1.0, 1.0, 1.0, 1.0)), [], 4) == []
