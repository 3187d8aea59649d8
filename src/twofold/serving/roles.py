"""The pools of a live service: which worker plays which role, and what may be changed about it."""

from collections.abc import Mapping
from operator import attrgetter

from twofold.errors import RequestError
from twofold.instance import InstanceLoad, Role
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.outcome import InstanceStatus
from twofold.serving.controller.workers import Worker, Workers
from twofold.serving.service import PoolMember

_prefills, _decodes = attrgetter("prefills"), attrgetter("decodes")


class Roles:
    """Of the workers that are up, as the cluster scheduler has them; `move` says whether they may change."""

    def __init__(self, cluster: ClusterScheduler, fleet: Workers, *, move: bool) -> None:
        self._cluster, self._fleet = cluster, fleet
        self.move = move

    @property
    def able(self) -> bool:
        """Whether there is somebody for both phases."""
        pools = self._cluster.pools
        prefill, decode, mixed = len(pools.prefill), len(pools.decode), len(pools.mixed)
        return (prefill + decode + mixed if self.move else prefill * decode + mixed) > 0

    def members(self, statuses: Mapping[str, InstanceStatus]) -> list[PoolMember]:
        """Every worker that there should be, with what those that are up have said last."""
        pools = self._cluster.pools
        return [
            _member(member, pools.get(instance), statuses.get(instance))
            for instance, member in self._fleet.members.items()
        ]

    def set(self, instance: str, role: Role) -> None:
        """Let a worker play another role; raises RequestError where it cannot."""
        load = self._cluster.pools.get(instance)
        if load is None:
            raise RequestError(
                f"there is no worker {instance!r} that is up", status=404, code="unknown_instance"
            )
        if not self.move:
            raise RequestError(
                "the workers of this service have fixed roles: serve with --router splitwise to move them",
                status=409,
                code="roles_fixed",
            )
        others = [one.role for one in self._cluster.pools if one is not load]
        if not all(any(phase(one) for one in [role, *others]) for phase in (_prefills, _decodes)):
            raise RequestError(
                f"{instance} is the last worker for its phase: with it as {role.value} nobody would do that phase",
                status=409,
                code="last_of_its_phase",
            )
        self._cluster.set_role(instance, role)
        self._fleet.members[instance].role = role


def _member(member: Worker, load: InstanceLoad | None, status: InstanceStatus | None) -> PoolMember:
    """`load` is there while it may be given work, and `status` when it has said how it is."""
    role = member.role if load is None else load.role
    return PoolMember(
        instance=member.instance,
        role=role,
        home=role if load is None else load.home,
        state="retired" if member.retired else member.state.value,
        trusted=member.breaker.state.value,
        restarts=member.restarts,
        waiting=0 if status is None else status.waiting,
        running=0 if status is None else status.running,
        blocks_total=0 if status is None else status.blocks_total,
        blocks_free=0 if status is None else status.blocks_free,
    )
