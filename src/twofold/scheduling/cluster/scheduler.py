"""Cluster scheduler: places requests on instances, chooses hand-off modes, and tracks the load of each instance."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from twofold.events import PlacedRequest, RequestSubscriber, Route
from twofold.handoff import HandoffMode
from twofold.instance import InstanceLoad, Role
from twofold.performance.transfer import TransferModel
from twofold.request import Request
from twofold.scheduling.cluster.router import Router
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation


@mypyc_attr(allow_interpreted_subclasses=True)
class TransferPaths(ABC):
    """Predicts KV transfer and prefill times."""

    def __init__(self, crossovers: dict[str, int]) -> None:
        self.crossovers = crossovers  # results of `crossover` by prefill instance

    def crossover(self, prefill: str) -> int:
        """Return the shortest prompt, in tokens, for which layer-wise transfer is faster than serialized transfer."""
        return self.crossovers[prefill]

    @abstractmethod
    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        """Return the KV transfer model between two instances; None if it is unknown."""

    @abstractmethod
    def prefill_s(self, prefill: str, tokens: int) -> float:
        """Predict the time in seconds to prefill `tokens` tokens on an instance."""


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffPolicy(ABC):
    """Chooses the mode (layer-wise, serialized or pull) of each hand-off."""

    @abstractmethod
    def choose(self, request: Request, route: Route) -> HandoffMode: ...

    def ended(self, request_id: str) -> None:  # noqa: B027  (most have no accounts to keep)
        """Record that the hand-off of a request has completed or been cancelled. Repeated calls have no effect."""


class FixedHandoff(HandoffPolicy):
    """Uses the same hand-off mode for every request."""

    def __init__(self, mode: HandoffMode) -> None:
        self.mode = mode

    def choose(self, request: Request, route: Route) -> HandoffMode:
        return self.mode


class BySizeHandoff(HandoffPolicy):
    """Uses layer-wise transfer for long prompts and serialized transfer for short prompts (Splitwise section 4.3)."""

    def __init__(self, paths: TransferPaths) -> None:
        self.paths = paths

    def choose(self, request: Request, route: Route) -> HandoffMode:
        serialized = request.prompt_tokens < self.paths.crossover(route.prefill)
        return HandoffMode.SERIALIZED if serialized else HandoffMode.LAYER_WISE


class AutoHandoff(HandoffPolicy):
    """Uses layer-wise or serialized transfer: the mode with the earlier predicted end of the transfer."""

    def __init__(self, paths: TransferPaths) -> None:
        self.paths = paths
        self.outstanding: dict[str, int] = {}  # bytes of earlier transfers by decode instance, which delay new ones
        self._sending: dict[str, tuple[str, int]] = {}

    def choose(self, request: Request, route: Route) -> HandoffMode:
        transfer = self.paths.transfer(route.prefill, route.decode)
        if transfer is None:
            return HandoffMode.LAYER_WISE  # at most slightly slower than serialized
        tokens, before = request.prompt_tokens, self.outstanding.get(route.decode, 0)
        size = tokens * transfer.kv_bytes_per_token
        self.outstanding[route.decode] = before + size
        self._sending[request.id] = (route.decode, size)
        queued_s, prefill_s = before / transfer.bytes_per_s, self.paths.prefill_s(route.prefill, tokens)
        first_layer_s = prefill_s / transfer.layers
        by_layer_s = transfer.layer_wise_s(tokens, prefill_s, max(0.0, queued_s - first_layer_s))
        at_once_s = transfer.serialized_s(tokens, max(0.0, queued_s - prefill_s))
        return HandoffMode.LAYER_WISE if by_layer_s <= at_once_s else HandoffMode.SERIALIZED

    def ended(self, request_id: str) -> None:
        decode, size = self._sending.pop(request_id, ("", 0))
        if size:
            self.outstanding[decode] -= size
            if not self.outstanding[decode]:
                del self.outstanding[decode]


class RegisteredHandoff(NamedTuple):
    """Registry entry of a hand-off policy: its constructor and help text."""

    build: Callable[[TransferPaths], HandoffPolicy]
    help: str


HANDOFF_POLICIES: dict[str, RegisteredHandoff] = {
    "serialized": RegisteredHandoff(lambda _: FixedHandoff(HandoffMode.SERIALIZED), "all layers after the last one"),
    "layer-wise": RegisteredHandoff(lambda _: FixedHandoff(HandoffMode.LAYER_WISE), "each layer as it is computed"),
    "pull": RegisteredHandoff(lambda _: FixedHandoff(HandoffMode.PULL), "read by the decode instance when it has room"),
    "by-size": RegisteredHandoff(BySizeHandoff, "serialized for short prompts, layer-wise for long ones"),
    "auto": RegisteredHandoff(AutoHandoff, "the mode with the shortest predicted visible transfer"),
}


@mypyc_attr(free_list_len=1)
class _AccountedRequest(PlacedRequest):
    """A placed request and its remaining load on its prefill and its decode instance."""

    __slots__ = ("decode", "handed_off", "prefill", "prefilled", "prompt_tokens", "start_tokens", "tokens")

    def __init__(
        self,
        request: Request,
        route: Route,
        mode: HandoffMode | None,
        prefill: InstanceLoad,
        decode: InstanceLoad,
        prompt_tokens: int,
        start_tokens: int,
        tokens: int,
    ) -> None:
        super().__init__(request, route, mode)
        self.prefill = prefill
        self.decode = decode
        self.prompt_tokens = prompt_tokens
        self.start_tokens = start_tokens  # KV tokens reserved on the prefill instance of a split request
        self.tokens = tokens  # KV tokens reserved on the decode instance
        self.prefilled = False
        self.handed_off = False


@mypyc_attr(allow_interpreted_subclasses=True)
class ClusterScheduler(RequestSubscriber):
    """Places requests on instances, and tracks the pools and loads of the instances. `place` adds the load of a
    request, and later events of the request subtract it.
    """

    def __init__(self, router: Router, handoffs: HandoffPolicy, reservation: KvReservation = FULL_RESERVATION) -> None:
        self.pools = router.new_pools()
        self.on_role_change: Callable[[str, Role], None] | None = None  # called when an instance changes its pool
        self._router = router
        self._handoffs = handoffs
        self._reservation = reservation
        self._placed: dict[str, _AccountedRequest] = {}

    def add_instance(self, instance_id: str, role: Role, capacity_tokens: int | None = None, cell: str = "") -> None:
        """Add an instance to the pool of a role. `capacity_tokens` is the instance's KV capacity; None if unknown."""
        self.pools.add(InstanceLoad(instance_id, role, capacity_tokens, cell))

    def remove_instance(self, instance_id: str) -> list[str]:
        """Remove an instance, and return the ids of its unfinished requests."""
        load = self.pools.get(instance_id)
        self.pools.remove(instance_id)
        if self.pools.forecast is not None:
            self.pools.forecast.leave(instance_id)
        # They stay placed until they end.
        return [
            request_id
            for request_id, placed in self._placed.items()
            if load is placed.decode or (load is placed.prefill and not placed.handed_off)
        ]

    def set_queued(self, instance_id: str, sequences: int) -> None:
        """Set the number of queued sequences that an instance has reported."""
        load = self.pools.get(instance_id)
        if load is not None:
            load.queued = lambda: sequences

    def pause(self, instance_id: str) -> None:
        """Route no new requests to an instance until `resume`. Its placed requests continue."""
        load = self.pools.get(instance_id)
        if load is not None:
            self.pools.pause(load)

    def resume(self, instance_id: str) -> None:
        load = self.pools.get(instance_id)
        if load is not None:
            self.pools.resume(load)

    def set_role(self, instance_id: str, role: Role) -> None:
        """Set the permanent role of an instance. Requests already on the instance are not interrupted."""
        load = self.pools.get(instance_id)
        if load is not None:
            load.home = role
            self._move(load, role)

    def idle(self, instance_id: str) -> None:
        """Record that an instance has no sequences left."""
        load = self.pools.get(instance_id)
        if load is not None:
            self._settle(load, idle=True)  # the router may return it to its home pool

    def would_place(self, request: Request, now: float) -> PlacedRequest | None:
        """Return the placement that `place` would choose now, without placing the request; None if impossible."""
        tokens = self._reservation.in_all(request.prompt_tokens, request.output_tokens)
        route = self._router.route(request, tokens, self.pools, now)
        decode = None if route is None else self.pools.get(route.decode)
        if route is None or decode is None or not _fits(decode, tokens):
            return None
        return PlacedRequest(request, route)

    def place(self, request: Request, now: float) -> PlacedRequest | None:
        """Route a request and add its load to the chosen instances; return None if no instance can run it."""
        reservation = self._reservation
        prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
        tokens = reservation.in_all(prompt_tokens, output_tokens)
        route = self._router.route(request, tokens, self.pools, now)
        if route is None:
            return None
        prefill, decode = self.pools.get(route.prefill), self.pools.get(route.decode)
        if prefill is None or decode is None or not _fits(decode, tokens):
            return None
        splits = prefill is not decode
        start_tokens = reservation.at_start(prompt_tokens, output_tokens, decodes_here=False) if splits else 0
        if splits and not _fits(prefill, start_tokens):
            return None
        for move in route.moves:
            load = self.pools.get(move.instance)
            if load is not None:
                self._move(load, move.role)
        mode = self._handoffs.choose(request, route) if splits else None
        placed = _AccountedRequest(request, route, mode, prefill, decode, prompt_tokens, start_tokens, tokens)
        self._placed[placed.id] = placed
        forecast = self.pools.forecast
        if forecast is not None:
            forecast.placed(placed.id, prefill.id, prompt_tokens, route.reused_tokens, now)
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
        return placed

    def place_apart_from(self, avoided: str, request: Request, now: float) -> PlacedRequest | None:
        """Place a request as `place` does, on the instance `avoided` only if no other instance can run it."""
        load = self.pools.get(avoided)
        if load is None or not load.place:
            return self.place(request, now)
        self.pools.pause(load)
        placed = self.place(request, now)
        self.pools.resume(load)
        return placed or self.place(request, now)

    def first_token(self, request_id: str, now: float) -> None:
        placed = self._placed.get(request_id)
        if placed is not None and not placed.prefilled:
            self._end_prefill(placed, now)

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        placed = self._placed.get(request_id)
        if placed is not None and not placed.handed_off:
            self._end_handoff(placed)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        self.withdraw(request_id)

    def aborted(self, request_id: str, now: float) -> None:
        self.withdraw(request_id)

    def withdraw(self, request_id: str) -> None:
        """Stop tracking a request, and subtract the request's remaining load from the recorded loads of instances."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        del self._placed[request_id]
        if not placed.prefilled:
            self._end_prefill(placed, None)
        if not placed.handed_off:
            self._end_handoff(placed)
        load = placed.decode
        load.decoding -= 1
        load.decodes -= 1
        load.reserved_tokens -= placed.tokens
        load.requests -= 1
        self._settle(load, idle=False)

    def forget(self, request_id: str) -> None:
        """Stop tracking a request without subtracting its load from its prefill and decode instance."""
        self._placed.pop(request_id, None)

    def _end_prefill(self, placed: _AccountedRequest, now: float | None) -> None:
        """Subtract a prompt from its prefill instance's load."""
        placed.prefilled = True
        placed.decode.decoding += 1
        forecast = self.pools.forecast
        if forecast is not None:
            forecast.prefill_ended(placed.id, now)  # `now` is None if the prefill did not complete
        load = placed.prefill
        load.pending_prefill_tokens -= placed.prompt_tokens
        load.prefills -= 1
        self._settle(load, idle=False)

    def _end_handoff(self, placed: _AccountedRequest) -> None:
        placed.handed_off = True
        self._handoffs.ended(placed.id)
        load = placed.prefill
        if load is not placed.decode:
            load.reserved_tokens -= placed.start_tokens
            load.requests -= 1
            self._settle(load, idle=False)

    def _settle(self, load: InstanceLoad, *, idle: bool) -> None:
        if not load.place:
            return  # paused or removed: its requests end later
        if load.role is not load.home:
            role = self._router.role_of(load, idle)
            if role is not load.role:
                self._move(load, role)
                return
        if not idle:
            self.pools.changed(load)

    def _move(self, load: InstanceLoad, role: Role) -> None:
        self.pools.move(load, role)
        if self.on_role_change is not None:
            self.on_role_change(load.id, role)


def _fits(load: InstanceLoad, tokens: int) -> bool:
    """Return whether a request of `tokens` KV tokens fits on an empty instance."""
    # A larger request would wait there forever.
    return load.capacity_tokens is None or tokens <= load.capacity_tokens
