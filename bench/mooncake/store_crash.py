"""Crash-test a host's KV store: kill it during puts and gets, and verify every block that is read.

Client processes behave like workers: they load a prompt's prefix from the store, compute the other blocks and store
them. Each round kills (SIGKILL) and restarts the store, alternately during a get and a put; every few rounds a client
is killed too. Disk usage must stay within capacity. Exits with 1 on any failure.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import Structure, c_long
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import zmq

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.serving.config import EngineConfig, ServiceConfig, StoreConfig
from twofold.serving.store.client import StoreClient
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.disk import DiskBlocks
from twofold.serving.store.server import contents_of, run_store

LAYOUT = KvLayout((LayerShape(4, 64, 64),) * 8, block_size=16, dtype="float32", itemsize=4)
MEMORY_BLOCKS, DISK_BLOCKS = 64, 192
PROMPTS, PROMPT_BLOCKS, SHARED_BLOCKS = 24, 24, 8  # prompts share a prefix
WAIT_S = 60.0

IDLE, GETS, PUTS = 0, 1, 2


class Tally(Structure):
    """Counters of one client, in shared memory."""

    _fields_ = [
        ("doing", c_long),
        ("requests", c_long),
        ("loaded", c_long),
        ("computed", c_long),
        ("stored", c_long),
        ("torn", c_long),
        ("damaged", c_long),
        ("broken_gets", c_long),  # interrupted by the store's death
        ("broken_puts", c_long),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twofold-crash-") as directory:
        sys.exit(Crashes(Path(directory), options.rounds, options.clients, options.seed).run())


class Crashes:
    """Crash test: clients use a KV store while it is killed and restarted."""

    def __init__(self, directory: Path, rounds: int, clients: int, seed: int) -> None:
        self._directory, self._rounds = directory, rounds
        self._draw = random.Random(seed)
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["twofold.serving.store.server", "twofold.serving.store.copier"])
        self._config = ServiceConfig(
            engine=EngineConfig(model="none"),
            workers=(),
            run_dir=str(directory),
            store=StoreConfig(
                memory_bytes=MEMORY_BLOCKS * LAYOUT.bytes_per_block,
                disk_dir=str(directory / "disk"),
                disk_bytes=(2 << 20) + DISK_BLOCKS * (LAYOUT.bytes_per_block + 256),
            ),
        )
        self._tallies: Any = [self._context.RawValue(Tally) for _ in range(clients)]
        self._done: list[Tally] = []  # tallies of killed clients
        self._lives = 0
        self._most_bytes = 0
        self._back_s: list[float] = []

    def run(self) -> int:
        store = self._start_store()
        clients = [self._start_client(place) for place in range(len(self._tallies))]
        kills = {GETS: 0, PUTS: 0}
        try:
            for number in range(self._rounds):
                what = (GETS, PUTS)[number % 2]
                self._let_work()
                if number % 5 == 4:
                    self._replace_client(clients, number // 5 % len(clients))
                self._catch(what)
                store.kill()
                store.join()
                kills[what] += 1
                self._look_at_disk()
                store = self._start_store()
            self._let_work()
        finally:
            for process in (store, *clients):
                process.kill()
                process.join()
        return self._verdict(kills)

    # -- processes ----------------------------------------------------------------------------------------------

    def _start_store(self) -> ForkServerProcess:
        process = self._context.Process(target=run_store, args=(self._config, "crash", LAYOUT))
        process.start()
        return process

    def _start_client(self, place: int) -> ForkServerProcess:
        self._lives += 1
        arguments = (str(self._directory), self._lives, self._tallies[place])
        process = self._context.Process(target=use, args=arguments)
        process.start()
        return process

    def _replace_client(self, clients: list[ForkServerProcess], place: int) -> None:
        _until(lambda: self._tallies[place].doing == PUTS)
        clients[place].kill()
        clients[place].join()
        self._done.append(Tally.from_buffer_copy(self._tallies[place]))
        self._tallies[place] = self._context.RawValue(Tally)
        clients[place] = self._start_client(place)

    # -- the right moment ---------------------------------------------------------------------------------------

    def _let_work(self) -> None:
        """Wait until every client has loaded and stored another block."""
        before, began_s = [(t.loaded, t.stored) for t in self._tallies], time.monotonic()
        _until(
            lambda: all(
                tally.loaded > old[0] and tally.stored > old[1]
                for tally, old in zip(self._tallies, before, strict=True)
            ),
            0.005,
        )
        self._back_s.append(time.monotonic() - began_s)
        time.sleep(self._draw.uniform(0.0, 0.1))

    def _catch(self, what: int) -> None:
        """Wait until a client performs the operation `what`, then wait for a random time of up to 3 ms."""
        _until(lambda: any(tally.doing == what for tally in self._tallies))
        until_s = time.monotonic() + self._draw.uniform(0.0, 0.003)
        while time.monotonic() < until_s:
            pass

    # -- outcome ----------------------------------------------------------------------------------------

    def _look_at_disk(self) -> None:
        sizes = [path.stat().st_size for path in (self._directory / "disk").iterdir()]
        self._most_bytes = max(self._most_bytes, sum(sizes))

    def _verdict(self, kills: dict[int, int]) -> int:
        total = {name: sum(getattr(t, name) for t in (*self._tallies, *self._done)) for name, *_ in Tally._fields_}
        store = self._config.store
        assert store is not None  # noqa: S101  (created above; for the type checker)
        whole, recovered = read_all(Path(self._directory / "disk"), store.disk_bytes)
        print(f"store killed             {kills[GETS]} times during a get, {kills[PUTS]} times during a put")
        print(f"interrupted              {total['broken_gets']} gets, {total['broken_puts']} puts")
        print(f"clients killed           {len(self._done)}")
        print(f"requests                 {total['requests']:,}, all complete")
        print(
            f"blocks                   {total['loaded']:,} loaded, {total['computed']:,} computed, "
            f"{total['stored']:,} put"
        )
        print(f"torn blocks read         {total['torn']} (checksum mismatches: {total['damaged']})")
        print(f"disk after the last kill {whole} of {recovered} blocks intact")
        print(f"max bytes on disk        {self._most_bytes:,} of {store.disk_bytes:,}")
        print(f"all clients active after {sorted(self._back_s)[len(self._back_s) // 2]:.2f} s (median)")
        right = (
            not total["torn"]
            and not total["damaged"]
            and whole == recovered > 0
            and self._most_bytes <= store.disk_bytes
            and total["broken_gets"] > 0
            and total["broken_puts"] > 0
        )
        print("passed" if right else "FAILED")
        return 0 if right else 1


def _until(happens: Callable[[], bool], pause_s: float = 0.0) -> None:
    began_s = time.monotonic()
    while not happens():
        time.sleep(pause_s)
        if time.monotonic() - began_s > WAIT_S:
            raise SystemExit("FAILED: the clients stopped using the store")


# -- what clients do ------------------------------------------------------------------------------------------------


def use(directory: str, life: int, tally: Tally) -> None:
    """Run a client that loads and stores the KV of random prompts until the crash test kills the client."""
    torch.set_num_threads(1)
    draw = random.Random(life)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = StoreClient(
        context, f"ipc://{directory}/client-{os.getpid()}.sock", f"ipc://{directory}/store.sock", verify=True
    )
    pool = KvPool(LAYOUT, PROMPT_BLOCKS)
    copier, blocks = PoolCopier(pool), range(PROMPT_BLOCKS)
    while True:
        prompt = draw.randrange(PROMPTS)
        keys = [key_of(prompt, index) for index in range(PROMPT_BLOCKS)]
        epoch, tally.doing = client.epoch, GETS
        count = client.load(keys, copier, blocks)
        tally.doing = IDLE
        tally.broken_gets += epoch is not None and client.epoch != epoch
        tally.torn += sum(not holds(pool, block, keys[block]) for block in range(count))
        for block in range(count, PROMPT_BLOCKS):
            fill(pool, block, keys[block])
        epoch, tally.doing = client.epoch, PUTS
        stored = client.store(keys, copier, blocks)
        tally.doing = IDLE
        tally.broken_puts += epoch is not None and client.epoch != epoch
        # Expected contents, independent of the loaded share.
        tally.torn += sum(not holds(pool, block, keys[block]) for block in blocks)
        tally.loaded, tally.stored = tally.loaded + count, tally.stored + stored
        tally.computed += PROMPT_BLOCKS - count
        tally.damaged = client.damaged
        tally.requests += 1


def key_of(prompt: int, index: int) -> bytes:
    return bytes([0 if index < SHARED_BLOCKS else 1 + prompt, index]) * 8


def pattern(key: bytes, layer: int) -> torch.Tensor:
    """Return the expected contents of one layer of a block."""
    size = LAYOUT.layer_bytes_per_block(layer) // 8
    return torch.arange(size) + (int.from_bytes(key[:2], "big") * len(LAYOUT.layers) + layer) * size


def fill(pool: KvPool, block: int, key: bytes) -> None:
    for layer in range(len(LAYOUT.layers)):
        whole, start = pattern(key, layer).view(torch.uint8), 0
        for rows in pool.block_rows(layer):
            rows[block] = whole[start : start + rows.shape[1]]
            start += rows.shape[1]


def holds(pool: KvPool, block: int, key: bytes) -> bool:
    return all(
        torch.equal(torch.cat([rows[block] for rows in pool.block_rows(layer)]), pattern(key, layer).view(torch.uint8))
        for layer in range(len(LAYOUT.layers))
    )


def read_all(directory: Path, capacity_bytes: int) -> tuple[int, int]:
    """Return the number of intact blocks on disk, and the number of all blocks on disk."""
    disk = DiskBlocks(directory, capacity_bytes, LAYOUT.bytes_per_block, contents_of("crash", LAYOUT))
    into = memoryview(bytearray(LAYOUT.bytes_per_block))
    whole = 0
    for key, _ in disk.recovered:
        expected = b"".join(pattern(key, layer).numpy().tobytes() for layer in range(len(LAYOUT.layers)))
        whole += disk.read(key, into) is not None and bytes(into) == expected
    disk.close()
    return whole, len(disk.recovered)


if __name__ == "__main__":
    main()
