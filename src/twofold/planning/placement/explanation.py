"""Why prefill is divided as it is: which parallelism the queueing formulas of DistServe (section 3.1) prefer.

Tensor parallelism makes each prompt quicker; a pipeline takes more of them at a time. So of instances with as many
accelerators the first is better at low rates and the second at high ones, and where they cross follows from what the
performance model says of a prompt of mean length, alone in its batch.
"""

from itertools import pairwise

import msgspec

from twofold.instance import Role
from twofold.performance.queueing import quickest_by_rate, stage_times
from twofold.planning.design import MachineKind
from twofold.planning.placement.plan import PlacementPlan


class Preference(msgspec.Struct, frozen=True, kw_only=True):
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


def preference(plan: PlacementPlan) -> Preference | None:
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
    return Preference(
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
