"""Cluster specs that reproduce the published experiments of Splitwise and DistServe."""

from collections.abc import Sequence

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import Catalog
from twofold.instance import Role

_LINK_BYTES_PER_S = 200 * 1024**3  # SplitwiseSim: transfer_bandwidth 200, in GiB


def splitwise_sim(pools: Sequence[PoolSpec], model: str = "bloom-176b", *, catalog: Catalog) -> ClusterSpec:
    """Create a cluster with the timing and rules of SplitwiseSim, the simulator of Splitwise (ISCA'24).

    If all pools are mixed, the cluster is a baseline of the Splitwise paper. Raises ConfigurationError for an
    unknown model.
    """
    known = catalog.model(model)
    split = any(pool.role is not Role.MIXED for pool in pools)
    return ClusterSpec(
        pools=tuple(pools),
        model=model,
        performance="splitwise-published",
        router="splitwise-sim" if split else "jsq-pending",
        handoff="serialized",
        block_size=1,
        memory_utilization=1.0,
        contention=False,
        link_bytes_per_s=float(_LINK_BYTES_PER_S),
        kv_bytes_per_token=2 * known.hidden_size * known.layers * 2,  # two-byte keys and values as wide as the state
        rules="splitwise-sim",
    )


def distserve_sim(pools: Sequence[PoolSpec], model: str, *, engine: str = "distserve") -> ClusterSpec:
    """Create a cluster with the timing and rules of DistServe's simulator (OSDI'24).

    With mixed pools and `engine` "vllm", it is the paper's baseline.
    """
    suffix = "" if engine == "distserve" else f"-{engine}"
    return ClusterSpec(
        pools=tuple(pools),
        model=model,
        performance=f"distserve-published{suffix}",
        router="jsq",
        handoff="serialized",
        rules="distserve-published",
    )
