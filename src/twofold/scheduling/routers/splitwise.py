"""Splitwise's cluster-level scheduler: three pools, with a mixed pool that grows and shrinks with the load."""

from typing import ClassVar, Final

from mypy_extensions import mypyc_attr

from twofold.events import Route
from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.route import RoleMove
from twofold.scheduling.cluster.pools import Pool, Pools, pending_tokens, reserved_tokens
from twofold.scheduling.cluster.router import Router

_PREFILL: Final = Role.PREFILL
_MIXED: Final = Role.MIXED


@mypyc_attr(allow_interpreted_subclasses=True)
class SplitwiseRouter(Router):
    """Router that picks the prefill and decode instances with the shortest queues (Splitwise section 4.1).

    If a pool is full, the router picks a mixed instance, or else an instance of the other pool, which becomes
    mixed. A mixed instance returns to its original pool when it has no work of the other phase.
    """

    fixed_roles: ClassVar[bool] = False
    MAX_PENDING_TOKENS: ClassVar[int] = 8192  # the setting of its published experiments

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        moves: list[RoleMove] = []
        prefill = self._prefill(request, pools.prefill) or self._prefill(request, pools.mixed)
        decode = self._decode(tokens, pools.decode) or self._decode(tokens, pools.mixed)
        if prefill is None:
            prefill = _take(pools.decode.least(pending_tokens), moves)
        if decode is None:
            decode = _take(pools.prefill.least(reserved_tokens), moves)
        if prefill is None or decode is None:  # none can become mixed
            prefill = decode = _least_of_all(pools, moves)
        if prefill is None or decode is None:
            return None
        return Route(prefill.id, decode.id, tuple(moves))

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        if load.role is not _MIXED:
            return load.role
        others = load.decodes if load.home is _PREFILL else load.prefills
        return load.role if others else load.home

    def _prefill(self, request: Request, pool: Pool) -> InstanceLoad | None:
        load = pool.least(pending_tokens)
        if load is None:
            return None
        # Full: it has queued sequences, and too many pending tokens with the new prompt.
        too_long = pending_tokens.of(load) + request.prompt_tokens > self.MAX_PENDING_TOKENS
        return None if too_long and load.queued() else load

    def _decode(self, tokens: int, pool: Pool) -> InstanceLoad | None:
        load = pool.least(reserved_tokens)
        if load is None or load.capacity_tokens is None:
            return load
        return load if load.reserved_tokens + tokens <= load.capacity_tokens else None


class SplitwiseSimRouter(SplitwiseRouter):
    """Routes as SplitwiseSim does: a mixed instance returns to its home pool only when it is idle."""

    needs_idle_events: ClassVar[bool] = True

    def role_of(self, load: InstanceLoad, idle: bool) -> Role:
        if load.role is not _MIXED:
            return load.role
        return load.home if idle else load.role


def _take(load: InstanceLoad | None, moves: list[RoleMove]) -> InstanceLoad | None:
    if load is not None:
        moves.append(RoleMove(load.id, Role.MIXED))
    return load


def _least_of_all(pools: Pools, moves: list[RoleMove]) -> InstanceLoad | None:
    """Return the instance with the fewest pending tokens."""
    moved = {move.instance for move in moves}  # avoided if loads are equal
    candidates = [pool.least(pending_tokens) for pool in (pools.prefill, pools.mixed, pools.decode)]
    known = [load for load in candidates if load is not None]
    return min(known, key=lambda load: (pending_tokens.of(load), load.id in moved), default=None)
