"""Clusters as published experiments ran them."""

from collections.abc import Sequence

from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import Catalog
from twofold.hardware.specs import Model
from twofold.instance import Role

_LINK_BYTES_PER_S = 200 * 1024**3  # its `transfer_bandwidth` of 200, in GiB


def splitwise_sim(pools: Sequence[PoolSpec], model: str = "bloom-176b", *, catalog: Catalog) -> ClusterSpec:
    """A cluster under the timing and the rules of SplitwiseSim, the simulator of Splitwise (ISCA'24).

    With pools of mixed machines only it is one of the paper's baselines: least pending tokens, no hand-off.
    Otherwise machines move between pools, and a KV cache goes all at once over a link of its own. A token has the
    KV of full multi-head attention, which for a model with grouped queries is more than it really needs.

    Raises ConfigurationError for a model that the catalog does not know.
    """
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
        kv_bytes_per_token=_kv_bytes_per_token(catalog.model(model)),
        rules="splitwise-sim",
    )


def distserve_sim(pools: Sequence[PoolSpec], model: str, *, engine: str = "distserve") -> ClusterSpec:
    """A cluster under the timing and the rules of the simulator that comes with DistServe (OSDI'24).

    With pools of mixed machines only and `engine` "vllm" it is the paper's baseline.
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


def _kv_bytes_per_token(model: Model) -> int:
    """Keys and values of two bytes, as wide as the hidden state, in every layer."""
    return 2 * model.hidden_size * model.layers * 2
