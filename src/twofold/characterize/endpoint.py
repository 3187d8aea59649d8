"""Characterization of a running server with an OpenAI API; times are measured at the client."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twofold.bench.client import Client, ClientConfig, Reply
from twofold.bench.endpoint import Endpoint, discover, http_get
from twofold.bench.prompts import PromptForm, PromptMaker, token_range
from twofold.characterize.target import ProbeStream, StreamTimes, TargetError, TargetLimits
from twofold.errors import ConfigurationError
from twofold.events import Recorder
from twofold.request import Request
from twofold.timeline import Moment, Timeline

_LOOK_S = 0.001
_DEFAULT_CONTEXT = 2048
_SERVER_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "twofold": "twofold"}


class EndpointTarget:
    """Characterization target that is a server with an OpenAI API."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        text: bool = False,
        max_num_batched_tokens: int | None = None,
        disaggregated: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Read the server's limits. Raises ConfigurationError if it is unreachable or rejects the key or the model."""
        self.endpoint: Endpoint = asyncio.run(discover(url, model, api_key))
        self.engine, capacity = asyncio.run(_served(self.endpoint.base_url, api_key))
        self.limits = TargetLimits(
            max_model_len=self.endpoint.max_model_len or _DEFAULT_CONTEXT,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_capacity_tokens=capacity,
            remote=True,
            disaggregated=disaggregated,
        )
        self._key, self._timeout_s = api_key, timeout_s
        lowest, vocabulary = token_range(self.endpoint.vocab_size)
        form = PromptForm.TEXT if text else PromptForm.TOKENS
        seed = int.from_bytes(os.urandom(6))
        self._prompts = PromptMaker(form=form, seed=seed, lowest=lowest, vocabulary=vocabulary)
        self._numbers = count()

    def run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        return asyncio.run(self._run(streams))

    def close(self) -> None:
        """Do nothing: every probe closes its own connections."""

    async def _run(self, streams: Sequence[ProbeStream]) -> list[StreamTimes]:
        found: dict[str, Timeline] = {}
        recorder = Recorder([lambda timeline: found.update({timeline.request.id: timeline})])
        replies = [Reply() for _ in streams]
        requests = [self._request(stream) for stream in streams]
        shared = {stream.prompt: request for stream, request in zip(streams, requests, strict=True)}
        config = ClientConfig(timeout_s=self._timeout_s)
        async with Client(self.endpoint, recorder, config, self._key) as client:
            bodies = [
                client.body(request, self._prompts.prompt(request if stream.prompt is None else shared[stream.prompt]))
                for stream, request in zip(streams, requests, strict=True)
            ]
            running = {number: replies[number] for number, stream in enumerate(streams) if not stream.after_tokens}

            async def send(number: int) -> None:
                wanted = streams[number].after_tokens
                while any(len(reply.chunk_times_s) < wanted for reply in running.values()):  # noqa: ASYNC110  (replies have no event)
                    await asyncio.sleep(_LOOK_S)
                outcome = await client.send(requests[number], bodies[number], replies[number])
                running.pop(number, None)  # a chunk may have several tokens
                if outcome.error is not None:
                    raise TargetError(
                        f"{self.endpoint.base_url} failed on a prompt of {streams[number].prompt_tokens} tokens: "
                        f"{outcome.error}: {outcome.detail}"
                    )
                given = len(found[requests[number].id].token_times_s)
                if given < streams[number].output_tokens:
                    raise TargetError(
                        f"{self.endpoint.base_url} ended an output after {given} of {streams[number].output_tokens} "
                        "tokens: it must honour ignore_eos"
                    )

            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(len(streams)):
                        group.create_task(send(number))
            except* TargetError as failed:
                raise failed.exceptions[0] from None
        return [_times(found[request.id]) for request in requests]

    def _request(self, stream: ProbeStream) -> Request:
        return Request(
            id=f"probe-{next(self._numbers)}",
            arrival_s=0.0,
            prompt_tokens=stream.prompt_tokens,
            output_tokens=stream.output_tokens,
        )


def _times(timeline: Timeline) -> StreamTimes:
    return StreamTimes(timeline.moments[Moment.ARRIVED], list(timeline.token_times_s))


async def _served(root: str, api_key: str | None) -> tuple[str, int | None]:
    """Return the name and version of a server, and its KV capacity in tokens or None, as far as it reports them."""
    engine, capacity = "unknown engine", None
    with suppress(ConfigurationError, msgspec.DecodeError, ValueError):
        _, metrics = await http_get(f"{root}/metrics", api_key)
        engine, capacity = _facts(metrics.decode())
        status, body = await http_get(f"{root}/version", api_key)
        if status == 200:
            engine = f"{engine} {msgspec.json.decode(body, type=dict[str, str])['version']}"
    return engine, capacity


def _facts(text: str) -> tuple[str, int | None]:
    engine, capacity = "unknown engine", None
    for family in text_string_to_metric_families(text):
        prefix = family.name.partition(":")[0]
        engine = _SERVER_NAMES.get(prefix, engine)
        if family.name == "vllm:cache_config_info":
            labels = family.samples[0].labels
            capacity = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    return engine, capacity
