"""A server with SGLang 0.5.23's HTTP API and its prefill/decode protocol, without a model.

It was written from SGLang's sources (`srt/entrypoints/openai`, `srt/disaggregation`), not run against SGLang. A prefill
server answers when a decode server has joined the request's room at its bootstrap server and got the first token; the
decode server's stream begins with that token. Each token depends on all tokens before it, as a greedy model's does.
"""

import argparse
import asyncio
import json
import zlib
from collections import defaultdict

import aiohttp
from aiohttp import web

from twofold.serving.gateway.tokenizer import load_tokenizer

IGNORED = {"model", "temperature", "top_p", "min_p", "seed", "cache_salt", "skip_special_tokens", "logit_bias"}
KNOWN = IGNORED | {
    *("prompt", "rid", "max_tokens", "min_tokens", "top_k", "stream", "return_token_ids", "ignore_eos"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "regex", "json_schema", "ebnf"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
}


def next_token(tokens, vocabulary):
    return zlib.crc32(json.dumps(tokens).encode()) % vocabulary


class Room:
    """Meeting of a prefill and a decode server, on the prefill server."""

    def __init__(self):
        self.joined, self.token = asyncio.Event(), asyncio.get_running_loop().create_future()


class SglangServer:
    """One server. `role` is prefill, decode or null."""

    def __init__(self, given):
        self.given, self.bodies, self.running = given, [], 0
        self.rooms = defaultdict(Room)
        self.tokenizer = load_tokenizer(given.model)

    async def models(self, _):
        card = {"id": "tiny", "object": "model", "owned_by": "sglang", "root": "tiny", "max_model_len": 512}
        return web.json_response({"object": "list", "data": [card]})

    async def server_info(self, _):
        info = {"disaggregation_mode": self.given.role, "disaggregation_bootstrap_port": self.given.bootstrap_port}
        return web.json_response({**info, "version": "0.5.23", "internal_states": [{}]})

    async def metrics(self, _):
        names = {"num_running_reqs": self.running, "max_total_num_tokens": 4096, "token_usage": 0.25}
        return web.Response(text="".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in names.items()))

    async def asked(self, _):
        return web.json_response(self.bodies)

    async def join(self, request):
        """Answer a decode server that joins a room with the first token."""
        room = self.rooms[request.match_info["room"]]
        room.joined.set()
        return web.json_response({"token": await room.token})

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        if not (body["top_k"] == -1 or body["top_k"] >= 1):
            return web.json_response({"object": "error", "message": f"top_k {body['top_k']}"}, status=400)
        if unknown := body.keys() - KNOWN:
            return web.json_response({"object": "error", "message": f"unknown: {unknown}"}, status=400)
        if self.given.role != "null" and body.get("bootstrap_room") is None:
            return web.json_response({"object": "error", "message": "no bootstrap_room"}, status=400)
        self.running += 1
        try:
            return await self.answer(request, body)
        finally:
            self.running -= 1

    async def answer(self, request, body):
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode_one(prompt, add_special_tokens=True)
        if self.given.role == "prefill":
            room = self.rooms[str(body["bootstrap_room"])]
            await room.joined.wait()
            await asyncio.sleep(self.given.prefill_s)
            first = next_token(prompt, self.given.vocabulary)
            room.token.set_result(first)
            return web.json_response({"choices": [self.choice(prompt, [first], "length", first=True)]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.stream(response, body, prompt)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def stream(self, response, body, prompt):
        output = [await self.fetched(body)] if self.given.role == "decode" else []
        for place in range(body["max_tokens"]):
            if place == len(output):
                output.append(next_token([*prompt, *output], self.given.vocabulary))
            last = "length" if place + 1 == body["max_tokens"] else None
            choice = self.choice(prompt, [output[place]], last, first=place == 0)
            await response.write(b"data: " + json.dumps({"choices": [choice], "usage": None}).encode() + b"\n\n")
            await asyncio.sleep(self.given.step_s)

    async def fetched(self, body):
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/rooms/{body['bootstrap_room']}"
        async with aiohttp.ClientSession() as session, session.put(url) as answer:
            return (await answer.json())["token"]

    def choice(self, prompt, tokens, finish, *, first):
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        ids = {"token_ids": tokens} | ({"prompt_token_ids": prompt} if first else {})
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None, **ids}

    async def serve(self):
        application, bootstrap = web.Application(), web.Application()
        application.add_routes(
            [
                web.get("/health", lambda _: asyncio.sleep(0, web.Response())),
                web.get("/v1/models", self.models),
                web.get("/server_info", self.server_info),
                web.get("/metrics", self.metrics),
                web.get("/asked", self.asked),
                web.post("/v1/completions", self.complete),
            ]
        )
        bootstrap.add_routes([web.put("/rooms/{room}", self.join)])
        ports = [(application, self.given.port)]
        if self.given.role == "prefill":
            ports.insert(0, (bootstrap, self.given.bootstrap_port))
        for each, port in ports:
            runner = web.AppRunner(each, handler_cancellation=True)  # as SGLang aborts the requests of lost clients
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def main():
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--role", default="null")
    parser.add_argument("--bootstrap-port", type=int, default=8998)
    parser.add_argument("--vocabulary", type=int, default=200)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    asyncio.run(SglangServer(parser.parse_args()).serve())


if __name__ == "__main__":
    main()
