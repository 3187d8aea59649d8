"""Round robin: the baseline that looks at nothing."""

from collections.abc import Sequence

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.router import Route


class RoundRobin:
    """Each phase goes to the next instance in turn that can run it."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, request: Request, instances: Sequence[InstanceLoad], now: float) -> Route | None:
        prefills = [load for load in instances if load.role.prefills]
        decodes = [load for load in instances if load.role.decodes]
        if not prefills or not decodes:
            return None
        prefill = prefills[self._turn % len(prefills)]
        decode = prefill if prefill.role is Role.MIXED else decodes[self._turn % len(decodes)]
        self._turn += 1
        return Route(prefill.id, decode.id)
