"""The cluster scheduler: routes requests and keeps the accounts that routers decide by."""

from collections.abc import Callable

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad, Role
from twofold.request import Request
from twofold.scheduling.cluster.handoff_policy import HandoffPolicy
from twofold.scheduling.cluster.router import Placement, Route, Router
from twofold.scheduling.instance.kv_reservation import FULL_RESERVATION, KvReservation

__all__ = ["ClusterScheduler", "Placement"]


@mypyc_attr(free_list_len=1)
class _Placed:
    """A request and what it still counts for: its prompt, its KV where it was prefilled, its KV where it decodes."""

    __slots__ = ("decode", "handed_off", "prefill", "prefilled", "prompt_tokens", "start_tokens", "tokens")

    def __init__(
        self, prefill: InstanceLoad, decode: InstanceLoad, prompt_tokens: int, start_tokens: int, tokens: int
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.prompt_tokens = prompt_tokens
        self.start_tokens = start_tokens  # reserved where it is prefilled, if it is handed off
        self.tokens = tokens  # reserved where it decodes
        self.prefilled = False
        self.handed_off = False


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterScheduler:
    """Pure cluster-level state: instances in pools, their loads and the requests placed on them.

    `on_move` is told of every instance that goes to another pool.
    """

    def __init__(
        self, router: Router, handoffs: HandoffPolicy, memory: KvReservation = FULL_RESERVATION
    ) -> None:
        self.pools = router.new_pools()
        self.on_move: Callable[[str, Role], None] | None = None
        self._router = router
        self._handoffs = handoffs
        self._memory = memory
        self._placed: dict[str, _Placed] = {}

    def add_instance(
        self, instance_id: str, role: Role, capacity_tokens: int | None = None, cell: str = ""
    ) -> None:
        """An instance that may hold KV of `capacity_tokens` tokens (None: not known), near the others of its `cell`."""
        load = InstanceLoad(instance_id, role, home=role, capacity_tokens=capacity_tokens, cell=cell)
        self.pools.add(load)

    def remove_instance(self, instance_id: str) -> list[str]:
        """Forget an instance; returns the requests that it held a part of. They stay placed until `ended`."""
        load = self.pools.get(instance_id)
        self.pools.remove(instance_id)
        if self.pools.forecast is not None:
            self.pools.forecast.leave(instance_id)
        return [
            request_id
            for request_id, placed in self._placed.items()
            if load is placed.decode or (load is placed.prefill and not placed.handed_off)
        ]

    def waits(self, instance_id: str, sequences: int) -> None:
        """An instance says how many sequences wait on it, where the cluster cannot look for itself."""
        load = self.pools.get(instance_id)
        if load is not None:
            load.queued = lambda: sequences

    def pause(self, instance_id: str) -> None:
        """Route nothing to an instance until `resume`; what was placed on it goes on."""
        load = self.pools.get(instance_id)
        if load is not None:
            self.pools.pause(load)

    def resume(self, instance_id: str) -> None:
        """An instance that was paused may be given requests again."""
        load = self.pools.get(instance_id)
        if load is not None:
            self.pools.resume(load)

    def set_role(self, instance_id: str, role: Role) -> None:
        """An operator gives an instance another home: what comes is routed by it, what is there goes on."""
        load = self.pools.get(instance_id)
        if load is not None:
            load.home = role
            self._move(load, role)

    def would_place(self, request: Request, now: float) -> Route | None:
        """Where a request would run if it came now, by a router that does not take turns; it is not placed."""
        tokens = self._memory.in_all(request.prompt_tokens, request.output_tokens)
        route = self._router.route(request, tokens, self.pools, now)
        decode = None if route is None else self.pools.get(route.decode)
        return route if decode is not None and _fits(decode, tokens) else None

    def arrive(self, request: Request, now: float) -> Placement | None:
        """Place a request; None when no instance can take it."""
        request_id, memory = request.id, self._memory
        prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
        tokens = memory.in_all(prompt_tokens, output_tokens)
        route = self._router.route(request, tokens, self.pools, now)
        if route is None:
            return None
        prefill, decode = self.pools.get(route.prefill), self.pools.get(route.decode)
        if prefill is None or decode is None or not _fits(decode, tokens):
            return None
        splits = prefill is not decode
        start_tokens = memory.at_start(prompt_tokens, output_tokens, decodes_here=False) if splits else 0
        if splits and not _fits(prefill, start_tokens):
            return None
        for move in route.moves:
            load = self.pools.get(move.instance)
            if load is not None:
                self._move(load, move.role)
        mode = self._handoffs.choose(request, route) if splits else None
        self._placed[request_id] = _Placed(prefill, decode, prompt_tokens, start_tokens, tokens)
        forecast = self.pools.forecast
        if forecast is not None:
            forecast.placed(request_id, prefill.id, prompt_tokens, route.reused_tokens, now)
        prefill.pending_prefill_tokens += prompt_tokens
        prefill.prefills += 1
        prefill.requests += 1
        decode.decodes += 1
        decode.reserved_tokens += tokens
        if splits:
            decode.requests += 1
            prefill.reserved_tokens += start_tokens
            self.pools.changed(prefill)
        self.pools.changed(decode)
        return Placement(route, mode)

    def forget(self, request_id: str) -> None:
        """A request has ended, and all of it stays counted where it was placed."""
        self._placed.pop(request_id, None)

    def prefilled(self, request_id: str, now: float | None = None) -> None:
        """The first token of a request is out, at `now` where somebody looked when."""
        placed = self._placed.get(request_id)
        if placed is None or placed.prefilled:
            return
        placed.prefilled = True
        forecast = self.pools.forecast
        if forecast is not None:
            forecast.prefilled(request_id, now)
        load = placed.prefill
        load.pending_prefill_tokens -= placed.prompt_tokens
        load.prefills -= 1
        self._settle(load, idle=False)

    def handed_off(self, request_id: str) -> None:
        """The KV cache of a request is no more where it was prefilled."""
        placed = self._placed.get(request_id)
        if placed is None or placed.handed_off:
            return
        placed.handed_off = True
        self._handoffs.over(request_id)
        load = placed.prefill
        if load is not placed.decode:
            load.reserved_tokens -= placed.start_tokens
            load.requests -= 1
            self._settle(load, idle=False)

    def ended(self, request_id: str) -> None:
        """A request has finished, failed or been aborted."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        if not placed.prefilled:
            self.prefilled(request_id)
        if not placed.handed_off:
            self.handed_off(request_id)
        del self._placed[request_id]
        load = placed.decode
        load.decodes -= 1
        load.reserved_tokens -= placed.tokens
        load.requests -= 1
        self._settle(load, idle=False)

    def idle(self, instance_id: str) -> None:
        """An instance says that it has nothing to run and nothing waiting."""
        load = self.pools.get(instance_id)
        if load is not None:
            self._settle(load, idle=True)

    def _settle(self, load: InstanceLoad, *, idle: bool) -> None:
        if not load.place:
            return  # what was placed on it ends after it
        if load.role is not load.home:
            role = self._router.role_of(load, idle)
            if role is not load.role:
                self._move(load, role)
                return
        if not idle:
            self.pools.changed(load)

    def _move(self, load: InstanceLoad, role: Role) -> None:
        self.pools.move(load, role)
        if self.on_move is not None:
            self.on_move(load.id, role)


def _fits(load: InstanceLoad, tokens: int) -> bool:
    """Whether an empty instance would have room for the request; without, it would wait for ever."""
    return load.capacity_tokens is None or tokens <= load.capacity_tokens
