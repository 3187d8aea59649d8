"""Join the shortest queue, counted in tokens."""

from collections.abc import Sequence

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.router import Route


class JoinShortestQueue:
    """Splitwise section 4.1: both instances are picked at arrival.

    Prefill goes to the fewest pending prompt tokens, decode to the least memory in use. Ties go to the
    instance with fewer tokens of the other kind, then to the one listed first.
    """

    def route(self, request: Request, instances: Sequence[InstanceLoad], now: float) -> Route | None:
        prefills = [load for load in instances if load.role.prefills]
        if not prefills:
            return None
        prefill = min(prefills, key=lambda load: (load.pending_prefill_tokens, load.reserved_tokens))
        if prefill.role is Role.MIXED:
            return Route(prefill.id, prefill.id)
        decodes = [load for load in instances if load.role.decodes]
        if not decodes:
            return None
        decode = min(decodes, key=lambda load: (load.reserved_tokens, load.pending_prefill_tokens))
        return Route(prefill.id, decode.id)
