"""The cluster scheduler: routes requests and keeps the accounts that routers decide by."""

from dataclasses import dataclass

import msgspec

from twofold.handoff import HandoffMode
from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.handoffs import HandoffPolicy
from twofold.scheduling.router import Route, Router


class Placement(msgspec.Struct, frozen=True):
    """Where a request runs and, if it is split, how its KV cache travels."""

    route: Route
    mode: HandoffMode | None


@dataclass(slots=True)
class _Placed:
    request: Request
    placement: Placement
    prefilled: bool = False


class ClusterScheduler:
    """Pure cluster-level state: instances, their loads and the requests placed on them."""

    def __init__(self, router: Router, handoffs: HandoffPolicy) -> None:
        self._router = router
        self._handoffs = handoffs
        self._loads: dict[str, InstanceLoad] = {}
        self._placed: dict[str, _Placed] = {}

    @property
    def loads(self) -> dict[str, InstanceLoad]:
        return self._loads

    def add_instance(self, instance_id: str, role: Role) -> None:
        self._loads[instance_id] = InstanceLoad(instance_id, role)

    def remove_instance(self, instance_id: str) -> list[str]:
        """Forget an instance; returns the requests that it held a part of. They stay placed until `ended`."""
        del self._loads[instance_id]
        return [
            request_id
            for request_id, placed in self._placed.items()
            if instance_id == placed.placement.route.decode
            or (instance_id == placed.placement.route.prefill and not placed.prefilled)
        ]

    def arrive(self, request: Request, now: float) -> Placement | None:
        """Place a request; None when no instance can take it."""
        route = self._router.route(request, list(self._loads.values()), now)
        if route is None:
            return None
        mode = self._handoffs.choose(request, route) if route.splits else None
        placement = Placement(route, mode)
        self._placed[request.id] = _Placed(request, placement)
        self._loads[route.prefill].pending_prefill_tokens += request.prompt_tokens
        self._loads[route.decode].reserved_tokens += request.total_tokens
        for instance_id in {route.prefill, route.decode}:
            self._loads[instance_id].requests += 1
        return placement

    def prefilled(self, request_id: str) -> None:
        """The first token of a request is out."""
        placed = self._placed.get(request_id)
        if placed is None or placed.prefilled:
            return
        placed.prefilled = True
        route = placed.placement.route
        load = self._loads.get(route.prefill)
        if load is not None:
            load.pending_prefill_tokens -= placed.request.prompt_tokens
            load.requests -= 1 if route.splits else 0

    def ended(self, request_id: str) -> None:
        """A request has finished, failed or been aborted."""
        self.prefilled(request_id)
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        load = self._loads.get(placed.placement.route.decode)
        if load is not None:
            load.reserved_tokens -= placed.request.total_tokens
            load.requests -= 1
