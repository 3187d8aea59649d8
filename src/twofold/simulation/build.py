"""Instances that die in a simulation, and come back.

From a cluster's description to a virtual cluster.
"""

from collections.abc import Sequence

from twofold.cluster.paths import local_bandwidth, paths_of, transfer_model
from twofold.cluster.profiles import InstanceProfile, with_host_profile
from twofold.cluster.rules import ClusterRules, cluster_rules
from twofold.cluster.slots import InstanceSlot, cells_of, instance_slots
from twofold.cluster.spec import ClusterSpec, ControlSpec, InstanceFailure
from twofold.cluster.timing import ps
from twofold.compat.stagewise import StagewiseInstance, StagewiseScheduler
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.leases import LeaseTable
from twofold.performance.distserve_published import published_capacity
from twofold.performance.host_profile import read_host_profile
from twofold.performance.transfer import TransferModel
from twofold.scheduling.batchers import BATCHERS, CHUNKED, INLINED
from twofold.scheduling.batchers.inlined import InlinedPrefill
from twofold.scheduling.cluster.handoff_policy import HANDOFF_POLICIES, HandoffPolicy
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.batcher import Batcher
from twofold.scheduling.instance.kv_reservation import KvReservation
from twofold.scheduling.instance.pipeline import ChunkedPipelineScheduler, PipelineScheduler
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, ROUTERS
from twofold.simulation.caches import CacheSite, attach_caches
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.controllers import ReplicatedControllers
from twofold.simulation.handoffs import SimulatedHandoffs
from twofold.simulation.hosting import Hosting
from twofold.simulation.instance import VirtualInstance
from twofold.simulation.kernel import EventOrder, Kernel
from twofold.simulation.network import MachineLink, VirtualNetwork
from twofold.simulation.observers.base import Observer
from twofold.simulation.pipeline import VirtualPipeline
from twofold.simulation.site import Site
from twofold.simulation.statistics import RunStatistics


def plan_failures(cluster: VirtualCluster, failures: Sequence[InstanceFailure]) -> None:
    """Schedule them; raises ConfigurationError for an instance or a time that cannot be."""
    for failure in failures:
        instance = cluster.instances.get(failure.instance)
        if instance is None:
            names = list(cluster.instances)
            known = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
            raise ConfigurationError(
                f"there is no instance {failure.instance!r} that could fail: there are {known}"
            )
        if failure.at_s < 0 or (failure.back_s is not None and failure.back_s <= failure.at_s):
            raise ConfigurationError(
                f"a failure of {failure.instance} at {failure.at_s:g} s must not be before 0 nor after its return"
            )
        order = EventOrder.FAILURE + instance.number
        cluster.kernel.schedule(ps(failure.at_s), order, cluster.take_down, instance)
        if failure.back_s is not None:
            cluster.kernel.schedule(ps(failure.back_s), order, cluster.bring_back, instance)


def build_cluster(
    spec: ClusterSpec,
    catalog: Catalog,
    kinds: Sequence[InstanceProfile],
    statistics: RunStatistics,
    observers: Sequence[Observer],
    max_run: int,
) -> VirtualCluster:
    """A cluster at rest, at picosecond 0."""
    how = cluster_rules(spec.rules)
    kernel = Kernel()
    model = with_host_profile(spec, catalog).model(spec.model)
    handoffs = HANDOFF_POLICIES[spec.handoff](paths_of(spec, model, kinds))
    scheduler = _cluster_scheduler(spec, kernel, handoffs, how.memory)
    seats = list(instance_slots(kinds))
    hosting: Hosting | None = None
    if spec.profile is None:
        cluster = VirtualCluster(kernel, scheduler, statistics, observers)
    else:
        workers = [(seat.name, seat.kind.pool.role) for seat in seats]
        hosting = Hosting(read_host_profile(spec.profile), workers, kernel, scheduler, statistics, observers)
        cluster = hosting.cluster
    transfers = [transfer_model(spec, model, kind) for kind in kinds]
    network = VirtualNetwork(kernel, contention=spec.contention, latency_s=transfers[0].latency_s)
    by_instance: dict[str, InstanceProfile] = {}

    def new_scheduler(name: str, epoch: int) -> InstanceScheduler:
        return _scheduler(spec, how, by_instance[name], name, epoch)

    cluster.new_scheduler = new_scheduler
    links: dict[str, MachineLink] = {}
    for seat in seats:
        kind, name = seat.kind, seat.name
        if seat.machine not in links:
            links[seat.machine] = MachineLink(transfers[seat.place].bytes_per_s, local_bandwidth(seat))
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
    cluster.handoffs = SimulatedHandoffs(
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
    spec: ClusterSpec, kernel: Kernel, handoffs: HandoffPolicy, memory: KvReservation
) -> ClusterScheduler:
    """The one controller that there is, or several."""
    router = ROUTERS[spec.router]
    if isinstance(spec.control, ControlSpec):
        return ReplicatedControllers(kernel, spec.control, router, handoffs, memory)
    return ClusterScheduler(router(), handoffs, memory)


def _scheduler(
    spec: ClusterSpec, how: ClusterRules, kind: InstanceProfile, name: str, epoch: int
) -> InstanceScheduler:
    blocks = BlockAllocator(kind.num_blocks(spec.block_size), spec.block_size)
    leases = LeaseTable(blocks, name, epoch, lease_s=float("inf"))
    stages = kind.layout.stages
    if how.stagewise:
        known = published_capacity(spec.model, kind.tensor_parallel, stages)
        return StagewiseScheduler(
            blocks, leases, spec.max_num_seqs, known or kind.max_num_batched_tokens, how.memory
        )
    batcher = _new_batcher(spec, kind)
    if stages > 1:
        pipeline = ChunkedPipelineScheduler if kind.batcher in CHUNKED else PipelineScheduler
        return pipeline(batcher, blocks, leases, spec.max_num_seqs, stages, how.memory)
    growth = (
        SwapPreemption(blocks, BlockAllocator(kind.swap.blocks, spec.block_size))
        if kind.swap.blocks
        else None
    )
    return InstanceScheduler(batcher, blocks, leases, spec.max_num_seqs, how.memory, growth)


def _new_batcher(spec: ClusterSpec, kind: InstanceProfile) -> Batcher:
    if kind.batcher == INLINED and spec.inline_tbt_s is not None:
        return InlinedPrefill(kind.max_num_batched_tokens, spec.max_num_seqs, kind.model, spec.inline_tbt_s)
    return BATCHERS[kind.batcher](kind.max_num_batched_tokens, spec.max_num_seqs)


def _placed(seat: InstanceSlot, transfer: TransferModel, link: MachineLink) -> CacheSite:
    kind = seat.kind
    prefills = kind.pool.role.prefills
    return CacheSite(seat.name, seat.machine, prefills, kind.model, transfer, kind.tensor_parallel, link)
