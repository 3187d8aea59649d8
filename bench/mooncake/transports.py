"""Measure the speed of every KV transport between two processes of this machine.

One process provides KV memory. The other process writes a prompt's KV into the memory layer by layer, as in
a hand-off, and reads the KV back. A prompt's KV is either contiguous or spread over every second block of the
memory. Network transports run over loopback. Reported write speeds are medians over rounds. A transport
without its optional package is skipped. Exits with 1 if the KV read differs from the KV written.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ConfigurationError
from twofold.handoff import Lease
from twofold.reporting.output import json_text
from twofold.security.key import write_key
from twofold.security.network import HostNetwork
from twofold.transport.base import Connection, KvCacheSpec, MemoryDescriptor
from twofold.transport.pooled import PooledTransport, load_transport

# Sizes of an 8B model with fewer layers: 64 KiB per block and layer.
LAYOUT = KvLayout(layers=(LayerShape(8, 128, 128),) * 4, block_size=16, dtype="bfloat16", itemsize=2)
BLOCKS = 512
PROMPTS = (512, 4096)
WAYS = {
    "shared_memory": ("shared_memory", {}),
    "nixl": ("nixl", {}),
    "nixl, TCP": ("nixl", {"UCX_TLS": "tcp"}),
    "mooncake, TCP": ("mooncake", {"MC_FORCE_TCP": "1"}),
    "curve": ("curve", {}),
}


class Case(msgspec.Struct, frozen=True):
    """KV of one prompt, in contiguous blocks (`apart` = 1) or in every other block (`apart` = 2)."""

    tokens: int
    apart: int

    @property
    def blocks(self) -> list[int]:
        return list(range(0, self.apart * self.tokens // LAYOUT.block_size, self.apart))

    @property
    def name(self) -> str:
        return f"{self.tokens:,} tokens, " + ("one run" if self.apart == 1 else "scattered")


CASES = [Case(tokens, apart) for apart in (1, 2) for tokens in PROMPTS]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    way: str
    case: Case
    bytes_per_s: float
    whole: bool


def make(way: str, role: str, key: Path) -> PooledTransport:
    """Create the transport of one process (`role`: prefill or decode)."""
    name, settings = WAYS[way]
    os.environ.update(settings)  # for the transport's library, only during this call
    network = HostNetwork(host=role, address="127.0.0.1", key_file=str(key), controller="tcp://127.0.0.1:1")
    try:
        cache = KvCacheSpec(role, 1 if role == "prefill" else 2, LAYOUT, BLOCKS, network=network)
        return load_transport(name)(cache)
    finally:
        for setting in settings:
            del os.environ[setting]


def lend(way: str, key: Path) -> None:
    """Provide this process's KV memory to the measuring process."""
    transport = make(way, "decode", key)
    blocks = tuple(range(BLOCKS))
    transport.granted(
        Lease(request_id="r", source="prefill", instance="decode", epoch=2, blocks=blocks, deadline_s=0.0)
    )
    os.write(1, msgspec.json.encode(transport.descriptor) + b"\n")
    sys.stdin.read()


@contextmanager
def joined(way: str, key: Path) -> Iterator[tuple[PooledTransport, Connection]]:
    """Start a process that provides KV memory, and yield a connection to it."""
    transport = make(way, "prefill", key)
    command = [sys.executable, __file__, "--lend", way, str(key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lender:
        try:
            assert lender.stdout is not None  # noqa: S101  (created as a pipe above)
            peer = msgspec.json.decode(lender.stdout.readline(), type=MemoryDescriptor)
            connection = transport.connect(peer)
            for layer in range(len(LAYOUT.layers)):
                for part in transport.engine_pool.block_rows(layer):
                    part.random_(0, 256)
            yield transport, connection
            connection.close()
        finally:
            lender.kill()
    transport.close()


def measure(way: str, case: Case, transport: PooledTransport, connection: Connection) -> Figure:
    """Measure the speed of writing the KV of one prompt, and verify the KV by reading it back."""
    blocks, layers = case.blocks, range(len(LAYOUT.layers))
    parts = [part for layer in layers for part in transport.engine_pool.block_rows(layer)]
    for part in parts:
        part[blocks] += 1  # change the data, so that stale contents are detected
    sent = [part[blocks] for part in parts]
    began_s = time.perf_counter()
    moved = sum(connection.write(range(layer, layer + 1), blocks, blocks) for layer in layers)
    took_s = time.perf_counter() - began_s
    for part in parts:
        part[blocks] = 0
    connection.read(layers, blocks, blocks)
    whole = all(torch.equal(part[blocks], rows) for part, rows in zip(parts, sent, strict=True))
    return Figure(way=way, case=case, bytes_per_s=moved / took_s, whole=whole)


def table(figures: list[Figure]) -> Table:
    drawn = Table(title="KV written between processes, GB/s (relative to shared memory)", title_justify="left")
    drawn.add_column("transport")
    for case in CASES:
        drawn.add_column(case.name, justify="right", no_wrap=True)
    medians = {
        (way, case): statistics.median(each.bytes_per_s for each in figures if (each.way, each.case) == (way, case))
        for way in dict.fromkeys(each.way for each in figures)
        for case in CASES
    }
    for way in dict.fromkeys(way for way, _ in medians):
        cells = [(medians[way, case], medians["shared_memory", case]) for case in CASES]
        drawn.add_row(way, *(f"{speed / 1e9:.2f} ({speed / shared:.0%})" for speed, shared in cells))
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--lend", nargs=2, metavar=("WAY", "KEY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    if given.lend is not None:
        lend(given.lend[0], Path(given.lend[1]))
        return
    figures: list[Figure] = []
    with ExitStack() as stack:
        key = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-transports-"))) / "key"
        write_key(key)
        ends = {}
        for way in WAYS:
            try:
                ends[way] = stack.enter_context(joined(way, key))
            except ConfigurationError as error:
                print(f"{way} is skipped: {error}")
        for number in range(given.rounds + 1):
            for way, (transport, connection) in ends.items():
                found = [measure(way, case, transport, connection) for case in CASES]
                figures += found if number else []  # the first round is a warm-up
    Console(width=140).print(table(figures))
    if given.json is not None:
        given.json.write_text(json_text(figures), "utf-8")
    wrong = [each for each in figures if not each.whole]
    for each in wrong:
        print(f"✗ {each.way}, {each.case.name}: the data read differs from the data written")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
