"""The requests that are alive: taken, placed on workers, replayed when those are lost, and ended.

`generate` is the life of a request as its client sees it. What workers say of it comes through progress.py, which hands
its tokens to the LiveRequest that `generate` waits for, and ends it here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.events import Recorder, RequestEvents
from twofold.handoff import HandoffMode
from twofold.request import FinishReason, Generation, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.controller.forecast import LiveForecast
from twofold.serving.controller.health import WorkerGroup, WorkerHealth
from twofold.serving.controller.live_request import Attempt, LiveRequest, deadline_error, rejection_error
from twofold.serving.controller.prompt_keys import BlockNaming
from twofold.serving.messages import Abort, Prefill, Reserve
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.timeline import Moment, Timeline

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
        health: WorkerHealth,
        telemetry: Telemetry,
        events: RequestEvents,
        recorder: Recorder,
        *,
        announces: bool,
        recomputes: bool,
        overload: OverloadControl | None,
        prompt_keys: BlockNaming | None,
        forecast: LiveForecast | None,
    ) -> None:
        self._cluster, self._admission, self._fleet, self._health = cluster, admission, fleet, health
        self._telemetry, self._events, self._recorder = telemetry, events, recorder
        self._announces, self._recomputes = announces, recomputes
        self._overload, self._prompt_keys = overload, prompt_keys
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
        request, live, now = generation.request, LiveRequest(generation), time.monotonic()
        self._events.arrived(request, now)
        refusal = self._admission.offer(live.queued, now)
        if refusal is not None:
            timeline = Timeline(
                request, {Moment.ARRIVED: request.arrival_s}, finish_reason=FinishReason.ERROR
            )
            self._events.rejected(timeline, refusal.reason, now)
            raise rejection_error(refusal)
        self._live[request.id] = live
        self._events.admitted(request, now)
        self.place_waiting()
        return live

    def look(self) -> None:
        """What nobody says: somebody may take those that wait now, or nobody waits for their answers any more."""
        self.place_waiting()
        for queued in self._admission.expired(time.monotonic()):
            self._telemetry.deadline_missed()
            self.fail(self._live[queued.id], deadline_error())
        self._telemetry.held(self._admission.waiting)

    def place_waiting(self) -> None:
        """Those that wait, as far as somebody can take them, in the order that admission gives them."""
        now = time.monotonic()
        while (queued := self._admission.next(now)) is not None:
            if not self._place(self._live[queued.id]):
                self._admission.put_back(queued, now)
                return

    def place_on_resumed(self) -> None:
        """Place waiting requests if the last events resumed a worker."""
        if self._health.take_resumed():
            self.place_waiting()

    def _place(self, live: LiveRequest) -> bool:
        """Begin an attempt; False if no instance can take it now."""
        generation, now = live.what_is_left(), time.monotonic()
        placed = self._cluster.place(generation.request, now)
        if placed is None:
            return False
        placed.request_id = live.id
        attempt = live.begin(generation, placed)
        self._attempts[attempt.id] = live
        self._events.placed(placed, now)
        if self._overload is not None and live.attempts == 1:
            live.predicted_ttft_s = self._overload.ledger.predicted_ttft_s(attempt.id)
        self._send(attempt)
        return True

    def _send(self, attempt: Attempt) -> None:
        """An attempt goes to the worker that prefills it, and to the one that decodes it."""
        generation, route, mode = attempt.generation, attempt.placed.route, attempt.placed.mode
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
        generation, route = attempt.generation, attempt.placed.route
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
        self._close_attempt(live, abort=abort, complete=reason.complete)
        timeline = self._recorder.end(live.id, reason)
        if timeline is not None:
            self._events.ended(timeline, time.monotonic())
        if not self._live:
            self._idle.set()
        self.place_on_resumed()

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
        self._admission.put_back(live.queued, time.monotonic())
        self.place_on_resumed()

    def _close_attempt(self, live: LiveRequest, *, abort: bool, complete: bool = False) -> None:
        """Its attempt, if there is one, is over; workers that still hold something of it are told to `abort`."""
        attempt = live.attempt
        if attempt is None:
            return
        del self._attempts[attempt.id]
        live.lose()
        if complete:
            self._events.finished(attempt.id, live.next_index - attempt.first_index, time.monotonic())
        else:
            self._events.aborted(attempt.id, time.monotonic())
        if abort:
            for instance in {attempt.placed.route.prefill, attempt.placed.route.decode}:
                self._fleet.send(instance, Abort(request_id=attempt.id))
