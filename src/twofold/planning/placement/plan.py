"""DistServe placement plans: the best placement, and the best prefill parallelism by request rate.

With equal numbers of accelerators, tensor parallelism has a lower TTFT at low request rates. Pipeline
parallelism has a lower TTFT at high request rates (DistServe, section 3.1).
"""

import math
from collections.abc import Callable
from itertools import chain, pairwise

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.queueing import quickest_by_rate, stage_times
from twofold.planning.design import MachineKind
from twofold.planning.placement.instances import Affinity, NodeLinks, instances_of, links_of
from twofold.planning.placement.search import (
    PlacementResults,
    best_of,
    fewest_accelerators,
    for_rate,
    most_goodput,
    most_per_accelerator,
    most_requests,
    promised,
    whole_stock,
)
from twofold.planning.plan import DesignChoice
from twofold.planning.problem import Problem
from twofold.planning.promise import Draws, Rank
from twofold.planning.rates import RateSearch
from twofold.slo import Slo


class PlacementQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerators and goal of a placement search: the fewest for a `rate` (requests/s), else the highest goodput."""

    stock: dict[str, int]  # numbers of accelerators by machine type
    rate: float | None = None  # without: goodput per accelerator of one machine type, or of the whole stock of several
    affinity: Affinity | None = None  # None: decided by the link bandwidths
    most_stages: int | None = None
    draws: Draws | None = None  # to check the best placements on; None for no check

    @property
    def accelerators(self) -> int:
        return sum(self.stock.values())

    @property
    def mixed(self) -> bool:
        return len(self.stock) > 1


class PreparedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a placement search."""

    query: PlacementQuery
    problem: Problem
    kinds: tuple[MachineKind, ...]  # instance kinds that fit
    links: NodeLinks  # of the machine type with the lowest ratio of link bandwidth to KV production
    affinity: Affinity
    node: int  # accelerators per node


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a placement search: simulated placements that meet the SLO, and the best split one."""

    prepared: PreparedPlacement
    placement: PlacementResults
    best: DesignChoice  # in several copies if the rate requires them

    @property
    def gain(self) -> float:
        """Goodput per accelerator of the best placement, relative to the best colocated design; infinite without one.

        If the plan is for a request rate, the gain is the inverse ratio of the numbers of accelerators.
        """
        if not self.placement.colocated:
            return math.inf
        other, best = self.placement.colocated[0], self.best
        if self.prepared.query.rate is not None and best.copies == 1:
            return other.accelerators / best.accelerators
        return best.per_accelerator / other.per_accelerator

    @property
    def recommended(self) -> DesignChoice:
        """The best placement, or the best colocated design if splitting does not pay."""
        return self.best if self.gain >= 1.0 else self.placement.colocated[0]

    @property
    def algorithm(self) -> str:
        if self.prepared.query.mixed:
            return "Mixed accelerators"
        return "Algorithm 1" if self.prepared.affinity is Affinity.HIGH else "Algorithm 2"


def prepare(problem: Problem, query: PlacementQuery) -> PreparedPlacement:
    """Prepare a placement search. Raises ConfigurationError for an unsupported query, SLO or workload."""
    slo = problem.slo
    if not isinstance(slo, Slo) or slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigurationError(
            "goodput needs TTFT and TPOT bounds in seconds: give both, as in --slo ttft=0.25,tpot=0.1"
        )
    if problem.workload.shape().decode_tokens == 0:
        raise ConfigurationError("all outputs of this workload have one token: there is no decode to place")
    if query.mixed and (query.rate is not None or query.affinity is Affinity.LOW):
        raise ConfigurationError(
            "mixed accelerators are placed on any node for the highest rate: leave out --rate and --affinity low"
        )
    of_machine = {name: instances_of(problem, name, most, query.most_stages) for name, most in query.stock.items()}
    links = min((links_of(problem, kinds) for kinds in of_machine.values()), key=lambda each: each.headroom)
    return PreparedPlacement(
        query=query,
        problem=problem,
        kinds=tuple(chain.from_iterable(of_machine.values())),
        links=links,
        affinity=Affinity.HIGH if query.mixed else query.affinity or links.affinity,
        node=min(problem.catalog.machine(name).count for name in query.stock),
    )


async def make_placement(search: RateSearch, prepared: PreparedPlacement) -> PlacementPlan:
    """Run a placement search. Raises ConfigurationError if no placement meets the SLO."""
    query, most = prepared.query, prepared.query.accelerators
    one_node = most <= prepared.node
    anywhere = prepared.affinity is Affinity.HIGH
    rank: Callable[[DesignChoice], Rank]
    sized = False  # whether placements are sized for a rate
    if query.mixed:
        placement, rank = await whole_stock(search, prepared.kinds, query.stock), most_requests
    elif query.rate is not None and (anywhere or one_node):
        placement = await for_rate(search, prepared.kinds, query.rate, most, shared=one_node)
        rank, sized = fewest_accelerators, True
    else:
        node = None if anywhere and not one_node else prepared.node
        placement, rank = await most_goodput(search, prepared.kinds, most, node=node), most_per_accelerator
    if query.draws is not None:
        placement = await promised(search, placement, rank, query.draws, most_accelerators=most if sized else None)
    best = best_of(placement)
    if query.rate is not None and best.rate < query.rate:
        best = _copied(best, query)
    return PlacementPlan(prepared=prepared, placement=placement, best=best)


def _copied(best: DesignChoice, query: PlacementQuery) -> DesignChoice:
    copies = math.ceil((query.rate or best.rate) / best.rate)
    found = msgspec.structs.replace(best, copies=copies)
    if found.accelerators > query.accelerators:
        raise ConfigurationError(
            f"{query.rate:g} requests/s need {copies} × {best.design.name} on {found.accelerators} accelerators: "
            f"allow more than {query.accelerators}"
        )
    return found


class ParallelismPreference(msgspec.Struct, frozen=True, kw_only=True):
    """Best parallelism of prefill instances for each range of request rates.

    The best parallelism is the parallelism with the lowest mean TTFT, calculated by queueing theory.
    """

    accelerators: int
    prompt_tokens: int
    rate: float  # of each prefill instance in the placement, in requests/s
    best: tuple[tuple[float, str], ...]  # parallelisms with the requests/s from which they are best, ascending

    @property
    def text(self) -> str:
        size = f"{self.prompt_tokens:,} tokens on {self.accelerators} accelerators"
        first = f"By queueing theory, mean TTFT of prompts of {size} is lowest"
        here = f"each instance serves {self.rate:.3g} requests/s here"
        if len(self.best) == 1:
            return f"{first} with {self.best[0][1]} at every rate; {here}."
        until = ", ".join(f"{name} up to {rate:.3g} requests/s" for (_, name), (rate, _) in pairwise(self.best))
        return f"{first} with {until}, above with {self.best[-1][1]}; {here}."


def preference(plan: PlacementPlan) -> ParallelismPreference | None:
    """Return the prefill parallelism with the lowest TTFT at each rate; None if there is nothing to compare."""
    prepared, placed = plan.prepared, plan.best
    prefill = list(placed.design.parts_of(Role.PREFILL))
    if len(prefill) != 1:  # several prefill kinds
        return None
    ((kind, count),) = prefill
    same = [each for each in prepared.kinds if (each.name, each.accelerators) == (kind.name, kind.accelerators)]
    if len(same) < 2:  # no other parallelism has as many accelerators
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
