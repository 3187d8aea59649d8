"""Cluster specs with the timing and rules of SplitwiseSim."""

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
