"""`twofold chat`: talk to an OpenAI-compatible endpoint in the terminal."""

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec
import typer
from rich.console import Console

from twofold.bench.client import NO_TOKENS, Client, ClientConfig, Reply, StreamChoice, StreamUsage
from twofold.bench.endpoint import Endpoint, discover
from twofold.cli import options
from twofold.cli.settings import command, flag
from twofold.errors import ConfigurationError
from twofold.events import Recorder
from twofold.reporting.summary import seconds
from twofold.request import Request

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
    asyncio.run(converse(settings))


@dataclass
class PrintedReply(Reply):
    """Reply that is printed as it arrives: reasoning on `console`, the answer on stdout."""

    console: Console = field(default_factory=Console)

    def add(self, choice: StreamChoice, now: float) -> None:
        """Record and print a chunk that arrived at `now` (s)."""
        super().add(choice, now)
        thought = "" if choice.delta is None else choice.delta.reasoning_content or choice.delta.reasoning or ""
        self.console.out(thought, end="", style="dim")
        typer.echo(choice.answer, nl=False)


async def converse(settings: ChatSettings) -> None:
    """Send the message of the settings, or those read from the terminal, and print the answers."""
    endpoint = await discover(settings.base_url, settings.model, settings.api_key)
    messages: list[Message] = []
    if settings.system is not None:
        messages.append({"role": "system", "content": settings.system})
    console = Console(stderr=True)
    async with Client(endpoint, Recorder(), ClientConfig(chat=True), settings.api_key) as client:
        if settings.message is not None:
            messages.append({"role": "user", "content": settings.message})
            await _answer(client, endpoint, settings, messages, console)
            return
        console.print(f"{endpoint.model} at {endpoint.base_url}; end with Ctrl-D", style="dim", highlight=False)
        while (said := await asyncio.to_thread(_read)) is not None:
            if said.strip():
                messages.append({"role": "user", "content": said})
                answer = await _answer(client, endpoint, settings, messages, console)
                messages.append({"role": "assistant", "content": answer})


def _read() -> str | None:
    """Read a line from the terminal; None at its end."""
    try:
        said = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if said.strip() in _LEAVE else said


async def _answer(
    client: Client, endpoint: Endpoint, settings: ChatSettings, messages: list[Message], console: Console
) -> str:
    """Print the answer as it arrives, then its speed. Return its text. Raises ConfigurationError if it fails."""
    fields: dict[str, object] = {"model": endpoint.model, "messages": messages, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    chosen = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
    fields |= {name: value for name, value in chosen.items() if value is not None}
    request = Request(id=f"chat-{len(messages)}", arrival_s=0.0, prompt_tokens=1, output_tokens=1)
    began, reply = time.monotonic(), PrintedReply(keeps_output=True, console=console)
    outcome = await client.send(request, msgspec.json.encode(fields), reply)
    if outcome.error not in (None, NO_TOKENS):
        raise ConfigurationError(f"{endpoint.base_url}: {outcome.error}: {outcome.detail}")
    typer.echo()
    times, usage = reply.token_times_s(), reply.usage or StreamUsage()
    tokens = usage.completion_tokens
    speed = "no answer"
    if times:
        decode_s = times[-1] - times[0]
        rate = f", {(tokens - 1) / decode_s:.1f} tokens/s" if tokens > 1 and decode_s > 0 else ""
        speed = f"TTFT {seconds(times[0] - began)}{rate}, {usage.prompt_tokens} + {tokens} tokens"
    console.print(speed, style="dim", highlight=False)
    return reply.text
