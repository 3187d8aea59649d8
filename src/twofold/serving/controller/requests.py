"""The requests that are alive: taken, placed on workers, replayed when those are lost, and ended.

`generate` is the life of a request as its client sees it. What workers say of it comes through progress.py, which hands
its tokens to the LiveRequest that `generate` waits for, and ends it here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.handoff import HandoffMode
from twofold.request import FinishReason, Generation, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.placement import PlacedRequest
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.controller.forecast import LiveForecast
from twofold.serving.controller.health import WorkerGroup, WorkerHealth
from twofold.serving.controller.live_request import Attempt, LiveRequest, deadline_error, rejection_error
from twofold.serving.controller.prompt_keys import BlockNaming
from twofold.serving.controller.replanning import LiveReplanning
from twofold.serving.messages import Abort, Prefill, Reserve
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.timeline import Moment
from twofold.events import Recorder

log = logging.getLogger(__name__)

# A request that was lost so often without a token in between may be what ends the workers.
MAX_FAILED_ATTEMPTS = 8


class Requests:
    """Knows every request from when it is taken to its end, and the attempt of each that runs now.

    None is taken before `open`, nor any more once it drains or all have failed. With `announces` room on the decode
    instance is asked for when a prefill starts (docs/decisions/0007). With `recomputes` that instance is given the
    prompt as well.
    """

    def __init__(
        self,
        cluster: ClusterScheduler,
        admission: Admission,
        fleet: WorkerGroup,
        trust: WorkerHealth,
        telemetry: Telemetry,
        recorder: Recorder,
        *,
        announces: bool,
        recomputes: bool,
        overload: OverloadControl | None,
        replanning: LiveReplanning | None,
        prompt_keys: BlockNaming | None,
        forecast: LiveForecast | None,
    ) -> None:
        self._cluster, self._admission, self._fleet, self._trust = cluster, admission, fleet, trust
        self._telemetry, self._recorder = telemetry, recorder
        self._announces, self._recomputes = announces, recomputes
        self._overload, self._replanning, self._prompt_keys = overload, replanning, prompt_keys
        self._forecast = forecast
        self._live: dict[str, LiveRequest] = {}
        self._attempts: dict[str, LiveRequest] = {}  # by the attempt that runs now
        self._opened = asyncio.Event()
        self._closed = False
        self._idle = asyncio.Event()

    def of(self, attempt_id: str) -> LiveRequest | None:
        """The request whose attempt this is; None where that is over."""
        return self._attempts.get(attempt_id)

    # -- whether any are taken ----------------------------------------------------------------------------------------

    def open(self) -> None:
        """From now on requests are taken."""
        self._opened.set()

    async def opened(self) -> None:
        """Wait until requests are taken."""
        await self._opened.wait()

    @property
    def taking(self) -> bool:
        """Whether a request that came now would be taken, as far as that depends on the life of the service."""
        return self._opened.is_set() and not self._closed

    async def drain(self) -> None:
        """Take no more, and wait until those that are here have ended."""
        self._closed = True
        self._idle.clear()
        if self._live:
            await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        """Take no more, and none that is here can go on."""
        self._closed = True
        for live in list(self._live.values()):
            self.fail(live, InstanceLostError(reason))

    # -- come -------------------------------------------------------------------------------------------------------

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield the output tokens of a request in order, as `Service.generate` says.

        Closing the generator early aborts the request on every worker.
        """
        if not self.taking:
            what = "is about to end" if self._closed else "is starting"
            raise RequestError(f"the service {what} and takes no requests", status=503, code="not_ready")
        live = self._take(generation)
        try:
            while True:
                output = await live.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            # The client has everything, and then the request has ended already, or has gone.
            self.end(live, FinishReason.ABORT)

    def _take(self, generation: Generation) -> LiveRequest:
        """A request begins, or waits for that; raises RequestError where it is refused."""
        if self._prompt_keys is not None:
            generation = self._prompt_keys.name(generation)
        request, live = generation.request, LiveRequest(generation)
        if self._replanning is not None:
            self._replanning.arrived(request)
        refusal = self._admission.offer(live.ticket, time.monotonic())
        if refusal is not None:
            if self._replanning is not None:
                self._replanning.refused(request.id)
            self._telemetry.rejected(request, refusal.reason.replace("-", "_"))
            raise rejection_error(refusal)
        self._live[request.id] = live
        self._telemetry.arrived(request)
        live.timeline = self._recorder.arrive(request, request.arrival_s)
        if self._replanning is not None:
            self._replanning.taken(live.timeline)
        self.place_waiting()
        return live

    def look(self) -> None:
        """What nobody says: somebody may take those that wait now, or nobody waits for their answers any more."""
        self.place_waiting()
        for ticket in self._admission.expired(time.monotonic()):
            self._telemetry.deadline_missed()
            self.fail(self._live[ticket.id], deadline_error())
        self._telemetry.held(self._admission.waiting)

    def place_waiting(self) -> None:
        """Those that wait, as far as somebody can take them, in the order that admission gives them."""
        now = time.monotonic()
        while (ticket := self._admission.next(now)) is not None:
            if not self._place(self._live[ticket.id]):
                self._admission.put_back(ticket, now)
                return

    def _place(self, live: LiveRequest) -> bool:
        """Begin an attempt; False if no instance can take it now."""
        generation, now = live.what_is_left(), time.monotonic()
        placement = self._cluster.arrive(generation.request, now)
        if placement is None:
            return False
        attempt, route = live.begin(generation, placement), placement.route
        self._attempts[attempt.id] = live
        self._expect(live, attempt, now)
        self._recorder.mark(live.id, Moment.ROUTED, now)
        self._telemetry.routed(route)
        live.timeline.prefill_instance, live.timeline.decode_instance = route.prefill, route.decode
        for instance in {route.prefill, route.decode}:
            self._trust.begin_trial(instance, attempt.id)
        self._send(attempt)
        return True

    def _expect(self, live: LiveRequest, attempt: Attempt, now: float) -> None:
        """Overload control knows of the attempt, and says when its first token will come."""
        if self._overload is not None:
            newcomer = PlacedRequest.of(attempt.generation.request, attempt.placement.route)
            ttft_s = self._overload.placed(newcomer, now)
            live.predicted_ttft_s = ttft_s if live.attempts == 1 else None

    def _send(self, attempt: Attempt) -> None:
        """An attempt goes to the worker that prefills it, and to the one that decodes it."""
        generation, route, mode = attempt.generation, attempt.placement.route, attempt.placement.mode
        fetch = None if self._forecast is None else self._forecast.fetch_of(route)
        if not route.splits:
            self._fleet.send(route.prefill, Prefill(generation=generation, fetch=fetch))
            return
        # Room is asked for when the prompt starts: then, and not sooner, its KV is on its way.
        announce = self._announces or mode is HandoffMode.PULL
        prefill = Prefill(
            generation=generation, target=route.decode, mode=mode, announce=announce, fetch=fetch
        )
        self._fleet.send(route.prefill, prefill)
        if not announce:
            self.reserve(attempt)

    def reserve(self, attempt: Attempt) -> None:
        """Ask the worker that decodes an attempt for room."""
        generation, route = attempt.generation, attempt.placement.route
        reserve = Reserve(
            request=generation.request,
            sampling=generation.sampling,
            source=route.prefill,
            prompt_token_ids=generation.prompt_token_ids if self._recomputes else None,
        )
        self._fleet.send(route.decode, reserve)

    # -- go ---------------------------------------------------------------------------------------------------------

    def stop(self, request_id: str) -> None:
        """The client has all it asked for, found in the text: end the request as finished, not as aborted."""
        live = self._live.get(request_id)
        if live is not None:
            self.end(live, FinishReason.STOP)

    def end(self, live: LiveRequest, reason: FinishReason, *, abort: bool = True) -> None:
        """A request is over, whatever it was doing; what ended before stays as it ended."""
        if self._live.pop(live.id, None) is None:
            return
        self._admission.ended(live.id, time.monotonic())
        self._close_attempt(live, abort=abort, complete=reason.complete)
        self._recorder.end(live.id, reason)
        if not self._live:
            self._idle.set()

    def fail(self, live: LiveRequest, error: TwofoldError) -> None:
        """A request cannot go on, and its client is told so."""
        self.end(live, FinishReason.ERROR)
        live.fail(error)

    def replay(self, attempt_id: str, instance: str, reason: str) -> None:
        """An attempt is lost, on `instance`; the next one of its request waits until somebody can take it."""
        live = self._attempts.get(attempt_id)
        if live is None:
            return
        stage = live.stage
        self._close_attempt(live, abort=True)
        if live.in_vain >= MAX_FAILED_ATTEMPTS:
            self.fail(
                live, InstanceLostError(f"the request was lost {live.in_vain} times in a row: {reason}")
            )
            return
        log.info("request %s is replayed after %d tokens: %s", live.id, live.next_index, reason)
        self._telemetry.replayed(live.id, instance, stage)
        self._admission.put_back(live.ticket, time.monotonic())

    def _close_attempt(self, live: LiveRequest, *, abort: bool, complete: bool = False) -> None:
        """Its attempt, if there is one, is over; workers that still hold something of it are told to `abort`."""
        attempt = live.attempt
        if attempt is None:
            return
        if self._overload is not None:
            made = live.next_index - attempt.first_index if complete else None
            self._overload.ended(attempt.id, time.monotonic(), made)
        del self._attempts[attempt.id]
        live.lose()
        self._cluster.ended(attempt.id)
        route = attempt.placement.route
        for instance in {route.prefill, route.decode}:
            if abort:
                self._fleet.send(instance, Abort(request_id=attempt.id))
            if self._trust.release(instance, attempt.id):
                self.place_waiting()
