"""Validation of a ClusterSpec."""

from collections.abc import Collection, Mapping

from twofold.cluster.rules import cluster_rules
from twofold.cluster.spec import CONTROL_ROUTERS, SATURATING, ClusterSpec, ControlSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.batchers import BATCHERS, INLINED, batchers_with
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES
from twofold.scheduling.routers import CELL_ROUTERS, FIXED_ROLE_ROUTERS, ROUTERS


def check_spec(spec: ClusterSpec) -> None:
    """Check everything that needs neither machines nor models; raises ConfigurationError."""
    _check_caches(spec)
    for what, name, known in (("router", spec.router, ROUTERS), ("hand-off", spec.handoff, HANDOFF_POLICIES)):
        if name not in known:
            raise ConfigurationError(f"unknown {what} {name!r}: choose one of {', '.join(known)}")
    if isinstance(spec.control, ControlSpec) and spec.router not in CONTROL_ROUTERS:
        raise ConfigurationError(
            f"the router {spec.router} cannot use load reports: several controllers and delayed reports need one of "
            f"the routers {', '.join(CONTROL_ROUTERS)}"
        )
    for field in ("max_num_batched_tokens", "max_num_seqs", "block_size", "pipeline_chunk"):
        value = getattr(spec, field)
        if isinstance(value, int) and value < 1:
            raise ConfigurationError(f"{field} must be at least 1, not {value}")
    if spec.link_bytes_per_s is not None and not spec.link_bytes_per_s > 0:
        raise ConfigurationError(f"link_bytes_per_s must be more than 0, not {spec.link_bytes_per_s:g}")
    roles = {pool.role for pool in spec.pools}
    if not (any(role.prefills for role in roles) and any(role.decodes for role in roles)):
        raise ConfigurationError("a cluster needs instances for both phases: prefill and decode, or mixed")
    if any(pool.machines < 1 for pool in spec.pools):
        raise ConfigurationError("a pool needs at least one machine")


def check_batchers(spec: ClusterSpec, batchers: Collection[str]) -> None:
    """Check that one of the pools' `batchers` supports each batching option; raises ConfigurationError."""
    whole_prompts = any(BATCHERS[batcher].whole_prompts for batcher in batchers)
    if spec.max_num_batched_tokens == SATURATING and not whole_prompts:
        known = ", ".join(batchers_with("whole_prompts"))
        raise ConfigurationError(
            f"max_num_batched_tokens {SATURATING} needs one of the batchers {known}, which take whole prompts, "
            "but no pool uses one: give a number"
        )
    if spec.pipeline_chunk is not None:
        if cluster_rules(spec.rules).stagewise:
            raise ConfigurationError(
                f"pipeline_chunk does not apply to the rules {spec.rules}, which do not chunk prompts"
            )
        if not any(BATCHERS[batcher].chunked for batcher in batchers):
            raise ConfigurationError(
                "pipeline_chunk needs a pipelined prefill pool, as in 2xdgx-a100@4x2:prefill, and one of the routers "
                f"with fixed roles: {', '.join(FIXED_ROLE_ROUTERS)}"
            )
    if (INLINED in batchers) != (spec.inline_tbt_s is not None):
        raise ConfigurationError(
            f"inline_tbt_s is the iteration time limit of the batcher {INLINED}, in seconds: give both or neither"
        )


def check_cells(spec: ClusterSpec, instances: Mapping[Role, int]) -> None:
    """Check the number of cells against the instances of each role; raises ConfigurationError."""
    if not isinstance(spec.cells, int):
        return
    if spec.router not in CELL_ROUTERS:
        raise ConfigurationError(f"cells need one of the routers {', '.join(CELL_ROUTERS)}, not {spec.router}")
    role = min(instances, key=instances.__getitem__)
    if not 1 <= spec.cells <= instances[role]:
        raise ConfigurationError(
            f"cells must be from 1 to {instances[role]}, the number of {role.value} instances, not {spec.cells}"
        )


def _check_caches(spec: ClusterSpec) -> None:
    if spec.kv_cache is None:
        return
    if spec.rules != "twofold" or spec.profile is not None:
        raise ConfigurationError("kv_cache needs the rules twofold and does not work with a host profile")
    if any(pool.pipeline_parallel > 1 and pool.role.prefills for pool in spec.pools):
        raise ConfigurationError(
            "kv_cache does not work with pipelined prefill: set pipeline_parallel 1 for pools that prefill"
        )
