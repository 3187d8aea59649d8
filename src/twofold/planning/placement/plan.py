"""A whole answer: which algorithm, the placements that it finds, and how sure the best of them is."""

import math
from itertools import chain

import msgspec

from twofold.errors import ConfigurationError
from twofold.planning.design import MachineKind
from twofold.planning.placement.affinity import Affinity, Links, links_of
from twofold.planning.placement.confidence import DRAWS, Confidence, confidence
from twofold.planning.placement.degrees import instances_of
from twofold.planning.placement.search import Placed, Placement, best_of, for_rate, most_goodput, whole_stock
from twofold.planning.problem import Problem
from twofold.planning.rates import RateSearch
from twofold.slo import Slo


class PlacementQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """`stock` says how many accelerators there are, by the machines that they are in.

    With a `rate` (requests per second) the fewest of them are wanted, without the most goodput of each, or, where they
    are unlike, of all. `affinity` None leaves the algorithm to the links. Pipelines have at most `most_stages`.
    """

    stock: dict[str, int]
    rate: float | None = None
    affinity: Affinity | None = None
    most_stages: int | None = None

    @property
    def accelerators(self) -> int:
        return sum(self.stock.values())

    @property
    def unlike(self) -> bool:
        return len(self.stock) > 1


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A question with what follows from it before anything is simulated; a `node` has so many accelerators.

    `links` are those of the machine that can send least of what it computes.
    """

    question: PlacementQuestion
    problem: Problem
    kinds: tuple[MachineKind, ...]
    links: Links
    affinity: Affinity
    node: int


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the first of `placement.split`, in as many copies as the rate needs."""

    prepared: Prepared
    placement: Placement
    best: Placed
    sure: Confidence | None

    @property
    def algorithm(self) -> str:
        if self.prepared.question.unlike:
            return "Unlike accelerators"
        return "Algorithm 1" if self.prepared.affinity is Affinity.HIGH else "Algorithm 2"


def prepare(problem: Problem, question: PlacementQuestion) -> Prepared:
    """Raises ConfigurationError for a question without an answer: see `instances_of`, and SLOs that do not fit."""
    slo = problem.slo
    if not isinstance(slo, Slo) or slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigurationError(
            "goodput counts requests that keep a TTFT and a TPOT in seconds: give both, as in --slo ttft=0.25,tpot=0.1"
        )
    if problem.workload.shape().decode_tokens == 0:
        raise ConfigurationError("every output of this workload has one token: there is no decode to place")
    if question.unlike and (question.rate is not None or question.affinity is Affinity.LOW):
        raise ConfigurationError(
            "unlike accelerators are placed anywhere, for the most that all of them take: leave out --rate and "
            "--affinity low"
        )
    of_machine = {
        name: instances_of(problem, name, most, question.most_stages) for name, most in question.stock.items()
    }
    links = min((links_of(problem, kinds) for kinds in of_machine.values()), key=lambda each: each.headroom)
    return Prepared(
        question=question,
        problem=problem,
        kinds=tuple(chain.from_iterable(of_machine.values())),
        links=links,
        affinity=Affinity.HIGH if question.unlike else question.affinity or links.affinity,
        node=min(problem.catalog.machine(name).count for name in question.stock),
    )


async def make_placement(search: RateSearch, prepared: Prepared) -> PlacementPlan:
    """Search as the question asks. Raises ConfigurationError where no placement keeps the SLO."""
    question, most = prepared.question, prepared.question.accelerators
    one_node = most <= prepared.node
    anywhere = prepared.affinity is Affinity.HIGH
    if question.unlike:
        placement = await whole_stock(search, prepared.kinds, question.stock)
    elif question.rate is not None and (anywhere or one_node):
        placement = await for_rate(search, prepared.kinds, question.rate, most, shared=one_node)
    else:
        node = None if anywhere and not one_node else prepared.node
        placement = await most_goodput(search, prepared.kinds, most, node=node)
    best = best_of(placement)
    if question.rate is not None and best.rate < question.rate:
        best = _copied(best, question)
    draws = range(DRAWS) if prepared.problem.workload.random else ()
    sure = await confidence(search, best.design, best.rate, draws) if draws else None
    return PlacementPlan(prepared=prepared, placement=placement, best=best, sure=sure)


def _copied(best: Placed, question: PlacementQuestion) -> Placed:
    """⌈rate / goodput⌉ of what shares nodes, side by side."""
    copies = math.ceil((question.rate or best.rate) / best.rate)
    found = msgspec.structs.replace(best, copies=copies)
    if found.accelerators > question.accelerators:
        raise ConfigurationError(
            f"{question.rate:g} requests/s need {copies} times {best.design.name}, which are {found.accelerators} "
            f"accelerators: allow more than {question.accelerators}"
        )
    return found
