"""Create the overload control (early rejection) of a cluster, for a simulation or a live service."""

from collections.abc import Sequence

from twofold.cluster.profiles import InstanceProfile, instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError, require
from twofold.scheduling.admission.ledger import InstanceCapacity, OverloadLedger
from twofold.scheduling.admission.overload import OverloadControl, create_overload_rule
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.routers import APPENDING_ROUTERS, FIXED_ROLE_ROUTERS
from twofold.slo import Slo


def overload_control(
    rule: str, spec: ClusterSpec, kinds: Sequence[InstanceProfile], slo: Slo | None, pools: Pools
) -> OverloadControl:
    """Create the overload control named `rule`. Raises ConfigurationError for an unsupported SLO or cluster."""
    chosen = create_overload_rule(rule)
    if slo is None or slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigurationError("overload control needs both bounds of the SLO, such as --slo ttft=30,tpot=0.1")
    fixed = spec.router in FIXED_ROLE_ROUTERS
    require(fixed, f"overload control needs a router with fixed roles, not {spec.router}")
    for kind in kinds:
        role = kind.pool.role
        require(not (role.prefills and role.decodes), "overload control does not support mixed pools")
        require(kind.layout.stages == 1, "overload control does not support pipeline parallelism")
        prefills = role.prefills or spec.router in APPENDING_ROUTERS
        whole = not prefills or BATCHERS[kind.batcher].whole_prompts
        require(whole, f"overload control needs a batcher of whole prompts in order, not {kind.batcher}")
    facts = {
        slot.name: InstanceCapacity(
            model=slot.profile.model,
            max_num_batched_tokens=slot.profile.max_num_batched_tokens,
            max_num_seqs=spec.max_num_seqs,
            capacity_tokens=slot.profile.capacity_tokens,
        )
        for slot in instance_slots(kinds)
    }
    return OverloadControl(chosen, OverloadLedger(pools, facts, ttft_s=slo.ttft_s, tbt_s=slo.tpot_s))
