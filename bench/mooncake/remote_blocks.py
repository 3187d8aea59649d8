"""Compare the TTFT when a prompt's KV is computed, fetched from another host, or loaded locally.

Two hosts, each with a worker and a KV store, are emulated on this machine and use TCP. With --bits-per-s, a
rate-limited link joins the hosts' network namespaces (needs root).

In each round, the first host computes a prompt. The second host then gets the same prompt and fetches the KV
from the first host's store. After the KV is evicted from the second host's engine memory, the second host gets
the prompt again and loads the KV from its own store. The program exits with 1 if the answers to a prompt differ,
or if the second host recomputes cached blocks.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from twofold.bench.services import free_port, metrics, stop, wait_ready
from twofold.reporting.output import json_text
from twofold.reporting.summary import seconds
from twofold.security.key import write_key

sys.path.append(str(Path(__file__).parents[1]))
from two_hosts import TwoHosts, two_hosts

BLOCK, OUTPUT = 16, 8
WAIT_S = 120.0
FIRST, SECOND = "home", "other"
PROGRAM = Path(__file__).with_name("serve_fetching.py")


class Answer(msgspec.Struct, frozen=True):
    """Answer to one prompt: TTFT in seconds, output tokens, and number of cached prompt tokens."""

    ttft_s: float
    tokens: list[int]
    cached: int


class LengthResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one prompt length: TTFTs in seconds, measured on the second of two hosts, and error
    messages of failed checks.
    """

    prompt_tokens: int
    cold_s: list[float]
    remote_s: list[float]
    local_s: list[float]
    wrong: list[str]


class Service:
    """Client of a live service with workers on two hosts."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str) -> None:
        self._url, self._session, self._model = url, session, model

    async def ask(self, prompt: list[int]) -> Answer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        began_s, ttft_s, cached = time.monotonic(), 0.0, 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event: dict[str, Any] = msgspec.json.decode(line[6:])
                for choice in event["choices"]:
                    ttft_s = ttft_s or time.monotonic() - began_s
                    tokens += choice["token_ids"]
                cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        return Answer(ttft_s, tokens, cached)

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all samples with the given labels."""
        lines = re.findall(rf"^twofold:{name}{{(.*)}} (\S+)$", metrics(self._url), re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in lines if all(each in found for each in wanted))

    async def until(self, name: str, least: float, **labels: str) -> None:
        """Wait until the metric `name` reaches the value `least`."""
        end_s = time.monotonic() + WAIT_S
        while await asyncio.to_thread(self.count, name, **labels) < least:
            if time.monotonic() > end_s:
                raise SystemExit(f"FAILED: {name} of {labels} did not reach {least:g}")
            await asyncio.sleep(0.2)


class Rounds:
    """Measurement of TTFTs for one prompt length, repeated in rounds."""

    def __init__(self, service: Service, prompt_tokens: int, vocabulary: int, block_bytes: int) -> None:
        self._service, self._block_bytes = service, block_bytes
        self._draw, self._vocabulary = random.Random(0), vocabulary
        self.found = LengthResult(prompt_tokens=prompt_tokens, cold_s=[], remote_s=[], local_s=[], wrong=[])

    async def run(self, rounds: int) -> None:
        """Run one warm-up round and `rounds` measured rounds."""
        for number in range(rounds + 1):
            cold_s, remote_s, local_s = await self._round()
            if number:
                self.found.cold_s.append(cold_s)
                self.found.remote_s.append(remote_s)
                self.found.local_s.append(local_s)

    async def _round(self) -> tuple[float, float, float]:
        service, prompt = self._service, self._prompt()
        first = await self._computed(prompt, FIRST)
        hits = service.count("kv_store_hits_total", host=SECOND)
        brought = service.count("kv_store_bytes_total", host=SECOND, way="peer_read")
        remote = await service.ask(prompt)
        blocks = len(prompt) // BLOCK
        await service.until("kv_store_hits_total", hits + blocks, host=SECOND)
        await self._computed(self._prompt(), FIRST)
        cold = await self._computed(self._prompt(), SECOND)
        await self._computed(self._prompt(), FIRST)
        local = await service.ask(prompt)
        await service.until("kv_store_hits_total", hits + blocks + 1, host=SECOND)  # the engine may still have some
        again = service.count("kv_store_bytes_total", host=SECOND, way="peer_read") - brought
        self._check("tokens differ", first.tokens == remote.tokens == local.tokens)
        self._check("the prompt was not fully cached", remote.cached == local.cached == blocks * BLOCK)
        self._check("the cold prompt was cached", first.cached == cold.cached == 0)
        self._check(
            f"{again / self._block_bytes:g} blocks were fetched, of {blocks}", again == blocks * self._block_bytes
        )
        return cold.ttft_s, remote.ttft_s, local.ttft_s

    def _prompt(self) -> list[int]:
        # One token less, so that the last block is not full and all full blocks can come from a cache.
        return [self._draw.randrange(10, self._vocabulary) for _ in range(self.found.prompt_tokens - 1)]

    async def _computed(self, prompt: list[int], host: str) -> Answer:
        before = self._service.count("kv_store_bytes_total", host=host, way="stored")
        answer = await self._service.ask(prompt)  # round-robin routes it to `host`
        more = len(prompt) // BLOCK * self._block_bytes
        await self._service.until("kv_store_bytes_total", before + more, host=host, way="stored")
        return answer

    def _check(self, what: str, right: bool) -> None:
        if not right:
            self.found.wrong.append(what)


@contextmanager
def running(model: Path, folder: Path, flags: list[str], store: str, hosts: TwoHosts | None) -> Iterator[str]:
    """Start a service on two hosts and yield its URL."""
    addresses = ("127.0.0.1", "127.0.0.1") if hosts is None else hosts.addresses
    key, port = folder / "cluster.key", free_port()
    controller, url = f"tcp://{addresses[0]}:{free_port()}", f"http://127.0.0.1:{port}"
    key.unlink(missing_ok=True)
    write_key(key)
    stores = ["--kv-store-dram", store]
    serve = [str(PROGRAM), str(model), "--colocated", "1", "--router", "round-robin", "--port", str(port)]
    serve += ["--listen-workers", controller, "--cluster-key", str(key), *stores, *flags]
    join = ["-m", "twofold.cli.main", "join", controller, "--cluster-key", str(key), "--model", str(model)]
    join += ["--name", SECOND, "--address", addresses[1], "--colocated", "1", *stores]
    with ExitStack() as stack, (folder / "log").open("w+") as log:
        processes = []
        for host, command in enumerate((serve, join)):
            whole = [sys.executable, *command]
            process = subprocess.Popen(
                whole if hosts is None else hosts.command(host, whole), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            stack.callback(stop, process)
            # Workers use all cores of their host; two hosts on one machine would compete.
            os.sched_setaffinity(process.pid, {sorted(os.sched_getaffinity(0))[-host]})
            processes.append(process)
        if not wait_ready(processes[0], url):
            raise SystemExit(f"FAILED: the service ended: {(folder / 'log').read_text()}")
        yield url


async def measure(url: str, prompt_tokens: int, rounds: int, vocabulary: int, block_bytes: int) -> LengthResult:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        async with session.get(f"{url}/v1/models") as response:
            name = (await response.json())["data"][0]["id"]
        service = Service(url, session, name)
        await service.until("kv_store_capacity_blocks", 1, host=SECOND)
        await service.until("kv_cache_blocks", 1, instance="mixed-1", state="total")
        found = Rounds(service, prompt_tokens, vocabulary, block_bytes)
        await found.run(rounds)
        return found.found


def table(found: list[LengthResult]) -> Table:
    drawn = Table(title="TTFT on the second host, and relative to a cold prompt (medians)")
    for name in ("prompt tokens", "cold", "fetched from the first", "from its own store"):
        drawn.add_column(name, justify="right")
    for each in found:
        cold_s = statistics.median(each.cold_s)
        others = [statistics.median(times_s) for times_s in (each.remote_s, each.local_s)]
        cells = [f"{seconds(other_s)}, {other_s / cold_s:.1%}" for other_s in others]
        drawn.add_row(f"{each.prompt_tokens:,}", seconds(cold_s), *cells)
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a small model is created)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4000], help="prompt tokens")
    parser.add_argument("--bits-per-s", type=int, help="bandwidth of the link between the hosts")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the service
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-remote-")))
        model = given.model or folder / "model"
        if given.model is None:
            command = [sys.executable, "-m", "twofold.cli.main", "model", "create", str(model)]
            subprocess.run(command, check=True)
        hosts = None
        if given.bits_per_s is not None:
            hosts = stack.enter_context(two_hosts(first_local=True))
            hosts.limit(given.bits_per_s)
        config = msgspec.json.decode((model / "config.json").read_bytes())
        found = [measure_length(model, folder, config, length, given.rounds, hosts) for length in given.lengths]
    console = Console()
    console.print(table(found))
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    wrong = [what for each in found for what in each.wrong]
    for what in sorted(set(wrong)):
        console.print(f"FAILED: {what} ({wrong.count(what)} times)")
    return 1 if wrong else 0


def measure_length(
    model: Path, folder: Path, config: dict[str, Any], length: int, rounds: int, hosts: TwoHosts | None
) -> LengthResult:
    """Start a service and measure its TTFTs for one prompt length."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    block_bytes = BLOCK * 2 * config["num_hidden_layers"] * kv_heads * head_dim * 4
    blocks = length // BLOCK + 2
    memory = ["--kv-cache-memory-bytes", str((blocks + 4) * block_bytes)]
    flags = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", str(length + BLOCK), *memory]
    store = str(8 * blocks * block_bytes)  # more than a round needs
    with running(model, folder, flags, store, hosts) as url:
        return asyncio.run(measure(url, length, rounds, config["vocab_size"], block_bytes))


if __name__ == "__main__":
    sys.exit(main())
