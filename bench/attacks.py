"""Attack a service while well-behaved clients stream from it, and measure how the attack affects them.

    python bench/attacks.py [--only NAME]… [--json OUT]

`twofold serve` runs with the emulated engine, and `twofold route` in front of two scripted servers. Eight clients
stream tokens at a steady pace. Each attack is sent by another process. The table shows the longest gap between two
tokens of a client before and during the attack, the answers to the attack, the growth of the gateway's resident memory,
and the requests, KV blocks and files that were in use 5 s after the last connection had ended.

Exits with 1 if an attack lengthens the longest gap by more than 0.25 s, takes more memory than `MEMORY_BYTES`, leaves
something in use, makes the service refuse a well-behaved client, or gets an internal error (500).
"""

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from attackers import ATTACKS, LOOPBACK, MIB, MODEL, TOKENS, Attack, attacker, run_server
from soak_samples import blocks_held
from twofold.bench.services import ServedProcess, free_port, metrics, stop, wait_ready

CLUSTER = """
model: llama2-70b
router: jsq
pools:
  - {machines: 1, machine: dgx-h100, role: prefill}
  - {machines: 1, machine: dgx-h100, role: decode}
"""
CONTEXT = 1_100_000  # so that a prompt of a million tokens is valid
STREAMS = 8
BASELINE_S, SETTLE_S, FREE_S, LIMIT_S = 8.0, 1.0, 5.0, 120.0
GAP_S = 0.25
MEMORY_BYTES = (256 + 4 * 32) * MIB  # unfinished bodies (docs/api.md), and the copies of one that is decoded
TWOFOLD = [sys.executable, "-m", "twofold.cli.main"]
SPAWN = multiprocessing.get_context("spawn")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of one attack."""

    attack: str
    answers: dict[str, int]
    baseline_gap_s: float
    gap_s: float
    refused_clients: int
    memory_bytes: int
    left: dict[str, int]  # requests, KV blocks and files that stayed in use

    @property
    def failures(self) -> list[str]:
        failed = [f"{count} {what} left in use" for what, count in self.left.items()]
        if self.gap_s > self.baseline_gap_s + GAP_S:
            failed.append(f"a gap of {self.gap_s:.2f} s")
        if self.memory_bytes > MEMORY_BYTES:
            failed.append(f"{self.memory_bytes // MIB} MiB of memory")
        if self.refused_clients:
            failed.append(f"{self.refused_clients} well-behaved requests refused")
        wrong = [each for each in self.answers if each.startswith(("500", "no end"))]
        return failed + [f"{self.answers[each]} × {each}" for each in wrong]


class Clients:
    """Well-behaved clients, each of which streams one completion after another."""

    def __init__(self, url: str) -> None:
        self.gap_s, self.refused = 0.0, 0
        self._url = url

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            tasks = [asyncio.create_task(self._stream(session)) for _ in range(STREAMS)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def longest_gap(self, seconds: float) -> float:
        """Return the longest gap between two tokens of a stream in the next seconds."""
        self.gap_s = 0.0
        await asyncio.sleep(seconds)
        return self.gap_s

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        body = {"model": MODEL, "prompt": [5] * 50, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        while True:
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                self.refused += response.status != 200
                last_s: float | None = None
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        self.gap_s = max(self.gap_s, now - (last_s or now))
                        last_s = now


def in_use(service: ServedProcess) -> Counter[str]:
    """Return the numbers of requests, KV blocks and open files of a service, without pooled connections to servers."""
    lines = metrics(service.url).splitlines()
    requests = sum(float(line.split()[-1]) for line in lines if line.startswith("twofold:admission_requests{"))
    process, port = psutil.Process(service.pid), int(service.url.rpartition(":")[2])
    pooled = sum(bool(each.raddr) and each.laddr.port != port for each in process.net_connections("tcp"))
    blocks = sum(blocks_held(service.url).values())
    return Counter(requests=int(requests), blocks=blocks, files=process.num_fds() - pooled)


async def left_after(service: ServedProcess, before: Counter[str]) -> dict[str, int]:
    """Wait until no more is in use than before, up to `FREE_S`, and return the difference."""
    end_s = time.monotonic() + FREE_S
    while (left := await asyncio.to_thread(in_use, service) - before) and time.monotonic() < end_s:  # noqa: ASYNC110  (the service is another process)
        await asyncio.sleep(0.1)
    return dict(left)


async def measure(name: str, service: ServedProcess) -> Row:
    """Run an attack beside well-behaved clients."""
    ready, begin = SPAWN.Event(), SPAWN.Event()
    received, sent = SPAWN.Pipe(duplex=False)
    port = int(service.url.rpartition(":")[2])
    process = SPAWN.Process(target=attacker, args=(name, port, ready, begin, sent), daemon=True)
    gateway, clients, before = psutil.Process(service.pid), Clients(service.url), in_use(service)
    async with clients.streaming():
        process.start()
        await asyncio.to_thread(ready.wait, LIMIT_S)
        await asyncio.sleep(SETTLE_S)
        baseline_s = await clients.longest_gap(BASELINE_S)
        memory_bytes = peak_bytes = gateway.memory_info().rss
        clients.gap_s, end_s = 0.0, time.monotonic() + LIMIT_S
        begin.set()
        while process.is_alive() and time.monotonic() < end_s:
            peak_bytes = max(peak_bytes, gateway.memory_info().rss)
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)  # for gaps that have not ended
        gap_s = clients.gap_s
    answers: Counter[str] = received.recv() if received.poll() else Counter({f"no end within {LIMIT_S:.0f} s": 1})
    process.kill()
    return Row(
        attack=name,
        answers=dict(sorted(answers.items())),
        baseline_gap_s=baseline_s,
        gap_s=gap_s,
        refused_clients=clients.refused,
        memory_bytes=peak_bytes - memory_bytes,
        left=await left_after(service, before),
    )


@contextmanager
def attacked(folder: Path, attack: Attack) -> Iterator[ServedProcess]:
    """Run the service that an attack targets."""
    model, port = str(folder / "model"), free_port()
    ports = [free_port(), free_port()] if attack.routes else []
    servers = [SPAWN.Process(target=run_server, args=(each,), daemon=True) for each in ports]
    if attack.routes:
        flags = ["route", "--model", model]
        flags += [flag for each in ports for flag in ("--colocated", f"http://{LOOPBACK}:{each}")]
    else:
        flags = ["serve", "--engine", "emulated", "--cluster", str(folder / "cluster.yaml"), "--tokenizer", model]
        flags += ["--max-model-len", str(CONTEXT)]
    limit = "" if attack.files is None else f"ulimit -n {attack.files}; "
    command = ["sh", "-c", limit + 'exec "$@"', "sh", *TWOFOLD, *flags]
    command += ["--served-model-name", MODEL, "--port", str(port)]
    for server in servers:
        server.start()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        if not wait_ready(process, f"http://{LOOPBACK}:{port}"):
            sys.exit(f"the service ended while starting: {(folder / 'log').read_text()[-2000:]}")
        yield ServedProcess(f"http://{LOOPBACK}:{port}", process.pid)
    finally:
        stop(process)
        for server in servers:
            server.kill()


def run(names: Sequence[str]) -> list[Row]:
    """Run each attack on a new service."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="twofold-attacks-") as directory:
        folder = Path(directory)
        (folder / "cluster.yaml").write_text(CLUSTER)
        shape = ("--hidden-size", "32", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--vocab-size", "1024")
        subprocess.run([*TWOFOLD, "model", "create", str(folder / "model"), *shape], check=True, capture_output=True)
        for name in names:
            with attacked(folder, ATTACKS[name]) as service:
                rows.append(asyncio.run(measure(name, service)))
            print(f"{name}: {', '.join(rows[-1].failures) or 'passed'}", flush=True)
    return rows


def table(rows: Sequence[Row]) -> Table:
    made = Table(title=f"Attacks beside {STREAMS} streams", title_justify="left")
    for column in ("attack", "answers", "gap before", "gap", "memory", "left in use", ""):
        made.add_column(column, justify="right" if column in {"gap before", "gap", "memory"} else "left")
    for row in rows:
        answers = "; ".join(f"{count} × {what}" for what, count in row.answers.items())
        left = ", ".join(f"{count} {what}" for what, count in row.left.items()) or "nothing"
        gaps = (f"{row.baseline_gap_s * 1e3:.0f} ms", f"{row.gap_s * 1e3:.0f} ms")
        memory = f"{row.memory_bytes // MIB} MiB"
        made.add_row(row.attack, answers, *gaps, memory, left, "✗" if row.failures else "✓")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ATTACKS, metavar="NAME", help="an attack; repeatable")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    rows = run(given.only or list(ATTACKS))
    Console(width=140).print(table(rows))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    failures = [f"{row.attack}: {failure}" for row in rows for failure in row.failures]
    for failure in failures:
        print(f"✗ {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
