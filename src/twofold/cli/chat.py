"""`twofold chat`: talk to an OpenAI-compatible endpoint in the terminal."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import msgspec
import typer
from rich.console import Console

from twofold.bench.client import DONE, EventSplitter, StreamEvent, StreamUsage, decode_event, error_text
from twofold.bench.endpoint import Endpoint, authorization, discover
from twofold.cli import options
from twofold.cli.settings import command, flag
from twofold.errors import ConfigurationError
from twofold.reporting.summary import seconds

_LEAVE: Final = ("exit", "quit", "/exit", "/quit")

Message = dict[str, str]


class ChatSettings(options.ApiSettings):
    """All flags of `twofold chat`."""

    message: str | None = flag(
        "Message to send; without it, messages are read from the terminal.", positional=True, metavar="MESSAGE"
    )
    system: str | None = flag("System prompt.")
    max_tokens: int | None = flag("Maximum number of tokens of an answer.", ge=1, unset="the context of the model")
    temperature: float | None = flag("Temperature.", ge=0.0, le=2.0, unset="the endpoint's default")


@command
def chat(settings: ChatSettings) -> None:
    """Send messages to an endpoint and print the answers as they arrive, each with its TTFT and tokens per second."""
    asyncio.run(_chat(settings))


async def _chat(settings: ChatSettings) -> None:
    endpoint = await discover(settings.base_url, settings.model, settings.api_key)
    messages: list[Message] = []
    if settings.system is not None:
        messages.append({"role": "system", "content": settings.system})
    console = Console(stderr=True)
    async with aiohttp.ClientSession(headers=authorization(settings.api_key)) as session:
        if settings.message is not None:
            await _answer(
                session, endpoint, settings, [*messages, {"role": "user", "content": settings.message}], console
            )
            return
        console.print(f"{endpoint.model} at {endpoint.base_url}; end with Ctrl-D", style="dim", highlight=False)
        while (said := await asyncio.to_thread(_read)) is not None:
            if said.strip():
                messages.append({"role": "user", "content": said})
                answer = await _answer(session, endpoint, settings, messages, console)
                messages.append({"role": "assistant", "content": answer})


def _read() -> str | None:
    """Read a line from the terminal; None at its end."""
    try:
        said = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if said.strip() in _LEAVE else said


async def _answer(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    settings: ChatSettings,
    messages: list[Message],
    console: Console,
) -> str:
    """Print the answer as it arrives, then its speed. Return its text."""
    began, first, last = time.monotonic(), 0.0, 0.0
    parts, usage = list[str](), StreamUsage()
    async for event in _events(session, endpoint, settings, messages):
        usage = event.usage or usage
        for choice in event.choices or ():
            if choice.has_text:
                last = time.monotonic()
                first = first or last
            thought = "" if choice.delta is None else choice.delta.reasoning_content or choice.delta.reasoning or ""
            console.out(thought, end="", style="dim")
            parts.append(choice.answer)
            typer.echo(choice.answer, nl=False)
    typer.echo()
    tokens = usage.completion_tokens
    rate = f", {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 and last > first else ""
    speed = f"TTFT {seconds(first - began)}{rate}, {usage.prompt_tokens} + {tokens} tokens"
    console.print(speed if parts else "no answer", style="dim", highlight=False)
    return "".join(parts)


async def _events(
    session: aiohttp.ClientSession, endpoint: Endpoint, settings: ChatSettings, messages: list[Message]
) -> AsyncIterator[StreamEvent]:
    """Yield the events of a streamed answer. Raises ConfigurationError with the endpoint's message."""
    fields: dict[str, object] = {
        "model": endpoint.model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chosen = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
    fields |= {name: value for name, value in chosen.items() if value is not None}
    splitter = EventSplitter()
    try:
        async with session.post(f"{endpoint.base_url}/v1/chat/completions", json=fields) as response:
            if response.status != 200:
                reason = error_text(await response.read())
                raise ConfigurationError(f"{endpoint.base_url}: HTTP {response.status}: {reason}")
            async for received in response.content.iter_any():
                for data in splitter.feed(received):
                    if data == DONE:
                        return
                    event = decode_event(data)
                    if event.error_message is not None:
                        raise ConfigurationError(f"{endpoint.base_url}: {event.error_message}")
                    yield event
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{endpoint.base_url}: {error}") from error
