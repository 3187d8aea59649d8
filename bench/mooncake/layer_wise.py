"""Measure the overlap of loading, computing and storing a prompt's KV layer by layer.

One process runs a worker's engine and scheduler, connected to a KV store. The prompt's prefix is loaded from
the store. The rest of the prompt is computed and stored. The overlapped time, from arrival until the KV is
stored, is compared with separate times of loading, computing and storing. Copies run at full speed, and then
throttled to `--throttle` GB/s.

The script exits with 1 if one of these checks fails:

- The overlapped time is at most 10% above the longest separate time.
- The overlapped time differs by at most 10% from the prediction of `performance/reuse.py`.
- The first token is the same with and without overlap.
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq
from rich.console import Console
from rich.table import Table

from twofold.engine.model_factory import ModelSpec, create_model
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel, load_model
from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.performance.reuse import layer_wise
from twofold.reporting.output import json_text
from twofold.reporting.summary import NOTHING
from twofold.request import Request, SamplingParams
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.serving.config import EngineConfig, ServiceConfig, StoreConfig
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import Message, StepDone
from twofold.serving.store.client import BlockCopier, StoreClient
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.server import run_store
from twofold.serving.worker.batch_loop import BatchLoop
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.prefix_store import StoredPrefixes
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import KvLanding, SharedWorkerState, TokenSequence
from twofold.transport.base import KvCacheSpec
from twofold.transport.memory import SlotMemory
from twofold.transport.shared_memory import SharedMemoryTransport

GOAL = 0.1
BLOCK = 16
MODEL = ModelSpec(hidden_size=256, layers=32, heads=4, kv_heads=2, max_model_len=8192)
STORE_PROMPTS = 8  # store capacity in longest prompts


class Lanes(msgspec.Struct, kw_only=True):
    """Seconds to load, compute and store a prompt's KV, in each round of the measurement.

    `load_s`, `compute_s` and `store_s` are the times of the separate steps. `overlapped_s` is the total time
    when the steps overlap.
    """

    layers: int
    prompt_tokens: int
    reused_tokens: int
    bytes_per_s: float | None
    load_s: list[float] = []
    compute_s: list[float] = []
    store_s: list[float] = []
    overlapped_s: list[float] = []

    def over_longest(self) -> float:
        """Return the total time with overlap, divided by the longest of the load, compute and store times."""
        lanes = zip(self.load_s, self.compute_s, self.store_s, strict=True)
        return _ratio(self.overlapped_s, [max(lane) for lane in lanes])

    def over_predicted(self) -> float:
        """Return the measured total time with overlap, divided by the predicted total time with overlap."""
        lanes = zip(self.load_s, self.compute_s, self.store_s, strict=True)
        return _ratio(self.overlapped_s, [layer_wise(self.layers, *lane) for lane in lanes])

    def holds(self) -> bool:
        return self.over_longest() <= 1 + GOAL and abs(self.over_predicted() - 1) <= GOAL


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


class Throttled:
    """Block copier with a speed limit in bytes/s."""

    def __init__(self, copier: BlockCopier, bytes_per_layer: int) -> None:
        self.layers, self.span = copier.layers, copier.span
        self.bytes_per_s: float | None = None
        self._copier, self._bytes = copier, bytes_per_layer  # per block and layer

    def read(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._take(partial(self._copier.read, memory, layer, slots, blocks), len(blocks))

    def write(self, memory: SlotMemory, layer: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._take(partial(self._copier.write, memory, layer, slots, blocks), len(blocks))

    def _take(self, copy: Callable[[], None], blocks: int) -> None:
        began_s = time.perf_counter()
        copy()
        if self.bytes_per_s is not None:
            left_s = began_s + blocks * self._bytes / self.bytes_per_s - time.perf_counter()
            time.sleep(max(0.0, left_s))


class Answer(Outbox):
    """Outbox stub that records the first token of a prompt."""

    token_id = reused_tokens = 0
    ends: Callable[[], None]

    def send(self, address: str, message: Message) -> None:
        if isinstance(message, StepDone) and message.tokens:
            _, token = message.tokens[0]
            self.token_id, self.reused_tokens = token.token_id, token.reused_tokens
            self.ends()


class Worker:
    """Worker that runs one prompt at a time, with or without a KV store."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], model: LoadedModel, tokens: int) -> None:
        layout, blocks = model.layout(BLOCK), tokens // BLOCK
        transport = SharedMemoryTransport(KvCacheSpec("prefill-0", 1, layout, blocks))
        pool = transport.engine_pool
        for layer in range(len(layout.layers)):
            for part in (pool.keys(layer), pool.values(layer)):
                part.zero_()  # page faults happen here
        self.shared = PrefixBlockAllocator(BLOCK, PrefixCache(blocks, create_eviction("lru")))
        leases = LeaseTable(self.shared, "prefill-0", 1, 10.0)
        self.copier = Throttled(PoolCopier(pool), layout.layer_bytes_per_block(0))
        self.answer = Answer(context)
        self.answer.ends = self._end
        self._scheduler = InstanceScheduler(BATCHERS["mixed"](8192, 16), self.shared, leases, 16)
        self.state = SharedWorkerState(
            instance="prefill-0",
            scheduler=self._scheduler,
            sender=HandoffSender(len(layout.layers), time.monotonic),
            receiver=HandoffReceiver(),
            landing=KvLanding(),
            peers=PeerDirectory(transport),
            outbox=self.answer,
            controller="",
        )
        self._iterations = BatchLoop(self.state, self._scheduler, TorchEngine(model, pool), frozenset())
        self._prompts = 0

    def use(self, client: StoreClient) -> None:
        """Connect the worker to a KV store."""
        self.state.prefixes = StoredPrefixes(self.state, self._scheduler, client, self.copier)
        self.state.prefixes.start()

    def prefill(self, tokens: list[int], keys: Sequence[bytes]) -> float:
        """Run a prompt. Return the seconds from arrival until its first token is computed and its KV is stored."""
        state, began_s = self.state, time.perf_counter()
        self._prompts += 1
        request = Request(
            id=str(self._prompts), arrival_s=0.0, prompt_tokens=len(tokens), output_tokens=1, prefix_blocks=tuple(keys)
        )
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        queue = partial(state.scheduler.submit, request, decodes_here=True)
        with state.changed:
            state.closing = False
            state.sequences[request.id] = TokenSequence(sampling, token_ids=tokens, block_keys=list(keys))
            state.prefixes.bring(request.id, request.prefix_blocks, queue)
        self._iterations.run()
        with state.changed:
            state.changed.wait_for(lambda: not self.shared.num_in_flight)
        return time.perf_counter() - began_s

    def _end(self) -> None:
        self.state.closing = True


class Bench:
    """Comparison of two workers: one has prompt prefixes in its memory, the other loads them from the KV store."""

    def __init__(self, model: LoadedModel, client: StoreClient, longest: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._model, self._client = model, client
        self._has, self._loads = (Worker(context, model, 3 * longest) for _ in range(2))
        self._loads.use(client)
        self._draw = random.Random(0)
        self._fill_store(longest)

    def measure(self, prompt_tokens: int, share: float, rounds: int, throttle: float | None) -> list[Lanes]:
        """Measure how long the KV of a partly cached prompt takes to load, compute and store.

        The measurement runs first with copies at full speed, then with throttled copies.
        """
        reused = int(prompt_tokens * share) // BLOCK * BLOCK
        begin, begin_keys = self._tokens(reused), self._keys(reused)
        self._has.prefill(begin, begin_keys)
        found: list[Lanes] = []
        for slowed in (False, True):
            lanes = Lanes(
                layers=len(self._model.layers), prompt_tokens=prompt_tokens, reused_tokens=reused, bytes_per_s=None
            )
            if slowed:
                moved = reused * self._model.layout(BLOCK).bytes_per_token
                lanes.bytes_per_s = throttle or moved / statistics.median(found[0].compute_s)
            for number in range(rounds + 1):  # the first is a warm-up
                times = self._round(begin, begin_keys, prompt_tokens - reused, lanes.bytes_per_s)
                if number:
                    for all_times, taken_s in zip(
                        (lanes.load_s, lanes.compute_s, lanes.store_s, lanes.overlapped_s), times, strict=True
                    ):
                        all_times.append(taken_s)
            found.append(lanes)
        return found

    def _round(
        self, begin: list[int], begin_keys: Sequence[bytes], rest: int, bytes_per_s: float | None
    ) -> tuple[float, float, float, float]:
        has, loads = self._has, self._loads
        blocks = self._blocks(begin_keys)
        # New keys, so that no block of an earlier round is reused.
        stored_keys, end, end_keys = self._keys(len(begin)), self._tokens(rest), self._keys(rest)
        has.copier.bytes_per_s = loads.copier.bytes_per_s = None
        self._client.store(stored_keys, has.copier, blocks)
        has.copier.bytes_per_s = loads.copier.bytes_per_s = bytes_per_s
        overlapped_s = loads.prefill([*begin, *end], [*stored_keys, *end_keys])
        token, reused = loads.answer.token_id, loads.answer.reused_tokens
        compute_s = has.prefill([*begin, *end], [*begin_keys, *end_keys])
        put = self._client.lookup([*stored_keys, *end_keys]).blocks
        if token != has.answer.token_id or reused != len(begin) or put < len(stored_keys) + len(end_keys):
            raise SystemExit("FAILED: incomplete load or store, or another first token")
        with loads.state.changed:
            scratch = loads.shared.allocate("scratch", len(begin))
            into = loads.shared.blocks_of(scratch)
        load_s = _timed(lambda: self._client.load(stored_keys, loads.copier, into))
        with loads.state.changed:
            loads.shared.release(scratch)
        ends = self._blocks([*begin_keys, *end_keys])[len(begin_keys) :]
        store_s = _timed(lambda: self._client.store(self._keys(rest), has.copier, ends))
        return load_s, compute_s, store_s, overlapped_s

    def _blocks(self, keys: Sequence[bytes]) -> Sequence[int]:
        grant, _ = self._has.shared.allocate_after("bench", len(keys) * BLOCK, keys)
        blocks = tuple(self._has.shared.blocks_of(grant))
        self._has.shared.release(grant)
        return blocks

    def _fill_store(self, longest: int) -> None:
        blocks = range(longest // BLOCK)
        # Write to all memory of the store now, so that no page faults occur during the measurement.
        for _ in range(STORE_PROMPTS + 1):
            self._client.store(self._keys(longest), self._has.copier, blocks)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(300, self._model.vocab_size) for _ in range(count)]

    def _keys(self, tokens: int) -> list[bytes]:
        return [self._draw.randbytes(16) for _ in range(tokens // BLOCK)]


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def running_client(stack: ExitStack, folder: Path, model: LoadedModel, longest: int) -> StoreClient:
    """Start a KV store process and return a client of the store."""
    layout = model.layout(BLOCK)
    config = ServiceConfig(
        engine=EngineConfig(model="none"),
        workers=(),
        run_dir=str(folder),
        store=StoreConfig(memory_bytes=STORE_PROMPTS * longest * layout.bytes_per_token),
    )
    forks = multiprocessing.get_context("forkserver")
    process = forks.Process(target=run_store, args=(config, "layer-wise", layout))
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = StoreClient(context, f"ipc://{folder}/client-{os.getpid()}.sock", config.store_inbox)
    if not client.wait(60.0):
        raise SystemExit("FAILED: the store did not start")
    return client


def table(found: Sequence[Lanes]) -> Table:
    drawn = Table(title="Seconds alone and overlapped; ratios to the longest and to the prediction")
    for heading in ("prompt", "reused", "GB/s", "load", "compute", "store", "all", "longest", "model"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for lanes in found:
        times = (lanes.load_s, lanes.compute_s, lanes.store_s, lanes.overlapped_s)
        rate = NOTHING if lanes.bytes_per_s is None else f"{lanes.bytes_per_s / 1e9:.3f}"
        drawn.add_row(
            f"{lanes.prompt_tokens:,}",
            f"{lanes.reused_tokens:,}",
            rate,
            *(f"{statistics.median(lane):.3f}" for lane in times),
            f"{lanes.over_longest():.1%}",
            f"{lanes.over_predicted():.1%}",
        )
    return drawn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: one of 32 layers is created)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="prompt tokens")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9], help="shares of reused tokens")
    parser.add_argument("--throttle", type=float, help="GB/s of throttled copies (default: as slow as compute)")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to stop the store
    torch.set_num_threads(1)  # leaves the other core to copies
    throttle = None if given.throttle is None else given.throttle * 1e9
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twofold-layers-")))
        if given.model is None:
            create_model(folder / "model", MODEL)
        model = load_model(given.model or folder / "model", dtype="float32")
        longest = max(given.lengths)
        bench = Bench(model, running_client(stack, folder, model, longest), longest)
        found = [
            lanes
            for length in given.lengths
            for share in given.shares
            for lanes in bench.measure(length, share, given.rounds, throttle)
        ]
    Console().print(table(found))
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    holds = all(lanes.holds() for lanes in found)
    print(f"within {GOAL:.0%} of the longest and of the prediction: {'yes' if holds else 'NO'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
