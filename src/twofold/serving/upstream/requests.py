"""Run requests on vLLM servers, with prefill and decode on one server or on two servers.

The prefill server and the decode server both generate the first token, because vLLM always computes the last
position of a prompt. The client gets the prefill server's token. If the decode server generates a different
first token, the decode server's output is discarded, and the remaining tokens are requested again.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import msgspec

from twofold.errors import RequestError, TwofoldError
from twofold.request import FinishReason, Generation, TokenOutput, TokenRun
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.messages import Prefill
from twofold.serving.upstream.client import (
    REMOTE_DECODE,
    KvParams,
    RejectedError,
    ServerError,
    StatusError,
    UnavailableError,
    UpstreamCompletion,
    rejected_decode_body,
)
from twofold.serving.upstream.servers import Server, ServerRegistry, refusal_error

log = logging.getLogger(__name__)

# Server fields whose effect does not depend on where the output begins.
CONTINUED_FIELDS = frozenset({"allowed_token_ids", "metadata", "safety_identifier", "service_tier", "store", "user"})

_Answer = TypeVar("_Answer")


class AttemptLostError(TwofoldError):
    """Raised if an attempt to run a request fails on a server, but another attempt may succeed.

    `unavailable` tells whether the server is lost for all requests; `status` is the HTTP status of its answer.
    """

    def __init__(self, instance: str, reason: str, *, unavailable: bool = False, status: int = 502) -> None:
        super().__init__(reason)
        self.instance, self.unavailable, self.status = instance, unavailable, status


@dataclass(slots=True)
class _Progress:
    """Progress of a stream."""

    requested_s: float
    index: int = 0  # of the next token
    ended: bool = False  # whether the last token has arrived


class _BeyondEndError(Exception):
    """Raised to close a connection, which aborts a request on a server that goes on after the last token."""


class UpstreamRequest:
    """One attempt to run a request on vLLM servers. Earlier attempts have produced `first_index` output tokens."""

    def __init__(
        self,
        generation: Generation,
        first_index: int,
        prefill: Server,
        decode: Server,
        listener: LiveRequests,
        later: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.handed_off = prefill is decode  # whether only the decode server is still needed
        self._listener, self._later = listener, later  # `later` schedules cleanup
        self._id = generation.request.id
        # Known tokens that the servers generate again, because they cannot continue after them.
        self._again: list[int] = []
        as_text = first_index > 0 and generation.prompt_token_ids[-1] < 0  # so far
        lacks_text = first_index > 0 and not as_text and not decode.kind.returns_ids
        self._misplaced = prefill.kind is not decode.kind or lacks_text
        if as_text or (first_index and not continues(generation)):
            self._again = generation.prompt_token_ids[-first_index:]
            generation = from_the_start(generation, first_index)
        self._generation = generation
        self._prompt_ids: msgspec.Raw | None = None  # JSON list of a prompt that a server has tokenized
        self._seed = seed_of(generation.sampling.seed, first_index - len(self._again))

    @property
    def required(self) -> tuple[Server, ...]:
        """Servers that the request still needs: after the hand-off, only the decode server."""
        return (self.decode,) if self.handed_off else (self.prefill, self.decode)

    async def run(self) -> None:
        """Run the request until its last token. Raises AttemptLostError or RejectedError."""
        if self._misplaced:
            name = self.prefill.instance
            raise AttemptLostError(name, f"{name} is of another kind than the servers that the request needs")
        one_token = self._generation.sampling.max_tokens == 1
        if self.prefill is not self.decode and self.prefill.kind.concurrent:
            await self._split_concurrently()
        elif self.prefill is self.decode or one_token:
            self._listener.prefill_started(self._id, time.monotonic())
            one_text = one_token and self._generation.prompt_text is not None
            await (self._one_text() if one_text else self._stream(self.prefill, {}, None))
        else:
            await self._split()

    async def _one_text(self) -> None:
        """Get the text of the only token. No server has to continue the output, so token ids are not needed."""
        server, requested_s = self.prefill, time.monotonic()
        more = {"stream": False, **({"return_token_ids": False} if server.kind.returns_ids else {})}
        body = server.body(self._generation, self._seed, more)
        answer = await self._response(server, server.client.complete(body))
        server.heard_s = time.monotonic()
        made = 1 if answer.usage is None else answer.usage.completion_tokens
        outputs = self._outputs(server, answer, 0, ids=False)
        if made > 1 or not outputs:
            raise AttemptLostError(server.instance, f"{server.instance} did not return one token")
        only = self._tokenized(server, answer, outputs[0]) if answer.prompt_tokens else outputs[0]
        reason = only.finish_reason or FinishReason.LENGTH
        self._emit(msgspec.structs.replace(only, finish_reason=reason), server, requested_s)

    async def _split(self) -> None:
        fewest = min(self._generation.sampling.min_tokens, 1)
        one = {"stream": False, "max_tokens": 1, "min_tokens": fewest, "kv_transfer_params": REMOTE_DECODE}
        body = self.prefill.body(self._generation, self._seed, one)
        requested_s = time.monotonic()
        answer = await self._response(self.prefill, self.prefill.client.complete(body))
        self._listener.prefill_started(self._id, requested_s + answer.queue_s)
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
                await self._stream(self.decode, {"kv_transfer_params": kv}, first)
        finally:
            if not fetched:
                self._later(self._release(kv))

    async def _split_concurrently(self) -> None:
        """Send the request to both servers, which find each other. The decode server's output has the first token."""
        meeting = {**self.prefill.handshake, "bootstrap_room": secrets.randbits(63)}
        self._listener.prefill_started(self._id, time.monotonic())
        body = self.prefill.body(self._generation, self._seed, {"stream": False, **meeting})
        prefill = asyncio.create_task(self._response(self.prefill, self.prefill.client.complete(body)))
        decode = asyncio.create_task(self._stream(self.decode, meeting, None))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_EXCEPTION)
            if not self.handed_off and prefill.done():
                await prefill  # raises its error, which is often the cause of the decode server's
            await decode
        finally:
            for task in (prefill, decode):
                task.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    def _first(self, answer: UpstreamCompletion) -> TokenOutput:
        outputs = self._outputs(self.prefill, answer, 0, ids=self.prefill.kind.returns_ids)
        if len(outputs) != 1:
            raise AttemptLostError(self.prefill.instance, f"{self.prefill.instance} returned no token")
        # The text of one token alone may end within a character, so the gateway detokenizes it.
        output = msgspec.structs.replace(outputs[0], reused_tokens=answer.reused_tokens, text=None)
        if output.finish_reason is FinishReason.LENGTH:
            output = msgspec.structs.replace(output, finish_reason=None)  # a prefill requests one token only
        return output

    async def _stream(self, server: Server, more: Mapping[str, object], first: TokenOutput | None) -> None:
        # A server that has tokenized the prompt in a prefill has told its ids.
        known = {} if self._prompt_ids is None else {"prompt": self._prompt_ids}
        body = server.body(self._generation, self._seed, {"stream": True, **known, **more})
        progress = _Progress(requested_s=time.monotonic())
        try:
            arrived = partial(self._arrived, server, first, progress)
            several = partial(self._tokens_arrived, server, first, progress) if server.kind.returns_ids else None
            await self._response(server, server.client.stream(body, arrived, several))
        except AttemptLostError:
            if not progress.ended:
                raise
        except _BeyondEndError:
            return
        if not progress.ended:
            raise AttemptLostError(server.instance, f"{server.instance} ended the stream before the last token")

    def _arrived(
        self, server: Server, first: TokenOutput | None, progress: "_Progress", event: UpstreamCompletion
    ) -> None:
        server.heard_s = time.monotonic()
        outputs = self._outputs(server, event, progress.index, ids=server.kind.returns_ids)
        known = max(len(self._again), 0 if first is None else 1)
        if len(outputs) > 1 and not known <= progress.index <= self._generation.sampling.max_tokens - len(outputs):
            # Only a part of the event's text is new, or within the limit: the gateway detokenizes that part.
            outputs = [msgspec.structs.replace(each, text=None) for each in outputs]
        for output in outputs:
            self._take(output, server, first, progress)

    def _tokens_arrived(
        self, server: Server, first: TokenOutput | None, progress: "_Progress", token_ids: list[int], texts: list[str]
    ) -> None:
        server.heard_s = now = time.monotonic()
        run = TokenRun(progress.index, token_ids, texts)
        end, with_text = progress.index + len(token_ids), self._generation.prompt_text is not None
        inner = end < self._generation.sampling.max_tokens and not progress.ended
        if inner and with_text and not self._again:
            progress.index = end
            self._listener.token_run(self._id, run, server.instance, progress.requested_s, now)
            return
        for output in run.outputs():
            taken = output if with_text else msgspec.structs.replace(output, text=None)
            self._take(taken, server, first, progress)

    def _take(self, output: TokenOutput, server: Server, first: TokenOutput | None, progress: "_Progress") -> None:
        if progress.ended:
            raise _BeyondEndError
        beyond = output.finish_reason is None and output.index + 1 >= self._generation.sampling.max_tokens
        if beyond:  # the server goes on, but the request ends
            output = msgspec.structs.replace(output, finish_reason=FinishReason.LENGTH)
        if first is not None and output.index == 0:
            self._fetched(first, output, progress.requested_s, time.monotonic())
        else:
            if server is self.decode and not self.handed_off:  # of a concurrent split, with an unknown transfer time
                self.handed_off, now = True, time.monotonic()
                self._listener.handed_off(self._id, now, now)
            self._emit(output, server, progress.requested_s)
        progress.index += 1
        progress.ended = output.finish_reason is not None
        if beyond:
            raise _BeyondEndError

    def _fetched(self, first: TokenOutput, again: TokenOutput, requested_s: float, now: float) -> None:
        self.handed_off = True
        self._listener.handed_off(self._id, requested_s, now)
        if (again.token_id, again.finish_reason) != (first.token_id, None):
            raise AttemptLostError(
                self.decode.instance,
                f"{self.decode.instance} produced another first token than {self.prefill.instance}",
            )

    def _emit(self, output: TokenOutput, server: Server, started_s: float) -> None:
        index = output.index - len(self._again)
        if index < 0:
            if (output.token_id, output.finish_reason) != (self._again[output.index], None):
                raise RejectedError(502, "the server was lost, and another one generates a different output")
            return
        if index != output.index:
            output = msgspec.structs.replace(output, index=index)
        self._listener.token(self._id, output, server.instance, started_s, time.monotonic())

    async def _release(self, kv: KvParams) -> None:
        # The decode server was not asked to fetch the KV, so the prefill server would keep it.
        try:
            await self.decode.client.complete(rejected_decode_body(self.decode.model, kv))
        except TwofoldError:
            return  # expected; if the request did not arrive, the KV's lease ends

    async def _response(self, server: Server, answer: Awaitable[_Answer]) -> _Answer:
        try:
            return await answer
        except StatusError as error:
            raise AttemptLostError(server.instance, str(error), status=error.status) from error
        except UnavailableError as error:
            raise AttemptLostError(server.instance, str(error), unavailable=True) from error
        except ServerError as error:
            raise AttemptLostError(server.instance, f"{server.instance}: {error}") from error

    def _outputs(self, server: Server, answer: UpstreamCompletion, index: int, *, ids: bool) -> list[TokenOutput]:
        if not answer.choices:
            return []
        text = self._generation.prompt_text is not None
        try:
            choice = answer.choices[0]
            outputs = choice.outputs(index, text=text) if ids else choice.text_outputs(index)
        except ServerError as error:
            raise AttemptLostError(server.instance, f"{server.instance}: {error}") from error
        if text and ids and outputs and self._prompt_ids is None:
            outputs[0] = self._tokenized(server, answer, outputs[0])
        return outputs

    def _tokenized(self, server: Server, answer: UpstreamCompletion, first: TokenOutput) -> TokenOutput:
        """Note the token ids of a prompt that a server has tokenized, and return the first token with their number."""
        tokens = answer.prompt_tokens
        if not tokens:
            raise AttemptLostError(server.instance, f"{server.instance} returned no token ids of the prompt")
        self._prompt_ids = answer.prompt_ids
        self._listener.tokenized(self._id, self._prompt_ids, tokens)
        return msgspec.structs.replace(first, prompt_tokens=tokens)


def continues(generation: Generation) -> bool:
    """Whether a server can continue the output of a request from its tokens: they would be in its prompt."""
    sampling = generation.sampling
    depends = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words or sampling.constraint
    return not depends and generation.server_fields.keys() <= CONTINUED_FIELDS


def from_the_start(generation: Generation, known: int) -> Generation:
    """Return the request that generates its whole output, whose first `known` tokens are the end of the prompt here."""
    request, sampling = generation.request, generation.sampling
    return msgspec.structs.replace(
        generation,
        request=msgspec.structs.replace(request, prompt_tokens=request.prompt_tokens - known),
        prompt_token_ids=generation.prompt_token_ids[:-known],
        sampling=msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens + known,
            min_tokens=sampling.min_tokens + known,  # no known token is the last
            resumed_tokens=0,
        ),
    )


def seed_of(seed: int, first_index: int) -> int:
    """Return the sampling seed of a request that continues after `first_index` output tokens."""
    if not first_index:
        return seed
    # With the same seed, vLLM would repeat the request's random sequence from its start.
    digest = blake2b(f"{seed} {first_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class UpstreamRequests:
    """Runs requests on vLLM servers, each in an asyncio task. Calls `on_unavailable` if a server fails."""

    def __init__(
        self, servers: ServerRegistry, requests: LiveRequests, on_unavailable: Callable[[str, str], object]
    ) -> None:
        self._servers, self._requests = servers, requests
        self._on_unavailable = on_unavailable
        self._running: dict[str, tuple[UpstreamRequest, asyncio.Task[None]]] = {}
        self._later: set[asyncio.Task[None]] = set()

    def begin(self, message: Prefill, prefill: str) -> None:
        """Start to run a request, with its prefill on server `prefill`."""
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
        """Abort a request by closing its connections to servers."""
        _, task = self._running.pop(attempt_id, (None, None))
        if task is not None:
            task.cancel()

    def lost(self, instance: str, reason: str) -> None:
        """Restart all requests that still need the lost server `instance`."""
        for attempt_id, (request, _) in list(self._running.items()):
            if any(server.instance == instance for server in request.required):
                self._requests.replay(attempt_id, instance, reason)

    async def close(self) -> None:
        """Cancel all requests and cleanup tasks."""
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
                refusal = None if error.unavailable else refusal_error(error.instance, error.status)
                self._requests.replay(attempt_id, error.instance, str(error), refusal)
                self._requests.place_waiting()
        except RejectedError as error:
            live = self._requests.find(attempt_id)
            if self._remove(attempt_id) and live is not None:
                log.info("a server rejected request %s: %.1000s", live.id, error)
                message = self._servers.hide_addresses(str(error))
                self._requests.fail(live, RequestError(message, status=error.status))
        except Exception:
            log.exception("attempt %s", attempt_id)
            if self._remove(attempt_id):
                name = request.prefill.instance
                self._requests.replay(attempt_id, name, "internal error", refusal_error(name, 502))
        finally:
            self._remove(attempt_id)

    def _remove(self, attempt_id: str) -> bool:
        return self._running.pop(attempt_id, None) is not None

    def _schedule(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
