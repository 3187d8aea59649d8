"""Layouts: assign the pipeline stages of a pool to machines, and the workers of a host to CPU cores."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twofold.cluster.spec import PoolSpec
from twofold.errors import require
from twofold.hardware.specs import Machine
from twofold.instance import Role
from twofold.performance.instance import check_expert_parallel, check_tensor_parallel

_NAME = re.compile(r"[\w-]+")


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of a pool's instances and their pipeline stages on machines."""

    tensor_parallel: int
    stages: int  # of each instance
    instances: int
    per_machine: int  # maximum number of stages on one machine

    @property
    def spans(self) -> bool:
        """Whether at least one instance runs on several machines."""
        return self.per_machine % self.stages != 0

    @property
    def accelerators(self) -> int:
        """Maximum number of accelerators used on one machine."""
        return self.per_machine * self.tensor_parallel

    def machines_of(self, instance: int) -> range:
        """Return the indices of the machines that run the instance with index `instance`."""
        first = instance * self.stages
        return range(first // self.per_machine, (first + self.stages - 1) // self.per_machine + 1)


def layout_of(pool: PoolSpec, machine: Machine) -> Layout:
    """Spread the stages of a pool evenly over its machines; raises ConfigurationError if they do not fit."""
    tensor_parallel = machine.count if pool.tensor_parallel is None else pool.tensor_parallel
    check_tensor_parallel(machine, tensor_parallel)
    stages = pool.pipeline_parallel
    require(stages >= 1, f"pipeline parallelism must be at least 1, not {stages}")
    group = 1  # instances that share experts
    if pool.expert_parallel is not None:
        check_expert_parallel(machine, tensor_parallel, pool.expert_parallel, stages)
        group = pool.expert_parallel // tensor_parallel
    named = pool.nodes is None or _NAME.fullmatch(pool.nodes) is not None
    require(named, f"invalid nodes name {pool.nodes!r}: use letters, digits, - and _")
    most = pool.machines * (machine.count // tensor_parallel) // stages
    wanted = max(most, 1) if pool.instances is None else pool.instances
    require(wanted >= 1, f"a pool needs at least one instance, not {wanted}")
    require(
        wanted <= most,
        f"{pool.machines} {machine.name} cannot hold {wanted} instances of {stages} stages of {tensor_parallel} "
        f"accelerators: at most {most}",
    )
    require(wanted % group == 0, f"{group} instances share the experts, so {wanted} instances are no whole groups")
    return Layout(tensor_parallel, stages, wanted, group * -(-wanted * stages // (group * pool.machines)))


def check_shared_nodes(pools: Sequence[tuple[PoolSpec, Machine]]) -> None:
    """Raise ConfigurationError if pools that share machines need more accelerators than the machines have.

    Also raise the error if these pools differ in machine type or number of machines.
    """
    used: dict[str, int] = {}
    firsts: dict[str, tuple[PoolSpec, Machine]] = {}
    for pool, machine in pools:
        if pool.nodes is None:
            continue
        first, its = firsts.setdefault(pool.nodes, (pool, machine))
        require(
            machine.name == its.name and pool.machines == first.machines,
            f"pools that share nodes {pool.nodes} need equal machines: one has "
            f"{first.machines} {its.name}, another {pool.machines} {machine.name}",
        )
        used[pool.nodes] = used.get(pool.nodes, 0) + layout_of(pool, machine).accelerators
        require(
            used[pool.nodes] <= machine.count,
            f"pools on nodes {pool.nodes} use {used[pool.nodes]} accelerators of a {machine.name}, which "
            f"has {machine.count}: give the number of instances of each pool",
        )


def share_cores(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Return the CPU cores of each worker: equally many, or one if there are more workers than cores."""
    each = len(cores) // workers
    if each:
        return [tuple(cores[i * each : (i + 1) * each]) for i in range(workers)]
    # The first workers, which routers prefer at equal load, are the last to share a core.
    there_and_back = [*cores, *reversed(cores)]
    return [(there_and_back[i % len(there_and_back)],) for i in range(workers)]


def gateway_cores(cores: Iterable[int], workers: Iterable[tuple[Role, Sequence[int]]]) -> tuple[int, ...]:
    """Return the cores for the gateway: the cores without a decode worker, or all cores if every core has one."""
    everywhere = set(cores)
    decoding = {core for role, own in workers if role.decodes for core in own}
    return tuple(sorted(everywhere - decoding or everywhere))
