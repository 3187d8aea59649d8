"""What the instances of each pool of a cluster have in common: how quick they are, and what they have room for."""

from collections import Counter
from dataclasses import dataclass

from twofold.cluster.layout import Layout, check_shared_nodes, layout_of
from twofold.cluster.rules import cluster_rules
from twofold.cluster.spec import TOKEN_BUDGET, ClusterSpec, PoolSpec
from twofold.cluster.swap_space import NONE, SwapCapacity, swap_space, swap_space_with
from twofold.cluster.timing import Timing, ps
from twofold.cluster.validation import check_batchers, check_cells, check_spec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Machine, Model
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.performance.host_profile import HOST, PackedModel, read_host_profile
from twofold.performance.instance import boundary_bandwidth, kv_capacity_tokens
from twofold.performance.queueing import saturating_tokens
from twofold.performance.registry import performance_model
from twofold.scheduling.batchers import BATCHERS, CHUNKED, UNPIPELINED, WHOLE_PROMPTS
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS

_ROLE_BATCHERS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.MIXED: "mixed"}
_ENDLESS_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """What the instances of a pool have in common; with memory to `swap` to, decodes take theirs as they go."""

    pool: PoolSpec
    machine: Machine
    tensor_parallel: int
    batcher: str
    model: PerformanceModel
    timing: Timing
    capacity_tokens: int
    max_num_batched_tokens: int
    swap: SwapCapacity = NONE

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that each of its instances has room for."""
        return max(1, self.capacity_tokens // block_size)

    def longest(self, block_size: int) -> int:
        """Tokens of the longest request that they can hold, wherever it may come to be."""
        swap = self.swap.blocks * block_size
        return min(self.capacity_tokens, swap) if swap else self.capacity_tokens

    @property
    def layout(self) -> Layout:
        return layout_of(self.pool, self.machine)

    @property
    def instances(self) -> int:
        return self.layout.instances


def instance_profiles(spec: ClusterSpec, catalog: Catalog) -> list[InstanceProfile]:
    """One kind per pool; raises ConfigurationError for whatever is unknown, or does not fit."""
    check_spec(spec)
    catalog = with_host_profile(spec, catalog)
    model = catalog.model(spec.model)
    pools = [(pool, catalog.machine(pool.machine)) for pool in spec.pools]
    check_shared_nodes(pools)
    timings: dict[tuple[str, int, int, bool], Timing] = {}
    kinds = [_kind(spec, pool, model, machine, catalog, timings) for pool, machine in pools]
    check_batchers(spec, {kind.batcher for kind in kinds})
    instances: Counter[Role] = Counter()
    for kind in kinds:
        instances[kind.pool.role] += kind.instances
    check_cells(spec, instances)
    return kinds


def with_host_profile(spec: ClusterSpec, catalog: Catalog) -> Catalog:
    """The catalog, with the host and the model of the cluster's profile in it if it has one."""
    return catalog if spec.profile is None else read_host_profile(spec.profile).extend(catalog)


def performance_of(
    spec: ClusterSpec,
    model: Model,
    machine: Machine,
    tensor_parallel: int,
    pipeline_parallel: int = 1,
    *,
    across: bool = False,
) -> PerformanceModel:
    """The times of an instance: those of the profile for a worker on its host.

    The stages of a pipeline `across` machines send each other activations over the link between those.
    """
    if spec.profile is not None and machine.name == HOST:
        return PackedModel(f"{model.name} on this host", read_host_profile(spec.profile).engine)
    boundary = boundary_bandwidth(machine, tensor_parallel, across=across)
    if across and spec.link_bytes_per_s is not None:
        boundary = spec.link_bytes_per_s
    return performance_model(
        spec.performance,
        model,
        machine,
        tensor_parallel,
        pipeline_parallel,
        boundary_bytes_per_s=boundary,
    )


def _kind(
    spec: ClusterSpec,
    pool: PoolSpec,
    model: Model,
    machine: Machine,
    catalog: Catalog,
    timings: dict[tuple[str, int, int, bool], Timing],
) -> InstanceProfile:
    layout = layout_of(pool, machine)
    tensor_parallel, stages, across = layout.tensor_parallel, layout.stages, layout.spans
    if stages > 1 and spec.profile is not None:
        raise ConfigurationError("workers on a host that was measured have one stage: leave pipelines out")
    if stages > 1 and spec.swap_space_bytes is not None:
        raise ConfigurationError("pipelines do not swap: leave swap_space_bytes or pipeline_parallel out")
    space = swap_space(spec, model, tensor_parallel, catalog)
    key = machine.name, tensor_parallel, stages, across
    if key not in timings:
        made = performance_of(spec, model, machine, tensor_parallel, stages, across=across)
        timings[key] = Timing(made, ps(space.copy_s))
    timing = timings[key]
    # The memory of a worker on a host is what the service gives it, all of which it may fill.
    share = spec.memory_utilization if spec.profile is None else 1.0
    endless = _ENDLESS_TOKENS if cluster_rules(spec.rules).endless_memory else None
    tokens = (
        endless
        or spec.kv_capacity_tokens
        or kv_capacity_tokens(model, machine, tensor_parallel, share, spec.kv_bytes_per_token, stages)
    )
    capacity = tokens // spec.block_size * spec.block_size
    batcher = _batcher(spec, pool)
    longest = min(capacity, model.max_context or capacity)
    budget = _token_budget(spec, batcher, timing.model, longest)
    swap = swap_space_with(batcher, space)
    return InstanceProfile(
        pool, machine, tensor_parallel, batcher, timing.model, timing, capacity, budget, swap
    )


def _batcher(spec: ClusterSpec, pool: PoolSpec) -> str:
    """The pool's own batcher, else that of the rules, else one that suits what its instances may be asked for."""
    batcher = pool.batcher
    if batcher is None and spec.rules == "splitwise-sim":
        batcher = "splitwise-sim"
    if batcher is None:
        batcher = _ROLE_BATCHERS[pool.role] if spec.router in FIXED_ROLE_ROUTERS else "splitwise"
    if batcher not in BATCHERS:
        raise ConfigurationError(f"there is no batcher {batcher!r}: there are {', '.join(BATCHERS)}")
    if pool.pipeline_parallel > 1 and batcher in UNPIPELINED:
        raise ConfigurationError(
            f"the batcher {batcher} knows one iteration at a time: give its pool pipeline parallelism 1"
        )
    if batcher == "prefill" and pool.pipeline_parallel > 1 and spec.pipeline_chunk is not None:
        return "prefill-chunks"
    return batcher


def _token_budget(spec: ClusterSpec, batcher: str, model: PerformanceModel, longest: int) -> int:
    """The prompt tokens of an iteration: of a chunk, or L_m where that is asked for and prompts are taken whole."""
    if batcher in CHUNKED and spec.pipeline_chunk is not None:
        return spec.pipeline_chunk
    budget = spec.max_num_batched_tokens
    if isinstance(budget, int):
        return budget
    if batcher not in WHOLE_PROMPTS:
        return TOKEN_BUDGET
    return saturating_tokens(lambda tokens: model.prefill_s(tokens, tokens * tokens), max(1, longest))
