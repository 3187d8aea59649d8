"""Measure `twofold serve --gateway-processes N` with emulated workers: capacity, limits of keys, and kills.

Capacity: the load generator (load.c) streams outputs of 64 tokens on 128 connections for each process, closed loop.
The table has the tokens per CPU second of the service's process and the gateway processes together, and the CPU time
of each kind for a token. From these follows how many tokens per second the processes carry on cores of their own: as
many as the busier of one gateway process and the service's process. Workers have no part in it.

Limits: a key with a limit of requests per minute is used on many connections at once, which the kernel spreads over
all gateway processes.

Kills: a gateway process is killed 20 times, while clients stream on connections of their own. A killed process ends
the streams of its connections. It is back when a new process has accepted a connection.

Exits with 1 if a stream of another process ends early, if a limit is off by more than 5%, if a process is back after
more than a second in the median, if two processes carry less than 1.8 times one, or if four processes take more CPU
time for a token than two by more than 10%.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import psutil
from measured_routers import HERE, KEY, MODEL_NAME, cpu_s, emulated_service
from native import LOAD, compile_programs, offer
from rich.console import Console
from rich.table import Table
from side_by_side import SMALL_MODEL

from twofold.bench.services import free_port
from twofold.reporting.output import json_text

sys.path.append(str(Path(__file__).parents[1] / "vllm"))
from frame import model_directory, run_and_exit, say
from started import Processes

COUNTS = (1, 2, 4)
LIMITED_KEY, PER_MINUTE = "a-key-with-a-limit", 60
CONNECTIONS, TOKENS = 128, 64  # for each gateway process
STREAMS, KILLED = 24, 3  # streams at a time, and gateway processes, while one is killed
SETTLE_S, BACK_S = 1.0, 10.0
GAIN, LOSS, INEXACT, LONGEST_BACK_S = 1.8, 0.1, 0.05, 1.0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a load, and the CPU seconds of the service's process and of its gateway processes meanwhile.

    With one process, `gateways_s` is 0: the service's process has the gateway.
    """

    processes: int
    tokens: int
    service_s: float
    gateways_s: float

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / (self.service_s + self.gateways_s)

    @property
    def carried(self) -> float:
        """Tokens per second on cores of their own, if the connections are spread evenly."""
        return self.tokens / max(self.service_s, self.gateways_s / self.processes)


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Streams at a kill of a gateway process, and seconds until another process has accepted a connection."""

    cut: int  # of the killed process
    others_cut: int
    whole: int
    back_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run. `admitted` requests of `PER_MINUTE` were admitted in the first seconds of a minute."""

    capacities: list[Capacity]
    admitted: int
    kills: list[Kill]


class Stream(NamedTuple):
    """A stream that has ended, on a connection of its own from the local port `port`."""

    port: int
    whole: bool


class Service:
    """`twofold serve` with emulated workers and `count` gateway processes."""

    def __init__(self, processes: Processes, model: Path, folder: Path, count: int) -> None:
        self.port = free_port()
        keys = folder / "keys"
        keys.write_text(f"all {KEY}\nfew {LIMITED_KEY} - {PER_MINUTE}\n")
        flags = ("--api-keys", str(keys), "--gateway-processes", str(count))
        command = emulated_service(model, folder, self.port, *flags)
        processes.start(f"serve-{count}", command, {})
        processes.wait(f"http://{HERE}:{self.port}/health")
        self._process = psutil.Process(processes.pid(f"serve-{count}"))

    def gateways(self) -> list[psutil.Process]:
        """Return the running gateway processes."""
        found = []
        for each in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if each.name() == "gateway" and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def serves_anew(self, known: set[int]) -> bool:
        """Return whether a gateway process that is not in `known` (process ids) has a connection."""
        return any(self.clients(each) for each in self.gateways() if each.pid not in known)

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds of the service's process and of the gateway processes."""
        return cpu_s(self._process.pid, tree=False), sum(cpu_s(each.pid, tree=False) for each in self.gateways())

    def clients(self, gateway: psutil.Process) -> set[int]:
        """Return the client ports of a process's connections."""
        with suppress(psutil.NoSuchProcess):
            found = gateway.net_connections("tcp4")
            return {each.raddr.port for each in found if each.raddr and each.laddr.port == self.port}
        return set()


def capacity(service: Service, folder: Path, count: int, seconds: float) -> Capacity:
    """Measure the CPU time of a closed loop of streams."""
    command = [str(folder / LOAD), "--host", HERE, "--port", str(service.port), "--model", MODEL_NAME, "--key", KEY]
    command += ["--tokens", str(TOKENS), "--stream", "--connections", str(count * CONNECTIONS), "--seed", str(count)]
    offer([*command, "--seconds", str(SETTLE_S)], BACK_S + SETTLE_S + 60)
    before = service.cpu_s()
    done = offer([*command, "--seconds", str(seconds)], seconds + 60)
    service_s, gateways_s = (after - earlier for after, earlier in zip(service.cpu_s(), before, strict=True))
    return Capacity(processes=count, tokens=done.tokens, service_s=service_s, gateways_s=gateways_s)


async def admitted(service: Service) -> int:
    """Return how many of 4 times the limit of a key are admitted, on as many connections at once."""
    statuses = await asyncio.gather(*(_status(service.port) for _ in range(4 * PER_MINUTE)))
    return statuses.count(200)


async def _status(port: int) -> int:
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(_request(LIMITED_KEY, tokens=1))
    line = await reader.readline()
    await reader.read()
    writer.close()
    return int(line.split()[1])


def _request(key: str, tokens: int) -> bytes:
    fields = {"model": MODEL_NAME, "prompt": [7] * 32, "max_tokens": tokens, "ignore_eos": True, "stream": tokens > 1}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Clients:
    """Clients that stream without end, each stream on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopped = False
        self.ended: list[Stream] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(STREAMS)))

    def stop(self) -> None:
        self._stopped = True

    async def _client(self) -> None:
        while not self._stopped:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(HERE, self._port)
                writer.write(_request(KEY, TOKENS))
                received = b""
                with suppress(OSError):
                    received = await reader.read(-1)
                whole = received.count(b"data: {") == TOKENS and b"data: [DONE]" in received
                self.ended.append(Stream(writer.get_extra_info("sockname")[1], whole))
                writer.close()


async def kills(service: Service, count: int) -> list[Kill]:
    """Kill one gateway process after another, under load."""
    clients, found = Clients(service.port), []
    load = asyncio.create_task(clients.run())
    try:
        for _ in range(count):
            await asyncio.sleep(SETTLE_S)
            found.append(await _kill(service, clients))
    finally:
        clients.stop()
        await load
    return found


async def _kill(service: Service, clients: Clients) -> Kill:
    before = await asyncio.to_thread(service.gateways)
    killed = before[0]
    # Stopped, it accepts no connection between the look at its connections and its end.
    killed.suspend()
    own = service.clients(killed)
    clients.ended.clear()
    killed.kill()
    killed_s, known = time.monotonic(), {each.pid for each in before}
    back_s = BACK_S
    while back_s == BACK_S and time.monotonic() - killed_s < BACK_S:
        if await asyncio.to_thread(service.serves_anew, known):
            back_s = time.monotonic() - killed_s
        await asyncio.sleep(0.01)
    await asyncio.sleep(SETTLE_S)
    ended = clients.ended
    return Kill(
        cut=sum(not each.whole and each.port in own for each in ended),
        others_cut=sum(not each.whole and each.port not in own for each in ended),
        whole=sum(each.whole for each in ended),
        back_s=back_s,
    )


def run(given: argparse.Namespace, folder: Path) -> tuple[Report, list[str]]:
    """Measure capacity, limits and kills. Return the report, and a sentence for each check that fails."""
    compile_programs(folder)
    model = model_directory(given.model, folder, *SMALL_MODEL)
    capacities = []
    for count in COUNTS:
        with Processes(folder) as processes:
            capacities.append(capacity(Service(processes, model, folder, count), folder, count, given.seconds))
            say(f"{count} processes: {capacities[-1].per_cpu_s:,.0f} tokens per CPU second")
    with Processes(folder) as processes:
        service = Service(processes, model, folder, KILLED)
        found = asyncio.run(admitted(service))
        say(f"{found} of {4 * PER_MINUTE} requests admitted; the limit is {PER_MINUTE}")
        killed = asyncio.run(kills(service, given.kills))
    report = Report(capacities=capacities, admitted=found, kills=killed)
    if given.json is not None:
        given.json.write_text(json_text(report), "utf-8")
    return report, list(failures(report))


def failures(report: Report) -> Iterator[str]:
    """Yield a sentence for each check that fails."""
    one, two, four = report.capacities
    if two.carried < GAIN * one.carried:
        yield f"two processes carry {two.carried / one.carried:.2f} times one, not {GAIN:g} times"
    if four.per_cpu_s < (1 - LOSS) * two.per_cpu_s:
        yield f"four processes carry {four.per_cpu_s / two.per_cpu_s:.2f} of the tokens of two in a CPU second"
    if abs(report.admitted - PER_MINUTE) > INEXACT * PER_MINUTE:
        yield f"{report.admitted} requests were admitted, the limit is {PER_MINUTE}"
    others = sum(each.others_cut for each in report.kills)
    if others:
        yield f"{others} streams of other processes ended early"
    if median(each.back_s for each in report.kills) > LONGEST_BACK_S:
        yield f"a killed process is back after more than {LONGEST_BACK_S:g} s in the median"


def show(report: Report) -> None:
    table = Table(title="gateway processes")
    columns = (
        "processes",
        "tokens per CPU s",
        "service, µs a token",
        "gateways, µs a token",
        "carry, tokens/s",
        "ratio",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for each in report.capacities:
        spent = (f"{1e6 * seconds / each.tokens:.1f}" for seconds in (each.service_s, each.gateways_s))
        ratio = f"{each.carried / report.capacities[0].carried:.2f}"
        table.add_row(str(each.processes), f"{each.per_cpu_s:,.0f}", *spent, f"{each.carried:,.0f}", ratio)
    console, back = Console(width=120), [each.back_s for each in report.kills]
    console.print(table)
    cut, others, whole = (sum(getattr(each, name) for each in report.kills) for name in ("cut", "others_cut", "whole"))
    console.print(
        f"{len(back)} kills: {cut} streams of killed processes ended early, {others} of others; {whole} whole; "
        f"back after {median(back):.2f} s in the median, {max(back):.2f} s at most"
    )
    console.print(f"limit of a key: {report.admitted} requests admitted, the limit is {PER_MINUTE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory with config.json and tokenizer (default: a small model)")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each load (default: 10)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep programs, model and logs in this directory")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    given = parser.parse_args()
    run_and_exit("gateway-processes", partial(run, given), show, given.folder)


if __name__ == "__main__":
    main()
