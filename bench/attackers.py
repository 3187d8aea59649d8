"""The attacks of attacks.py, each a client that sends real requests, and the servers behind `twofold route`."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web

MODEL, LOOPBACK = "attacked", "127.0.0.1"
MIB = 1 << 20
TOKENS = 2000  # of a long answer

Go = Callable[[], Awaitable[None]]  # reports that an attacker is ready, and waits for the start
Answers = Counter[str]


def post(length: int, path: str = "/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length)


async def send(port: int, body: bytes, path: str = "/v1/completions") -> str:
    """Send a request, and return the status of its answer once it has ended."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=1 << 24)
    with suppress(ConnectionError):
        writer.write(post(len(body), path) + body)
        await writer.drain()
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: " in head.lower():
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        return head.split()[1].decode()
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.transport.abort()


async def send_all(port: int, go: Go, bodies: Sequence[bytes], path: str = "/v1/completions") -> Answers:
    await go()
    return Counter(await asyncio.gather(*(send(port, body, path) for body in bodies)))


def encode(**fields: object) -> bytes:
    return msgspec.json.encode({"model": MODEL, "max_tokens": 16, **fields})


async def empty_messages(port: int, go: Go) -> Answers:
    messages = b",".join([b'{"role":"user","content":""}'] * 700_000)
    body = b'{"model":"attacked","max_tokens":1,"messages":[%b]}' % messages
    return await send_all(port, go, [body] * 2, "/v1/chat/completions")


async def long_stops(port: int, go: Go) -> Answers:
    stops = ["a" * 1000 + str(number) for number in range(16)]
    return await send_all(port, go, [encode(prompt=["a b c"] * 16, n=128, stop=stops)] * 4)


async def short_prompts(port: int, go: Go) -> Answers:
    prompts = b",".join([b"[5]"] * 8_000_000)
    return await send_all(port, go, [b'{"model":"attacked","prompt":[%b]}' % prompts] * 2)


async def stop_token_ids(port: int, go: Go) -> Answers:
    bodies = [encode(prompt=[5], stop_token_ids=[5] * 7_000_000), encode(prompt=[5] * 1_000_000, n=8)]
    return await send_all(port, go, bodies * 2)


async def silent_connections(port: int, go: Go) -> Answers:
    await go()
    opened = [await asyncio.open_connection(LOOPBACK, port) for _ in range(400)]
    probe = await send(port, encode(prompt=[5]))
    await asyncio.sleep(5)
    gone = sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened)
    for _, writer in opened:
        writer.transport.abort()
    return Counter({f"request: {probe}": 1, "closed": gone, "open": len(opened) - gone})


async def unfinished_bodies(port: int, go: Go) -> Answers:
    await go()

    async def one() -> str:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        try:
            writer.write(post(32 * MIB))
            for _ in range(31):
                writer.write(bytes(MIB))
                await writer.drain()
            return (await asyncio.wait_for(reader.readline(), 10)).split()[1].decode()
        except TimeoutError:
            return "none"
        except (ConnectionError, IndexError):
            return "closed"
        finally:
            writer.transport.abort()

    return Counter(await asyncio.gather(*(one() for _ in range(40))))


async def unread_streams(port: int, go: Go) -> Answers:
    body = encode(prompt=[5], n=16, max_tokens=TOKENS, stream=True, logprobs=5, timeout=5)
    await go()
    socks = [socket.socket() for _ in range(4)]
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((LOOPBACK, port))
        sock.sendall(post(len(body)) + body)
    await asyncio.sleep(5 + 3 + 2)  # the timeout, and the time for its error
    answers: Answers = Counter()
    for sock in socks:
        received = b""
        with suppress(ConnectionError):
            while data := sock.recv(1 << 20):
                received = received[-100:] + data
        answers["whole" if b"[DONE]" in received else "ended"] += 1
        sock.close()
    return answers


async def pipelined_disconnects(port: int, go: Go) -> Answers:
    body = encode(prompt=[5] * 100, max_tokens=TOKENS, stream=True)
    await go()
    opened = [await asyncio.open_connection(LOOPBACK, port) for _ in range(50)]
    for _, writer in opened:
        writer.write(post(len(body)) + body)
    await asyncio.sleep(1)
    for _, writer in opened:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        writer.close()
    return Counter({"disconnected": len(opened)})


async def deep_and_wide(port: int, go: Go) -> Answers:
    def chat(field: bytes) -> bytes:
        return b'{"model":"attacked","max_tokens":1,"messages":[{"role":"user","content":"a"}],%b}' % field

    keys = b",".join(b'"k%d":1' % number for number in range(1_000_000))
    depths = (900, 100_000, 15_000_000)
    fields = [b'"chat_template_kwargs":{"a":%b}' % (b"[" * depth + b"]" * depth) for depth in depths]
    fields += [b'"%b":1' % (b"k" * 30_000_000), keys, b'"metadata":{%b}' % keys]
    return await send_all(port, go, [chat(field) for field in fields], "/v1/chat/completions")


FAILS, REDIRECTS, BREAKS, GOES_ON = range(10, 14)  # first token of a prompt


async def act(request: web.Request) -> web.StreamResponse:
    """Answer a completion request as the first token of its prompt demands."""
    body = await request.json()
    kind, tokens, pause_s = body["prompt"][0], body["max_tokens"], 0.03
    if kind == FAILS:
        return web.json_response({"error": {"message": "out of memory"}}, status=500)
    if kind == REDIRECTS:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})
    if kind == GOES_ON:
        tokens, pause_s = 5000, 0.0
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(tokens):
        finish = "length" if number == tokens - 1 else None
        choice = {"index": 0, "text": "", "token_ids": [7], "finish_reason": finish}
        await response.write(b"data: %b\n\n" % msgspec.json.encode({"choices": [choice]}))
        await asyncio.sleep(pause_s)
        if kind == BREAKS and request.transport is not None:
            request.transport.abort()
            return response
    await response.write(b"data: [DONE]\n\n")
    return response


def run_server(port: int) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 8192}]})

    async def empty(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.get("/v1/models", models), web.get("/health", empty), web.get("/metrics", empty)])
    app.add_routes([web.post("/v1/completions", act)])
    web.run_app(app, host=LOOPBACK, port=port, print=None, handler_cancellation=True)


def routed(kind: int, **fields: object) -> Callable[[int, Go], Awaitable[Answers]]:
    """Return an attacker whose requests make the servers act in one way."""

    async def run(port: int, go: Go) -> Answers:
        body = {"model": MODEL, "prompt": [kind, 9], "max_tokens": 5, "return_token_ids": True, **fields}
        await go()
        async with aiohttp.ClientSession() as session:

            async def one() -> str:
                async with session.post(f"http://{LOOPBACK}:{port}/v1/completions", json=body) as response:
                    answer = await response.json()
                    count = f", {len(answer['choices'][0]['token_ids'])} tokens" if response.ok else ""
                    return f"{response.status}{count}"

            return Counter(await asyncio.gather(*(one() for _ in range(20))))

    return run


class Attack(NamedTuple):
    """An attack: its attacker, whether it targets `twofold route`, and the limit on open files of the service."""

    run: Callable[[int, Go], Awaitable[Answers]]
    routes: bool = False
    files: int | None = None


ATTACKS = {
    "empty messages": Attack(empty_messages),
    "long stops": Attack(long_stops),
    "short prompts": Attack(short_prompts),
    "stop token ids": Attack(stop_token_ids),
    "unfinished bodies": Attack(unfinished_bodies),
    "unread streams": Attack(unread_streams),
    "pipelined disconnects": Attack(pipelined_disconnects),
    "deep and wide": Attack(deep_and_wide),
    "silent connections": Attack(silent_connections, files=256),
    "servers fail": Attack(routed(FAILS), routes=True),
    "servers redirect": Attack(routed(REDIRECTS), routes=True),
    "servers break streams": Attack(routed(BREAKS, timeout=15), routes=True),
    "servers go on": Attack(routed(GOES_ON), routes=True),
}


def attacker(name: str, port: int, ready: Event, begin: Event, results: "Connection[Answers, None]") -> None:
    async def go() -> None:
        ready.set()
        await asyncio.to_thread(begin.wait)

    async def run() -> Answers:
        return await ATTACKS[name].run(port, go)

    results.send(asyncio.run(run()))
