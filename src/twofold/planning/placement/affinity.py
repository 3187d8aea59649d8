"""Whether prefill and decode may be anywhere, or must share nodes: what the links between nodes can carry decides.

DistServe (OSDI'24, section 4.2) calls clusters of the first kind high in node affinity. There Algorithm 1 places each
phase by itself. In the others hand-offs must stay within a node, so stage i of prefill lies beside stage i of decode,
in Algorithm 2.
"""

from enum import StrEnum

import msgspec

from twofold.planning.design import Design, MachineKind
from twofold.planning.problem import Problem

_SATURATED, _LONG = 4096, 1024  # tokens that keep a prefill busy, in prompts of so many


class Affinity(StrEnum):
    """High: hand-offs may cross nodes. Low: they may not."""

    HIGH = "high"
    LOW = "low"


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What leaves one accelerator, in bytes per second: KV that it computes at most, and what carries it."""

    kv: float
    between_nodes: float
    within_node: float

    @property
    def headroom(self) -> float:
        """How many times the KV the way out carries."""
        return self.between_nodes / self.kv

    @property
    def affinity(self) -> Affinity:
        """Low only where the way out is slower than the KV that takes it, and the way within is better."""
        narrow = self.between_nodes < self.kv and self.between_nodes < self.within_node
        return Affinity.LOW if narrow else Affinity.HIGH

    @property
    def reason(self) -> str:
        """One sentence for people."""
        kv, out, within = (
            f"{value / 1e9:,.3g} GB/s" for value in (self.kv, self.between_nodes, self.within_node)
        )
        made = f"an accelerator that prefills makes up to {kv} of KV cache"
        if self.affinity is Affinity.LOW:
            return f"{made} and the network takes {out} from it ({within} within a node): hand-offs stay within nodes"
        if self.between_nodes >= self.within_node:
            return f"{made} and the network takes {out} from it, no less than within a node: instances may be anywhere"
        return f"{made} and the network takes {out} from it: instances may be anywhere"


def links_of(problem: Problem, kinds: list[MachineKind]) -> Links:
    """Of the machine of these kinds, for the kind that computes the most KV per accelerator."""
    machine = problem.catalog.machine(kinds[0].name)
    model = problem.catalog.model(problem.template.model)
    per_token = problem.template.kv_bytes_per_token or model.kv_bytes_per_token
    fastest = max(kinds, key=lambda kind: _tokens_per_s(problem, kind) / kind.accelerators)
    out = machine.network_bytes_per_s / machine.count
    if problem.template.link_bytes_per_s is not None:  # of an instance, whatever it has
        out = problem.template.link_bytes_per_s / fastest.accelerators
    return Links(
        kv=_tokens_per_s(problem, fastest) / fastest.accelerators * per_token,
        between_nodes=out,
        within_node=machine.accelerator.interconnect_bytes_per_s,
    )


def shares_nodes(design: Design, node: int) -> bool:
    """Whether each stage of prefill can lie on one node with the same stage of decode, of `node` accelerators.

    What fits on a single node as a whole always can.
    """
    if design.accelerators <= node:
        return True
    stages = {kind.pipeline_parallel for kind in design.family.kinds}
    if len(stages) > 1:
        return False
    return sum(count * (kind.tensor_parallel or kind.accelerators) for kind, count in design.parts()) <= node


def _tokens_per_s(problem: Problem, kind: MachineKind) -> float:
    model = problem.performance(kind)
    return _SATURATED / model.prefill_s(_SATURATED, _SATURATED * _LONG)
