"""Candidate placements (instance counts and parallelism of each phase): completeness and order."""

import math

from hypothesis import given
from hypothesis import strategies as st

from support.analytic_placement import kind
from twofold.planning.design import Design, Family
from twofold.planning.placement.candidates import PhaseGoodput, balanced, replicated
from twofold.request import Phase

RATES = st.floats(0.1, 20.0)
DEGREES = st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])


def of(phase, degrees, rate):
    return PhaseGoodput(kind=kind(*degrees), phase=phase, rate=rate)


@given(DEGREES, RATES, DEGREES, RATES, st.integers(2, 24))
def test_the_first_candidate_has_the_highest_predicted_goodput(prefill, takes, decode, others, most):
    one, other = of(Phase.PREFILL, prefill, takes), of(Phase.DECODE, decode, others)
    found = balanced([one], [other], most)
    best = max(
        (
            min(count * takes, more * others) / (count * one.kind.accelerators + more * other.kind.accelerators)
            for count in range(1, most)
            for more in range(1, most)
            if count * one.kind.accelerators + more * other.kind.accelerators <= most
        ),
        default=None,
    )
    assert bool(found) == (best is not None)
    if found:
        assert math.isclose(found[0].per_accelerator, best, rel_tol=1e-6)
        assert all(each.design.accelerators <= most for each in found)


def test_larger_candidates_win_ties():
    found = balanced([of(Phase.PREFILL, (1, 1), 2.0)], [of(Phase.DECODE, (1, 1), 2.0)], 6)
    assert [each.design.counts for each in found[:3]] == [(3, 3), (2, 2), (1, 1)]


def test_candidates_on_shared_nodes_must_fit():
    one, other = of(Phase.PREFILL, (1, 2), 2.0), of(Phase.DECODE, (1, 2), 1.0)
    found = balanced([one], [other, of(Phase.DECODE, (1, 1), 3.0)], 16, node=2)
    assert [each.design for each in found] == [
        Design(family=Family(kinds=(one.kind, other.kind), shared=True), counts=(1, 1))
    ]


def test_replicates_by_rate_over_goodput():
    """Each phase gets ⌈rate / goodput of one instance⌉ instances."""
    wide, narrow = of(Phase.PREFILL, (4, 1), 9.0), of(Phase.PREFILL, (1, 1), 2.0)
    decode = of(Phase.DECODE, (1, 1), 4.0)
    found = replicated([wide, narrow], [decode], 10.0, 99)
    family = Family(kinds=(narrow.kind, decode.kind))
    assert found[0].design == Design(family=family, counts=(5, 3))
    assert found[0].rate == 10.0
    assert found[1].design.counts == (2, 3)
