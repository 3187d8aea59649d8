"""The verdict says in plain words what the numbers say."""

import pytest

from support.analytic_cluster import COLOCATED, SPLIT, design
from support.plans import choice, plan, split_and_colocated
from support.simulated import ESTIMATED
from twofold.planning.advice import advise
from twofold.planning.search import Objective

TOLERANCE = 0.02


def test_splitting_pays_from_a_rate_on():
    """How much within the budget, per dollar and per watt; and where it does not."""
    told = advise(split_and_colocated(break_even=9.0), TOLERANCE)
    assert told.split
    assert told.gain == pytest.approx(2.0)
    assert told.per_dollar == pytest.approx(2.0 * 380 / 278)
    assert told.per_watt == pytest.approx(2.0 * 102 / 83.5)
    assert told.text.startswith("Split: 2.00× the throughput of the best colocated design, 2.73× per dollar")
    assert "Below about 9 requests/s, a colocated design costs no more" in told.text
    assert not told.within_error


def test_splitting_does_not_pay():
    """Then the sentence begins with that."""
    told = advise(split_and_colocated(10.0, 20.0, break_even=20.0), TOLERANCE)
    assert not told.split
    assert told.text.startswith("Do not split: the best split design has 0.50× the throughput")
    assert "Below" not in told.text


def test_more_throughput_may_cost_more_money():
    """Split machines take more in all; at that rate colocated ones would be no dearer."""
    told = advise(split_and_colocated(break_even=20.0), TOLERANCE)
    assert "Without the machine budget, a colocated design" in told.text


def test_a_difference_within_the_errors_is_called_that():
    """Ten per cent of prefill and the search's two: a gain of eight says little."""
    assert advise(split_and_colocated(10.8, 10.0), TOLERANCE).within_error
    assert "within the error" in advise(split_and_colocated(10.8, 10.0), TOLERANCE).text
    assert not advise(split_and_colocated(11.3, 10.0), TOLERANCE).within_error
    unsure = plan(
        choice(design(5, 5), 12.0, error=ESTIMATED),
        choice(design(10, family=COLOCATED), 10.0, error=ESTIMATED),
    )
    assert advise(unsure, TOLERANCE).within_error


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (Objective.COST, "$278.00 per hour instead of $380.00 per hour at 20 requests/s, 27% less"),
        (Objective.POWER, "83.5 kW instead of 102.0 kW at 20 requests/s, 18% less"),
    ],
)
def test_at_a_given_rate_dollars_or_watts_are_compared(objective, words):
    """With the unit of the objective."""
    both = choice(design(5, 5), 20.0, 21.0), choice(design(10, family=COLOCATED), 20.0, 22.0)
    told = advise(plan(*both, objective=objective, rate=20.0, break_even=7.0), TOLERANCE)
    assert told.split
    assert words in told.text
    assert "Below about 7 requests/s" in told.text


def test_equal_costs_are_no_reason_to_split():
    """The simpler design wins a draw."""
    both = choice(design(5, 5), 20.0), choice(design(10, family=SPLIT_PRICE), 20.0)
    told = advise(plan(*both, objective=Objective.COST, rate=20.0, break_even=20.0), TOLERANCE)
    assert told.gain == pytest.approx(1.0)
    assert told.text.startswith("Do not split")


def test_with_one_kind_only_it_says_why():
    """The other cannot keep the SLO, or nobody asked for it."""
    alone = plan(choice(design(5, 5), 20.0), without=("fast mixed",))
    assert "no colocated design meets the SLO" in advise(alone, TOLERANCE).text
    unasked = plan(choice(design(5, 5), 20.0), families=(SPLIT,))
    assert "colocated designs were excluded" in advise(unasked, TOLERANCE).text


def test_where_it_always_pays_it_says_so():
    """No break-even was found."""
    assert "holds at all lower rates searched" in advise(split_and_colocated(), TOLERANCE).text


def _priced():
    from twofold.planning.design import Family, MachineKind

    return Family(kinds=(MachineKind(name="dgx-mean", price_per_h=27.8, tdp_w=9_000.0),), batcher="mixed")


SPLIT_PRICE = _priced()
