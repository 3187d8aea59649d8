"""The plan: the best design of every family, which of them to take, and when not to split at all."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from twofold.planning.break_even import break_even
from twofold.planning.budget import Budget, frontier
from twofold.planning.cheapest import cheapest
from twofold.planning.design import Design, Family
from twofold.planning.evaluation import Evaluation, Trial
from twofold.planning.mistakes import require_room, unmet
from twofold.planning.objective import Objective
from twofold.planning.rates import Capacity, RateSearch
from twofold.planning.throughput import most_throughput


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to plan: `rate` requests per second are given for cost and power, and sought for throughput."""

    objective: Objective
    families: tuple[Family, ...]
    budget: Budget = Budget()
    rate: float | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The best design of a family.

    It was judged at `rate`, as `evaluation` says: the rate that was given, else the highest it takes. `highest_rate` is
    the latter in both cases.
    """

    design: Design
    rate: float
    highest_rate: float
    evaluation: Evaluation

    @property
    def requests_per_dollar(self) -> float:
        return 3600 * self.highest_rate / self.design.price_per_h

    @property
    def requests_per_kwh(self) -> float:
        """Of provisioned power."""
        return 3.6e6 * self.highest_rate / self.design.tdp_w


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`choices` are the best of each family that can keep the SLO, best first; `without` names those that cannot.

    `break_even` is the rate, about, at or below which some colocated design costs no more than any split one. It is
    the rate of the plan itself where splitting does not pay even there, and None where splitting pays as far
    down as was looked, or where not both kinds can keep the SLO.
    """

    question: Question
    choices: tuple[Choice, ...]
    without: tuple[str, ...]
    break_even: float | None

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def best_split(self) -> Choice | None:
        return next((choice for choice in self.choices if choice.design.family.split), None)

    @property
    def best_colocated(self) -> Choice | None:
        return next((choice for choice in self.choices if not choice.design.family.split), None)


Found = Callable[[Choice], None]


async def make_plan(search: RateSearch, question: Question, found: Found = lambda _: None) -> Plan:
    """Search all families at once; `found` is told of the best of each as it becomes known.

    Raises ConfigurationError where the budget holds no design and where no design can keep the SLO.
    """
    bounded = question.objective is Objective.THROUGHPUT
    require_room(question.families, question.budget, bounded=bounded)
    families = question.families
    told = await asyncio.gather(*(_choose(search, question, family, found) for family in families))
    choices = sorted((choice for choice in told if choice is not None), key=_rank(question.objective))
    if not choices:
        raise await unmet(search, families, question.budget, question.rate)
    without = [family.name for family, choice in zip(families, told, strict=True) if choice is None]
    return Plan(
        question=question,
        choices=tuple(choices),
        without=tuple(without),
        break_even=await _break_even(search, question, choices),
    )


async def _choose(search: RateSearch, question: Question, family: Family, found: Found) -> Choice | None:
    budget = question.budget
    if question.objective is Objective.THROUGHPUT:
        designs = frontier(family, budget.allows)
        capacity = await most_throughput(search, designs) if designs else None
        choice = None if capacity is None else _at_capacity(search, capacity)
    else:
        rate = question.rate or 0.0
        design = await cheapest(search, family, rate, budget.allows, question.objective.weigh)
        choice = None if design is None else await _at_rate(search, design, rate)
    if choice is not None:
        found(choice)
    return choice


def _at_capacity(search: RateSearch, capacity: Capacity) -> Choice | None:
    if capacity.step is None or capacity.kept is None:
        return None
    rate = search.grid.rate(capacity.step)
    return Choice(design=capacity.design, rate=rate, highest_rate=rate, evaluation=capacity.kept)


async def _at_rate(search: RateSearch, design: Design, rate: float) -> Choice:
    evaluation = await search.evaluate(Trial(design, rate))
    capacity = await search.highest(design, search.grid.step(rate))
    highest = rate if capacity.step is None else max(rate, search.grid.rate(capacity.step))
    return Choice(design=design, rate=rate, highest_rate=highest, evaluation=evaluation)


async def _break_even(search: RateSearch, question: Question, choices: Sequence[Choice]) -> float | None:
    """Of the families that can keep the SLO; without limits, as it asks for small clusters, not for large ones."""
    kinds = [choice.design.family for choice in choices]
    if len({family.split for family in kinds}) < 2:
        return None
    top = question.rate or choices[0].rate
    return await break_even(search, kinds, top, question.objective.weigh)


def _rank(objective: Objective) -> Callable[[Choice], tuple[float | str, ...]]:
    """Best first; a design of fewer dollars, watts or machines, or else of an earlier name, before its equals."""

    def rank(choice: Choice) -> tuple[float | str, ...]:
        design = choice.design
        costs = design.price_per_h, design.tdp_w
        if objective is Objective.THROUGHPUT:
            return (-choice.rate, *costs, design.machines, design.name)
        return (*objective.weigh(design), -choice.highest_rate, design.name)

    return rank
