"""One attempt of a request on vLLM: its prompt on one server, its output on that one or on another.

The prefill server makes the first token, and the client has it at once. The decode server fetches the KV of the prompt
and, because it is asked for the same, makes that token again: it computes the last position of the prompt in any case.
With the same seed it draws the same token, and that one is dropped. Where it makes another, because sums were added in
another order and two tokens were nearly as likely, its output is not the one that the client has the beginning of: the
attempt is lost, and the next one goes on from the token that is known.

The attempts that run on servers, each in a task of its own, and what becomes of those that cannot go on.
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
from twofold.serving.controller.requests import Requests
from twofold.serving.messages import Prefill
from twofold.serving.upstream import api
from twofold.serving.upstream.client import RejectedError, UnavailableError
from twofold.serving.upstream.servers import Server, ServerRegistry

_Answer = TypeVar("_Answer")


class AttemptLostError(TwofoldError):
    """An attempt cannot go on, and another may; `instance` is where, and is in `trouble` or not."""

    def __init__(self, instance: str, reason: str, *, trouble: bool) -> None:
        super().__init__(reason)
        self.instance, self.trouble = instance, trouble


class AttemptListener(Protocol):
    """Who is told of the progress of attempts (the controller's `Progress`)."""

    def begun(self, attempt_id: str, at_s: float) -> None: ...

    def token(
        self, attempt_id: str, output: TokenOutput, instance: str, started_s: float, now: float
    ) -> None: ...

    def arrived(self, attempt_id: str, started_s: float, ended_s: float) -> None: ...


class UpstreamRequest:
    """Runs an attempt of `generation`, whose first token is the `first_index`-th of its request.

    `later` is given what is still to be done when the attempt is over.
    """

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
        self.decodes = prefill is decode  # all that it needs is where it is decoded
        self._generation, self._listener, self._later = generation, listener, later
        self._id = generation.request.id
        self._seed = seed_of(generation.sampling.seed, first_index)

    @property
    def needs(self) -> tuple[Server, ...]:
        """The servers without which it cannot go on."""
        return (self.decode,) if self.decodes else (self.prefill, self.decode)

    async def run(self) -> None:
        """Returns after the last token; raises AttemptLostError, and RefusedError."""
        self._listener.begun(self._id, time.monotonic())
        if self.prefill is self.decode or self._generation.sampling.max_tokens == 1:
            await self._stream(self.prefill, None, None)
        else:
            await self._split()

    async def _split(self) -> None:
        answer = await self._asked(self.prefill, self.prefill.client.complete(self._prefill_body()))
        kv = answer.kv_transfer_params
        if kv is None:
            raise AttemptLostError(
                self.prefill.instance,
                f"{self.prefill.instance} hands no KV over: is it started with a NixlConnector?",
                trouble=False,
            )
        fetched = False
        try:
            first = self._first(answer)
            self._tell(first, self.prefill, time.monotonic())
            if first.finish_reason is None:
                fetched = True  # from here on the decode server says so where it does not fetch
                await self._stream(self.decode, kv, first)
        finally:
            if not fetched:
                self._later(self._release(kv))

    def _prefill_body(self) -> bytes:
        return api.body(
            self._generation,
            self.prefill.model,
            self._seed,
            stream=False,
            max_tokens=1,
            kv=api.REMOTE_DECODE,
        )

    def _first(self, answer: api.Completion) -> TokenOutput:
        """The first token of a prefill, which ends the output only where the model says so."""
        outputs = self._outputs(self.prefill, answer, 0)
        if len(outputs) != 1:
            raise AttemptLostError(
                self.prefill.instance, f"{self.prefill.instance} made no token", trouble=False
            )
        output = msgspec.structs.replace(outputs[0], reused_tokens=answer.reused_tokens)
        if output.finish_reason is FinishReason.LENGTH:
            output = msgspec.structs.replace(output, finish_reason=None)
        return output

    async def _stream(self, server: Server, kv: api.KvParams | None, first: TokenOutput | None) -> None:
        """The output from one server, but for a `first` token that is known."""
        body = api.body(self._generation, server.model, self._seed, stream=True, kv=kv)
        asked_s, index, ended = time.monotonic(), 0, False
        events = server.client.stream(body)
        try:
            while (event := await self._asked(server, anext(events, None))) is not None:
                now = time.monotonic()
                for output in self._outputs(server, event, index):
                    if output.index == 0 and first is not None:
                        self._fetched(first, output, asked_s, now)
                    else:
                        self._tell(output, server, asked_s)
                    index, ended = index + 1, output.finish_reason is not None
        except AttemptLostError:
            if not ended:
                raise
        finally:
            await events.aclose()
        if not ended:
            raise AttemptLostError(
                server.instance, f"{server.instance} ended a stream before its output", trouble=False
            )

    def _fetched(self, first: TokenOutput, again: TokenOutput, asked_s: float, now: float) -> None:
        """The KV was fetched, and the first token made again."""
        self.decodes = True
        self._listener.arrived(self._id, asked_s, now)
        if (again.token_id, again.finish_reason) != (first.token_id, None):
            raise AttemptLostError(
                self.decode.instance,
                f"{self.decode.instance} begins with another token than {self.prefill.instance}",
                trouble=False,
            )

    def _tell(self, output: TokenOutput, server: Server, started_s: float) -> None:
        self._listener.token(self._id, output, server.instance, started_s, time.monotonic())

    async def _release(self, kv: api.KvParams) -> None:
        """Let the prefill server have its memory back: nobody will fetch from it."""
        try:
            await self.decode.client.complete(api.refused_body(self.decode.model, kv))
        except TwofoldError:
            return  # as it should; and where it could not be asked the KV's lease ends

    async def _asked(self, server: Server, answer: Awaitable[_Answer]) -> _Answer:
        try:
            return await answer
        except UnavailableError as error:
            raise AttemptLostError(server.instance, str(error), trouble=True) from error
        except api.ServerError as error:
            raise AttemptLostError(
                server.instance, f"{server.instance} says: {error}", trouble=False
            ) from error

    def _outputs(self, server: Server, answer: api.Completion, index: int) -> list[TokenOutput]:
        try:
            return [output for choice in answer.choices for output in choice.outputs(index)]
        except api.ServerError as error:
            raise AttemptLostError(server.instance, f"{server.instance}: {error}", trouble=False) from error


def seed_of(seed: int, first_index: int) -> int:
    """The seed of an attempt that begins with the `first_index`-th token of its output.

    vLLM draws the tokens of a request from one generator, from the beginning: an attempt that goes on in the middle
    cannot draw what would have come. It must not draw what came either, so every place has a seed of its own.
    """
    if not first_index:
        return seed
    digest = blake2b(f"{seed} {first_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


log = logging.getLogger(__name__)


class UpstreamRequests:
    """Implements `Runner`; `on_trouble` is told of servers that failed an attempt, and why."""

    def __init__(
        self,
        servers: ServerRegistry,
        requests: Requests,
        listener: AttemptListener,
        on_trouble: Callable[[str, str], object],
    ) -> None:
        self._servers, self._requests, self._listener = servers, requests, listener
        self._on_trouble = on_trouble
        self._running: dict[str, tuple[UpstreamRequest, asyncio.Task[None]]] = {}
        self._later: set[asyncio.Task[None]] = set()

    def begin(self, message: Prefill, prefill: str) -> None:
        """Run an attempt that is prefilled there."""
        attempt_id, members = message.generation.request.id, self._servers.members
        live = self._requests.of(attempt_id)
        attempt = None if live is None else live.attempt
        if attempt is None:
            return
        exchange = UpstreamRequest(
            message.generation,
            attempt.first_index,
            members[prefill],
            members[prefill if message.target is None else message.target],
            self._listener,
            self._do_later,
        )
        task = asyncio.create_task(self._run(attempt_id, exchange))
        self._running[attempt_id] = (exchange, task)

    def abort(self, attempt_id: str) -> None:
        """Stop listening to its answers, which ends it on the servers; to be called for one that is over as well."""
        _, task = self._running.pop(attempt_id, (None, None))
        if task is not None:
            task.cancel()

    def lost(self, instance: str, reason: str) -> None:
        """A server does not work: what needs it begins anew elsewhere."""
        for attempt_id, (exchange, _) in list(self._running.items()):
            if any(server.instance == instance for server in exchange.needs):
                self._requests.replay(attempt_id, instance, reason)

    async def close(self) -> None:
        """End all that still runs."""
        tasks = [task for _, task in self._running.values()] + list(self._later)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, attempt_id: str, exchange: UpstreamRequest) -> None:
        try:
            await exchange.run()
        except AttemptLostError as error:
            if self._over(attempt_id):
                if error.trouble:
                    self._on_trouble(error.instance, str(error))
                self._requests.replay(attempt_id, error.instance, str(error))
                self._requests.place_waiting()
        except RejectedError as error:
            live = self._requests.of(attempt_id)
            if self._over(attempt_id) and live is not None:
                self._requests.fail(live, RequestError(str(error), status=error.status))
        except Exception:
            log.exception("attempt %s", attempt_id)
            if self._over(attempt_id):
                self._requests.replay(attempt_id, exchange.prefill.instance, "an error of our own")
        finally:
            self._over(attempt_id)

    def _over(self, attempt_id: str) -> bool:
        """Nothing runs of this attempt any more; False if that was known."""
        return self._running.pop(attempt_id, None) is not None

    def _do_later(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
