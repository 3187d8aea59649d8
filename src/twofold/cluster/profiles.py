"""Instance profiles of pools (speed, memory, batching), and the names and machines of instances."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twofold.cluster.layout import Layout, check_shared_nodes, layout_of
from twofold.cluster.spec import TOKEN_BUDGET, ClusterSpec, PoolSpec, cluster_rules
from twofold.cluster.timing import Timing, ps
from twofold.cluster.validation import check_batchers, check_cells, check_spec
from twofold.errors import require
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Machine, Model
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.instance import boundary_bandwidth, kv_capacity_tokens, resident_kv_bytes_per_token
from twofold.performance.profile import MeasuredProfile, load_profiles
from twofold.performance.queueing import saturating_tokens
from twofold.performance.registry import performance_model
from twofold.scheduling.batchers import BATCHERS, can_swap
from twofold.scheduling.routers import APPENDING_ROUTERS, FIXED_ROLE_ROUTERS

_ROLE_BATCHERS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.MIXED: "mixed"}
_ENDLESS_TOKENS = 1 << 40
_Parallelism = tuple[str, int, int, int | None, bool]  # machine, TP, PP, EP, and whether stages span machines
_SWAP_LINK = "pcie4"


@dataclass(frozen=True, slots=True)
class SwapCapacity:
    """Swap space of an instance in host memory: number of blocks, bytes per block and seconds to copy a block."""

    blocks: int
    block_bytes: int
    copy_s: float


NO_SWAP = SwapCapacity(0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """Speed, memory, swap space and batching of a pool's instances."""

    pool: PoolSpec
    machine: Machine
    tensor_parallel: int
    batcher: str
    model: PerformanceModel
    timing: Timing
    capacity_tokens: int
    max_num_batched_tokens: int
    swap: SwapCapacity = NO_SWAP

    def num_blocks(self, block_size: int) -> int:
        """Number of KV blocks in the memory of one instance."""
        return max(1, self.capacity_tokens // block_size)

    def longest(self, block_size: int) -> int:
        """Maximum length of a request in tokens, limited by an instance's KV memory and swap space."""
        swap = self.swap.blocks * block_size
        return min(self.capacity_tokens, swap) if swap else self.capacity_tokens

    @property
    def layout(self) -> Layout:
        return layout_of(self.pool, self.machine)

    def prefill_s(self, tokens: int) -> float:
        """Return the prefill time in seconds of one prompt that runs alone."""
        return self.model.prefill_s(tokens, tokens * tokens)


def instance_profiles(spec: ClusterSpec, catalog: Catalog) -> list[InstanceProfile]:
    """Validate a cluster and create the profile of each pool. Raises ConfigurationError."""
    check_spec(spec)
    catalog = with_profiles(spec, catalog)
    model = catalog.model(spec.model)
    pools = [(pool, catalog.machine(pool.machine)) for pool in spec.pools]
    check_shared_nodes(pools)
    timings: dict[_Parallelism, Timing] = {}
    profiles = [_profile(spec, pool, model, machine, catalog, timings) for pool, machine in pools]
    check_batchers(spec, {profile.batcher for profile in profiles})
    instances: Counter[Role] = Counter()
    for profile in profiles:
        instances[profile.pool.role] += profile.layout.instances
    check_cells(spec, instances)
    return profiles


def with_profiles(spec: ClusterSpec, catalog: Catalog) -> Catalog:
    """Return the catalog extended by the machines and models of the cluster's measured profiles."""
    for measured in load_profiles(spec.profiles):
        catalog = measured.extend(catalog)
    return catalog


def measured_on(spec: ClusterSpec, machine: Machine) -> MeasuredProfile | None:
    """Return the cluster's measured profile of `machine`, or None if there is none."""
    return next((each for each in load_profiles(spec.profiles) if each.machine == machine.name), None)


def performance_of(
    spec: ClusterSpec,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    expert_parallel: int | None = None,
    *,
    across: bool = False,  # the stages are on several machines
) -> PerformanceModel:
    """Create the performance model of an instance, from a measured profile of `machine` if one exists.

    Raise ConfigurationError if the profile was measured for a different LLM or a different parallelism.
    """
    measured = measured_on(spec, machine)
    if measured is not None:
        wanted = f"{model.name} TP{tensor_parallel}" + (f" PP{pipeline_parallel}" if pipeline_parallel > 1 else "")
        wanted += "" if expert_parallel is None else f" EP{expert_parallel}"
        known = f"{measured.model.name} TP{measured.tensor_parallel}"
        require(wanted == known, f"the profile of {machine.name} has measurements of {known}, not of {wanted}")
        return measured.performance()
    boundary = boundary_bandwidth(machine, tensor_parallel, across=across)
    if across and spec.link_bytes_per_s is not None:
        boundary = spec.link_bytes_per_s
    parallelism = tensor_parallel, pipeline_parallel, expert_parallel
    return performance_model(spec.performance, model, machine, *parallelism, boundary_bytes_per_s=boundary)


def _profile(
    spec: ClusterSpec,
    pool: PoolSpec,
    model: Model,
    machine: Machine,
    catalog: Catalog,
    timings: dict[_Parallelism, Timing],
) -> InstanceProfile:
    layout = layout_of(pool, machine)
    tensor_parallel, stages, experts, across = layout.tensor_parallel, layout.stages, pool.expert_parallel, layout.spans
    if stages > 1:
        swaps = spec.swap_space_bytes is not None
        require(not swaps, "pipelines cannot swap: leave swap_space_bytes or pipeline_parallel out")
    swap = _swap_capacity(spec, model, tensor_parallel, catalog)
    key = machine.name, tensor_parallel, stages, experts, across
    if key not in timings:
        performance = performance_of(spec, model, machine, tensor_parallel, stages, experts, across=across)
        timings[key] = Timing(performance, ps(swap.copy_s))
    timing = timings[key]
    tokens = _ENDLESS_TOKENS
    if not cluster_rules(spec.rules).endless_memory:
        tokens = capacity_tokens(spec, model, machine, tensor_parallel, stages, experts)
    capacity = tokens // spec.block_size * spec.block_size
    batcher = _batcher(spec, pool)
    longest = min(capacity, model.max_context or capacity)
    require(
        not (swap.blocks and BATCHERS[batcher].may_preempt),
        f"the batcher {batcher} preempts decodes by itself: with swap_space_bytes use one of "
        f"{', '.join(filter(can_swap, BATCHERS))}",
    )
    return InstanceProfile(
        pool=pool,
        machine=machine,
        tensor_parallel=tensor_parallel,
        batcher=batcher,
        model=timing.model,
        timing=timing,
        capacity_tokens=capacity,
        max_num_batched_tokens=_token_budget(spec, batcher, timing.model, longest),
        swap=swap if can_swap(batcher) else NO_SWAP,
    )


def capacity_tokens(
    spec: ClusterSpec,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: int | None = None,
) -> int:
    """Return an instance's KV capacity in tokens. Raises ConfigurationError if the model does not fit in memory."""
    if spec.kv_capacity_tokens is not None:
        return spec.kv_capacity_tokens
    measured = measured_on(spec, machine)
    if measured is not None:
        return measured.kv_capacity_tokens
    memory = spec.memory_utilization, spec.kv_bytes_per_token
    return kv_capacity_tokens(model, machine, tensor_parallel, *memory, pipeline_parallel, expert_parallel)


def _swap_capacity(spec: ClusterSpec, model: Model, tensor_parallel: int, catalog: Catalog) -> SwapCapacity:
    space = spec.swap_space_bytes
    if space is None:
        return NO_SWAP
    require(
        spec.router in FIXED_ROLE_ROUTERS and spec.rules == "twofold",
        f"swap_space_bytes needs fixed roles and the rules twofold: use one of the routers "
        f"{', '.join(FIXED_ROLE_ROUTERS)}",
    )
    block_bytes = spec.block_size * (spec.kv_bytes_per_token or resident_kv_bytes_per_token(model, tensor_parallel))
    require(space >= block_bytes, f"swap_space_bytes {space:,} is less than one KV block of {block_bytes:,} bytes")
    speed = spec.swap_bytes_per_s or catalog.link(_SWAP_LINK).bytes_per_s * tensor_parallel
    return SwapCapacity(space // block_bytes, block_bytes, block_bytes / speed)


def _batcher(spec: ClusterSpec, pool: PoolSpec) -> str:
    batcher, appends = pool.batcher, spec.router in APPENDING_ROUTERS and pool.role is Role.DECODE
    if batcher is None:
        by_role = _ROLE_BATCHERS[pool.role] if spec.router in FIXED_ROLE_ROUTERS else "splitwise"
        if appends:
            by_role = "chunked-prefill"
        batcher = "splitwise-sim" if spec.rules == "splitwise-sim" else by_role
    require(batcher in BATCHERS, f"unknown batcher {batcher!r}: choose one of {', '.join(BATCHERS)}")
    require(
        not appends or BATCHERS[batcher].prefills,
        f"the router {spec.router} prefills on decode instances, which the batcher {batcher} cannot",
    )
    staged = pool.pipeline_parallel == 1 or BATCHERS[batcher].pipelined
    require(staged, f"the batcher {batcher} does not support pipelines: set pipeline_parallel 1 for its pool")
    if batcher == "prefill" and pool.pipeline_parallel > 1 and spec.pipeline_chunk is not None:
        return "prefill-chunks"
    return batcher


def _token_budget(spec: ClusterSpec, batcher: str, model: PerformanceModel, longest: int) -> int:
    """Return the maximum number of prompt tokens in a batch."""
    if BATCHERS[batcher].chunked and spec.pipeline_chunk is not None:
        return spec.pipeline_chunk
    budget = spec.max_num_batched_tokens
    if isinstance(budget, int):
        return budget
    if not BATCHERS[batcher].whole_prompts:
        return TOKEN_BUDGET
    return saturating_tokens(lambda tokens: model.prefill_s(tokens, tokens * tokens), max(1, longest))


@dataclass(frozen=True, slots=True)
class InstanceSlot:
    """An instance of a cluster, with its name, machines and profile."""

    name: str
    number: int  # in the cluster
    pool: int  # index of its pool
    machine: str  # names of its machines, joined by +
    profile: InstanceProfile


def instance_slots(profiles: Sequence[InstanceProfile]) -> Iterator[InstanceSlot]:
    """Yield every instance of a cluster, pool by pool, with names such as `prefill-0`."""
    numbers: dict[Role, int] = dict.fromkeys(Role, 0)
    for pool, profile in enumerate(profiles):
        role, layout = profile.pool.role, profile.layout
        nodes = str(pool) if profile.pool.nodes is None else f"nodes-{profile.pool.nodes}"
        for number in range(layout.instances):
            machines = "+".join(f"{nodes}/{machine}" for machine in layout.machines_of(number))
            yield InstanceSlot(f"{role.value}-{numbers[role]}", sum(numbers.values()), pool, machines, profile)
            numbers[role] += 1


def cells_of(spec: ClusterSpec, slots: Sequence[InstanceSlot]) -> dict[str, str]:
    """Map the name of each instance to the name of its cell (group of instances)."""
    if not isinstance(spec.cells, int):
        return {}
    of_role = {role: [slot.name for slot in slots if slot.profile.pool.role is role] for role in Role}
    return {
        name: f"cell-{number * spec.cells // len(names)}"
        for names in of_role.values()
        for number, name in enumerate(names)
    }


def machines_of(profiles: Sequence[InstanceProfile]) -> list[tuple[Machine, int]]:
    """Return the machine type and number of machines of each pool. Pools that share machines get one entry."""
    distinct = {profile.pool.nodes or pool: profile for pool, profile in enumerate(profiles)}
    return [(profile.machine, profile.pool.machines) for profile in distinct.values()]
