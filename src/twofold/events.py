"""Request events, their subscribers, and the recorder of timelines."""

from collections.abc import Callable, Collection, Iterable
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.handoff import HandoffMode
from twofold.request import FinishReason, Request
from twofold.route import PrefixFetch, RoleMove
from twofold.timeline import Moment, Timeline


class Route:
    """The prefill instance and the decode instance of a request, which may be the same."""

    __slots__ = ("decode", "fetch", "moves", "prefill", "reused_tokens", "ttft_s")

    def __init__(
        self,
        prefill: str,
        decode: str,
        moves: tuple[RoleMove, ...] = (),  # role changes to make first
        reused_tokens: int = 0,  # prompt tokens expected in the cache of the prefill instance, after `fetch`
        fetch: PrefixFetch | None = None,  # copy of cached blocks to the prefill instance
        ttft_s: float | None = None,  # predicted TTFT
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.moves = moves
        self.reused_tokens = reused_tokens
        self.fetch = fetch
        self.ttft_s = ttft_s

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Route) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Route{self._fields()}"

    def _fields(self) -> tuple[object, ...]:
        return self.prefill, self.decode, self.moves, self.reused_tokens, self.fetch, self.ttft_s

    @property
    def splits(self) -> bool:
        return self.prefill != self.decode


@mypyc_attr(allow_interpreted_subclasses=True)
class PlacedRequest:
    """A request with its route and its hand-off mode."""

    __slots__ = ("id", "mode", "request", "request_id", "route")

    def __init__(self, request: Request, route: Route, mode: HandoffMode | None = None) -> None:
        # If the request is placed again after the loss of an instance, `id` changes.
        self.id = self.request_id = request.id
        self.request = request
        self.route = route
        self.mode = mode  # None without a hand-off


#    arrived ─┬─ rejected
#             └─ admitted ─ placed ─ prefill_started ─ first_token ─ handed_off ─ decode_started ─────┐
#                             ▲                                                                       │
#                             └── placed again after the loss of an instance ── aborted ◄─────────────┤
#                                                                                  │                  ▼
#                                                                                ended ◄────────── finished
#
# The events `arrived`, `rejected`, `admitted` and `ended` concern a client's request. The other events concern one
# placement of the request on instances, and carry the placement's id. Times are seconds on the emitter's clock. The
# simulator emits neither `admitted` nor `decode_started`. Output tokens are no events: only the recorder notes them.
@mypyc_attr(allow_interpreted_subclasses=True)
class RequestSubscriber:
    """Base class of subscribers to request events. A subclass overrides the methods of the events that it needs."""

    def arrived(self, request: Request, now: float) -> None:
        """The request reached the service."""

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        """Admission control refused the request, or no instance can run it. No further events follow."""

    def admitted(self, request: Request, now: float) -> None:
        """The request was accepted and waits for placement."""

    def placed(self, placed: PlacedRequest, now: float) -> None:
        """The router assigned the request to a prefill and a decode instance."""

    def prefill_started(self, request_id: str, now: float) -> None:
        """The first iteration that computes tokens of the prompt began."""

    def first_token(self, request_id: str, now: float) -> None:
        """The prefill is complete, and the first output token is sampled."""

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        """The KV transfer, which began at `started`, is complete."""

    def decode_started(self, request_id: str, now: float) -> None:
        """The first decode iteration of the request began at `now`."""

    # `output_tokens` excludes tokens of earlier placements.
    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        """The request's output is complete."""

    def aborted(self, request_id: str, now: float) -> None:
        """The request stopped on its instances before its output was complete."""

    def ended(self, timeline: Timeline, now: float) -> None:
        """The request left the service: it was completed, failed or cancelled."""


_EVENTS: Final = [name for name in vars(RequestSubscriber) if not name.startswith("_")]


class RequestEvents:
    """Passes each request event to the subscribers that handle it."""

    def __init__(self, subscribers: Iterable[RequestSubscriber] = ()) -> None:
        self.records_timelines = False
        # The subscribers of each event; `subscribe` finds them by name.
        self._arrived: list[RequestSubscriber] = []
        self._rejected: list[RequestSubscriber] = []
        self._admitted: list[RequestSubscriber] = []
        self._placed: list[RequestSubscriber] = []
        self._prefill_started: list[RequestSubscriber] = []
        self._first_token: list[RequestSubscriber] = []
        self._handed_off: list[RequestSubscriber] = []
        self._decode_started: list[RequestSubscriber] = []
        self._finished: list[RequestSubscriber] = []
        self._aborted: list[RequestSubscriber] = []
        self._ended: list[RequestSubscriber] = []
        for subscriber in subscribers:
            self.subscribe(subscriber)

    def subscribe(self, subscriber: RequestSubscriber) -> None:
        """Add a subscriber, which receives each event after all earlier subscribers."""
        for event in _EVENTS:
            if getattr(type(subscriber), event) is not getattr(RequestSubscriber, event):
                getattr(self, f"_{event}").append(subscriber)
        self.records_timelines = bool(self._ended or self._rejected)  # the events with a timeline

    def arrived(self, request: Request, now: float) -> None:
        for subscriber in self._arrived:
            subscriber.arrived(request, now)

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        for subscriber in self._rejected:
            subscriber.rejected(timeline, reason, now)

    def admitted(self, request: Request, now: float) -> None:
        for subscriber in self._admitted:
            subscriber.admitted(request, now)

    def placed(self, placed: PlacedRequest, now: float) -> None:
        for subscriber in self._placed:
            subscriber.placed(placed, now)

    def prefill_started(self, request_id: str, now: float) -> None:
        for subscriber in self._prefill_started:
            subscriber.prefill_started(request_id, now)

    def first_token(self, request_id: str, now: float) -> None:
        for subscriber in self._first_token:
            subscriber.first_token(request_id, now)

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        for subscriber in self._handed_off:
            subscriber.handed_off(request_id, started, now)

    def decode_started(self, request_id: str, now: float) -> None:
        for subscriber in self._decode_started:
            subscriber.decode_started(request_id, now)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        for subscriber in self._finished:
            subscriber.finished(request_id, output_tokens, now)

    def aborted(self, request_id: str, now: float) -> None:
        for subscriber in self._aborted:
            subscriber.aborted(request_id, now)

    def ended(self, timeline: Timeline, now: float) -> None:
        for subscriber in self._ended:
            subscriber.ended(timeline, now)


Sink = Callable[[Timeline], None]


class Recorder(RequestSubscriber):
    """Records the timelines of live requests."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._open: dict[str, Timeline] = {}
        self._placements: dict[str, Timeline] = {}  # by the id of the current placement

    @property
    def live(self) -> Collection[Timeline]:
        """Return the timelines of all requests that have not ended, in order of arrival."""
        return self._open.values()

    def get(self, request_id: str) -> Timeline | None:
        """Return the timeline of a live request, by the id of the request or of its current `PlacedRequest`."""
        return self._placements.get(request_id) or self._open.get(request_id)

    def admitted(self, request: Request, now: float) -> None:
        self.arrive(request, request.arrival_s)

    def placed(self, placed: PlacedRequest, now: float) -> None:
        timeline = self._open.get(placed.request_id)
        if timeline is not None:
            self._placements[placed.id] = timeline
            timeline.moments.setdefault(Moment.ROUTED, now)
            timeline.prefill_instance, timeline.decode_instance = placed.route.prefill, placed.route.decode

    def prefill_started(self, request_id: str, now: float) -> None:
        self.mark(request_id, Moment.PREFILL_STARTED, now)

    def handed_off(self, request_id: str, started: float, now: float) -> None:
        if started < now:  # otherwise nobody has measured the transfer
            self.mark(request_id, Moment.HANDOFF_STARTED, started)
            self.mark(request_id, Moment.HANDOFF_ENDED, now)

    def decode_started(self, request_id: str, now: float) -> None:
        self.mark(request_id, Moment.DECODE_STARTED, now)

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        self._placements.pop(request_id, None)

    def aborted(self, request_id: str, now: float) -> None:
        self._placements.pop(request_id, None)

    def arrive(self, request: Request, now: float) -> Timeline:
        """Open the timeline of a request that arrived."""
        timeline = Timeline(request)
        timeline.moments[Moment.ARRIVED] = now
        self._open[request.id] = timeline
        return timeline

    def mark(self, request_id: str, moment: Moment, now: float) -> None:
        """Record the time at which a request first reached `moment`, such as the start of its prefill."""
        timeline = self.get(request_id)
        if timeline is not None:
            timeline.moments.setdefault(moment, now)

    def token(self, request_id: str, now: float, tokens: int = 1) -> None:
        """Record the time at which output tokens are sent to the client. `request_id` is the client's request."""
        timeline = self._open.get(request_id)
        if timeline is None:
            return
        timeline.token_times_s += [now] * tokens
        timeline.output_tokens += tokens
        timeline.moments.setdefault(Moment.FIRST_TOKEN, now)
        timeline.moments[Moment.LAST_TOKEN] = now

    def end(self, request_id: str, reason: FinishReason) -> Timeline | None:
        """Close the timeline of a request and return it, or None if it is not open."""
        timeline = self._open.pop(request_id, None)
        if timeline is None:
            return None
        timeline.finish_reason = reason
        for sink in self._sinks:
            sink(timeline)
        return timeline
