"""Instance types that fit on a machine, and DistServe's node affinity (OSDI'24, section 4.2).

With high affinity (fast links between nodes), Algorithm 1 places each phase separately. With low affinity (slow links),
Algorithm 2 puts stage i of prefill and stage i of decode on the same node, so that hand-offs stay within nodes.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, MachineKind
from twofold.planning.problem import Problem


def instances_of(
    problem: Problem, machine: str, most_accelerators: int, most_stages: int | None = None
) -> list[MachineKind]:
    """List the tensor and pipeline parallelisms that can run the model on machines of type `machine`.

    The list starts with the fewest accelerators. Raise ConfigurationError if there are none.
    """
    degrees = _degrees(problem, machine, most_accelerators, most_stages)
    found, reason = problem.able(problem.instance(machine, *each) for each in degrees)
    if not found:
        raise reason or ConfigurationError(f"no instance on {machine} has {most_accelerators} accelerators")
    return found


def _degrees(problem: Problem, machine: str, most: int, most_stages: int | None) -> Iterator[tuple[int, int]]:
    # Tensor parallelism divides the heads and stays within a machine; pipeline parallelism divides the layers.
    model, whole = problem.catalog.model(problem.template.model), problem.catalog.machine(machine)
    tensors = [degree for degree in range(1, whole.count + 1) if model.heads % degree == 0]
    deepest = most if most_stages is None else min(most, most_stages)
    pipelines = [degree for degree in range(1, deepest + 1) if model.layers % degree == 0]
    pairs = [(tensor, stages) for tensor in tensors for stages in pipelines if tensor * stages <= most]
    yield from sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


_SATURATED, _LONG = 4096, 1024  # tokens of a batch that saturates prefill, and of each of its prompts


class Affinity(StrEnum):
    """Node affinity as in DistServe: `high` for fast links between nodes, `low` for slow links between nodes."""

    HIGH = "high"
    LOW = "low"


class NodeLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidths between and within nodes, and the highest rate of KV production: bytes/s per accelerator."""

    kv: float  # peak KV production
    between_nodes: float
    within_node: float

    @property
    def headroom(self) -> float:
        """Bandwidth between nodes, divided by the peak rate of KV production."""
        return self.between_nodes / self.kv

    @property
    def affinity(self) -> Affinity:
        """Node affinity in the terms of DistServe: `low` if hand-offs are too slow between nodes, otherwise `high`.

        Hand-offs are too slow if the bandwidth between nodes is below the peak rate of KV production and below the
        bandwidth within a node.
        """
        narrow = self.between_nodes < self.kv and self.between_nodes < self.within_node
        return Affinity.LOW if narrow else Affinity.HIGH

    @property
    def reason(self) -> str:
        """Sentence that explains why hand-offs may cross nodes or must stay within a node."""
        kv, out, within = (f"{value / 1e9:,.3g} GB/s" for value in (self.kv, self.between_nodes, self.within_node))
        made = f"a prefill accelerator produces up to {kv} of KV"
        if self.affinity is Affinity.LOW:
            return f"{made} and its network share is {out} ({within} within a node): hand-offs stay within nodes"
        if self.between_nodes >= self.within_node:
            return f"{made} and its network share is {out}, no less than within a node: instances may be anywhere"
        return f"{made} and its network share is {out}: instances may be anywhere"


def links_of(problem: Problem, kinds: list[MachineKind]) -> NodeLinks:
    """Return a machine type's link bandwidths, and its highest rate of KV from prefill: bytes/s per accelerator."""
    machine = problem.catalog.machine(kinds[0].name)
    model = problem.catalog.model(problem.template.model)
    per_token = problem.template.kv_bytes_per_token or model.kv_bytes_per_token
    fastest = max(kinds, key=lambda kind: _tokens_per_s(problem, kind) / kind.accelerators)
    out = machine.network_bytes_per_s / machine.count
    if problem.template.link_bytes_per_s is not None:  # per instance
        out = problem.template.link_bytes_per_s / fastest.accelerators
    return NodeLinks(
        kv=_tokens_per_s(problem, fastest) / fastest.accelerators * per_token,
        between_nodes=out,
        within_node=machine.accelerator.interconnect_bytes_per_s,
    )


def shares_nodes(design: Design, node: int) -> bool:
    """Return whether every node, of `node` accelerators, can have both prefill and decode of a design."""
    if design.accelerators <= node:
        return True
    # A larger design needs one node per pipeline stage.
    stages = {kind.pipeline_parallel for kind in design.family.kinds}
    if len(stages) > 1:
        return False
    return sum(count * (kind.tensor_parallel or kind.accelerators) for kind, count in design.parts()) <= node


def _tokens_per_s(problem: Problem, kind: MachineKind) -> float:
    model = problem.performance(kind)
    return _SATURATED / model.prefill_s(_SATURATED, _SATURATED * _LONG)
