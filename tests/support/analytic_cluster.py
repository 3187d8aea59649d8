"""A stub of the planner's simulations that computes the capacity of a cluster by a formula."""

from twofold.planning.design import Design, Family, MachineKind
from twofold.planning.evaluation import Evaluation
from twofold.planning.rates import RateGrid, RateSearch
from twofold.request import Phase
from twofold.simulation.result import Check

FAST = MachineKind(name="dgx-fast", price_per_h=38.0, tdp_w=10_200.0)
SLOW = MachineKind(name="dgx-slow", price_per_h=17.6, tdp_w=6_500.0)
SPLIT = Family(kinds=(FAST, SLOW))
SAME = Family(kinds=(FAST, FAST))
COLOCATED = Family(kinds=(FAST,), batcher="mixed")


def design(*counts, family=SPLIT):
    return Design(family=family, counts=counts)


class AnalyticCluster:
    """Stub of the planner's simulator: each machine of a role serves a fixed number of requests/s."""

    def __init__(self, per_prefill=5.0, per_decode=3.0, per_mixed=2.0, *, slack=1.2, overhead=0.0, tells=True):
        self.per_prefill, self.per_decode, self.per_mixed = per_prefill, per_decode, per_mixed
        # The upper bound is `slack` times the capacity; a split design serves `overhead` requests/s less; if `tells`
        # is True, evaluations name the limiting phase.
        self.slack, self.overhead, self.tells = slack, overhead, tells
        self.asked = []

    def capacity(self, one):
        if not one.family.split:
            return one.machines * self.per_mixed
        prefill, decode = one.counts
        return max(min(prefill * self.per_prefill, decode * self.per_decode) - self.overhead, 1e-3)

    async def __call__(self, trial):
        self.asked.append(trial)
        return self.judged(trial.design, trial.rate)

    def judged(self, one, rate):
        capacity = self.capacity(one)
        met = rate <= capacity
        check = Check(name="TTFT slowdown P50", value=rate / capacity, bound=1.0, met=met)
        return Evaluation(met=met, checks=(check,), bound_by=self._bound_by(one) if self.tells else None)

    def feasible(self, family):
        return True

    def upper(self, one):
        return self.capacity(one) * self.slack

    def estimate(self, one):
        return self.capacity(one) * 0.9

    def suggest(self, family, rate):
        if not family.split:
            return (max(1, round(rate / self.per_mixed)),)
        return max(1, round(rate / self.per_prefill)), max(1, round(rate / self.per_decode))

    def search(self, tolerance=0.02):
        return RateSearch(evaluate=self, bound=self, grid=RateGrid(tolerance))

    def _bound_by(self, one):
        if not one.family.split:
            return None
        prefill, decode = one.counts
        return Phase.PREFILL if prefill * self.per_prefill < decode * self.per_decode else Phase.DECODE
