"""Upper bounds on the rate of a design, computed from performance models without simulation."""

import math

from msgspec.structs import replace

from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.problem import Problem
from twofold.planning.workload import WorkloadShape
from twofold.request import Phase
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.slo import Slo

_REACHED = 0.8  # typical share of the bound, after queueing and uneven batches
_PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)


class MachineSeconds:
    """Least machine time, in seconds, for the prefill and the decode of an average request."""

    def __init__(
        self, problem: Problem, shape: WorkloadShape, kind: MachineKind, tiers: list[tuple[float, float]]
    ) -> None:
        self.model = model = problem.performance(kind)
        instances = kind.instances
        per_token = min(model.prefill_s(tokens, 0) / tokens for tokens in _PREFILL_TOKENS)
        self.prefill = per_token * shape.prompt_tokens / instances
        capacity = problem.kv_capacity_tokens(kind)
        most = min(problem.template.max_num_seqs, max(1, int(capacity / max(shape.context, 1.0))))
        per_step = sum(share * _step_s(model, shape.context, most, bound_s) for share, bound_s in tiers)
        self.decode = per_step * shape.decode_tokens / instances

    def of(self, role: Role) -> float:
        """Return the machine seconds of an average request in the phases of `role`: prefill, decode or both."""
        return (self.prefill if role.prefills else 0.0) + (self.decode if role.decodes else 0.0)


class AnalyticBounds:
    """Upper bounds on the request rates of designs. They neglect queueing and assume the best batch sizes."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._shape = problem.workload.shape()
        self._cache = problem.template.kv_cache
        if self._cache is not None:
            computed = problem.workload.computed_tokens(self._cache.block_tokens)
            self._shape = replace(self._shape, prompt_tokens=computed)
        self._reference = problem.reference_model()
        self._tiers = _tiers(problem, self._shape, self._reference)
        self._known: dict[MachineKind, MachineSeconds] = {}

    def feasible(self, family: Family) -> bool:
        """Return whether requests that run alone meet the bounds of the SLO on TTFT and TPOT."""
        return all(
            (not role.prefills or self._prefill_meets(kind)) and (not role.decodes or self._decode_meets(kind))
            for kind, role in zip(family.kinds, family.role_of, strict=True)
        )

    def _prefill_meets(self, kind: MachineKind) -> bool:
        if self._cache is not None:
            return True  # most of a prompt may be cached
        slo, seconds = self._problem.slo, self._of(kind).model.prefill_s
        prompts = [(each, each * each) for each in self._shape.prompt_percentiles]
        if isinstance(slo, Slo):
            longest = prompts[math.floor(100 * self._problem.attainment)]
            return slo.ttft_s is None or seconds(*longest) <= slo.ttft_s
        if self._reference is None:
            return True
        slowdowns = sorted(seconds(*each) / self._reference.prefill_s(*each) for each in prompts)
        return all(slowdowns[percentile] <= bound for percentile, bound in slo.ttft.items())

    def _decode_meets(self, kind: MachineKind) -> bool:
        cost = self._of(kind).model.decode_cost(1)
        shortest_s = min((bound_s for _, bound_s in self._tiers[:-1]), default=math.inf)
        return cost.base_s + cost.context_s * self._shape.context <= shortest_s

    def upper(self, design: Design) -> float:
        """Return a rate above which the design cannot meet the SLO."""
        family = design.family
        pooled = (family.router or self._problem.template.router) not in FIXED_ROLE_ROUTERS
        if not family.split or (pooled and family.judged is None):
            # The router can move machines between pools, so every machine counts for both phases.
            prefill = sum(count / self._of(kind).prefill for kind, count in design.parts())
            decode = sum(_per(count, self._of(kind).decode) for kind, count in design.parts())
            return min(prefill, decode)
        return self._by_phase(design)

    def estimate(self, design: Design) -> float:
        """Return the approximate highest rate, in requests/s, at which the design meets the SLO."""
        if design.family.split:
            return _REACHED * self._by_phase(design)
        return _REACHED * sum(count / self._of(kind).of(Role.MIXED) for kind, count in design.parts())

    def suggest(self, family: Family, rate: float) -> tuple[int, ...]:
        """Return the approximate number of machines of each type that a design needs for `rate` requests/s."""
        wanted = rate / _REACHED
        return tuple(
            max(1, math.ceil(wanted * self._of(kind).of(role)))
            for kind, role in zip(family.kinds, family.role_of, strict=True)
        )

    def _by_phase(self, design: Design) -> float:
        prefill = sum(count / self._of(kind).prefill for kind, count in design.parts_of(Role.PREFILL))
        decode = sum(_per(count, self._of(kind).decode) for kind, count in design.parts_of(Role.DECODE))
        judged = design.family.judged
        if judged is None:
            return min(prefill, decode)
        return prefill if judged is Phase.PREFILL else decode

    def _of(self, kind: MachineKind) -> MachineSeconds:
        if kind not in self._known:
            self._known[kind] = MachineSeconds(self._problem, self._shape, kind, self._tiers)
        return self._known[kind]


def _per(count: int, seconds: float) -> float:
    return count / seconds if seconds else math.inf


def _step_s(model: PerformanceModel, context: float, most: int, bound_s: float) -> float:
    """Return the shortest time per decoded token, in seconds, over batches of up to `most` sequences.

    Only batches whose iteration takes at most `bound_s` seconds count. If there is no such batch, every batch counts.
    """
    costs = [(sequences, model.decode_cost(sequences)) for sequences in _batches(most)]
    steps = [(cost.base_s + cost.context_s * context * sequences, sequences) for sequences, cost in costs]
    within = [step_s / sequences for step_s, sequences in steps if step_s <= bound_s]
    # If no batch size meets the bound, ignore it.
    return min(within or [step_s / sequences for step_s, sequences in steps])


def _batches(most: int) -> list[int]:
    sizes = {1, most}  # spaced by about 1%
    size = 1.0
    while size < most:
        sizes.add(math.ceil(size))
        size = max(size + 1.0, size * 1.01)
    return sorted(sizes)


def _tiers(problem: Problem, shape: WorkloadShape, reference: PerformanceModel | None) -> list[tuple[float, float]]:
    """Return the TPOT bounds of the SLO as (share of requests, seconds) pairs."""
    slo = problem.slo
    if isinstance(slo, Slo):
        bound_s = math.inf if slo.tpot_s is None else slo.tpot_s
        return [(problem.attainment, bound_s), (1.0 - problem.attainment, math.inf)]
    if reference is None or not slo.tpot:
        return [(1.0, math.inf)]
    cost = reference.decode_cost(1)
    alone_s = cost.base_s + cost.context_s * shape.context
    tiers, below = [], 0.0
    for percentile, multiple in sorted(slo.tpot.items()):
        tiers.append((percentile / 100 - below, multiple * alone_s))
        below = percentile / 100
    return [*tiers, (1.0 - below, math.inf)]
