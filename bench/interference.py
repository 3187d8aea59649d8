"""Measure how arriving long prompts slow down decodes: P99 ITL with long prompts, relative to P99 ITL without.

Three services run the same requests in turn on one machine:

    split               --prefill 1 --decode 1
    colocated           --colocated 2 --no-enable-chunked-prefill
    colocated, chunked  --colocated 2 --enable-chunked-prefill

In each round, `--streams` requests with short prompts decode alone, and then again while long prompts arrive evenly
spaced, at a rate that keeps one prefill worker busy for `--utilisation` of the time. The result is the median over
rounds.
"""

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.client import Client, ClientConfig, Reply
from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.prompts import PromptMaker, token_range
from twofold.bench.services import served
from twofold.events import Recorder
from twofold.reporting.output import json_text
from twofold.reporting.summary import LatencyDistribution, seconds
from twofold.request import Request
from twofold.timeline import Timeline

SERVICES = {
    "split": ["--prefill", "1", "--decode", "1"],
    "colocated": ["--colocated", "2", "--no-enable-chunked-prefill"],
    "colocated, chunked": ["--colocated", "2", "--enable-chunked-prefill"],
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the benchmark."""

    rounds: int
    streams: int
    stream_prompt: int
    stream_output: int
    long_prompt: int
    long_output: int
    utilisation: float
    seed: int


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one service in seconds: ITL of the decoding requests, and TTFT of the long prompts.

    In each round, a service runs one phase without and one phase with long prompts.
    """

    itl_s: LatencyDistribution
    gaps: int
    long_ttft_s: LatencyDistribution | None
    long_prompts: int


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one service in one round, once without and once with long prompts."""

    alone: Phase
    disturbed: Phase

    @property
    def ratio(self) -> float:
        return self.disturbed.itl_s.p99 / self.alone.itl_s.p99


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of a run."""

    setting: Setting
    prefill_s: float  # of one long prompt on the idle split service
    rounds: list[dict[str, Measurement]]


class Subject:
    """Client of one of the compared services."""

    def __init__(self, endpoint: Endpoint, setting: Setting) -> None:
        self._endpoint, self._setting = endpoint, setting
        lowest, vocabulary = token_range(endpoint.vocab_size)
        self._prompts = PromptMaker(seed=setting.seed, lowest=lowest, vocabulary=vocabulary)
        self._number = 0

    async def prefill_s(self) -> float:
        """Warm up the idle service, and return the seconds to prefill a long prompt."""
        timelines: list[Timeline] = []
        async with self._client(timelines) as client:
            for _ in range(3):
                await self._ask(client, "calibrate", self._setting.long_prompt, 1)
        return min(timeline.ttft_s or 0.0 for timeline in timelines)

    async def phase(self, name: str, spacing_s: float | None) -> Phase:
        """Run the requests with short prompts concurrently, and return the measured latencies.

        If `spacing_s` is given, also send a long prompt every `spacing_s` seconds.
        """
        timelines: list[Timeline] = []
        async with self._client(timelines) as client, asyncio.TaskGroup() as tasks:
            replies = [Reply() for _ in range(self._setting.streams)]
            streams = [
                tasks.create_task(
                    self._ask(client, f"{name}/stream", self._setting.stream_prompt, self._setting.stream_output, reply)
                )
                for reply in replies
            ]
            while not all(reply.chunk_times_s for reply in replies):  # noqa: ASYNC110 (replies have no event)
                await asyncio.sleep(0.005)
            if spacing_s is not None:
                tasks.create_task(self._disturb(client, f"{name}/long", spacing_s, streams, tasks))
        return self._phase_of(timelines)

    async def _disturb(
        self, client: Client, name: str, spacing_s: float, streams: list[asyncio.Task[None]], tasks: asyncio.TaskGroup
    ) -> None:
        due_s = time.monotonic()
        while not any(stream.done() for stream in streams):
            tasks.create_task(self._ask(client, name, self._setting.long_prompt, self._setting.long_output))
            due_s += spacing_s
            await asyncio.sleep(due_s - time.monotonic())

    async def _ask(
        self, client: Client, name: str, prompt_tokens: int, output_tokens: int, reply: Reply | None = None
    ) -> None:
        self._number += 1
        request = Request(
            id=f"{name}/{self._number}", arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )
        outcome = await client.send(request, client.body(request, self._prompts.prompt(request)), reply)
        if outcome.error is not None:
            raise RuntimeError(f"{self._endpoint.base_url}: {outcome.error}: {outcome.detail}")

    def _client(self, timelines: list[Timeline]) -> Client:
        return Client(self._endpoint, Recorder([timelines.append]), ClientConfig())

    @staticmethod
    def _phase_of(timelines: list[Timeline]) -> Phase:
        streams = [timeline for timeline in timelines if "/stream/" in timeline.request.id]
        prompts = [timeline for timeline in timelines if "/long/" in timeline.request.id]
        start = max(stream.token_times_s[0] for stream in streams)
        end = min(stream.token_times_s[-1] for stream in streams)
        gaps = [
            gap
            for stream in streams
            for earlier, gap in zip(stream.token_times_s, stream.itl_s, strict=False)
            if earlier >= start and earlier + gap <= end
        ]
        itl_s = LatencyDistribution.of(gaps)
        if itl_s is None:
            raise RuntimeError("the streams never decoded concurrently: give more --stream-output tokens")
        ttft_s = LatencyDistribution.of(prompt.ttft_s or 0.0 for prompt in prompts)
        return Phase(itl_s=itl_s, gaps=len(gaps), long_ttft_s=ttft_s, long_prompts=len(prompts))


async def measure(urls: dict[str, str], setting: Setting) -> Report:
    """Measure all services in turn, round by round."""
    subjects = {name: Subject(await discover(url), setting) for name, url in urls.items()}
    prefills = {name: await subject.prefill_s() for name, subject in subjects.items()}
    prefill_s = prefills["split"]
    spacing_s = prefill_s / setting.utilisation
    print(f"one long prefill takes {seconds(prefill_s)}; a long prompt every {seconds(spacing_s)}")
    rounds: list[dict[str, Measurement]] = []
    names = list(subjects)
    for number in range(setting.rounds):
        turn = number % len(names)
        measured: dict[str, Measurement] = {}
        for name in names[turn:] + names[:turn]:
            alone = await subjects[name].phase(f"{number}/alone", None)
            disturbed = await subjects[name].phase(f"{number}/disturbed", spacing_s)
            measured[name] = Measurement(alone=alone, disturbed=disturbed)
            print(f"round {number + 1}, {name}: {measured[name].ratio:.2f}", flush=True)
        rounds.append(measured)
    return Report(setting=setting, prefill_s=prefill_s, rounds=rounds)


def table(report: Report) -> Table:
    drawn = Table(title=f"Inter-token time of {report.setting.streams} streams", title_justify="left")
    drawn.add_column("", no_wrap=True)
    for heading in ("alone P99", "disturbed P50", "P99", "max", "P99 ratio", "of rounds"):
        drawn.add_column(heading, justify="right")
    for name in SERVICES:
        lines = [measured[name] for measured in report.rounds]
        ratios = [line.ratio for line in lines]
        drawn.add_row(
            name,
            seconds(statistics.median(line.alone.itl_s.p99 for line in lines)),
            seconds(statistics.median(line.disturbed.itl_s.p50 for line in lines)),
            seconds(statistics.median(line.disturbed.itl_s.p99 for line in lines)),
            seconds(statistics.median(line.disturbed.itl_s.max for line in lines)),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
        )
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-prompt", type=int, default=64)
    parser.add_argument("--stream-output", type=int, default=256)
    parser.add_argument("--long-prompt", type=int, default=1024)
    parser.add_argument("--long-output", type=int, default=4)
    parser.add_argument("--utilisation", type=float, default=0.65)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the services
    setting = Setting(**{name: getattr(given, name) for name in Setting.__struct_fields__})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-interference-")))
        model = given.model or folder / "model"
        if given.model is None:
            subprocess.run([sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)], check=True)
        cold = ["--no-enable-prefix-caching"]  # prompts repeat in the next round
        urls = {name: stack.enter_context(served(model, [*flags, *cold])) for name, flags in SERVICES.items()}
        report = asyncio.run(measure(urls, setting))
    Console().print(table(report))
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")


if __name__ == "__main__":
    main()
