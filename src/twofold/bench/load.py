"""Load on an endpoint: open loop, where each request is sent when it is due, or closed loop, where each of a number of
clients sends its next request after its last one has ended.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from twofold.bench.client import Client, ClientConfig, Reply, RequestOutcome
from twofold.bench.endpoint import Endpoint
from twofold.bench.prompts import PromptMaker
from twofold.bench.sessions import Dialogue
from twofold.errors import ConfigurationError, require
from twofold.events import Recorder
from twofold.request import Request, RequestTimings
from twofold.timeline import Moment, Timeline


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run of the load generator."""

    endpoint: Endpoint
    prompts: PromptMaker = PromptMaker()
    client: ClientConfig = ClientConfig()
    max_concurrency: int | None = None  # maximum number of requests in flight
    concurrency: int | None = None  # clients of a closed loop; None: open loop
    think_s: float = 0.0  # between the end of a request and the client's next one
    warmup: int = 0  # requests with the lengths of the first request, before the measurement
    api_key: str | None = None  # exclude it when serializing this struct


@dataclass(slots=True)
class LoadCounts:
    """Numbers of requests sent, done and failed so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class LoadResult:
    """Results of a load test, in order of completion. `send_lags_s`: how late each request was sent, in seconds."""

    timelines: list[Timeline] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)  # none for an aborted request
    send_lags_s: list[float] = field(default_factory=list)  # timelines start after this delay
    started_s: float = 0.0  # of time.monotonic(), as all times
    ended_s: float = 0.0
    interrupted: bool = False

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def errors(self) -> dict[str, str]:
        """Failure reason of each failed request, by request id."""
        return {outcome.request_id: outcome.error for outcome in self.outcomes if outcome.error is not None}

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that the server found in its prefix cache; None if it does not report them."""
        lengths = {timeline.request.id: timeline.request.prompt_tokens for timeline in self.timelines}
        done = [outcome for outcome in self.outcomes if outcome.cached_tokens is not None]
        tokens = sum(lengths[outcome.request_id] for outcome in done)
        return sum(outcome.cached_tokens or 0 for outcome in done) / tokens if tokens else None

    @property
    def cached_at_start(self) -> int:
        """Number of tokens of the first prompt that the server had in its prefix cache before the run."""
        first = min(self.timelines, key=lambda timeline: timeline.request.arrival_s, default=None)
        cached = {outcome.request_id: outcome.cached_tokens for outcome in self.outcomes}
        return 0 if first is None else cached.get(first.request.id) or 0

    @property
    def timings(self) -> list[tuple[RequestTimings, float]]:
        """Phases of each completed request that the server reports, with the TTFT of the client in seconds."""
        ttft_s = {timeline.request.id: timeline.ttft_s for timeline in self.timelines if timeline.complete}
        reported = ((each.timings, ttft_s.get(each.request_id)) for each in self.outcomes)
        return [(timings, seconds) for timings, seconds in reported if timings is not None and seconds is not None]

    @property
    def packed_tokens(self) -> int:
        """Number of output tokens that share a stream chunk with the token before them."""
        chunks = {outcome.request_id: outcome.chunks for outcome in self.outcomes if outcome.error is None}
        return sum(
            max(0, timeline.output_tokens - chunks.get(timeline.request.id, timeline.output_tokens))
            for timeline in self.timelines
        )


OnChange = Callable[[LoadCounts], None]


async def run_load(
    config: LoadConfig,
    requests: Iterable[Request],
    *,
    stop: asyncio.Event | None = None,
    on_change: OnChange | None = None,
) -> LoadResult:
    """Send the requests at their arrival times and wait for all replies. Setting `stop` ends the load early.

    Raises ConfigurationError if every warm-up request fails; later failures are in the result.
    """
    result = LoadResult()
    recorder = Recorder([result.timelines.append])
    async with Client(config.endpoint, recorder, config.client, config.api_key) as client:
        load = _Load(config, client, result, on_change)
        sending = asyncio.create_task(load.drive(requests))
        await _until_done(sending, stop, result)
    return result


async def _until_done(sending: asyncio.Task[None], stop: asyncio.Event | None, result: LoadResult) -> None:
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        result.interrupted = not sending.done()
    finally:
        stopping.cancel()
        if not sending.done():
            sending.cancel()
        with suppress(asyncio.CancelledError):  # cancelled above
            await sending


class _Load:
    def __init__(self, config: LoadConfig, client: Client, result: LoadResult, on_change: OnChange | None) -> None:
        self._config, self._client, self._result = config, client, result
        self._on_change = on_change or (lambda _: None)
        self._counts = LoadCounts()
        cap = config.max_concurrency
        self._slots = nullcontext() if cap is None else asyncio.Semaphore(cap)

    async def drive(self, requests: Iterable[Request]) -> None:
        iterator = iter(requests)
        first = next(iterator, None)
        if first is None:
            return
        await self._warm_up(first)
        self._result.started_s = time.monotonic()
        left = chain([first], iterator)
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._config.concurrency is None:
                    await self._open_loop(left, self._result.started_s - first.arrival_s, tasks)
                else:
                    for _ in range(self._config.concurrency):
                        tasks.create_task(self._client_of_closed_loop(left))
        except ExceptionGroup as failed:  # a wrong setting, which is the same for every request
            raise failed.exceptions[0] from None
        finally:
            self._result.ended_s = time.monotonic()

    async def _open_loop(self, requests: Iterator[Request], origin_s: float, replies: asyncio.TaskGroup) -> None:
        sessions: dict[str, asyncio.Task[Dialogue]] = {}
        for request in requests:
            due_s = origin_s + request.arrival_s
            if request.session:
                await asyncio.sleep(due_s - time.monotonic())
                turn = self._turn(request, due_s, sessions.get(request.session))
                sessions[request.session] = replies.create_task(turn)
            else:
                body = self._body(request)
                await asyncio.sleep(due_s - time.monotonic())
                replies.create_task(self._send(request, body, due_s))

    async def _turn(self, request: Request, due_s: float, before: asyncio.Task[Dialogue] | None) -> Dialogue:
        """Send a turn of a session after the one before it, and return the session so far."""
        if before is None:
            dialogue = Dialogue(self._config.prompts, self._config.client.chat)
        else:
            dialogue = await before
            due_s = max(due_s, time.monotonic() + request.think_s)
            await asyncio.sleep(due_s - time.monotonic())
        prompt, reply = dialogue.prompt(request), Reply(keeps_output=True)
        await self._send(request, self._client.body(request, prompt), due_s, reply)
        return dialogue.answered(request, prompt, reply)

    async def _client_of_closed_loop(self, requests: Iterator[Request]) -> None:
        for request in requests:  # shared with the other clients
            require(not request.session, "sessions follow their own pace: leave out the number of clients")
            await self._send(request, self._body(request), time.monotonic())
            await asyncio.sleep(self._config.think_s)

    async def _send(self, request: Request, body: bytes, due_s: float, reply: Reply | None = None) -> None:
        async with self._slots:
            self._result.send_lags_s.append(max(0.0, time.monotonic() - due_s))
            self._counts.sent += 1
            self._on_change(self._counts)
            outcome = await self._client.send(request, body, reply)
        self._result.outcomes.append(outcome)
        self._counts.done += outcome.error is None
        self._counts.failed += outcome.error is not None
        self._on_change(self._counts)

    async def _warm_up(self, like: Request) -> None:
        names = [f"warmup-{number}" for number in range(self._config.warmup)]
        # No prefix blocks: a warm-up must not fill caches for the run.
        samples = [msgspec.structs.replace(like, id=name, prefix_blocks=(), shared_tokens=0) for name in names]
        outcomes = await asyncio.gather(*(self._client.send(sample, self._body(sample)) for sample in samples))
        self._result.timelines.clear()
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed and len(failed) == len(outcomes):
            raise ConfigurationError(
                f"{self._config.endpoint.base_url} fails every warm-up request: {failed[0].error}: {failed[0].detail}"
            )

    def _body(self, request: Request) -> bytes:
        return self._client.body(request, self._config.prompts.prompt(request))


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one request in the JSON report."""

    id: str
    sent_s: float  # since the start of the load
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    token_times_s: list[float]  # since the request was sent
    chunks: int | None
    cached_tokens: int | None
    timings: RequestTimings | None
    error: str | None
    detail: str | None


_LATENCIES = ("output_tokens", "finish_reason", "ttft_s", "tpot_s", "e2e_s")
_OUTCOMES = ("chunks", "cached_tokens", "timings", "error", "detail")


def records(result: LoadResult) -> list[RequestRecord]:
    """Return one record per request, in the order in which the requests were sent."""
    outcomes = {outcome.request_id: outcome for outcome in result.outcomes}
    made = []
    for timeline in result.timelines:
        sent_s = timeline.moments[Moment.ARRIVED]
        outcome = outcomes.get(timeline.request.id)
        made.append(
            RequestRecord(
                id=timeline.request.id,
                sent_s=sent_s - result.started_s,
                prompt_tokens=timeline.request.prompt_tokens,
                token_times_s=[time_s - sent_s for time_s in timeline.token_times_s],
                **{name: getattr(timeline, name) for name in _LATENCIES},
                **dict[str, Any]((name, getattr(outcome, name, None)) for name in _OUTCOMES),
            )
        )
    return sorted(made, key=lambda record: record.sent_s)
