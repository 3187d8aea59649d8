"""Attempts (runs of requests) on vLLM servers: prefill on one server, decode on the same or another server. The prefill
server generates the first token, which the client receives at once. The decode server fetches the prompt's KV and
generates the first token again, because vLLM always computes the last position of a prompt. The repeated token is
dropped. If rounding makes it differ from the first one, the attempt is lost, and the next attempt resumes after the
first token.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import blake2b
from typing import Protocol, TypeVar

import msgspec

from twofold.errors import RequestError, TwofoldError
from twofold.request import FinishReason, Generation, TokenOutput
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.messages import Prefill
from twofold.serving.upstream.client import (
    REMOTE_DECODE,
    KvParams,
    RejectedError,
    ServerError,
    UnavailableError,
    UpstreamCompletion,
    completion_body,
    rejected_decode_body,
)
from twofold.serving.upstream.servers import Server, ServerRegistry

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class AttemptLostError(TwofoldError):
    """Raised if an attempt (run of a request) fails on server `instance` and may be retried. `unavailable` is true if
    the server is down.
    """

    def __init__(self, instance: str, reason: str, *, unavailable: bool = False) -> None:
        super().__init__(reason)
        self.instance, self.unavailable = instance, unavailable


class AttemptListener(Protocol):
    """Interface to receive the progress of attempts (runs of requests), implemented by `LiveRequests`."""

    def prefill_started(self, attempt_id: str, at_s: float) -> None: ...

    def token(self, attempt_id: str, output: TokenOutput, instance: str, started_s: float, now: float) -> None: ...

    def handed_off(self, attempt_id: str, started_s: float, ended_s: float) -> None: ...


class UpstreamRequest:
    """Runs one attempt of a request that already has `first_index` output tokens. `later` schedules cleanup work."""

    def __init__(
        self,
        generation: Generation,
        first_index: int,
        prefill: Server,
        decode: Server,
        listener: AttemptListener,
        later: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.handed_off = prefill is decode  # whether only the decode server is still needed
        self._generation, self._listener, self._later = generation, listener, later
        self._id = generation.request.id
        self._seed = seed_of(generation.sampling.seed, first_index)

    @property
    def required(self) -> tuple[Server, ...]:
        """Servers that the attempt still needs: both, or only the decode server after the hand-off."""
        return (self.decode,) if self.handed_off else (self.prefill, self.decode)

    async def run(self) -> None:
        """Run the attempt until its last token. Raises AttemptLostError and RejectedError."""
        self._listener.prefill_started(self._id, time.monotonic())
        if self.prefill is self.decode or self._generation.sampling.max_tokens == 1:
            await self._stream(self.prefill, None, None)
        else:
            await self._split()

    async def _split(self) -> None:
        body = completion_body(
            self._generation, self.prefill.model, self._seed, stream=False, max_tokens=1, kv=REMOTE_DECODE
        )
        answer = await self._response(self.prefill, self.prefill.client.complete(body))
        kv = answer.kv_transfer_params
        if kv is None:
            name = self.prefill.instance
            raise AttemptLostError(name, f"{name} returned no KV transfer parameters: start it with a NixlConnector")
        fetched = False
        try:
            first = self._first(answer)
            self._emit(first, self.prefill, time.monotonic())
            if first.finish_reason is None:
                fetched = True  # from here on the decode server reports a failed fetch itself
                await self._stream(self.decode, kv, first)
        finally:
            if not fetched:
                self._later(self._release(kv))

    def _first(self, answer: UpstreamCompletion) -> TokenOutput:
        """Return the token of a prefill response, without its finish reason `length`: a prefill requests one token."""
        outputs = self._outputs(self.prefill, answer, 0)
        if len(outputs) != 1:
            raise AttemptLostError(self.prefill.instance, f"{self.prefill.instance} returned no token")
        output = msgspec.structs.replace(outputs[0], reused_tokens=answer.reused_tokens)
        if output.finish_reason is FinishReason.LENGTH:
            output = msgspec.structs.replace(output, finish_reason=None)
        return output

    async def _stream(self, server: Server, kv: KvParams | None, first: TokenOutput | None) -> None:
        """Stream a server's output. If the prefill server has generated the `first` token, drop the repeated one."""
        body = completion_body(self._generation, server.model, self._seed, stream=True, kv=kv)
        requested_s, index, ended = time.monotonic(), 0, False
        events = server.client.stream(body)
        try:
            while (event := await self._response(server, anext(events, None))) is not None:
                now = time.monotonic()
                for output in self._outputs(server, event, index):
                    if output.index == 0 and first is not None:
                        self._fetched(first, output, requested_s, now)
                    else:
                        self._emit(output, server, requested_s)
                    index, ended = index + 1, output.finish_reason is not None
        except AttemptLostError:
            if not ended:
                raise
        finally:
            await events.aclose()
        if not ended:
            raise AttemptLostError(server.instance, f"{server.instance} ended the stream before the last token")

    def _fetched(self, first: TokenOutput, again: TokenOutput, requested_s: float, now: float) -> None:
        """Report the completed hand-off. Raises AttemptLostError if the servers generated different first tokens."""
        self.handed_off = True
        self._listener.handed_off(self._id, requested_s, now)
        if (again.token_id, again.finish_reason) != (first.token_id, None):
            raise AttemptLostError(
                self.decode.instance,
                f"{self.decode.instance} produced another first token than {self.prefill.instance}",
            )

    def _emit(self, output: TokenOutput, server: Server, started_s: float) -> None:
        self._listener.token(self._id, output, server.instance, started_s, time.monotonic())

    async def _release(self, kv: KvParams) -> None:
        """Make the prefill server release the KV of an attempt that ended before its decode request was sent."""
        try:
            await self.decode.client.complete(rejected_decode_body(self.decode.model, kv))
        except TwofoldError:
            return  # expected; if the request did not arrive, the KV's lease ends

    async def _response(self, server: Server, answer: Awaitable[_Answer]) -> _Answer:
        try:
            return await answer
        except UnavailableError as error:
            raise AttemptLostError(server.instance, str(error), unavailable=True) from error
        except ServerError as error:
            raise AttemptLostError(server.instance, f"{server.instance}: {error}") from error

    def _outputs(self, server: Server, answer: UpstreamCompletion, index: int) -> list[TokenOutput]:
        try:
            return [output for choice in answer.choices for output in choice.outputs(index)]
        except ServerError as error:
            raise AttemptLostError(server.instance, f"{server.instance}: {error}") from error


def seed_of(seed: int, first_index: int) -> int:
    """Return the sampling seed of an attempt that starts after `first_index` output tokens. A resumed attempt gets
    another seed: with the same one, vLLM would repeat the request's random sequence from its start.
    """
    if not first_index:
        return seed
    digest = blake2b(f"{seed} {first_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class UpstreamRequests:
    """`AttemptRunner` with one asyncio task per attempt. Calls `on_unavailable(instance, reason)` if a server fails."""

    def __init__(
        self, servers: ServerRegistry, requests: LiveRequests, on_unavailable: Callable[[str, str], object]
    ) -> None:
        self._servers, self._requests = servers, requests
        self._on_unavailable = on_unavailable
        self._running: dict[str, tuple[UpstreamRequest, asyncio.Task[None]]] = {}
        self._later: set[asyncio.Task[None]] = set()

    def begin(self, message: Prefill, prefill: str) -> None:
        """Start an attempt with its prefill on server `prefill`."""
        attempt_id, members = message.generation.request.id, self._servers.members
        live = self._requests.find(attempt_id)
        if live is None:
            return
        request = UpstreamRequest(
            message.generation,
            live.first_index,
            members[prefill],
            members[prefill if message.target is None else message.target],
            self._requests,
            self._schedule,
        )
        task = asyncio.create_task(self._run(attempt_id, request))
        self._running[attempt_id] = (request, task)

    def abort(self, attempt_id: str) -> None:
        """Abort an attempt by closing its connections to servers. No effect if the attempt has ended."""
        _, task = self._running.pop(attempt_id, (None, None))
        if task is not None:
            task.cancel()

    def lost(self, instance: str, reason: str) -> None:
        """Replay all attempts that still need the lost server `instance`."""
        for attempt_id, (request, _) in list(self._running.items()):
            if any(server.instance == instance for server in request.required):
                self._requests.replay(attempt_id, instance, reason)

    async def close(self) -> None:
        """Cancel all attempts and cleanup tasks, and wait for their end."""
        tasks = [task for _, task in self._running.values()] + list(self._later)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, attempt_id: str, request: UpstreamRequest) -> None:
        try:
            await request.run()
        except AttemptLostError as error:
            if self._remove(attempt_id):
                if error.unavailable:
                    self._on_unavailable(error.instance, str(error))
                self._requests.replay(attempt_id, error.instance, str(error))
                self._requests.place_waiting()
        except RejectedError as error:
            live = self._requests.find(attempt_id)
            if self._remove(attempt_id) and live is not None:
                self._requests.fail(live, RequestError(str(error), status=error.status))
        except Exception:
            log.exception("attempt %s", attempt_id)
            if self._remove(attempt_id):
                self._requests.replay(attempt_id, request.prefill.instance, "internal error")
        finally:
            self._remove(attempt_id)

    def _remove(self, attempt_id: str) -> bool:
        """Remove an attempt; return False if it was already removed."""
        return self._running.pop(attempt_id, None) is not None

    def _schedule(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
