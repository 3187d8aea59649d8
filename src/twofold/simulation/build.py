"""From a cluster's description to a virtual cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.machine import Machine
from twofold.hardware.model import Model
from twofold.instance import Role
from twofold.kvcache.counts import BlockCounts
from twofold.kvcache.leases import LeaseBook
from twofold.performance.base import PerformanceModel
from twofold.performance.distserve_published import published_capacity
from twofold.performance.host_profile import HOST, read_host_profile
from twofold.performance.memory import kv_capacity_tokens
from twofold.performance.packed import PackedModel
from twofold.performance.pipeline import boundary_bandwidth
from twofold.performance.registry import performance_model
from twofold.performance.saturation import saturating_tokens
from twofold.performance.transfer import TransferModel, default_sync_s
from twofold.scheduling.batcher import Batcher
from twofold.scheduling.batchers import BATCHERS, CHUNKED, INLINED, UNPIPELINED, WHOLE_PROMPTS
from twofold.scheduling.batchers.inlined import InlinedPrefill
from twofold.scheduling.chunked_pipeline import ChunkedPipelineScheduler
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.growth import Growth
from twofold.scheduling.handoffs import HANDOFF_POLICIES, HandoffPolicy
from twofold.scheduling.instance import InstanceScheduler
from twofold.scheduling.memory import MemoryRule
from twofold.scheduling.pipeline import PipelineScheduler
from twofold.scheduling.routers import CELL_ROUTERS, FIXED_ROLE_ROUTERS, ROUTERS
from twofold.simulation.caches import Placed, attach_caches, check_caches
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.control_spec import ControlSpec, check_control
from twofold.simulation.controllers import Controllers
from twofold.simulation.failures import plan_failures
from twofold.simulation.handoffs import Handoffs
from twofold.simulation.hosting import Hosting
from twofold.simulation.instance import VirtualInstance
from twofold.simulation.kernel import Kernel, ps
from twofold.simulation.layout import Layout, check_shared, layout_of
from twofold.simulation.network import Link, Network
from twofold.simulation.observer import Observer
from twofold.simulation.paths import ModelledPaths, Outlet
from twofold.simulation.pipeline import VirtualPipeline
from twofold.simulation.rules import Rules, rules
from twofold.simulation.site import Site
from twofold.simulation.spec import SATURATING, TOKEN_BUDGET, ClusterSpec, PoolSpec
from twofold.simulation.stagewise import StagewiseInstance, StagewiseScheduler
from twofold.simulation.statistics import Statistics
from twofold.simulation.swap_space import NONE, SwapSpace, swap_space, swap_space_with
from twofold.simulation.timing import Timing

_ROLE_BATCHERS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.MIXED: "mixed"}
_ENDLESS_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Kind:
    """What the instances of a pool have in common; with memory to `swap` to, decodes take theirs as they go."""

    pool: PoolSpec
    machine: Machine
    tensor_parallel: int
    batcher: str
    model: PerformanceModel
    timing: Timing
    capacity_tokens: int
    token_budget: int
    swap: SwapSpace = NONE

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


@dataclass(frozen=True, slots=True)
class Seat:
    """An instance to be: its name, the pool (`place`) that it is in, and the machine, or machines, that it is on."""

    name: str
    place: int
    machine: str
    kind: Kind


def seats_of(kinds: Sequence[Kind]) -> Iterator[Seat]:
    """Every instance of a cluster, in order. Names count the instances of a role over all its pools."""
    numbers: dict[Role, int] = dict.fromkeys(Role, 0)
    for place, kind in enumerate(kinds):
        role, layout = kind.pool.role, kind.layout
        nodes = str(place) if kind.pool.nodes is None else f"nodes-{kind.pool.nodes}"
        for number in range(layout.instances):
            machines = "+".join(f"{nodes}/{machine}" for machine in layout.machines_of(number))
            yield Seat(f"{role.value}-{numbers[role]}", place, machines, kind)
            numbers[role] += 1


def kinds_of(spec: ClusterSpec, catalog: Catalog) -> list[Kind]:
    """One kind per pool; raises ConfigurationError for whatever is unknown, or does not fit."""
    _check(spec)
    catalog = with_profile(spec, catalog)
    model = catalog.model(spec.model)
    pools = [(pool, catalog.machine(pool.machine)) for pool in spec.pools]
    check_shared(pools)
    timings: dict[tuple[str, int, int, bool], Timing] = {}
    kinds = [_kind(spec, pool, model, machine, catalog, timings) for pool, machine in pools]
    if spec.token_budget == SATURATING and not any(kind.batcher in WHOLE_PROMPTS for kind in kinds):
        raise ConfigurationError(
            f"token_budget {SATURATING} is for the batchers {', '.join(WHOLE_PROMPTS)}, which take whole prompts: "
            "no pool has one of them, so give a number"
        )
    _check_chunks(spec, kinds)
    _check_inlining(spec, kinds)
    _check_cells(spec, kinds)
    return kinds


def with_profile(spec: ClusterSpec, catalog: Catalog) -> Catalog:
    """The catalog, with the host and the model of the cluster's profile in it if it has one."""
    return catalog if spec.profile is None else read_host_profile(spec.profile).extend(catalog)


def build(
    spec: ClusterSpec,
    catalog: Catalog,
    kinds: Sequence[Kind],
    statistics: Statistics,
    observers: Sequence[Observer],
    max_run: int,
) -> VirtualCluster:
    """A cluster at rest, at picosecond 0."""
    how = rules(spec.rules)
    kernel = Kernel()
    model = with_profile(spec, catalog).model(spec.model)
    handoffs = HANDOFF_POLICIES[spec.handoff](paths_of(spec, model, kinds))
    scheduler = _cluster_scheduler(spec, kernel, handoffs, how.memory)
    seats = list(seats_of(kinds))
    hosting: Hosting | None = None
    if spec.profile is None:
        cluster = VirtualCluster(kernel, scheduler, statistics, observers)
    else:
        workers = [(seat.name, seat.kind.pool.role) for seat in seats]
        hosting = Hosting(read_host_profile(spec.profile), workers, kernel, scheduler, statistics, observers)
        cluster = hosting.cluster
    transfers = [transfer_of(spec, model, kind) for kind in kinds]
    network = Network(kernel, contention=spec.contention, latency_s=transfers[0].latency_s)
    by_instance: dict[str, Kind] = {}

    def new_scheduler(name: str, epoch: int) -> InstanceScheduler:
        return _scheduler(spec, how, by_instance[name], name, epoch)

    cluster.new_scheduler = new_scheduler
    links: dict[str, Link] = {}
    for seat in seats:
        kind, name = seat.kind, seat.name
        if seat.machine not in links:
            links[seat.machine] = Link(transfers[seat.place].bytes_per_s, local_bandwidth(seat))
        by_instance[name] = kind
        cluster.capacities[name] = kind.longest(spec.block_size)
        number, link = len(cluster.instances), links[seat.machine]
        site = Site(name, number, link, seat.place, kind.pool.role, kind.timing)
        fresh = new_scheduler(name, 1)
        instance: VirtualInstance
        if hosting is not None:
            instance = hosting.instance(site, fresh)
        elif how.stagewise:
            instance = StagewiseInstance(site, fresh, kernel, cluster)
        elif kind.layout.stages > 1:
            instance = VirtualPipeline(site, fresh, kernel, cluster)
        else:
            instance = VirtualInstance(site, fresh, kernel, cluster, max_run)
        cluster.instances[name] = instance
    slowest = max(transfers, key=lambda transfer: transfer.sync_s)
    cluster.handoffs = Handoffs(
        kernel,
        network,
        scheduler,
        statistics,
        observers,
        slowest,
        how.lease_retry_s,
        spec.router in FIXED_ROLE_ROUTERS,
        how.instant_handoff,
    )
    cluster.cells = cells_of(spec, seats)
    placed = [_placed(seat, transfers[seat.place], links[seat.machine]) for seat in seats]
    attach_caches(spec, catalog, cluster, network, placed)
    for instance in cluster.instances.values():
        cluster.join(instance)
    plan_failures(cluster, spec.failures)
    return cluster


def _cluster_scheduler(
    spec: ClusterSpec, kernel: Kernel, handoffs: HandoffPolicy, memory: MemoryRule
) -> ClusterScheduler:
    """The one controller that there is, or several."""
    router = ROUTERS[spec.router]
    if isinstance(spec.control, ControlSpec):
        return Controllers(kernel, spec.control, router, handoffs, memory)
    return ClusterScheduler(router(), handoffs, memory)


def cells_of(spec: ClusterSpec, seats: Sequence[Seat]) -> dict[str, str]:
    """The cell of each instance: those of each role are dealt out in order, the first ones to the first cell."""
    if not isinstance(spec.cells, int):
        return {}
    of_role = {role: [seat.name for seat in seats if seat.kind.pool.role is role] for role in Role}
    return {
        name: f"cell-{number * spec.cells // len(names)}"
        for names in of_role.values()
        for number, name in enumerate(names)
    }


def _placed(seat: Seat, transfer: TransferModel, link: Link) -> Placed:
    kind = seat.kind
    prefills = kind.pool.role.prefills
    return Placed(seat.name, seat.machine, prefills, kind.model, transfer, kind.tensor_parallel, link)


def _check(spec: ClusterSpec) -> None:
    check_caches(spec)
    for what, name, known in (
        ("router", spec.router, ROUTERS),
        ("hand-off", spec.handoff, HANDOFF_POLICIES),
    ):
        if name not in known:
            raise ConfigurationError(f"there is no {what} {name!r}: there are {', '.join(known)}")
    if isinstance(spec.control, ControlSpec):
        check_control(spec.router)
    for what, value in (
        ("token budget", spec.token_budget if isinstance(spec.token_budget, int) else 1),
        ("number of sequences", spec.max_seqs),
        ("block size", spec.block_size),
        ("chunk", 1 if spec.pipeline_chunk is None else spec.pipeline_chunk),
    ):
        if value < 1:
            raise ConfigurationError(f"the {what} of a batch must be at least 1, not {value}")
    if spec.link_bytes_per_s is not None and not spec.link_bytes_per_s > 0:
        raise ConfigurationError(f"a link of {spec.link_bytes_per_s:g} bytes per second carries nothing")
    roles = {pool.role for pool in spec.pools}
    if not (any(role.prefills for role in roles) and any(role.decodes for role in roles)):
        raise ConfigurationError("a cluster needs instances for both phases: prefill and decode, or mixed")
    if any(pool.machines < 1 for pool in spec.pools):
        raise ConfigurationError("a pool needs at least one machine")


def _check_chunks(spec: ClusterSpec, kinds: Sequence[Kind]) -> None:
    if spec.pipeline_chunk is None:
        return
    if rules(spec.rules).stagewise:
        raise ConfigurationError(
            f"pipeline_chunk means nothing to the rules {spec.rules}, which cut no prompts"
        )
    if not any(kind.batcher in CHUNKED for kind in kinds):
        raise ConfigurationError(
            "pipeline_chunk is for pools of several stages that only prefill, as in 2xdgx-a100@4x2:prefill, and for "
            f"routers that leave it at that: {', '.join(FIXED_ROLE_ROUTERS)}"
        )


def _check_inlining(spec: ClusterSpec, kinds: Sequence[Kind]) -> None:
    if any(kind.batcher == INLINED for kind in kinds) != (spec.inline_tbt_s is not None):
        raise ConfigurationError(
            f"inline_tbt_s is the seconds that an iteration of the batcher {INLINED} may take: give both or neither"
        )


def _check_cells(spec: ClusterSpec, kinds: Sequence[Kind]) -> None:
    if not isinstance(spec.cells, int):
        return
    if spec.router not in CELL_ROUTERS:
        raise ConfigurationError(f"cells are for the routers {', '.join(CELL_ROUTERS)}, not {spec.router}")
    counts: dict[Role, int] = {}
    for kind in kinds:
        counts[kind.pool.role] = counts.get(kind.pool.role, 0) + kind.instances
    role = min(counts, key=counts.__getitem__)
    if not 1 <= spec.cells <= counts[role]:
        raise ConfigurationError(
            f"{spec.cells} cells cannot be: give from 1 to {counts[role]}, so that each has a {role.value} instance"
        )


def _kind(
    spec: ClusterSpec,
    pool: PoolSpec,
    model: Model,
    machine: Machine,
    catalog: Catalog,
    timings: dict[tuple[str, int, int, bool], Timing],
) -> Kind:
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
    endless = _ENDLESS_TOKENS if rules(spec.rules).endless_memory else None
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
    return Kind(pool, machine, tensor_parallel, batcher, timing.model, timing, capacity, budget, swap)


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
    budget = spec.token_budget
    if isinstance(budget, int):
        return budget
    if batcher not in WHOLE_PROMPTS:
        return TOKEN_BUDGET
    return saturating_tokens(lambda tokens: model.prefill_s(tokens, tokens * tokens), max(1, longest))


def _scheduler(spec: ClusterSpec, how: Rules, kind: Kind, name: str, epoch: int) -> InstanceScheduler:
    blocks = BlockCounts(kind.num_blocks(spec.block_size), spec.block_size)
    leases = LeaseBook(blocks, name, epoch, lease_s=float("inf"))
    stages = kind.layout.stages
    if how.stagewise:
        known = published_capacity(spec.model, kind.tensor_parallel, stages)
        return StagewiseScheduler(blocks, leases, spec.max_seqs, known or kind.token_budget, how.memory)
    batcher = _new_batcher(spec, kind)
    if stages > 1:
        pipeline = ChunkedPipelineScheduler if kind.batcher in CHUNKED else PipelineScheduler
        return pipeline(batcher, blocks, leases, spec.max_seqs, stages, how.memory)
    growth = Growth(blocks, BlockCounts(kind.swap.blocks, spec.block_size)) if kind.swap.blocks else None
    return InstanceScheduler(batcher, blocks, leases, spec.max_seqs, how.memory, growth)


def _new_batcher(spec: ClusterSpec, kind: Kind) -> Batcher:
    if kind.batcher == INLINED and spec.inline_tbt_s is not None:
        return InlinedPrefill(kind.token_budget, spec.max_seqs, kind.model, spec.inline_tbt_s)
    return BATCHERS[kind.batcher](kind.token_budget, spec.max_seqs)


def local_bandwidth(seat: Seat) -> float:
    """Bytes per second of a KV cache between instances on the same machine, or on the same machines."""
    each = seat.kind.machine.accelerator.interconnect_bytes_per_s
    return each * len(seat.kind.layout.machines_of(0))


def machines_of(kinds: Sequence[Kind]) -> Iterator[tuple[Machine, int]]:
    """Every kind of machine of a cluster and how many there are of it, those that pools share once."""
    shared: set[str] = set()
    for kind in kinds:
        nodes = kind.pool.nodes
        if nodes is None or nodes not in shared:
            yield kind.machine, kind.pool.machines
        if nodes is not None:
            shared.add(nodes)


def paths_of(spec: ClusterSpec, model: Model, kinds: Sequence[Kind]) -> ModelledPaths:
    """What hand-off policies may know of the cluster."""
    outlets = [Outlet.of(transfer_of(spec, model, kind), partial(_prefill_s, kind)) for kind in kinds]
    return ModelledPaths({seat.name: outlets[seat.place] for seat in seats_of(kinds)})


def _prefill_s(kind: Kind, tokens: int) -> float:
    return kind.model.prefill_s(tokens, tokens * tokens)


def transfer_of(spec: ClusterSpec, model: Model, kind: Kind) -> TransferModel:
    """The path of a KV cache that leaves an instance of this kind: its share of the network of its machines."""
    layout = kind.layout
    share = layout.tensor_parallel * layout.stages / kind.machine.count
    override = spec.link_bytes_per_s and spec.link_bytes_per_s * len(layout.machines_of(0))
    bytes_per_s = override or kind.machine.network_bytes_per_s * share
    latency_s, sync_s = 0.0, default_sync_s(bytes_per_s)
    if spec.profile is not None:
        link = read_host_profile(spec.profile).link
        latency_s, sync_s = link.latency_s, link.sync_s
    return TransferModel(
        kv_bytes_per_token=spec.kv_bytes_per_token or model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s if spec.link_latency_s is None else spec.link_latency_s,
        sync_s=sync_s,
    )
