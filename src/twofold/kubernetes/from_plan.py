"""From a plan to the values of a deployment: what it says of pools, machines and policies, and nothing else."""

from collections.abc import Sequence

from twofold.cluster.profiles import InstanceProfile, instance_profiles
from twofold.cluster.spec import SATURATING, ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.kubernetes.values import Json
from twofold.performance.host_profile import HOST
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS

MACHINE_LABEL = "twofold/machine"
GPU = "nvidia.com/gpu"
# What workers that join can be; where roles move all of them are `splitwise`.
_BATCHERS = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode",), Role.MIXED: ("chunked-prefill", "mixed")}


def values_from(spec: ClusterSpec, catalog: Catalog, text: str, *, emulated: bool) -> Json:
    """The values that a plan sets, for the chart and `Values`; `text` is its file.

    A worker is an instance on one accelerator, a pod has one worker, and runs on a node that is labelled with the
    machine of its pool. Raises ConfigurationError for what pods cannot serve.
    """
    if emulated:
        return {"engine": "emulated", "plan": text}
    kinds = instance_profiles(spec, catalog)
    workers: Json = {role.value: {"replicas": 0} for role in Role}
    for index, kind in enumerate(kinds):
        role = kind.pool.role.value
        before = any(kind.pool.role is other.pool.role for other in kinds[:index])
        what = _mistake(kind, roles_move=spec.router not in FIXED_ROLE_ROUTERS, before=before)
        if what is not None:
            raise ConfigurationError(f"pools[{index}]: {what}")
        workers[role] = _workers(kind, catalog.model(spec.model).kv_bytes_per_token)
    return {"plan": text, "serve": _serve(spec, kinds), "workers": workers}


def _mistake(kind: InstanceProfile, *, roles_move: bool, before: bool) -> str | None:
    """What keeps a pool from being pods; `before` it may be another of its role."""
    accelerators = kind.tensor_parallel * kind.pool.pipeline_parallel
    if accelerators > 1:
        return (
            f"its instances have {accelerators} accelerators, and workers that join have one: plan with "
            "--tensor-parallel 1, or deploy it emulated (engine: emulated)"
        )
    known = ("splitwise",) if roles_move else _BATCHERS[kind.pool.role]
    if kind.batcher not in known:
        return f"the batcher {kind.batcher} is not what workers that join have: {' or '.join(known)}"
    if before:
        return f"there is a pool of {kind.pool.role.value} before, and all pods of a role are alike"
    return None


def _serve(spec: ClusterSpec, kinds: Sequence[InstanceProfile]) -> Json:
    more = []
    if spec.swap_space_bytes is not None:
        more.append(f"--swap-space={spec.swap_space_bytes}")
    if any(kind.batcher == "mixed" for kind in kinds):
        more.append("--no-enable-chunked-prefill")
    budget = "auto" if spec.max_num_batched_tokens == SATURATING else str(spec.max_num_batched_tokens)
    return {
        "router": spec.router,
        "handoff": spec.handoff,
        "blockSize": spec.block_size,
        "maxNumSeqs": spec.max_num_seqs,
        "maxNumBatchedTokens": budget,
        "extraArgs": more,
    }


def _workers(kind: InstanceProfile, kv_bytes_per_token: int) -> Json:
    found: Json = {
        "replicas": kind.layout.instances,
        "kvCacheMemory": str(kind.capacity_tokens * kv_bytes_per_token),
    }
    if kind.machine.name != HOST:  # that of a profile is any CPU
        found |= {
            "device": "cuda",
            "resources": {"limits": {GPU: 1}},
            "nodeSelector": {MACHINE_LABEL: kind.machine.name},
        }
    return found
