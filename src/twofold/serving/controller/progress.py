"""What workers say of the attempts that they run, from the start of a prompt to the last token."""

import time

from twofold.events import RequestEvents
from twofold.handoff import Lease
from twofold.request import TokenOutput
from twofold.scheduling.admission.overload import OverloadControl
from twofold.serving.controller.health import WorkerGroup
from twofold.serving.controller.live_request import Attempt, LiveRequest, rejection_error
from twofold.serving.controller.requests import Requests
from twofold.serving.messages import HandoffEnded, HandoffReport, LeaseGranted, StepDone
from twofold.serving.telemetry.telemetry import Telemetry


class Progress:
    """Of attempts that are over nothing is heard any more; with `reuses` workers say what prompts found cached."""

    def __init__(
        self,
        requests: Requests,
        fleet: WorkerGroup,
        telemetry: Telemetry,
        events: RequestEvents,
        *,
        overload: OverloadControl | None,
        reuses: bool,
    ) -> None:
        self._requests, self._fleet = requests, fleet
        self._telemetry, self._events = telemetry, events
        self._overload, self._reuses = overload, reuses

    def prefill_started(self, attempt_id: str) -> None:
        """The prompt of an announced attempt starts: now room is asked for where it is decoded."""
        live = self._requests.of(attempt_id)
        if live is not None and live.attempt is not None:
            self._requests.reserve(live.attempt)

    def leased(self, lease: Lease) -> None:
        """A lease goes to its source while its request lives; otherwise nothing was, or will be, written."""
        if self._requests.of(lease.request_id) is not None:
            self._fleet.send(lease.source, LeaseGranted(lease=lease))
        else:
            self._fleet.send(lease.instance, HandoffEnded(request_id=lease.request_id, epoch=lease.epoch))

    def stepped(self, message: StepDone) -> None:
        """An iteration is over: prompts have started, and tokens are there."""
        now, started_s = time.monotonic(), self._fleet.ours(message.instance, message.started_s)
        self._telemetry.step(message.instance, len(message.tokens))
        self._learn_pace(message, now - started_s)
        for attempt_id in message.started:
            self.begun(attempt_id, started_s)
        for attempt_id, output in message.tokens:
            self.token(attempt_id, output, message.instance, started_s, now)

    def begun(self, attempt_id: str, at_s: float) -> None:
        """The prefill of an attempt began."""
        if self._requests.of(attempt_id) is not None:
            self._events.prefill_started(attempt_id, at_s)

    def token(
        self, attempt_id: str, output: TokenOutput, instance: str, started_s: float, now: float
    ) -> None:
        """An attempt has a token more, of an iteration of `instance` that began at `started_s`."""
        live = self._requests.of(attempt_id)
        if live is not None:
            self._token(live, output, instance, started_s, now)

    def _learn_pace(self, message: StepDone, seconds: float) -> None:
        """Overload control follows how quick decodes are; iterations with prompts it times by their first tokens."""
        if (
            self._overload is not None
            and message.tokens
            and all(output.index for _, output in message.tokens)
        ):
            self._overload.ledger.observe_iteration(message.instance, len(message.tokens), seconds)

    def _token(
        self, live: LiveRequest, output: TokenOutput, instance: str, started_s: float, now: float
    ) -> None:
        attempt = live.attempt
        assert attempt is not None  # noqa: S101  (it was found by its attempt; tells the type checker so)
        if output.index == 0:
            self._events.first_token(attempt.id, now)
            if self._reuses:
                prompt_tokens = attempt.generation.request.prompt_tokens
                self._telemetry.prefilled(instance, prompt_tokens, output.reused_tokens)
        elif output.index == 1:
            self._events.decode_started(attempt.id, started_s)
        self._requests.place_on_resumed()
        if output.index == 0 and not self._decodes(live, attempt, output, now):
            return
        for ordered in live.push(output):
            self._events.token(attempt.id, now)
            if ordered.finish_reason is not None:
                # One that ended with its first token is still expected where it was to be decoded.
                unused = attempt.placed.route.splits and live.next_index == attempt.first_index + 1
                self._requests.end(live, ordered.finish_reason, abort=unused)

    def _decodes(self, live: LiveRequest, attempt: Attempt, output: TokenOutput, now: float) -> bool:
        """Whether a request goes on whose prompt is computed: once its client has a token it does."""
        if self._overload is None:
            return True
        if live.predicted_ttft_s is not None:
            self._telemetry.predicted(live.predicted_ttft_s, now - live.generation.request.arrival_s)
        force = live.next_index > 0 or output.finish_reason is not None
        reason = self._overload.admit_decode(attempt.id, now, force=force)
        if reason is None:
            return True
        self._telemetry.count_rejection(live.generation.request, reason)
        self._requests.fail(live, rejection_error(self._overload.refusal(attempt.placed, reason, now)))
        return False

    def handed_off(self, message: HandoffReport) -> None:
        """The KV of an attempt is where it is decoded."""
        fleet, source = self._fleet, message.instance
        self._telemetry.handoff(message)
        self.arrived(
            message.request_id, fleet.ours(source, message.started_s), fleet.ours(source, message.ended_s)
        )

    def arrived(self, attempt_id: str, started_s: float, ended_s: float) -> None:
        """The KV of an attempt travelled between these times, and is not where it was prefilled any more."""
        live = self._requests.of(attempt_id)
        if live is not None:
            live.handed_off = True
            self._events.handed_off(attempt_id, started_s, ended_s)
