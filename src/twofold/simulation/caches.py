"""From a cluster's description to its prefix caches, and to what routers may expect of its instances."""

from collections.abc import Sequence
from typing import NamedTuple

from twofold.cluster.spec import CacheSpec, ClusterSpec
from twofold.cluster.timing import ps
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.kvcache.index import PrefixIndex
from twofold.kvcache.tiers import TieredCache
from twofold.performance.base import PerformanceModel
from twofold.performance.transfer import TransferModel
from twofold.scheduling.cluster.forecast import ClusterForecast, ModelPrediction
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS
from twofold.simulation.cluster import VirtualCluster
from twofold.simulation.network import MachineLink, VirtualNetwork
from twofold.simulation.reuse import BLOCK_TOKENS, HostCache, PrefixReuse, make_cache
from twofold.simulation.reuse_statistics import ReuseStatistics

_DRAM_LINK, _DISK_LINK = "pcie4", "nvme"
_NONE = CacheSpec(dram="1 tokens")  # stands in where there is none, to know what loading would take


class CacheSite(NamedTuple):
    """An instance as its cache sees it: on which machine, how quick, and whether prompts may come to it."""

    name: str
    machine: str
    prefills: bool
    model: PerformanceModel
    transfer: TransferModel
    tensor_parallel: int
    link: MachineLink


def check_caches(spec: ClusterSpec) -> None:
    """Raise ConfigurationError where the cluster cannot have prefix caches."""
    if spec.kv_cache is None:
        return
    if spec.rules != "twofold" or spec.profile is not None:
        raise ConfigurationError(
            "kv_cache is for clusters under the rules twofold, and without a profile of a host"
        )
    if any(pool.pipeline_parallel > 1 and pool.role.prefills for pool in spec.pools):
        raise ConfigurationError(
            "kv_cache is for prompts that run on one stage: give instances that prefill pipeline parallelism 1"
        )


def attach_caches(
    spec: ClusterSpec,
    catalog: Catalog,
    cluster: VirtualCluster,
    network: VirtualNetwork,
    instances: Sequence[CacheSite],
) -> None:
    """Give a cluster its caches, and its routers predictions, as far as it has either."""
    if spec.kv_cache is None and spec.router not in FORECASTING_ROUTERS:
        return
    prefixes = PrefixIndex()
    forecast = cluster.scheduler.pools.forecast = ClusterForecast(prefixes, BLOCK_TOKENS)
    known: dict[tuple[int, TransferModel], ModelPrediction] = {}  # one for all instances of a kind
    for instance in instances:
        kind = id(instance.model), instance.transfer
        if kind not in known:
            speed, _ = _speeds(spec.kv_cache or _NONE, catalog, instance.tensor_parallel)
            load_token_s = instance.transfer.kv_bytes_per_token / speed
            known[kind] = ModelPrediction(instance.model, instance.transfer, load_token_s)
        forecast.join(instance.name, known[kind])
    if spec.kv_cache is not None:
        cluster.reuse = _reuse(spec, spec.kv_cache, catalog, cluster, network, instances, prefixes)


def _reuse(
    spec: ClusterSpec,
    cache: CacheSpec,
    catalog: Catalog,
    cluster: VirtualCluster,
    network: VirtualNetwork,
    instances: Sequence[CacheSite],
    prefixes: PrefixIndex,
) -> PrefixReuse:
    moves = spec.router not in FIXED_ROLE_ROUTERS
    transfer = instances[0].transfer
    caches: dict[str, TieredCache] = {}
    hosts: dict[str, HostCache] = {}
    for instance in instances:
        if instance.prefills or moves:
            machine, size = instance.machine, instance.transfer.kv_bytes_per_token
            if machine not in caches:
                caches[machine] = make_cache(machine, cache, prefixes, size)
            speeds = _speeds(cache, catalog, instance.tensor_parallel)
            block_ps = [ps(BLOCK_TOKENS * size / speed) for speed in speeds]
            hosts[instance.name] = HostCache(machine, caches[machine], block_ps, instance.link)
    tiers = [tier for tier, _ in cache.rooms]
    statistics = ReuseStatistics(tiers, list(caches), list(hosts))
    return PrefixReuse(
        cluster.kernel, network, hosts, statistics, transfer.kv_bytes_per_token, transfer.layers
    )


def _speeds(cache: CacheSpec, catalog: Catalog, tensor_parallel: int) -> tuple[float, float]:
    """Bytes per second from the memory of a machine to an instance, and from its disk."""
    dram = cache.dram_bytes_per_s or catalog.link(_DRAM_LINK).bytes_per_s * tensor_parallel
    return dram, cache.disk_bytes_per_s or catalog.link(_DISK_LINK).bytes_per_s
