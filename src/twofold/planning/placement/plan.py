"""How sure a goodput is: the same search over other draws of arrivals and lengths.

A whole answer: which algorithm, the placements that it finds, and how sure the best of them is.

Why prefill is divided as it is: which parallelism the queueing formulas of DistServe (section 3.1) prefer.

Tensor parallelism makes each prompt quicker; a pipeline takes more of them at a time. So of instances with as many
accelerators the first is better at low rates and the second at high ones, and where they cross follows from what the
performance model says of a prompt of mean length, alone in its batch.
"""

import asyncio
import math
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import median

import msgspec
from msgspec.structs import replace

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.queueing import quickest_by_rate, stage_times
from twofold.planning.design import Design, MachineKind
from twofold.planning.placement.instances import Affinity, NodeLinks, instances_of, links_of
from twofold.planning.placement.search import (
    PlacementResults,
    SimulatedPlacement,
    best_of,
    for_rate,
    most_goodput,
    whole_stock,
)
from twofold.planning.problem import Problem
from twofold.planning.rates import RateSearch
from twofold.slo import Slo

DRAWS = 6


class Confidence(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second that a design took in independent draws of the workload, sorted.

    The median over all draws there could be lies between the least and the greatest of n with probability 1 − 2^(1−n),
    however they are distributed.
    """

    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rates)

    @property
    def level(self) -> float:
        """The probability that `rates[0]` to `rates[-1]` holds the median."""
        return 1.0 - 2.0 ** (1 - len(self.rates))


async def confidence(search: RateSearch, design: Design, rate: float, draws: Sequence[int]) -> Confidence:
    """The goodput of a design in these draws, 0 where it keeps the SLO at no rate; a search begins at `rate`."""
    start = search.grid.step(rate)
    told = await asyncio.gather(*(replace(search, draw=draw).highest(design, start) for draw in draws))
    rates = (0.0 if each.step is None else search.grid.rate(each.step) for each in told)
    return Confidence(rates=tuple(sorted(rates)))


class PlacementQuery(msgspec.Struct, frozen=True, kw_only=True):
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


class PreparedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A question with what follows from it before anything is simulated; a `node` has so many accelerators.

    `links` are those of the machine that can send least of what it computes.
    """

    question: PlacementQuery
    problem: Problem
    kinds: tuple[MachineKind, ...]
    links: NodeLinks
    affinity: Affinity
    node: int


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`best` is the first of `placement.split`, in as many copies as the rate needs."""

    prepared: PreparedPlacement
    placement: PlacementResults
    best: SimulatedPlacement
    sure: Confidence | None

    @property
    def algorithm(self) -> str:
        if self.prepared.question.unlike:
            return "Unlike accelerators"
        return "Algorithm 1" if self.prepared.affinity is Affinity.HIGH else "Algorithm 2"


def prepare(problem: Problem, question: PlacementQuery) -> PreparedPlacement:
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
    return PreparedPlacement(
        question=question,
        problem=problem,
        kinds=tuple(chain.from_iterable(of_machine.values())),
        links=links,
        affinity=Affinity.HIGH if question.unlike else question.affinity or links.affinity,
        node=min(problem.catalog.machine(name).count for name in question.stock),
    )


async def make_placement(search: RateSearch, prepared: PreparedPlacement) -> PlacementPlan:
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


def _copied(best: SimulatedPlacement, question: PlacementQuery) -> SimulatedPlacement:
    """⌈rate / goodput⌉ of what shares nodes, side by side."""
    copies = math.ceil((question.rate or best.rate) / best.rate)
    found = msgspec.structs.replace(best, copies=copies)
    if found.accelerators > question.accelerators:
        raise ConfigurationError(
            f"{question.rate:g} requests/s need {copies} times {best.design.name}, which are {found.accelerators} "
            f"accelerators: allow more than {question.accelerators}"
        )
    return found


class ParallelismPreference(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance of so many accelerators should be, at any rate.

    `best` has the parallelism with the lowest mean TTFT and the requests per second from which on it has it, in
    order; `rate` is what an instance of the placement takes.
    """

    accelerators: int
    prompt_tokens: int
    rate: float
    best: tuple[tuple[float, str], ...]

    @property
    def text(self) -> str:
        """A sentence for people."""
        size = f"{self.prompt_tokens:,} tokens on {self.accelerators} accelerators"
        first = f"By the queueing formulas, prompts of {size}"
        here = f"an instance takes {self.rate:.3g} here"
        if len(self.best) == 1:
            return f"{first} wait least with {self.best[0][1]} at every rate; {here}."
        until = ", ".join(
            f"{name} up to {rate:.3g} requests/s" for (_, name), (rate, _) in pairwise(self.best)
        )
        return f"{first} wait least with {until}, above with {self.best[-1][1]}; {here}."


def preference(plan: PlacementPlan) -> ParallelismPreference | None:
    """None where prefill has unlike instances, or where there is no other way to divide one."""
    prepared, placed = plan.prepared, plan.best
    prefill = list(placed.design.parts_of(Role.PREFILL))
    if len(prefill) != 1:
        return None
    ((kind, count),) = prefill
    same = [
        each for each in prepared.kinds if (each.name, each.accelerators) == (kind.name, kind.accelerators)
    ]
    if len(same) < 2:
        return None
    problem = prepared.problem
    tokens = round(problem.workload.shape().prompt_tokens)
    times = {_words(each): stage_times(problem.performance(each), tokens) for each in same}
    return ParallelismPreference(
        accelerators=kind.accelerators,
        prompt_tokens=tokens,
        rate=placed.rate / count,
        best=tuple(quickest_by_rate(times)),
    )


def _words(kind: MachineKind) -> str:
    if kind.pipeline_parallel == 1:
        return f"tensor parallelism (TP{kind.tensor_parallel})"
    if kind.tensor_parallel == 1:
        return f"a pipeline (PP{kind.pipeline_parallel})"
    return f"both (TP{kind.tensor_parallel} PP{kind.pipeline_parallel})"
