"""Run a workload through a simulated cluster."""

import time
from collections.abc import Callable, Iterable, Sequence

from twofold.cluster.overload import overload_control
from twofold.cluster.profiles import InstanceProfile, instance_profiles
from twofold.cluster.rules import cluster_rules
from twofold.cluster.slots import machines_of
from twofold.cluster.spec import ClusterSpec
from twofold.cluster.timing import PS
from twofold.errors import WorkloadError
from twofold.hardware.catalog import Catalog
from twofold.performance.base import PerformanceModel
from twofold.request import Request
from twofold.simulation.build import build_cluster
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.histogram import Histogram
from twofold.simulation.observers.base import Observer
from twofold.simulation.overload import SimulatedOverload
from twofold.simulation.result import PoolResult, SimulationResult
from twofold.simulation.series import Series
from twofold.simulation.statistics import MICRO, RunStatistics, Sampler
from twofold.slo import Slo

# Incremented when equal inputs may give different results; stored results of other versions are ignored.
VERSION = 1

Progress = Callable[[int, float], None]
StopWhen = Callable[[RunStatistics], bool]
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
    max_run: int = 1 << 60,
    prepare: Callable[[VirtualCluster], None] | None = None,
    overload: str | None = None,
) -> SimulationResult:
    """Simulate `requests`, in order of arrival, until the last has ended.

    `reference` is the performance model of the uncontended instance for slowdowns. `progress` gets the number of
    ended requests and the simulated seconds. `stop_when` may end the run early; requests in progress are then
    unfinished. Without `series` no time series are kept, which is faster. `max_run` limits the iterations simulated
    at a time and affects only speed. `prepare` is called with the cluster before the first arrival. `overload` names
    an overload rule that rejects requests which would miss `slo`.

    Raises ConfigurationError for an invalid cluster and WorkloadError without requests.
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
        cluster.events.subscribe(control)
    if prepare is not None:
        prepare(cluster)
    cluster.feed(requests)
    _run(cluster, statistics, sampler, progress, stop_when)
    if statistics.first_arrival is None:
        raise WorkloadError("the workload", "no requests")
    sampled = sampler.finish(cluster.kernel.now) if sampler is not None else {}
    for observer in observers:
        observer.close(cluster.kernel.now)
    return _result(spec, profiles, cluster, statistics, sampled, time.process_time() - began)


def _run(
    cluster: VirtualCluster,
    statistics: RunStatistics,
    sampler: Sampler | None,
    progress: Progress | None,
    stop_when: StopWhen | None,
) -> None:
    kernel = cluster.kernel
    if sampler is not None:
        kernel.before_step = sampler.before
    next_check = _CHECK_EVERY
    while kernel.run(until_events=next_check):
        next_check += _CHECK_EVERY
        if progress is not None:
            progress(statistics.completed + statistics.failed + statistics.rejected, kernel.now / PS)
        if stop_when is not None and stop_when(statistics):
            return


def _result(
    spec: ClusterSpec,
    profiles: Sequence[InstanceProfile],
    cluster: VirtualCluster,
    statistics: RunStatistics,
    sampled: dict[str, Series],
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
    return SimulationResult(
        spec=spec,
        arrived=statistics.arrived,
        completed=statistics.completed,
        rejected=statistics.rejected,
        failed=statistics.failed,
        unfinished=len(cluster.requests),
        prompt_tokens=statistics.prompt_tokens,
        output_tokens=statistics.output_tokens,
        duration_s=duration / PS,
        arrival_s=(statistics.last_arrival - first) / PS,
        ttft_s=Histogram.of(statistics.ttft, 1 / PS),
        tpot_s=Histogram.of(statistics.tpot, 1 / PS),
        itl_s=Histogram.of(statistics.itl, 1 / PS),
        e2e_s=Histogram.of(statistics.e2e, 1 / PS),
        queue_s=Histogram.of(statistics.queue, 1 / PS),
        transfer_s=Histogram.of(statistics.transfer, 1 / PS),
        ttft_slowdown=Histogram.of(slowdowns.ttft, 1 / MICRO) if slowdowns else None,
        tpot_slowdown=Histogram.of(slowdowns.tpot, 1 / MICRO) if slowdowns else None,
        e2e_slowdown=Histogram.of(slowdowns.e2e, 1 / MICRO) if slowdowns else None,
        slo_met=None if statistics.slo is None else statistics.slo_met,
        slo_scale=None if statistics.slo is None else Histogram.of(statistics.slo_scale, 1 / MICRO),
        preemptions=sum(instance.scheduler.preemptions for instance in cluster.instances.values()),
        swaps=sum(growth.swaps for growth, _ in swapping),
        swap_bytes=sum(growth.blocks_copied * block_bytes for growth, block_bytes in swapping),
        handoffs=statistics.handoffs,
        pools=pools,
        series=sampled if cluster.overload is None else sampled | cluster.overload.series,
        overload=None if cluster.overload is None else cluster.overload.result(),
        energy_j=sum(pool.energy_j for pool in pools),
        price_per_h=sum(count * machine.price_per_h for machine, count in machines_of(profiles)),
        tdp_w=sum(count * machine.tdp_w for machine, count in machines_of(profiles)),
        events=cluster.kernel.events,
        iterations=sum(instance.iterations for instance in cluster.instances.values()),
        cpu_s=cpu_s,
        reuse=None if cluster.reuse is None else cluster.reuse.statistics.result(),
    )


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
