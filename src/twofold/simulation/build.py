"""Build a virtual cluster from a ClusterSpec."""

from collections.abc import Sequence
from typing import Final

from twofold.cluster.paths import local_bandwidth, paths_of, transfer_model
from twofold.cluster.profiles import InstanceProfile, with_host_profile
from twofold.cluster.rules import ClusterRules, cluster_rules
from twofold.cluster.slots import InstanceSlot, cells_of, instance_slots
from twofold.cluster.spec import CacheSpec, ClusterSpec, ControlSpec, InstanceFailure
from twofold.cluster.timing import ps
from twofold.compat.stagewise import StagewiseInstance, StagewiseScheduler
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.leases import LeaseTable
from twofold.kvcache.tiers import TieredCache
from twofold.performance.distserve_published import published_capacity
from twofold.performance.host_profile import read_host_profile
from twofold.performance.transfer import TransferModel
from twofold.scheduling.batchers import create_batcher
from twofold.scheduling.cluster.forecast import ClusterForecast, ModelPrediction
from twofold.scheduling.cluster.handoff_policy import HANDOFF_POLICIES, HandoffPolicy
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.scheduling.instance.kv_reservation import KvReservation
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS, ROUTERS
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.controllers import ReplicatedControllers
from twofold.simulation.handoffs import SimulatedHandoffs
from twofold.simulation.hosted import HostedCluster
from twofold.simulation.instance import SimulatedInstance, VirtualInstance
from twofold.simulation.kernel import EventOrder, Kernel
from twofold.simulation.network import MachineLink, VirtualNetwork
from twofold.simulation.observers.base import Observer
from twofold.simulation.reuse import BLOCK_TOKENS, HostCache, PrefixReuse, make_cache
from twofold.simulation.reuse_statistics import ReuseStatistics
from twofold.simulation.statistics import RunStatistics

_DRAM_LINK, _DISK_LINK = "pcie4", "nvme"
_DEFAULT_CACHE: Final = CacheSpec(dram="1 tokens")  # gives forecasting routers load times without a cache


def build_cluster(
    spec: ClusterSpec,
    catalog: Catalog,
    profiles: Sequence[InstanceProfile],
    statistics: RunStatistics,
    observers: Sequence[Observer],
    max_run: int,
) -> VirtualCluster:
    """Build an idle cluster at time 0."""
    rules = cluster_rules(spec.rules)
    kernel = Kernel()
    model = with_host_profile(spec, catalog).model(spec.model)
    handoffs = HANDOFF_POLICIES[spec.handoff](paths_of(spec, model, profiles))
    scheduler = _cluster_scheduler(spec, kernel, handoffs, rules.memory)
    slots = list(instance_slots(profiles))
    if spec.profile is None:
        cluster = VirtualCluster(kernel, scheduler, statistics, observers)
    else:
        workers = [(slot.name, slot.profile.pool.role) for slot in slots]
        host = read_host_profile(spec.profile)
        cluster = HostedCluster(host, workers, kernel, scheduler, statistics, observers)
    transfers = [transfer_model(spec, model, profile) for profile in profiles]
    network = VirtualNetwork(kernel, contention=spec.contention, latency_s=transfers[0].latency_s)
    by_instance = {slot.name: slot.profile for slot in slots}

    def new_scheduler(name: str, epoch: int) -> InstanceScheduler:
        return _scheduler(spec, rules, by_instance[name], name, epoch)

    cluster.new_scheduler = new_scheduler
    links: dict[str, MachineLink] = {}
    for number, slot in enumerate(slots):
        profile, name = slot.profile, slot.name
        if slot.machine not in links:
            links[slot.machine] = MachineLink(transfers[slot.pool].bytes_per_s, local_bandwidth(slot))
        cluster.capacities[name] = profile.longest(spec.block_size)
        link, fresh = links[slot.machine], new_scheduler(name, 1)
        instance: SimulatedInstance
        if isinstance(fresh, StagewiseScheduler):
            instance = StagewiseInstance(slot, number, link, fresh, kernel, cluster)
        elif isinstance(cluster, HostedCluster):
            # One iteration at a time, because other workers may start to compute in the middle of any.
            instance = VirtualInstance(slot, number, link, fresh, kernel, cluster, 1, cluster.cores[name])
        else:
            instance = VirtualInstance(slot, number, link, fresh, kernel, cluster, max_run)
        cluster.instances[name] = instance
    cluster.handoffs = SimulatedHandoffs(
        kernel,
        network,
        cluster.events,
        statistics,
        observers,
        max(transfers, key=lambda transfer: transfer.sync_s),
        rules.lease_retry_s,
        spec.router in FIXED_ROLE_ROUTERS,
        rules.instant_handoff,
    )
    cluster.cells = cells_of(spec, slots)
    _attach_caches(spec, catalog, cluster, network, slots, transfers, links)
    for instance in cluster.instances.values():
        cluster.join(instance)
    _schedule_failures(cluster, spec.failures)
    return cluster


def _cluster_scheduler(
    spec: ClusterSpec, kernel: Kernel, handoffs: HandoffPolicy, memory: KvReservation
) -> ClusterScheduler:
    router = ROUTERS[spec.router]
    if isinstance(spec.control, ControlSpec):
        return ReplicatedControllers(kernel, spec.control, router, handoffs, memory)
    return ClusterScheduler(router(), handoffs, memory)


def _scheduler(
    spec: ClusterSpec, rules: ClusterRules, profile: InstanceProfile, name: str, epoch: int
) -> InstanceScheduler:
    blocks = BlockAllocator(profile.num_blocks(spec.block_size), spec.block_size)
    leases = LeaseTable(blocks, name, epoch, lease_s=float("inf"))
    stages = profile.layout.stages
    if rules.stagewise:
        published = published_capacity(spec.model, profile.tensor_parallel, stages)
        budget = published or profile.max_num_batched_tokens
        return StagewiseScheduler(blocks, leases, spec.max_num_seqs, budget, rules.memory)
    batcher = create_batcher(
        profile.batcher, profile.max_num_batched_tokens, spec.max_num_seqs, profile.model, spec.inline_tbt_s
    )
    host_blocks = profile.swap.blocks
    swap = SwapPreemption(blocks, BlockAllocator(host_blocks, spec.block_size)) if host_blocks else None
    return InstanceScheduler(batcher, blocks, leases, spec.max_num_seqs, rules.memory, swap, stages)


def _attach_caches(
    spec: ClusterSpec,
    catalog: Catalog,
    cluster: VirtualCluster,
    network: VirtualNetwork,
    slots: Sequence[InstanceSlot],
    transfers: Sequence[TransferModel],
    links: dict[str, MachineLink],
) -> None:
    """Create the forecast of a forecasting router and one prefix cache per machine that may prefill."""
    cache = spec.kv_cache
    if cache is None and spec.router not in FORECASTING_ROUTERS:
        return
    prefixes = PrefixIndex()
    forecast = cluster.scheduler.pools.forecast = ClusterForecast(prefixes, BLOCK_TOKENS)
    known: dict[tuple[int, TransferModel], ModelPrediction] = {}
    for slot in slots:
        profile, transfer = slot.profile, transfers[slot.pool]
        key = id(profile.model), transfer
        if key not in known:
            speed, _ = _cache_speeds(cache or _DEFAULT_CACHE, catalog, profile.tensor_parallel)
            known[key] = ModelPrediction(profile.model, transfer, transfer.kv_bytes_per_token / speed)
        forecast.join(slot.name, known[key])
    if cache is None:
        return
    size, roles_move = transfers[0].kv_bytes_per_token, spec.router not in FIXED_ROLE_ROUTERS
    caches: dict[str, TieredCache] = {}
    hosts: dict[str, HostCache] = {}
    for slot in slots:
        if slot.profile.pool.role.prefills or roles_move:
            machine = slot.machine
            if machine not in caches:
                caches[machine] = make_cache(machine, cache, prefixes, size)
            speeds = _cache_speeds(cache, catalog, slot.profile.tensor_parallel)
            block_ps = [ps(BLOCK_TOKENS * size / speed) for speed in speeds]
            hosts[slot.name] = HostCache(machine, caches[machine], block_ps, links[machine])
    statistics = ReuseStatistics([tier for tier, _ in cache.tier_sizes], list(caches), list(hosts))
    cluster.reuse = PrefixReuse(cluster.kernel, network, hosts, statistics, size, transfers[0].layers)
    cluster.events.subscribe(cluster.reuse)


def _cache_speeds(cache: CacheSpec, catalog: Catalog, tensor_parallel: int) -> tuple[float, float]:
    """Return (DRAM, disk) bandwidth to an instance, in bytes per second."""
    dram = cache.dram_bytes_per_s or catalog.link(_DRAM_LINK).bytes_per_s * tensor_parallel
    return dram, cache.disk_bytes_per_s or catalog.link(_DISK_LINK).bytes_per_s


def _schedule_failures(cluster: VirtualCluster, failures: Sequence[InstanceFailure]) -> None:
    """Schedule instance failures; raises ConfigurationError for an unknown instance or an invalid time."""
    for failure in failures:
        instance = cluster.instances.get(failure.instance)
        if instance is None:
            names = list(cluster.instances)
            known = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
            raise ConfigurationError(
                f"unknown instance {failure.instance!r} in failures: the instances are {known}"
            )
        if failure.at_s < 0 or (failure.back_s is not None and failure.back_s <= failure.at_s):
            raise ConfigurationError(
                f"the failure of {failure.instance} at {failure.at_s:g} s must be at 0 s or later and before back_s"
            )
        order = EventOrder.FAILURE + instance.number
        cluster.kernel.schedule(ps(failure.at_s), order, cluster.take_down, instance)
        if failure.back_s is not None:
            cluster.kernel.schedule(ps(failure.back_s), order, cluster.bring_back, instance)
