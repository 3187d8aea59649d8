"""Which clusters cannot be: each is refused in one sentence that says what would be right."""

from collections.abc import Collection, Mapping

from twofold.cluster.rules import cluster_rules
from twofold.cluster.spec import SATURATING, ClusterSpec, ControlSpec, check_control
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.batchers import CHUNKED, INLINED, WHOLE_PROMPTS
from twofold.scheduling.cluster.handoff_policy import HANDOFF_POLICIES
from twofold.scheduling.routers import CELL_ROUTERS, FIXED_ROLE_ROUTERS, ROUTERS
from twofold.simulation.caches import check_caches


def check_spec(spec: ClusterSpec) -> None:
    """Raises ConfigurationError for what is wrong whatever machines and models there are."""
    check_caches(spec)
    for what, name, known in (
        ("router", spec.router, ROUTERS),
        ("hand-off", spec.handoff, HANDOFF_POLICIES),
    ):
        if name not in known:
            raise ConfigurationError(f"there is no {what} {name!r}: there are {', '.join(known)}")
    if isinstance(spec.control, ControlSpec):
        check_control(spec.router)
    for what, value in (
        ("token budget", spec.max_num_batched_tokens if isinstance(spec.max_num_batched_tokens, int) else 1),
        ("number of sequences", spec.max_num_seqs),
        ("block size", spec.block_size),
        ("chunk", 1 if spec.pipeline_chunk is None else spec.pipeline_chunk),
    ):
        if value < 1:
            raise ConfigurationError(f"the {what} of a batch must be at least 1, not {value}")
    if spec.link_bytes_per_s is not None and not spec.link_bytes_per_s > 0:
        raise ConfigurationError(f"a link of {spec.link_bytes_per_s:g} bytes per second carries nothing")
    roles = {pool.role for pool in spec.pools}
    if not (any(role.prefills for role in roles) and any(role.decodes for role in roles)):
        raise ConfigurationError("a cluster needs instances for both phases: prefill and decode, or mixed")
    if any(pool.machines < 1 for pool in spec.pools):
        raise ConfigurationError("a pool needs at least one machine")


def check_batchers(spec: ClusterSpec, batchers: Collection[str]) -> None:
    """Raises ConfigurationError where none of the `batchers` that its pools have does what the cluster asks of one."""
    if spec.max_num_batched_tokens == SATURATING and not any(
        batcher in WHOLE_PROMPTS for batcher in batchers
    ):
        raise ConfigurationError(
            f"max_num_batched_tokens {SATURATING} is for the batchers {', '.join(WHOLE_PROMPTS)},"
            " which take whole prompts: "
            "no pool has one of them, so give a number"
        )
    if spec.pipeline_chunk is not None:
        _check_chunks(spec, batchers)
    if (INLINED in batchers) != (spec.inline_tbt_s is not None):
        raise ConfigurationError(
            f"inline_tbt_s is the seconds that an iteration of the batcher {INLINED} may take: give both or neither"
        )


def _check_chunks(spec: ClusterSpec, batchers: Collection[str]) -> None:
    if cluster_rules(spec.rules).stagewise:
        raise ConfigurationError(
            f"pipeline_chunk means nothing to the rules {spec.rules}, which cut no prompts"
        )
    if not any(batcher in CHUNKED for batcher in batchers):
        raise ConfigurationError(
            "pipeline_chunk is for pools of several stages that only prefill, as in 2xdgx-a100@4x2:prefill, and for "
            f"routers that leave it at that: {', '.join(FIXED_ROLE_ROUTERS)}"
        )


def check_cells(spec: ClusterSpec, instances: Mapping[Role, int]) -> None:
    """Raises ConfigurationError where so many instances of each role cannot be divided into the cells."""
    if not isinstance(spec.cells, int):
        return
    if spec.router not in CELL_ROUTERS:
        raise ConfigurationError(f"cells are for the routers {', '.join(CELL_ROUTERS)}, not {spec.router}")
    role = min(instances, key=instances.__getitem__)
    if not 1 <= spec.cells <= instances[role]:
        raise ConfigurationError(
            f"{spec.cells} cells cannot be: give from 1 to {instances[role]}, so that each has a {role.value} instance"
        )
