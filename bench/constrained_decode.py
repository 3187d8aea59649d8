"""Measure what constraints cost: time of constrained decode iterations, and delay of other streams by a compilation.

The same service decodes batches of streams with and without a constraint, by turns. Then streams without a constraint
run while a request brings a large schema, which the gateway and the workers compile. The script exits with 1 if a
constrained iteration takes more than 1.15 times as long, or if the compilation delays a token by more than an
iteration.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from twofold.bench.client import Client, ClientConfig, Reply
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.events import Recorder
from twofold.reporting.output import json_text
from twofold.request import Request
from twofold.timeline import Timeline

PROMPT_TOKENS = 32
GOAL = 1.15
SHORT = {"type": "array", "minItems": 500, "items": {"type": "object", "properties": {"name": {"type": "string"}}}}


def large_schema(properties: int) -> dict[str, Any]:
    """Return a schema of an object with many properties of different types."""
    kinds = [{"type": "string", "maxLength": 40}, {"type": "integer"}, {"enum": ["red", "green"]}, SHORT]
    named = {f"property_{number}": kinds[number % len(kinds)] for number in range(properties)}
    return {"type": "object", "properties": named, "required": list(named)[:20]}


class Streams:
    """Client that runs streams at the same time and keeps their timelines."""

    def __init__(self, client: Client, timelines: list[Timeline], maker: PromptMaker) -> None:
        self._client, self._timelines, self._maker = client, timelines, maker
        self._number = 0

    async def run(self, count: int, tokens: int, schema: dict[str, Any] | None = None) -> list[Timeline]:
        before = len(self._timelines)
        outcomes = await asyncio.gather(*(self._one(tokens, schema) for _ in range(count)))
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise RuntimeError(f"{failed[0].error}: {failed[0].detail}")
        return self._timelines[before:]

    async def _one(self, tokens: int, schema: dict[str, Any] | None) -> Any:  # noqa: ANN401
        self._number += 1
        request = Request(id=str(self._number), arrival_s=0.0, prompt_tokens=PROMPT_TOKENS, output_tokens=tokens)
        body = msgspec.json.decode(self._client.body(request, self._maker.prompt(request)))
        if schema is not None:
            body["structured_outputs"] = {"json": schema}
            del body["ignore_eos"]
        return await self._client.send(request, msgspec.json.encode(body), Reply())


async def step_s(streams: Streams, count: int, tokens: int, schema: dict[str, Any] | None) -> float:
    """Return the median time of an iteration, in seconds."""
    timelines = await streams.run(count, tokens, schema)
    return statistics.median(gap for timeline in timelines for gap in timeline.itl_s)


async def longest_gap_s(streams: Streams, count: int, tokens: int, schema: dict[str, Any] | None) -> float:
    """Return the longest gap between tokens of streams while a request with `schema` arrives, in seconds."""
    running = asyncio.create_task(streams.run(count, tokens))
    await asyncio.sleep(1.0)
    began = time.monotonic()
    await streams.run(1, 1, schema)
    ended = time.monotonic()
    mine = [timeline for timeline in await running if timeline.output_tokens > 1]
    gaps = [
        later - earlier
        for timeline in mine
        for earlier, later in zip(timeline.token_times_s, timeline.token_times_s[1:], strict=False)
        if later >= began and earlier <= ended
    ]
    return max(gaps)


async def measure(url: str, given: argparse.Namespace) -> tuple[list[float], list[float], list[float], float]:
    endpoint, timelines = await discover(url), list[Timeline]()
    lowest, vocabulary = token_range(endpoint.vocab_size)
    async with Client(endpoint, Recorder([timelines.append]), ClientConfig()) as client:
        streams = Streams(client, timelines, PromptMaker(lowest=lowest, vocabulary=vocabulary))
        ratios, with_schema, without, steps = list[float](), list[float](), list[float](), list[float]()
        for number in range(given.rounds + 1):
            plain = await step_s(streams, given.batch, given.tokens, None)
            constrained = await step_s(streams, given.batch, given.tokens, SHORT)
            if number:  # the first round warms up
                ratios.append(constrained / plain)
                steps.append(plain)
        for number in range(given.rounds):
            schema = large_schema(given.properties + number)  # not compiled before
            with_schema.append(await longest_gap_s(streams, given.batch, given.tokens, schema))
            without.append(await longest_gap_s(streams, given.batch, given.tokens, None))
    return ratios, with_schema, without, statistics.median(steps)


def shown(values: Sequence[float], scale: float, unit: str) -> str:
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.3g}{unit} ({low:.3g} to {high:.3g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--properties", type=int, default=400, help="of the large schema")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("flags", nargs="*", help="flags of twofold serve, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twofold-constrained-") as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)], check=True)
        flags = given.flags or ["--colocated", "1"]
        with served(model, [*flags, "--no-enable-prefix-caching"]) as url:
            ratios, with_schema, without, step = asyncio.run(measure(url, given))
    console = Console()
    size = len(msgspec.json.encode(large_schema(given.properties)))
    console.print(
        f"constrained iteration, batch {given.batch}: {shown(ratios, 1.0, '×')} the unconstrained {step * 1e3:.1f} ms"
    )
    console.print(f"longest gap while a schema of {size:,} bytes compiles: {shown(with_schema, 1e3, ' ms')}")
    console.print(f"longest gap while a request without a schema arrives: {shown(without, 1e3, ' ms')}")
    delayed = statistics.median(with_schema) - statistics.median(without)
    console.print(f"delay by the compilation: {delayed * 1e3:.1f} ms, {delayed / step:.2f} iterations; the goal is 1")
    if given.json is not None:
        found = {"ratios": ratios, "step_s": step, "gap_with_schema_s": with_schema, "gap_without_s": without}
        given.json.write_text(json_text(found), "utf-8")
    return 0 if statistics.median(ratios) <= GOAL and delayed <= step else 1


if __name__ == "__main__":
    sys.exit(main())
