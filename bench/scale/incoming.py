"""Measure a controller's CPU cost per worker message, request and token, by number of workers.

A live service's controller runs in this process, without an HTTP server. A second process sends the messages of
all workers as fast as possible, but runs no model. Costs are CPU seconds of the controller's process, including
ZeroMQ's threads. A plain Python loop is also timed, to compare machines.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq
from rich.console import Console
from rich.table import Table
from talking_workers import ENCODE, PROMPT, STATUS, name_of, outputs, registered, role_of

from twofold.errors import TwofoldError
from twofold.handoff import HandoffMode
from twofold.request import Generation, Request, SamplingParams, TokenOutput
from twofold.scheduling.admission.admission import Admission
from twofold.scheduling.admission.limits import AdmissionLimits
from twofold.scheduling.cluster.scheduler import ClusterScheduler, FixedHandoff
from twofold.scheduling.routers import ROUTERS
from twofold.serving.config import EngineConfig, ServiceConfig
from twofold.serving.controller.controller import Controller
from twofold.serving.controller.forecast import MeasuredPaths
from twofold.serving.controller.live_request import OutputSink
from twofold.serving.controller.mailbox import Inbox, Outbox, new_context
from twofold.serving.controller.registry import HealthTimeouts, ProcessControl, WorkerRegistry
from twofold.serving.controller.remote import Hosts
from twofold.serving.controller.requests import LiveRequests
from twofold.serving.controller.service import ServedModel
from twofold.serving.messages import Alive, Message, Peers, Status, StepDone, ToController
from twofold.serving.telemetry.telemetry import Telemetry

sys.path.append(str(Path(__file__).parents[1]))
from decision_cost import LOOP_ITERATIONS, cpu_seconds, reference_loop

WORKERS = Path(__file__).with_name("talking_workers.py")
MOST_SOCKETS = 4_000
PATIENCE_S = 300.0  # timeout until all ordered messages have arrived


class CountedInbox(Inbox[ToController]):
    """Message inbox of a controller, with a count of received messages."""

    count = 0

    def drain(self) -> Iterator[ToController]:
        for message in super().drain():
            self.count += 1
            yield message


class NoProcesses(ProcessControl):
    """Stub of process control that starts and kills no processes."""

    def start_worker(self, instance: str) -> None: ...

    def kill_worker(self, instance: str) -> None: ...

    def release_worker(self, instance: str) -> None: ...

    def refuse_worker(self, instance: str, reason: str) -> None: ...


class Measured(msgspec.Struct, frozen=True):
    """Measurement of one operation: CPU seconds and number of repetitions."""

    what: str
    times: int
    cpu_s: float


class ControllerBench:
    """Live controller, with a second process that sends the messages of fake workers."""

    def __init__(self, directory: Path, workers: int) -> None:
        context = new_context()
        self.inbox = CountedInbox(context, f"ipc://{directory}/controller.sock", ToController)
        telemetry, outbox = Telemetry("model"), Outbox(context)
        config = ServiceConfig(engine=EngineConfig(model="/model"), workers=(), run_dir=str(directory))
        hosts = Hosts(config, "model", "", NoProcesses(), outbox)
        cluster = ClusterScheduler(ROUTERS["jsq"](), FixedHandoff(HandoffMode.LAYER_WISE))
        roles = {name_of(number): role_of(number) for number in range(workers)}
        registry = WorkerRegistry(roles, outbox, hosts, HealthTimeouts(silence_s=1e9))
        admission = Admission(AdmissionLimits(max_running=1 << 20, max_waiting=1 << 20))
        self.controller = Controller(
            model=ServedModel(name="model", path="/model", max_model_len=32768, vocab_size=32000, created=0),
            cluster=cluster,
            requests=LiveRequests(
                cluster, admission, registry, telemetry, announces=False, recomputes=False, reuses=False
            ),
            registry=registry,
            hosts=hosts,
            inbox=self.inbox,
            telemetry=telemetry,
            paths=MeasuredPaths(),
            roles_move=False,
            replan=None,
            forecast=None,
        )
        command = [sys.executable, str(WORKERS), str(directory), str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def order(self, text: str) -> None:
        assert self._process.stdin is not None  # noqa: S101  (created as a pipe above)
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    async def timed(self, what: str, order: str, messages: int, times: int) -> Measured:
        """Make the workers send messages; return the controller's CPU time until all are received."""
        began, end = time.process_time(), self.inbox.count + messages
        self.order(order)
        await until(lambda: self.inbox.count >= end)
        return Measured(what, times, time.process_time() - began)

    async def idle(self, seconds: float) -> Measured:
        """Return the controller's CPU time per second while all workers are silent."""
        began = time.process_time()
        await asyncio.sleep(seconds)
        return Measured("idle second", 1, (time.process_time() - began) / seconds)

    async def requests(self, count: int, tokens: int, batch: int) -> tuple[Measured, Measured]:
        """Run `count` requests. Return the controller's CPU seconds up to the last hand-off, and after it."""
        began, before = time.process_time(), self.inbox.count
        self.order(f"requests {count}")
        tasks = [asyncio.create_task(self._follow(number, tokens)) for number in range(count)]
        await until(lambda: self.inbox.count >= before + 3 * count)
        begun = Measured("request up to its hand-off", count, time.process_time() - began)
        began = time.process_time()
        self.order(f"tokens {batch}")
        came = sum(await asyncio.gather(*tasks))
        if came != count * tokens:
            raise SystemExit(f"{came} tokens arrived of {count * tokens}")
        made = count * (tokens - 1)
        return begun, Measured(f"token, {batch} per iteration", made, time.process_time() - began)

    async def _follow(self, number: int, tokens: int) -> int:
        request = Request(
            id=f"r{number}-{time.monotonic_ns()}",
            arrival_s=time.monotonic(),
            prompt_tokens=PROMPT,
            output_tokens=tokens,
        )
        generation = Generation(
            request=request, prompt_token_ids=[5] * PROMPT, sampling=SamplingParams(max_tokens=tokens)
        )
        sink = Arrivals()
        self.controller.submit(generation, sink)
        await sink.ended.wait()
        return sink.came

    def close(self) -> None:
        self.controller.shutdown()
        assert self._process.stdin is not None  # noqa: S101  (as above)
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()


class Arrivals(OutputSink):
    """Counts the tokens of a request."""

    def __init__(self) -> None:
        self.came, self.ended = 0, asyncio.Event()

    def output(self, output: TokenOutput) -> None:
        self.came += 1
        if output.finish_reason is not None:
            self.ended.set()

    def failed(self, error: TwofoldError) -> None:
        raise SystemExit(str(error))


async def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happens():
        if time.monotonic() > end:
            raise SystemExit("expected messages did not arrive")
        await asyncio.sleep(0.02)


async def measure(workers: int, messages: int, batches: list[int]) -> list[Measured]:
    prefill = (workers + 3) // 4
    pairs = prefill * (workers - prefill)
    with tempfile.TemporaryDirectory() as directory:
        scene = ControllerBench(Path(directory), workers)
        scene.controller.start()
        try:
            rows = [
                await scene.timed("new worker", "register", workers, workers),
                await scene.timed("returning worker", "restart", 1, 1),
                await scene.timed("measured link", "links", pairs, pairs),
                await scene.idle(3.0),
                await scene.timed("Alive", f"alive {messages}", messages, messages),
                await scene.timed("Status", f"status {messages}", messages, messages),
                await scene.timed("StepDone without tokens", f"steps {messages}", messages, messages),
            ]
            for batch in batches:
                begun, made = await scene.requests(8 * workers, 32 if batch > 1 else 8, batch)
                rows += [made] if batch != batches[0] else [begun, made]
        finally:
            scene.close()
    return rows


def sizes(workers: int) -> list[tuple[str, int]]:
    """Return the size in bytes of each kind of message."""
    peer = registered(1, "ipc:///run/user/1000/twofold/decode-1.sock")
    tokens = [(f"chatcmpl-{number:032x}.1", outputs(5, 9)) for number in range(32)]
    step = StepDone(instance="decode-1", epoch=1, started_s=1.0, started=[], tokens=tokens, status=STATUS, number=9)
    messages: list[tuple[str, Message]] = [
        ("Alive", Alive(instance="decode-1", epoch=1, batch_s=0.1, said_s=1.0, now_s=1.0)),
        ("Status", Status(instance="decode-1", epoch=1, status=STATUS, number=9)),
        ("StepDone, 32 tokens", step),
        ("Registered", peer),
        (f"Peers, {workers} workers", Peers(peers=[peer.peer] * workers)),
    ]
    return [(name, len(ENCODE(message))) for name, message in messages]


def sockets(context: zmq.Context[zmq.Socket[bytes]]) -> str:
    """Describe how many worker inboxes one process can connect to, and what limits the number."""
    most, why = MOST_SOCKETS, "no more were tried"
    with tempfile.TemporaryDirectory() as directory:
        outbox, before = Outbox(context), len(list(Path("/proc/self/fd").iterdir()))
        for number in range(MOST_SOCKETS):
            try:
                outbox.send(f"ipc://{directory}/{number}.sock", Alive(instance="x", epoch=1))
            except zmq.ZMQError as error:
                most, why = number, error.strerror
                break
        files = len(list(Path("/proc/self/fd").iterdir())) - before
        outbox.close()
        context.destroy(linger=0)
    return f"{most:,} connections ({why}), {files / most:.1f} files per worker before any response"


def show(rows: dict[int, list[Measured]], turn_s: float) -> Table:
    table = Table(title="µs of the controller's CPU (iterations of a plain loop)", title_justify="left")
    table.add_column("each")
    for workers in rows:
        table.add_column(f"{workers:,} workers", justify="right")
    for each in zip(*rows.values(), strict=True):
        seconds = [row.cpu_s / row.times for row in each]
        table.add_row(each[0].what, *(f"{1e6 * one_s:,.1f} ({one_s / turn_s:,.0f})" for one_s in seconds))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=(40, 100, 400))
    parser.add_argument("--messages", type=int, default=40_000)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32))
    args = parser.parse_args()
    loops = [cpu_seconds(reference_loop) for _ in range(3)]
    rows = {workers: asyncio.run(measure(workers, args.messages, args.batch)) for workers in args.workers}
    loops += [cpu_seconds(reference_loop) for _ in range(3)]
    console = Console(width=110)
    console.print(show(rows, min(loops) / LOOP_ITERATIONS))
    console.print("Bytes: " + ", ".join(f"{name} {size:,}" for name, size in sizes(max(args.workers))) + ".")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name, context in (("ZeroMQ by itself", zmq.Context()), ("as a service", new_context())):
        console.print(f"{name}: {sockets(context)}.")
    console.print(f"A process may have {soft:,} files (at most {hard:,}).")
    console.print(f"A million loop iterations took {min(loops) * 1e3:.1f} ms (at most {max(loops) * 1e3:.1f}).")


if __name__ == "__main__":
    main()
