"""Advice on whether to serve with a split or a colocated design."""

import pytest
from msgspec.structs import replace

from support.analytic_cluster import COLOCATED, SPLIT, design
from support.plans import choice, plan, split_and_colocated
from support.simulated import ESTIMATED
from twofold.planning.advice import advise
from twofold.planning.promise import Promise
from twofold.planning.search import Objective

TOLERANCE = 0.02


def test_reports_gain_and_break_even_rate():
    told = advise(split_and_colocated(break_even=9.0), TOLERANCE)
    assert told.split
    assert told.gain == pytest.approx(2.0)
    assert told.per_dollar == pytest.approx(2.0 * 380 / 278)
    assert told.per_watt == pytest.approx(2.0 * 102 / 83.5)
    assert told.text.startswith("Split: 2.00× the throughput of the best colocated design, 2.73× per dollar")
    assert "Below about 9 requests/s, a colocated design costs no more" in told.text
    assert not told.within_error


def test_advises_against_splitting():
    told = advise(split_and_colocated(10.0, 20.0, break_even=20.0), TOLERANCE)
    assert not told.split
    assert told.text.startswith("Do not split: 2.00× the throughput of the best split design")
    assert "Below" not in told.text


def test_reports_that_colocated_designs_cost_no_more_without_the_budget():
    told = advise(split_and_colocated(break_even=20.0), TOLERANCE)
    assert "Without the machine budget, a colocated design" in told.text


def test_flags_differences_within_the_error():
    assert advise(split_and_colocated(10.8, 10.0), TOLERANCE).within_error
    assert "within the error" in advise(split_and_colocated(10.8, 10.0), TOLERANCE).text
    assert not advise(split_and_colocated(11.3, 10.0), TOLERANCE).within_error
    unsure = plan(
        choice(design(5, 5), 12.0, error=ESTIMATED), choice(design(10, family=COLOCATED), 10.0, error=ESTIMATED)
    )
    assert advise(unsure, TOLERANCE).within_error


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (Objective.COST, "$278.00 per hour instead of $380.00 per hour at 20 requests/s, 27% less"),
        (Objective.POWER, "83.5 kW instead of 102.0 kW at 20 requests/s, 18% less"),
    ],
)
def test_compares_cost_or_power_at_a_given_rate(objective, words):
    both = choice(design(5, 5), 20.0, 21.0), choice(design(10, family=COLOCATED), 20.0, 22.0)
    told = advise(plan(*both, objective=objective, rate=20.0, break_even=7.0), TOLERANCE)
    assert told.split
    assert words in told.text
    assert "Below about 7 requests/s" in told.text


def test_colocated_wins_ties():
    both = choice(design(5, 5), 20.0), choice(design(10, family=SPLIT_PRICE), 20.0)
    told = advise(plan(*both, objective=Objective.COST, rate=20.0, break_even=20.0), TOLERANCE)
    assert told.gain == pytest.approx(1.0)
    assert told.text.startswith("Do not split")


def test_explains_a_missing_kind():
    alone = plan(choice(design(5, 5), 20.0), without=("fast mixed",))
    assert "no colocated design meets the SLO" in advise(alone, TOLERANCE).text
    unasked = plan(choice(design(5, 5), 20.0), families=(SPLIT,))
    assert "colocated designs were excluded" in advise(unasked, TOLERANCE).text


def test_explains_that_one_machine_has_no_room_for_two_phases():
    alone = plan(choice(design(1, family=COLOCATED), 20.0), no_room=(SPLIT.group,))
    assert "no room for a split design: each phase needs a machine of its own" in advise(alone, TOLERANCE).text


@pytest.mark.parametrize(
    ("kept", "whole", "words"),
    [
        (20, True, "In 20 of 20 draws that the search did not use"),
        (20, True, "as does the whole trace. For the whole trace alone, it meets the SLO at 1.25× this rate."),
        (20, None, "For the draw of the search alone, it meets the SLO at 1.25× this rate."),
        (19, None, "A confidence of 95% needs more, and no design in the budget has more."),
        (20, False, "but the whole trace misses it"),
    ],
)
def test_says_in_how_many_unseen_draws_the_slo_is_met(kept, whole, words):
    promise = Promise(confidence=0.95, draws=20, kept=kept, whole=whole, optimistic="another", margin=1.25)
    one = plan(replace(choice(design(5, 5), 20.0), promise=promise))
    assert words in advise(one, TOLERANCE).text


def test_a_promise_at_no_cost_has_no_comparison():
    promise = Promise(confidence=0.95, draws=20, kept=20, optimistic="another", margin=0.98)
    told = advise(plan(replace(choice(design(5, 5), 20.0), promise=promise)), TOLERANCE)
    assert told.text.endswith("(95% interval 84% to 100%).")


def test_reports_a_missing_break_even():
    assert "holds at all lower rates searched" in advise(split_and_colocated(), TOLERANCE).text


def _priced():
    from twofold.planning.design import Family, MachineKind

    return Family(kinds=(MachineKind(name="dgx-mean", price_per_h=27.8, tdp_w=9_000.0),), batcher="mixed")


SPLIT_PRICE = _priced()
