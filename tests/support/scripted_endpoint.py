"""An OpenAI-compatible server on a real socket, which follows a script and records the requests."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass(frozen=True)
class Send:
    """A script step that sends the bytes `data` in a single write."""

    data: bytes


@dataclass(frozen=True)
class Pause:
    """A script step that sleeps for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class UntilAsked:
    """A script step that waits until the server has received `count` completion requests."""

    count: int


@dataclass(frozen=True)
class Hang:
    """A script step that keeps the connection open and sends nothing."""


@dataclass(frozen=True)
class Drop:
    """A script step that aborts the connection in the middle of the response."""


@dataclass(frozen=True)
class Refuse:
    """A script step that responds with an HTTP error before the stream starts."""

    status: int
    body: bytes = b'{"error": {"message": "refused by the script"}}'


@dataclass(frozen=True)
class Flood:
    """A script step that sends the bytes `data` again and again until the client disconnects."""

    data: bytes


@dataclass(frozen=True)
class SendUntilProbed:
    """A script step that sends the bytes `data` every 100 ms until the server has left `count` probes unanswered."""

    data: bytes
    count: int


Step = Flood | Send | SendUntilProbed | Pause | UntilAsked | Hang | Drop | Refuse
Body = dict[str, object]
Script = Callable[[Body], Sequence[Step]]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(text: str = "x", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts)


DONE = b"data: [DONE]\n\n"


def well_behaved(body: Body) -> list[Step]:
    """Return a script that sends the requested number of tokens, then the usage."""
    wanted = int(str(body["max_tokens"]))
    prompt = body["prompt"]
    length = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
    chunks = [chunk("x", "length" if number == wanted - 1 else None) for number in range(wanted)]
    return [*(Send(data) for data in chunks), Send(usage(length, wanted)), Send(DONE)]


@dataclass
class ScriptedEndpoint:
    """A running server that follows a script and records all completion requests."""

    script: Script = well_behaved
    models: Sequence[Body] = ({"id": "scripted", "max_model_len": 4096},)
    models_status: int = 200
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    content_type: str = "text/event-stream"
    flooded_bytes: int = 0
    stalls: bool = False  # whether probes get no answer
    unanswered: int = 0  # probes
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # released by each response
    asked: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self.models)}, status=self.models_status)

    async def metrics(self, _: web.Request) -> web.Response:
        if self.stalls:
            self.unanswered += 1
            await asyncio.Event().wait()
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._follow(request)
        finally:
            self.ended.release()

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        body: Body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        async with self.asked:
            self.asked.notify_all()
        steps = list(self.script(body))
        if steps and isinstance(steps[0], Refuse):
            return web.Response(status=steps[0].status, body=steps[0].body)
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        for step in steps:
            if isinstance(step, Drop):
                assert request.transport is not None
                request.transport.abort()
                return response
            try:
                await self._take(step, response)
            except ConnectionResetError:  # the client has left
                return response
        return response

    async def _take(self, step: Step, response: web.StreamResponse) -> None:
        if isinstance(step, Send):
            await response.write(step.data)
            await asyncio.sleep(0)
        elif isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, UntilAsked):
            async with self.asked:
                await self.asked.wait_for(lambda: len(self.bodies) >= step.count)
        elif isinstance(step, Flood):
            while True:
                await response.write(step.data)
                self.flooded_bytes += len(step.data)
        elif isinstance(step, SendUntilProbed):
            while self.unanswered < step.count:
                await response.write(step.data)
                await asyncio.sleep(0.1)
        elif isinstance(step, Hang):
            await asyncio.Event().wait()


@contextmanager
def endpoint(script: Script = well_behaved, **settings: object) -> Iterator[ScriptedEndpoint]:
    """Run a scripted endpoint in a separate thread, so that the test may block or run an event loop."""
    scripted = ScriptedEndpoint(script=script, **settings)  # type: ignore[arg-type]
    started, finish = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", scripted.list_models)
        app.router.add_get("/health", scripted.metrics)
        app.router.add_get("/metrics", scripted.metrics)
        app.router.add_post("/v1/completions", scripted.complete)
        app.router.add_post("/v1/embeddings", scripted.complete)
        app.router.add_post("/v1/chat/completions", scripted.complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        scripted.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        loop = asyncio.get_running_loop()
        loops.append(loop)
        started.set()
        await finish.wait()
        # Python 3.11 leaks a socket that it accepted, but has not made a connection of, when the server closes.
        loop.remove_reader(listening)
        await asyncio.sleep(0)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(600)
    try:
        yield scripted
    finally:
        loops[0].call_soon_threadsafe(finish.set)
        thread.join()
