"""From a cluster's description to a virtual cluster."""

from collections.abc import Sequence

from twofold.hardware.catalog import Catalog
from twofold.kvcache.counts import BlockCounts
from twofold.kvcache.leases import LeaseBook
from twofold.performance.distserve_published import published_capacity
from twofold.performance.host_profile import read_host_profile
from twofold.performance.transfer import TransferModel
from twofold.scheduling.batcher import Batcher
from twofold.scheduling.batchers import BATCHERS, CHUNKED, INLINED
from twofold.scheduling.batchers.inlined import InlinedPrefill
from twofold.scheduling.chunked_pipeline import ChunkedPipelineScheduler
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.growth import Growth
from twofold.scheduling.handoffs import HANDOFF_POLICIES, HandoffPolicy
from twofold.scheduling.instance import InstanceScheduler
from twofold.scheduling.memory import MemoryRule
from twofold.scheduling.pipeline import PipelineScheduler
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS
from twofold.simulation.caches import Placed, attach_caches
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.control_spec import ControlSpec
from twofold.simulation.controllers import Controllers
from twofold.simulation.failures import plan_failures
from twofold.simulation.handoffs import Handoffs
from twofold.simulation.hosting import Hosting
from twofold.simulation.instance import VirtualInstance
from twofold.simulation.kernel import Kernel
from twofold.simulation.kinds import Kind, with_profile
from twofold.simulation.network import Link, Network
from twofold.simulation.observer import Observer
from twofold.simulation.paths import local_bandwidth, paths_of, transfer_of
from twofold.simulation.pipeline import VirtualPipeline
from twofold.simulation.rules import Rules, rules
from twofold.simulation.seats import Seat, cells_of, seats_of
from twofold.simulation.site import Site
from twofold.simulation.spec import ClusterSpec
from twofold.simulation.stagewise import StagewiseInstance, StagewiseScheduler
from twofold.simulation.statistics import Statistics


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


def _scheduler(spec: ClusterSpec, how: Rules, kind: Kind, name: str, epoch: int) -> InstanceScheduler:
    blocks = BlockCounts(kind.num_blocks(spec.block_size), spec.block_size)
    leases = LeaseBook(blocks, name, epoch, lease_s=float("inf"))
    stages = kind.layout.stages
    if how.stagewise:
        known = published_capacity(spec.model, kind.tensor_parallel, stages)
        return StagewiseScheduler(blocks, leases, spec.max_num_seqs, known or kind.max_num_batched_tokens, how.memory)
    batcher = _new_batcher(spec, kind)
    if stages > 1:
        pipeline = ChunkedPipelineScheduler if kind.batcher in CHUNKED else PipelineScheduler
        return pipeline(batcher, blocks, leases, spec.max_num_seqs, stages, how.memory)
    growth = Growth(blocks, BlockCounts(kind.swap.blocks, spec.block_size)) if kind.swap.blocks else None
    return InstanceScheduler(batcher, blocks, leases, spec.max_num_seqs, how.memory, growth)


def _new_batcher(spec: ClusterSpec, kind: Kind) -> Batcher:
    if kind.batcher == INLINED and spec.inline_tbt_s is not None:
        return InlinedPrefill(kind.max_num_batched_tokens, spec.max_num_seqs, kind.model, spec.inline_tbt_s)
    return BATCHERS[kind.batcher](kind.max_num_batched_tokens, spec.max_num_seqs)


def _placed(seat: Seat, transfer: TransferModel, link: Link) -> Placed:
    kind = seat.kind
    prefills = kind.pool.role.prefills
    return Placed(seat.name, seat.machine, prefills, kind.model, transfer, kind.tensor_parallel, link)
