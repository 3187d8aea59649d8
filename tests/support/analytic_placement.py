"""Stub of the placement search's simulator. The stub computes the goodput of instances by a formula."""

from twofold.instance import Role
from twofold.planning.design import MachineKind
from twofold.planning.evaluation import Evaluation
from twofold.planning.rates import RateGrid, RateSearch
from twofold.request import Phase
from twofold.simulation.result import Check


def kind(tensor, pipeline=1, name="dgx-node"):
    accelerators = tensor * pipeline
    return MachineKind(
        name=name,
        price_per_h=2.0 * accelerators,
        tdp_w=400.0 * accelerators,
        accelerators=accelerators,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )


class AnalyticPlacement:
    """Stub of the placement search's simulator: each kind of instance serves a fixed number of requests/s.

    A batcher other than the default multiplies the rate of prefill by `factors[batcher]`.
    """

    def __init__(self, prefill, decode, factors=None):
        self.prefill, self.decode = prefill, decode  # functions from an instance kind to requests/s
        self.factors = {None: 1.0, **(factors or {})}
        self.asked = []

    def capacity(self, design):
        family = design.family
        if not family.split:
            ((one, count),) = design.parts()
            return count * min(self.prefill(one), self.decode(one)) / 3
        prefill = sum(count * self.prefill(one) for one, count in design.parts_of(Role.PREFILL))
        prefill *= self.factors[family.batcher]
        decode = sum(count * self.decode(one) for one, count in design.parts_of(Role.DECODE))
        if family.judged is None:
            return min(prefill, decode)
        return prefill if family.judged is Phase.PREFILL else decode

    async def __call__(self, trial):
        self.asked.append(trial)
        capacity = self.capacity(trial.design)
        met = trial.rate <= capacity
        check = Check(name="TTFT P90", value=trial.rate / capacity, bound=1.0, met=met)
        return Evaluation(met=met, checks=(check,))

    def upper(self, design):
        return 1.2 * self.capacity(design)

    def estimate(self, design):
        return 0.9 * self.capacity(design)

    def suggest(self, family, rate):
        rates = self.prefill, self.decode
        if not family.split:
            return (max(1, round(3 * rate / min(each(family.kinds[0]) for each in rates))),)
        return tuple(max(1, round(rate / each(one))) for each, one in zip(rates, family.kinds, strict=True))

    def search(self, tolerance=0.01):
        return RateSearch(evaluate=self, bound=self, grid=RateGrid(tolerance), split_batchers=tuple(self.factors))
