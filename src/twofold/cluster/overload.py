"""The overload control of a cluster, from its description: for a simulation of it, or for a service like it."""

from collections.abc import Sequence

from twofold.cluster.profiles import InstanceProfile
from twofold.cluster.slots import instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.scheduling.admission.ledger import InstanceCapacity, OverloadLedger
from twofold.scheduling.admission.overload import OverloadControl, create_overload_rule
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.slo import Slo


def overload_control(
    rule: str, spec: ClusterSpec, kinds: Sequence[InstanceProfile], slo: Slo | None, pools: Pools
) -> OverloadControl:
    """A rule by name over the instances of `kinds`, with the times of their performance models.

    Raises ConfigurationError for an SLO, or a cluster, that it cannot judge by.
    """
    chosen = create_overload_rule(rule)
    if slo is None or slo.ttft_s is None or slo.tpot_s is None:
        raise ConfigurationError(
            "overload control refuses what would miss the SLO: give both bounds, as in --slo ttft=30,tpot=0.1"
        )
    if spec.router not in FIXED_ROLE_ROUTERS:
        raise ConfigurationError(
            f"overload control knows instances that keep their roles: leave out the router {spec.router}"
        )
    for kind in kinds:
        role = kind.pool.role
        if role.prefills and role.decodes:
            raise ConfigurationError("overload control looks at the two phases apart: give no mixed pool")
        if kind.layout.stages > 1:
            raise ConfigurationError("overload control knows instances of one stage: leave pipelines out")
        if role.prefills and not BATCHERS[kind.batcher].whole_prompts:
            raise ConfigurationError(
                f"overload control predicts prompts that are taken whole, in order: leave out batcher {kind.batcher}"
            )
    facts = {
        slot.name: InstanceCapacity(
            slot.profile.model,
            max_num_batched_tokens=slot.profile.max_num_batched_tokens,
            max_num_seqs=spec.max_num_seqs,
            capacity_tokens=slot.profile.capacity_tokens,
        )
        for slot in instance_slots(kinds)
    }
    return OverloadControl(chosen, OverloadLedger(pools, facts, ttft_s=slo.ttft_s, tbt_s=slo.tpot_s))
