"""Lifecycle of requests in the controller: admission, placement on workers, retry after worker loss, and completion."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec

from twofold.errors import InstanceLostError, RequestError, TwofoldError
from twofold.events import PlacedRequest, Recorder, RequestEvents
from twofold.handoff import HandoffMode, Lease
from twofold.request import FinishReason, Generation, TokenOutput, TokenRun
from twofold.scheduling.admission.admission import Admission, QueuedRequest
from twofold.scheduling.admission.overload import OverloadControl
from twofold.scheduling.cluster.scheduler import ClusterScheduler
from twofold.serving.controller.forecast import LiveForecast
from twofold.serving.controller.health import WorkerGroup, WorkerHealth
from twofold.serving.controller.live_request import LiveRequest, OutputSink, deadline_error, rejection_error
from twofold.serving.messages import Abort, HandoffEnded, HandoffReport, LeaseGranted, Prefill, Reserve, StepDone
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.timeline import Moment, Timeline

log = logging.getLogger(__name__)

MAX_FAILED_ATTEMPTS = 8  # consecutive attempts without a token: the request itself may crash workers
REFUSED_S = 0.05  # delay after an attempt that a server refused; it doubles with each attempt without a token


class LiveRequests:
    """Live requests of a service, from arrival to completion.

    With `announces`, KV blocks on the decode worker are reserved only when the prefill worker announces the start
    of a prefill. With `recomputes`, the decode worker also gets the prompt, to recompute KV. With `reuses`, the
    metrics include prefix cache hits.
    """

    def __init__(
        self,
        cluster: ClusterScheduler,
        admission: Admission,
        workers: WorkerGroup,
        telemetry: Telemetry,
        *,
        announces: bool,
        recomputes: bool,
        reuses: bool,
        overload: OverloadControl | None = None,
        name_blocks: Callable[[Generation], Generation] | None = None,
        forecast: LiveForecast | None = None,
    ) -> None:
        self._cluster, self._admission, self._workers, self._telemetry = cluster, admission, workers, telemetry
        self._announces, self._recomputes, self._reuses = announces, recomputes, reuses
        self._overload, self._name_blocks, self._forecast = overload, name_blocks, forecast
        self.recorder = Recorder()
        self.health = WorkerHealth(cluster, workers, telemetry)
        ledger = None if overload is None else overload.ledger
        subscribers = (cluster, ledger, self.recorder, self.health, telemetry, admission)
        self.events = RequestEvents(each for each in subscribers if each is not None)
        telemetry.admission(admission)
        if overload is not None:
            telemetry.overload(overload.ledger)
        self._live: dict[str, LiveRequest] = {}
        self._attempts: dict[str, LiveRequest] = {}  # by the id of the current attempt
        self._forwarded: dict[str, asyncio.Event] = {}  # set when it is the turn of a request
        self.opened = asyncio.Event()  # set while requests are admitted
        self._closed = False
        self._idle = asyncio.Event()

    def find(self, attempt_id: str) -> LiveRequest | None:
        """Return the live request that currently runs under the id `attempt_id`, or None."""
        return self._attempts.get(attempt_id)

    # -- opening and closing ----------------------------------------------------------------------------------------

    @property
    def admitting(self) -> bool:
        """Whether the service admits new requests."""
        return self.opened.is_set() and not self._closed

    @property
    def live(self) -> int:
        """Number of requests that have not ended, including forwarded ones."""
        return len(self._live) + len(self._forwarded)

    async def drain(self) -> None:
        """Stop admitting requests, and wait until all live requests have ended."""
        self._closed = True
        self._idle.clear()
        if self.live:
            await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        """Stop admitting requests, and fail all live requests with `reason`."""
        self._closed = True
        for live in list(self._live.values()):
            self.fail(live, InstanceLostError(reason))

    # -- admission and placement ------------------------------------------------------------------------------------

    def submit(self, generation: Generation, sink: OutputSink) -> None:
        """Run a request, whose output goes to `sink` (see `Service.submit`)."""
        self._check_admitting()
        self._admit(LiveRequest(generation if self._name_blocks is None else self._name_blocks(generation), sink))

    @asynccontextmanager
    async def forwarding(self, queued: QueuedRequest) -> AsyncGenerator[None, None]:
        """Admit a request that a server answers without this service, and wait for its turn. Raises RequestError."""
        self._check_admitting()
        refusal = self._admission.offer(queued, time.monotonic())
        if refusal is not None:
            raise rejection_error(refusal)
        turn = self._forwarded[queued.id] = asyncio.Event()
        try:
            self.place_waiting()
            await turn.wait()
            yield
        finally:
            del self._forwarded[queued.id]
            self._admission.release(queued.id, time.monotonic())
            self._ended_one()
            self.place_waiting()

    def _check_admitting(self) -> None:
        if not self.admitting:
            what = "shutting down" if self._closed else "starting"
            raise RequestError(f"the service is {what} and takes no requests", status=503, code="not_ready")

    def _ended_one(self) -> None:
        if not self.live:
            self._idle.set()

    def _admit(self, live: LiveRequest) -> None:
        request, now = live.generation.request, time.monotonic()
        self.events.arrived(request, now)
        refusal = self._admission.offer(live.queued, now)
        if refusal is not None:
            moments = {Moment.ARRIVED: request.arrival_s}
            timeline = Timeline(request, moments, finish_reason=FinishReason.ERROR)
            self.events.rejected(timeline, refusal.reason, now)
            raise rejection_error(refusal)
        self._live[request.id] = live
        self.events.admitted(request, now)
        self.place_waiting()

    def check_waiting(self) -> None:
        """Place waiting requests, and fail waiting requests past their deadline."""
        self.place_waiting()
        for queued in self._admission.expired(time.monotonic()):
            self._telemetry.deadline_missed()
            if queued.id in self._live:  # forwarded requests have a timeout of their own
                self.fail(self._live[queued.id], deadline_error())
        self._telemetry.held.set(self._admission.waiting)

    def place_waiting(self) -> None:
        """Place waiting requests on workers, in the order of the queue."""
        now = time.monotonic()
        while (queued := self._admission.next(now)) is not None:
            if queued.id in self._forwarded:
                self._forwarded[queued.id].set()
            elif not self._place(self._live[queued.id]):
                self._admission.put_back(queued, now)
                return

    def _place_on_resumed(self) -> None:
        if self.health.take_resumed():  # the circuit breaker of a worker has closed again
            self.place_waiting()

    def _place(self, live: LiveRequest) -> bool:
        """Run a request on instances that can accept it now; return False if there are none."""
        try:
            generation, now = live.remaining(), time.monotonic()
        except InstanceLostError as error:
            self.fail(live, error)
            return True
        placed = self._cluster.place_apart_from(live.refused_by, generation.request, now)
        if placed is None:
            return False
        placed.request_id = live.id
        live.begin(generation, placed)
        self._attempts[placed.id] = live
        self.events.placed(placed, now)
        if self._overload is not None and live.attempts == 1:
            live.predicted_ttft_s = self._overload.ledger.predicted_ttft_s(placed.id)
        self._send(generation, placed)
        return True

    def _send(self, generation: Generation, placed: PlacedRequest) -> None:
        route, mode = placed.route, placed.mode
        fetch = None if self._forecast is None else self._forecast.fetch_of(route)
        if not route.splits:
            self._workers.send(route.prefill, Prefill(generation=generation, fetch=fetch))
            return
        announce = self._announces or mode is HandoffMode.PULL
        prefill = Prefill(generation=generation, target=route.decode, mode=mode, announce=announce, fetch=fetch)
        self._workers.send(route.prefill, prefill)
        if not announce:
            self._reserve(generation, placed)

    def _reserve(self, generation: Generation, placed: PlacedRequest) -> None:
        request, prompt, chain = generation.request, generation.prompt_token_ids, generation.chain
        if not (self._recomputes or generation.sampling.needs_history):
            prompt = [] if chain is None else prompt[len(request.prefix_blocks) * chain.block_size :]
        reserve = Reserve(
            request=request,
            # The prefill worker scores the prompt.
            sampling=msgspec.structs.replace(generation.sampling, prompt_logprobs=None),
            source=placed.route.prefill,
            prompt_token_ids=prompt,
            chain=chain,
        )
        self._workers.send(placed.route.decode, reserve)

    # -- reports of workers -----------------------------------------------------------------------------------------

    def announced(self, attempt_id: str) -> None:
        """Reserve decode blocks for a request whose prefill has started."""
        live = self._attempts.get(attempt_id)
        if live is not None and live.placed is not None:
            self._reserve(live.current, live.placed)

    def leased(self, lease: Lease) -> None:
        """Forward a lease to the prefill worker, which may then write KV into the decode worker's blocks."""
        if lease.request_id in self._attempts:  # otherwise, the request has ended
            self._workers.send(lease.source, LeaseGranted(lease=lease))
        else:
            self._workers.send(lease.instance, HandoffEnded(request_id=lease.request_id, epoch=lease.epoch))

    def stepped(self, message: StepDone) -> None:
        """Process a worker's report of one iteration."""
        now, instance = time.monotonic(), message.instance
        started_s = self._workers.to_local_time(instance, message.started_s)
        self._telemetry.instances.step(instance, len(message.tokens))
        # Overload control learns decode speed from iterations without prompts.
        if self._overload is not None and message.tokens and all(output.index for _, output in message.tokens):
            self._overload.ledger.observe_iteration(instance, len(message.tokens), now - started_s)
        for attempt_id in message.started:
            self.prefill_started(attempt_id, started_s)
        for attempt_id, output in message.tokens:
            self.token(attempt_id, output, instance, started_s, now)

    def prefill_started(self, attempt_id: str, at_s: float) -> None:
        if attempt_id in self._attempts:
            self.events.prefill_started(attempt_id, at_s)

    def tokenized(self, attempt_id: str, prompt_ids: msgspec.Raw, tokens: int) -> None:
        """Record that a server has tokenized a request's prompt: its token ids (a JSON list) and their number."""
        live = self._attempts.get(attempt_id)
        timeline = None if live is None else self.recorder.get(live.id)
        if live is not None and timeline is not None:
            live.tokenized(prompt_ids)
            timeline.request = msgspec.structs.replace(timeline.request, prompt_tokens=tokens)

    def token(self, attempt_id: str, output: TokenOutput, instance: str, started_s: float, now: float) -> None:
        """Process an output token that a worker has reported."""
        live = self._attempts.get(attempt_id)
        if live is None or live.placed is None:
            return
        if output.index == 0:
            self.events.first_token(attempt_id, now)
            if (timeline := self.recorder.get(live.id)) is not None:
                timeline.cached_tokens = output.reused_tokens
            if self._reuses:
                self._telemetry.instances.prefilled(instance, live.current.request.prompt_tokens, output.reused_tokens)
            self._place_on_resumed()
            if self._rejects_decode(live, live.placed, output, now):
                return
        elif output.index == 1:
            self.events.decode_started(attempt_id, started_s)
            self._place_on_resumed()
        timeline = self.recorder.get(live.id) if live.generation.returns_timings else None
        arrived = live.push(output)
        for ordered in arrived:
            self.recorder.token(live.id, now)
            if ordered.finish_reason is not None:
                # If the first token ends the request, the decode worker still waits for its KV.
                unused = live.placed.route.splits and live.next_index == live.first_index + 1
                self.end(live, ordered.finish_reason, abort=unused)
        for ordered in arrived:  # the request has ended before its last token is delivered
            live.sink.output(
                ordered if timeline is None else msgspec.structs.replace(ordered, timings=timeline.timings)
            )

    def token_run(self, attempt_id: str, run: TokenRun, instance: str, started_s: float, now: float) -> None:
        """Process tokens that a server has reported one after the other."""
        live = self._attempts.get(attempt_id)
        if live is None or live.placed is None:
            return
        ordered = None if live.generation.returns_timings else live.push_run(run)
        if ordered is None:
            for output in run.outputs():
                self.token(attempt_id, output, instance, started_s, now)
            return
        if run.index == 1:
            self.events.decode_started(attempt_id, started_s)
            self._place_on_resumed()
        self.recorder.token(live.id, now, len(run.token_ids))
        live.sink.outputs(ordered)

    def _rejects_decode(self, live: LiveRequest, placed: PlacedRequest, output: TokenOutput, now: float) -> bool:
        """Reject a request after its prefill if decode is overloaded; return whether it was rejected."""
        if self._overload is None:
            return False
        if live.predicted_ttft_s is not None:
            self._telemetry.predicted(live.predicted_ttft_s, now - live.generation.request.arrival_s)
        force = live.next_index > 0 or output.finish_reason is not None
        reason = self._overload.admit_decode(placed.id, now, force=force)
        if reason is None:
            return False
        self._telemetry.count_rejection(live.generation.request, reason)
        self.fail(live, rejection_error(self._overload.refusal(placed, reason, now)))
        return True

    def reported_handoff(self, message: HandoffReport) -> None:
        """Process a worker's report of a completed hand-off."""
        local, source = self._workers.to_local_time, message.instance
        self._telemetry.handoff(message)
        self.handed_off(message.request_id, local(source, message.started_s), local(source, message.ended_s))

    def handed_off(self, attempt_id: str, started_s: float, ended_s: float) -> None:
        """Record that the KV of a request was transferred between `started_s` and `ended_s`."""
        live = self._attempts.get(attempt_id)
        if live is not None:
            live.handed_off = True
            self.events.handed_off(attempt_id, started_s, ended_s)

    # -- end and replay ---------------------------------------------------------------------------------------------

    def stop(self, request_id: str, reason: FinishReason) -> None:
        """End a request for a reason other than its last token."""
        live = self._live.get(request_id)
        if live is not None:
            self.end(live, reason)

    def end(self, live: LiveRequest, reason: FinishReason, *, abort: bool = True) -> None:
        """End a request. With `abort`, also abort it on its workers."""
        if self._live.pop(live.id, None) is None:
            return
        self._end_attempt(live, abort=abort, complete=reason.complete)
        timeline = self.recorder.end(live.id, reason)
        if timeline is not None:
            self.events.ended(timeline, time.monotonic())
        self._ended_one()
        self._place_on_resumed()

    def fail(self, live: LiveRequest, error: TwofoldError) -> None:
        """End a request and deliver `error` to its client."""
        self._telemetry.failed(error)
        self.end(live, FinishReason.ERROR)
        live.sink.failed(error)

    def replay(self, attempt_id: str, instance: str, reason: str, refusal: RequestError | None = None) -> None:
        """Retry a request after the loss of a worker, or fail it after too many losses.

        `refusal` is the request's error if the worker is well and only refuses this request. Then the next attempt
        begins after a delay, which doubles each time, and prefers other workers. Clients do not see `reason`.
        """
        live = self._attempts.get(attempt_id)
        if live is None:
            return
        stage = live.stage
        self._end_attempt(live, abort=True)
        if live.failed_in_a_row >= MAX_FAILED_ATTEMPTS:
            log.warning("request %s failed %d times in a row: %s", live.id, live.failed_in_a_row, reason)
            lost = f"the request was lost {live.failed_in_a_row} times in a row, the last time on {instance}"
            self.fail(live, refusal or InstanceLostError(lost))
            return
        log.info("request %s is replayed after %d tokens: %s", live.id, live.next_index, reason)
        self._telemetry.replayed(live.id, instance, stage)
        if refusal is None:
            self._admission.put_back(live.queued, time.monotonic())
        else:
            live.refused_by = instance
            delay_s = REFUSED_S * 2**live.failed_in_a_row
            asyncio.get_running_loop().call_later(delay_s, self._try_again, live)
        self._place_on_resumed()

    def _try_again(self, live: LiveRequest) -> None:
        if live.id in self._live:
            self._admission.put_back(live.queued, time.monotonic())
            self.place_waiting()

    def _end_attempt(self, live: LiveRequest, *, abort: bool, complete: bool = False) -> None:
        placed = live.placed
        if placed is None:
            return
        del self._attempts[placed.id]
        live.end_attempt()
        if complete:
            self.events.finished(placed.id, live.next_index - live.first_index, time.monotonic())
        else:
            self.events.aborted(placed.id, time.monotonic())
        if abort:
            for instance in {placed.route.prefill, placed.route.decode}:
                self._workers.send(instance, Abort(request_id=placed.id))
