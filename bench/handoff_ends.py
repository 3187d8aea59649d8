"""Script of the prefill process and of the decode process that handoff.py starts.

Requests and replies are JSON lines on stdin and stdout.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec
import torch

from twofold.engine.base import SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.handoff import HandoffMode, Lease
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.request import SamplingParams
from twofold.serving.worker.peers import link_speed
from twofold.serving.worker.process import prefill_speed
from twofold.serving.worker.sender import HandoffSender, OutgoingHandoff, layers_per_transfer
from twofold.transport.base import KvCacheSpec, MemoryDescriptor
from twofold.transport.nixl import NixlTransport

BLOCK_SIZE = 16


class StartupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measured link and prefill speed, and the model's KV size and layer count."""

    link: LinkSpeed
    prefill: PrefillSpeed
    kv_bytes_per_token: int
    layers: int


class HandoffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to prefill a prompt of `tokens` tokens and to hand it off in a given mode."""

    tokens: int
    mode: HandoffMode


class HandoffTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds: prefill, whole hand-off, and the part of the hand-off after the first token."""

    prefill_s: float
    transfer_s: float
    visible_s: float


def decode_end(model: Path, blocks: int, answers: TextIO) -> None:
    """Provide KV memory to the prefill process until stdin closes."""
    layout = load_model(model, dtype="float32").layout(BLOCK_SIZE)
    transport = NixlTransport(KvCacheSpec("decode-0", 1, layout, blocks))
    _answer(answers, transport.descriptor)
    sys.stdin.read()


def prefill_end(model: Path, blocks: int, answers: TextIO) -> None:
    """Connect to the decode process and serve the requests on stdin."""
    loaded = load_model(model, dtype="float32")
    transport = NixlTransport(KvCacheSpec("prefill-0", 1, loaded.layout(BLOCK_SIZE), blocks))
    engine = TorchEngine(loaded, transport.engine_pool)
    peer = msgspec.json.decode(sys.stdin.readline(), type=MemoryDescriptor)
    connection = transport.connect(peer)
    runs = PrefillSide(engine, connection.write)
    runs.once(HandoffRequest(tokens=blocks * BLOCK_SIZE, mode=HandoffMode.SERIALIZED))  # warm up all memory
    layout = engine.layout
    facts = StartupFacts(
        link=link_speed(connection),
        prefill=prefill_speed(engine, 2048),
        kv_bytes_per_token=layout.bytes_per_token,
        layers=len(layout.layers),
    )
    _answer(answers, facts)
    for line in sys.stdin:
        _answer(answers, runs.once(msgspec.json.decode(line, type=HandoffRequest)))


class PrefillSide:
    def __init__(self, engine: TorchEngine, write: Callable[[range, list[int], list[int]], int]) -> None:
        self._engine, self._write = engine, write
        self._over = threading.Event()
        self._started_s = self._ended_s = 0.0
        layers = len(engine.layout.layers)
        self._sender = HandoffSender(layers, time.perf_counter, layers_per_transfer(engine.layout))
        self._sender.start(self._write_layers, lambda _: None, self._ended)

    def once(self, ask: HandoffRequest) -> HandoffTimes:
        blocks = list(range(-(-ask.tokens // BLOCK_SIZE)))
        self._over.clear()
        self._sender.expect("r", "decode-0", ask.mode)
        lease = Lease(
            request_id="r", source="prefill-0", instance="decode-0", epoch=1, blocks=tuple(blocks), deadline_s=0.0
        )
        self._sender.lease(lease)
        self._sender.begin("r", blocks)
        step = SequenceStep(
            "r", list(range(10, 10 + ask.tokens)), 0, blocks, SamplingParams(max_tokens=1, temperature=0.0)
        )
        began_s = time.perf_counter()
        (first,) = self._engine.run([step], lambda layer: self._sender.layer_computed(["r"], layer))
        token_s = time.perf_counter()
        assert first is not None  # noqa: S101  (it is sampled; for the type checker)
        self._sender.prefilled("r", [first.token_id])
        self._over.wait()
        return HandoffTimes(
            prefill_s=token_s - began_s,
            transfer_s=self._ended_s - self._started_s,
            visible_s=max(0.0, self._ended_s - token_s),
        )

    def _write_layers(self, outgoing: OutgoingHandoff, layers: range) -> int:
        blocks = list(outgoing.blocks)
        return self._write(layers, blocks, blocks)

    def _ended(self, outgoing: OutgoingHandoff) -> None:
        self._ended_s, self._started_s = time.perf_counter(), outgoing.started_s or 0.0
        self._over.set()


def _answer(answers: TextIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message).decode() + "\n")
    answers.flush()


def main() -> None:
    role, model, blocks, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the replies
    {"prefill": prefill_end, "decode": decode_end}[role](Path(model), int(blocks), answers)


if __name__ == "__main__":
    main()
