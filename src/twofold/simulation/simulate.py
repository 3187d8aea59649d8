"""Build a simulated cluster from its spec, run a workload on it, and collect the result."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from twofold.cluster.overload import overload_control
from twofold.cluster.paths import local_bandwidth, paths_of, transfer_model
from twofold.cluster.profiles import (
    InstanceProfile,
    InstanceSlot,
    cells_of,
    instance_profiles,
    instance_slots,
    machines_of,
    with_profiles,
)
from twofold.cluster.spec import CacheSpec, ClusterRules, ClusterSpec, ControlSpec, InstanceFailure, cluster_rules
from twofold.cluster.timing import PS, ps
from twofold.compat.stagewise import StagewiseInstance, StagewiseScheduler
from twofold.errors import ConfigurationError, WorkloadError
from twofold.hardware.catalog import Catalog
from twofold.kvcache.allocator import BlockAllocator, LeaseTable
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.tiers import TieredCache
from twofold.performance.base import PerformanceModel
from twofold.performance.distserve_published import published_capacity
from twofold.performance.profile import load_profiles
from twofold.performance.transfer import TransferModel
from twofold.request import Request
from twofold.scheduling.batchers import BATCHERS, create_batcher
from twofold.scheduling.cluster.forecast import ClusterForecast, ModelPrediction
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES, ClusterScheduler
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.scheduling.instance.swap_preemption import SwapPreemption
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS, ROUTERS
from twofold.simulation.clients import SessionOrder
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.controllers import ReplicatedControllers
from twofold.simulation.handoffs import SimulatedHandoffs
from twofold.simulation.histogram import Histogram
from twofold.simulation.hosted import HostedCluster, ServedCluster
from twofold.simulation.instance import SimulatedInstance, VirtualInstance
from twofold.simulation.kernel import EventOrder, Kernel, MachineLink, VirtualNetwork
from twofold.simulation.observers.base import Observer
from twofold.simulation.overload import SimulatedOverload
from twofold.simulation.result import PoolResult, SimulationResult, SteadyState
from twofold.simulation.reuse import HostCache, PrefixReuse, make_cache
from twofold.simulation.series import Series
from twofold.simulation.statistics import MICRO, RunStatistics, Sampler
from twofold.slo import Slo
from twofold.workload.blocks import BLOCK_TOKENS

_DRAM_LINK, _DISK_LINK = "pcie4", "nvme"
_DEFAULT_CACHE: Final = CacheSpec(dram="1 tokens")  # load times for forecasts if there is no cache


def build_cluster(
    spec: ClusterSpec,
    catalog: Catalog,
    profiles: Sequence[InstanceProfile],
    statistics: RunStatistics,
    observers: Sequence[Observer],
    max_run: int,
) -> VirtualCluster:
    """Build an idle cluster at time 0. Raise ConfigurationError if `spec.failures` names an unknown instance."""
    rules = cluster_rules(spec.rules)
    kernel = Kernel()
    model = with_profiles(spec, catalog).model(spec.model)
    handoffs = HANDOFF_POLICIES[spec.handoff].build(paths_of(spec, model, profiles))
    router = ROUTERS[spec.router]
    if isinstance(spec.control, ControlSpec):
        scheduler: ClusterScheduler = ReplicatedControllers(kernel, spec.control, router, handoffs, rules.memory)
    else:
        scheduler = ClusterScheduler(router(), handoffs, rules.memory)
    slots = list(instance_slots(profiles))
    measured = load_profiles(spec.profiles)
    request_s = max((each.request_s for each in measured), default=0.0)
    if measured and measured[0].host is not None:
        cluster: VirtualCluster = HostedCluster(measured[0], slots, kernel, scheduler, statistics, observers)
    elif request_s:
        cluster = ServedCluster(request_s, kernel, scheduler, statistics, observers)
    else:
        cluster = VirtualCluster(kernel, scheduler, statistics, observers)
    transfers = [transfer_model(spec, model, profile) for profile in profiles]
    network = VirtualNetwork(kernel, contention=spec.contention, latency_s=transfers[0].latency_s)
    cluster.new_scheduler = partial(_new_scheduler, spec, rules, {slot.name: slot.profile for slot in slots})
    cluster.capacities = {slot.name: slot.profile.longest(spec.block_size) for slot in slots}
    links: dict[str, MachineLink] = {}
    for slot in slots:
        name = slot.name
        if slot.machine not in links:
            links[slot.machine] = MachineLink(transfers[slot.pool].bytes_per_s, local_bandwidth(slot))
        link, fresh = links[slot.machine], cluster.new_scheduler(name, 1)
        instance: SimulatedInstance
        if isinstance(fresh, StagewiseScheduler):
            instance = StagewiseInstance(slot, link, fresh, cluster)
        else:
            cores = cluster.cores[name] if isinstance(cluster, HostedCluster) else None
            instance = VirtualInstance(slot, link, fresh, cluster, max_run, cores)
        cluster.instances[name] = instance
    slowest, fixed_roles = max(transfers, key=attrgetter("sync_s")), spec.router in FIXED_ROLE_ROUTERS
    cluster.handoffs = SimulatedHandoffs(
        kernel, network, cluster.events, statistics, observers, slowest, rules, fixed_roles
    )
    cluster.cells = cells_of(spec, slots)
    _attach_caches(spec, catalog, cluster, network, slots, transfers)
    for instance in cluster.instances.values():
        cluster.join(instance)
    _schedule_failures(cluster, spec.failures)
    return cluster


def _new_scheduler(
    spec: ClusterSpec, rules: ClusterRules, profiles: Mapping[str, InstanceProfile], name: str, epoch: int
) -> InstanceScheduler:
    profile = profiles[name]
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
) -> None:
    cache = spec.kv_cache
    if cache is None and spec.router not in FORECASTING_ROUTERS:
        return
    prefixes = PrefixIndex()
    forecast = cluster.scheduler.pools.forecast = ClusterForecast(prefixes, _block_tokens(spec))
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
    size = transfers[0].kv_bytes_per_token
    caches: dict[str, TieredCache] = {}
    hosts: dict[str, HostCache] = {}
    for slot in slots:
        machine = slot.machine
        if machine not in caches:
            caches[machine] = make_cache(machine, cache, prefixes, size)
        speeds = _cache_speeds(cache, catalog, slot.profile.tensor_parallel)
        block_ps = [ps(cache.block_tokens * size / speed) for speed in speeds]
        prefills = BATCHERS[slot.profile.batcher].prefills
        hosts[slot.name] = HostCache(machine, caches[machine], block_ps, cluster.instances[slot.name].link, prefills)
    cluster.reuse = PrefixReuse(cluster.kernel, network, hosts, cache, size, transfers[0].layers)
    cluster.events.subscribe(cluster.reuse)


def _cache_speeds(cache: CacheSpec, catalog: Catalog, tensor_parallel: int) -> tuple[float, float]:
    """Return the bandwidths from the DRAM tier and the disk tier to an instance, in bytes per second."""
    dram = cache.dram_bytes_per_s or catalog.link(_DRAM_LINK).bytes_per_s * tensor_parallel
    return dram, cache.disk_bytes_per_s or catalog.link(_DISK_LINK).bytes_per_s


def _schedule_failures(cluster: VirtualCluster, failures: Sequence[InstanceFailure]) -> None:
    for failure in failures:
        instance = cluster.instances.get(failure.instance)
        if instance is None:
            known = ", ".join(list(cluster.instances)[:6]) + (" …" if len(cluster.instances) > 6 else "")
            raise ConfigurationError(f"unknown instance {failure.instance!r} in failures: the instances are {known}")
        order = EventOrder.FAILURE + instance.number
        cluster.kernel.schedule(ps(failure.at_s), order, cluster.take_down, instance)
        if failure.back_s is not None:
            cluster.kernel.schedule(ps(failure.back_s), order, cluster.bring_back, instance)


# Incremented when equal inputs may give different results; stored results of other versions are ignored.
VERSION = 2

Progress = Callable[[int, float], None]
StopWhen = Callable[[RunStatistics], bool]
_STEADY = 30  # least completed requests in steady state
_CHECK_EVERY = 512  # events between two checks of progress and stop_when


def simulate(
    spec: ClusterSpec,
    requests: Iterable[Request],
    *,
    catalog: Catalog,
    slo: Slo | None = None,
    reference: PerformanceModel | None = None,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    stop_when: StopWhen | None = None,
    series: bool = True,
    max_run: int = 1 << 60,  # maximum number of iterations per event; affects only speed
    prepare: Callable[[VirtualCluster], None] | None = None,
    overload: str | None = None,
) -> SimulationResult:
    """Simulate requests, sorted by arrival, until the last request has ended or `stop_when` returns true.

    If the performance model `reference` is given, the result has slowdowns: latencies divided by the latencies on
    an idle instance with this model. `overload` names a rule that rejects requests predicted to miss `slo`. If
    `series` is false, the result has no time series of the instances.

    `prepare` is called with the cluster before the first arrival. `progress` is called with the number of ended
    requests and the simulated seconds. Raise ConfigurationError for an invalid cluster, and WorkloadError if
    there are no requests.
    """
    profiles = instance_profiles(spec, catalog)
    statistics = RunStatistics(slo, reference, over_all_tokens=cluster_rules(spec.rules).over_all_tokens)
    began = time.process_time()
    cluster = build_cluster(spec, catalog, profiles, statistics, observers, max_run)
    instances = list(cluster.instances.values())
    sampler = Sampler(instances) if series else None
    if overload is not None:
        control = overload_control(overload, spec, profiles, slo, cluster.scheduler.pools)
        cluster.overload = SimulatedOverload(overload, control)
        cluster.events.subscribe(control.ledger)
    if prepare is not None:
        prepare(cluster)
    cluster.feed(_in_turn(requests, cluster, spec))
    if sampler is not None:
        cluster.kernel.before_step = sampler.before
    next_check = _CHECK_EVERY
    while cluster.kernel.run(until_events=next_check):
        next_check += _CHECK_EVERY
        if progress is not None:
            progress(statistics.completed + statistics.failed + statistics.rejected, cluster.kernel.now / PS)
        if stop_when is not None and stop_when(statistics):
            break
    if statistics.first_arrival is None:
        raise WorkloadError("the workload", "no requests")
    sampled = sampler.finish(cluster.kernel.now) if sampler is not None else {}
    for observer in observers:
        observer.close(cluster.kernel.now)
    context = with_profiles(spec, catalog).model(spec.model).max_context
    return _result(spec, profiles, cluster, statistics, sampled, context, time.process_time() - began)


def _in_turn(requests: Iterable[Request], cluster: VirtualCluster, spec: ClusterSpec) -> Iterable[Request]:
    """Return the requests; those of sessions wait for the turns before them."""
    iterator = iter(requests)
    first = next(iterator, None)
    if first is None:
        return ()
    if not first.session:
        return chain((first,), iterator)
    turns = SessionOrder(chain((first,), iterator), _block_tokens(spec))
    turns.attach(cluster)
    return turns


def _block_tokens(spec: ClusterSpec) -> int:
    return BLOCK_TOKENS if spec.kv_cache is None else spec.kv_cache.block_tokens


def _result(
    spec: ClusterSpec,
    profiles: Sequence[InstanceProfile],
    cluster: VirtualCluster,
    statistics: RunStatistics,
    sampled: dict[str, Series],
    max_context: int | None,
    cpu_s: float,
) -> SimulationResult:
    first = statistics.first_arrival or 0
    end = max(statistics.last_end, statistics.last_arrival) if not cluster.requests else cluster.kernel.now
    duration = end - first
    pools = tuple(_pool(profile, place, cluster, duration) for place, profile in enumerate(profiles))
    swapping = [
        (growth, profiles[instance.pool].swap.block_bytes)
        for instance in cluster.instances.values()
        if (growth := instance.scheduler.swap) is not None
    ]
    slowdowns = statistics.slowdowns
    measured: dict[str, Any] = {name: getattr(statistics, name) for name in _COUNTS}
    measured |= {f"{name}_s": Histogram.of(getattr(statistics, name), 1 / PS) for name in _LATENCIES}
    return SimulationResult(
        spec=spec,
        unfinished=len(cluster.requests),
        max_context=max_context,
        duration_s=duration / PS,
        arrival_s=(statistics.last_arrival - first) / PS,
        **measured,
        ttft_slowdown=Histogram.of(slowdowns.ttft, 1 / MICRO) if slowdowns else None,
        tpot_slowdown=Histogram.of(slowdowns.tpot, 1 / MICRO) if slowdowns else None,
        e2e_slowdown=Histogram.of(slowdowns.e2e, 1 / MICRO) if slowdowns else None,
        slo_met=None if statistics.slo is None else statistics.slo_met,
        slo_scale=None if statistics.slo is None else Histogram.of(statistics.slo_scale, 1 / MICRO),
        steady=_steady(statistics),
        preemptions=sum(instance.scheduler.preemptions for instance in cluster.instances.values()),
        swaps=sum(growth.swaps for growth, _ in swapping),
        swap_bytes=sum(growth.blocks_copied * block_bytes for growth, block_bytes in swapping),
        pools=pools,
        series=sampled if cluster.overload is None else sampled | cluster.overload.series,
        overload=None if cluster.overload is None else cluster.overload.result(),
        energy_j=sum(pool.energy_j for pool in pools),
        price_per_h=sum(count * machine.price_per_h for machine, count in machines_of(profiles)),
        tdp_w=sum(count * machine.tdp_w for machine, count in machines_of(profiles)),
        events=cluster.kernel.events,
        iterations=sum(instance.iterations for instance in cluster.instances.values()),
        cpu_s=cpu_s,
        reuse=None if cluster.reuse is None else cluster.reuse.result(),
    )


# Attributes of `RunStatistics`.
_COUNTS: Final = (
    *("arrived", "completed", "rejected", "failed", "handoffs"),
    *("prompt_tokens", "output_tokens", "longest_request", "longest_prompt"),
)
_LATENCIES: Final = ("ttft", "tpot", "itl", "e2e", "queue", "transfer", "visible_transfer")


def _steady(statistics: RunStatistics) -> SteadyState | None:
    duration, completed, tokens, met = statistics.steady()
    if completed < _STEADY or not duration:
        return None
    seconds = duration / PS
    good = None if statistics.slo is None else met / seconds
    return SteadyState(requests_per_s=completed / seconds, output_tokens_per_s=tokens / seconds, goodput_per_s=good)


def _pool(profile: InstanceProfile, place: int, cluster: VirtualCluster, duration: int) -> PoolResult:
    members = [instance for instance in cluster.instances.values() if instance.pool == place]
    busy = sum(instance.busy for instance in members)
    energy = sum(instance.energy for instance in members) + len(members) * duration * profile.timing.idle_mw
    together = sum(instance.sequence_time for instance in members)
    return PoolResult(
        role=profile.pool.role.value,
        machine=profile.machine.name,
        machines=profile.pool.machines,
        instances=len(members),
        utilization=busy / (len(members) * duration) if duration else 0.0,
        energy_j=energy / 1e3 / PS,
        mean_batch=together / busy if busy else None,
        performance=profile.model.name,
        error=profile.model.error,
    )
