"""Layout of a pool's pipeline stages on its machines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twofold.cluster.spec import PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.specs import Machine
from twofold.performance.instance import check_tensor_parallel

_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class Layout:
    """`instances` pipelines of `stages` stages, with up to `per_machine` stages on each machine, in order.

    A stage uses `tensor_parallel` accelerators of one machine.
    """

    tensor_parallel: int
    stages: int
    instances: int
    per_machine: int

    @property
    def spans(self) -> bool:
        """Whether an instance spans several machines."""
        return self.per_machine % self.stages != 0

    @property
    def accelerators(self) -> int:
        """Accelerators that the pool uses on its fullest machine."""
        return self.per_machine * self.tensor_parallel

    def machines_of(self, instance: int) -> range:
        """Machines of an instance's stages, counted from 0."""
        first = instance * self.stages
        return range(first // self.per_machine, (first + self.stages - 1) // self.per_machine + 1)


def layout_of(pool: PoolSpec, machine: Machine) -> Layout:
    """Spread the stages of a pool evenly over its machines; raises ConfigurationError if they do not fit."""
    tensor_parallel = machine.count if pool.tensor_parallel is None else pool.tensor_parallel
    check_tensor_parallel(machine, tensor_parallel)
    stages = pool.pipeline_parallel
    if stages < 1:
        raise ConfigurationError(f"pipeline parallelism must be at least 1, not {stages}")
    if pool.nodes is not None and not _NAME.fullmatch(pool.nodes):
        raise ConfigurationError(f"invalid nodes name {pool.nodes!r}: use letters, digits, - and _")
    most = pool.machines * (machine.count // tensor_parallel) // stages
    if pool.instances is not None and pool.instances < 1:
        raise ConfigurationError(f"a pool needs at least one instance, not {pool.instances}")
    wanted = pool.instances or max(most, 1)
    if wanted > most:
        raise ConfigurationError(
            f"{pool.machines} {machine.name} cannot hold {wanted} instances of {stages} stages of {tensor_parallel} "
            f"accelerators: at most {most}"
        )
    return Layout(tensor_parallel, stages, wanted, -(-wanted * stages // pool.machines))


def check_shared_nodes(pools: Sequence[tuple[PoolSpec, Machine]]) -> None:
    """Check that pools with the same `nodes` fit on their shared machines; raises ConfigurationError."""
    used: dict[str, int] = {}
    firsts: dict[str, tuple[PoolSpec, Machine]] = {}
    for pool, machine in pools:
        if pool.nodes is None:
            continue
        first, its = firsts.setdefault(pool.nodes, (pool, machine))
        if machine.name != its.name or pool.machines != first.machines:
            raise ConfigurationError(
                f"pools that share nodes {pool.nodes} need equal machines: one has "
                f"{first.machines} {its.name}, another {pool.machines} {machine.name}"
            )
        used[pool.nodes] = used.get(pool.nodes, 0) + layout_of(pool, machine).accelerators
        if used[pool.nodes] > machine.count:
            raise ConfigurationError(
                f"pools on nodes {pool.nodes} use {used[pool.nodes]} accelerators of a {machine.name}, which "
                f"has {machine.count}: give the number of instances of each pool"
            )
