"""Validation of cluster specs: ranges of numbers, batchers, instance groups (cells), and combinations of options."""

from collections.abc import Collection, Mapping
from typing import Final

from twofold.cluster.spec import CONTROL_ROUTERS, SATURATING, ClusterSpec, ControlSpec, cluster_rules
from twofold.errors import require
from twofold.instance import Role
from twofold.scheduling.batchers import BATCHERS, INLINED, batchers_with
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES
from twofold.scheduling.routers import CELL_ROUTERS, FIXED_ROLE_ROUTERS, ROUTERS

# Values outside these limits are typing errors. In picoseconds, they would also exceed the precision of floats.
MAX_SECONDS: Final = 1e9
MIN_BYTES_PER_S: Final = 1.0
_SPEEDS: Final = ("link_bytes_per_s", "swap_bytes_per_s")
_POSITIVE: Final = (
    *("max_num_batched_tokens", "pipeline_chunk", "inline_tbt_s", "max_num_seqs", "block_size", "kv_bytes_per_token"),
    *("kv_capacity_tokens", "swap_space_bytes", *_SPEEDS),
)


def check_numbers(spec: ClusterSpec) -> None:
    """Raise ConfigurationError if a number in a cluster spec, such as a bandwidth or failure time, is out of range."""
    for field in _POSITIVE:
        value = getattr(spec, field)
        given = value is not None and value != SATURATING
        require(not given or 0 < value < float("inf"), f"{field} must be more than 0, not {value}")
        slow = field in _SPEEDS and given and value < MIN_BYTES_PER_S
        require(not slow, f"{field} must be at least {MIN_BYTES_PER_S:g}, not {value}")
    latency, share, limit = spec.link_latency_s, spec.memory_utilization, f"must be seconds from 0 to {MAX_SECONDS:g}"
    require(latency is None or 0 <= latency <= MAX_SECONDS, f"link_latency_s {limit}, not {latency}")
    require(0 < share <= 1, f"memory_utilization must be more than 0 and at most 1, not {share}")
    for index, failure in enumerate(spec.failures):
        at_s, back_s = failure.at_s, failure.back_s
        require(0 <= at_s <= MAX_SECONDS, f"failures[{index}]: at_s {limit}, not {at_s}")
        later = back_s is None or at_s < back_s <= MAX_SECONDS
        require(later, f"failures[{index}]: back_s must be after at_s ({at_s}), not {back_s}")


def check_spec(spec: ClusterSpec) -> None:
    """Raise ConfigurationError for invalid or contradictory settings of a cluster spec."""
    check_numbers(spec)
    roles = {pool.role for pool in spec.pools}
    both_phases = any(role.prefills for role in roles) and any(role.decodes for role in roles)
    require(both_phases, "a cluster needs instances for both phases: prefill and decode, or mixed")
    require(all(pool.machines >= 1 for pool in spec.pools), "a pool needs at least one machine")
    for what, name, known in (("router", spec.router, ROUTERS), ("hand-off", spec.handoff, HANDOFF_POLICIES)):
        require(name in known, f"unknown {what} {name!r}: choose one of {', '.join(known)}")
    require(
        not isinstance(spec.control, ControlSpec) or spec.router in CONTROL_ROUTERS,
        f"the router {spec.router} cannot use load reports: several controllers and delayed reports need one of the "
        f"routers {', '.join(CONTROL_ROUTERS)}",
    )
    if spec.kv_cache is not None:
        supported = spec.rules == "twofold" and not spec.profiles
        require(supported, "kv_cache needs the rules twofold and does not work with a measured profile")
        require(
            not any(pool.pipeline_parallel > 1 and pool.role.prefills for pool in spec.pools),
            "kv_cache does not work with pipelined prefill: set pipeline_parallel 1 for pools that prefill",
        )


def check_batchers(spec: ClusterSpec, batchers: Collection[str]) -> None:
    """Raise ConfigurationError if the batching options of a cluster spec do not fit the batchers of its pools."""
    classes = [BATCHERS[batcher] for batcher in batchers]
    require(
        spec.max_num_batched_tokens != SATURATING or any(batcher.whole_prompts for batcher in classes),
        f"max_num_batched_tokens {SATURATING} needs one of the batchers {', '.join(batchers_with('whole_prompts'))}, "
        "which take whole prompts, but no pool uses one: give a number",
    )
    if spec.pipeline_chunk is not None:
        require(
            not cluster_rules(spec.rules).stagewise,
            f"pipeline_chunk does not apply to the rules {spec.rules}, which do not chunk prompts",
        )
        require(
            any(batcher.chunked for batcher in classes),
            "pipeline_chunk needs a pipelined prefill pool, as in 2xdgx-a100@4x2:prefill, and one of the routers "
            f"with fixed roles: {', '.join(FIXED_ROLE_ROUTERS)}",
        )
    require(
        (INLINED in batchers) == (spec.inline_tbt_s is not None),
        f"inline_tbt_s is the iteration time limit of the batcher {INLINED}, in seconds: give both or neither",
    )


def check_cells(spec: ClusterSpec, instances: Mapping[Role, int]) -> None:
    """Raise ConfigurationError if the router has no cells (groups of instances), or a role has too few instances."""
    if isinstance(spec.cells, int):
        known = spec.router in CELL_ROUTERS
        require(known, f"cells need one of the routers {', '.join(CELL_ROUTERS)}, not {spec.router}")
        role = min(instances, key=instances.__getitem__)
        most = instances[role]
        fits = 1 <= spec.cells <= most
        require(fits, f"cells must be from 1 to {most}, the number of {role.value} instances, not {spec.cells}")
