"""A worker in its pool, from what the fleet, the router and the worker itself know of it."""

from twofold.instance import InstanceLoad
from twofold.scheduling.outcome import InstanceStatus
from twofold.serving.fleet import Member
from twofold.serving.service import PoolMember


def pool_member(member: Member, load: InstanceLoad | None, status: InstanceStatus | None) -> PoolMember:
    """`load` is there while it may be given work, and `status` when it has said how it is."""
    role = member.role if load is None else load.role
    return PoolMember(
        instance=member.instance,
        role=role,
        home=role if load is None else load.home,
        state=member.state.value,
        trusted=member.breaker.state.value,
        restarts=member.restarts,
        waiting=0 if status is None else status.waiting,
        running=0 if status is None else status.running,
        blocks_total=0 if status is None else status.blocks_total,
        blocks_free=0 if status is None else status.blocks_free,
    )
