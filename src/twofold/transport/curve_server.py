"""What travels between the two ends of transport `curve`: questions, answers, and the bytes of KV blocks with either.

The bytes are one frame for the keys and one for the values of each layer, the blocks one after the other in each.

Which blocks may be written for peers on other hosts just now.

The thread of transport `curve` that peers on other hosts ask to write and read the cache for them.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
import zmq

from twofold.engine.torch.pool import KvPool, block_runs
from twofold.security.guard import ENCRYPTION_BYTES, Guard
from twofold.transport.base import SCRATCH_BYTES

Bytes = bytes | memoryview


class WriteBlocks(msgspec.Struct, frozen=True, tag=True):
    """Put these layers of `source`'s, whose bytes come along, into these blocks of this life of the peer."""

    source: str
    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Answer with these layers of these blocks."""

    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Only answer; bytes come along that mean nothing."""

    epoch: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done; for `ReadBlocks`, the bytes come along."""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """It is not done, for this reason."""

    reason: str


CurveRequest = WriteBlocks | ReadBlocks | Probe
CurveReply = Done | Denied


def gather(pool: KvPool, layers: range, blocks: Sequence[int]) -> list[Bytes]:
    """The bytes of these layers of these blocks, copied."""
    take = torch.tensor(blocks, device=pool.device)
    return [
        part.index_select(0, take).cpu().numpy().reshape(-1).data
        for layer in layers
        for part in pool.block_rows(layer)
    ]


def scatter(pool: KvPool, layers: range, blocks: Sequence[int], frames: Sequence[zmq.Frame]) -> None:
    """Write what `gather` made elsewhere into blocks of a pool in host memory; raises ValueError if it does not fit."""
    parts = [part.numpy() for layer in layers for part in pool.block_rows(layer)]
    rows = [
        np.frombuffer(frame.buffer, dtype=np.uint8).reshape(len(blocks), part.shape[1])
        for part, frame in zip(parts, frames, strict=True)
    ]
    runs = block_runs(range(len(blocks)), blocks)
    for part, row in zip(parts, rows, strict=True):
        for start, target, count in runs:
            part[target : target + count] = row[start : start + count]


class LeaseGate:
    """The blocks of every lease that stands, by who holds it.

    Whoever writes goes through the gate for as long as it writes, and nobody closes it meanwhile: when `close` has
    returned, nothing more is written under that lease.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[str, str], frozenset[int]] = {}
        self._lock = threading.Lock()

    def open(self, source: str, request_id: str, blocks: Sequence[int]) -> None:
        with self._lock:
            self._leases[source, request_id] = frozenset(blocks)

    def close(self, source: str, request_id: str) -> None:
        with self._lock:
            self._leases.pop((source, request_id), None)

    @contextmanager
    def passing(self, source: str, blocks: Sequence[int]) -> Iterator[bool]:
        """Whether `source` may write these blocks, for as long as the context lasts: all under one lease, or none."""
        with self._lock:
            yield any(
                holder == source and leased.issuperset(blocks) for (holder, _), leased in self._leases.items()
            )


log = logging.getLogger(__name__)

_LOOK_MS = 200


class CurveServer:
    """Answers at `address`, one question after the other, on the pool that lies in host memory."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        guard: Guard,
        host_address: str,
        epoch: int,
        pool: KvPool,
        gate: LeaseGate,
    ) -> None:
        self._epoch, self._pool, self._gate = epoch, pool, gate
        self._socket = context.socket(zmq.ROUTER)
        guard.listen(self._socket, host_address, bulk=True)
        largest = max(pool.layout.layer_bytes_per_block(layer) for layer in range(len(pool.layout.layers)))
        self._socket.setsockopt(
            zmq.MAXMSGSIZE, max(SCRATCH_BYTES, largest * pool.num_blocks) + ENCRYPTION_BYTES
        )
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that calls again is the same peer
        self._socket.bind(f"tcp://{host_address}:*")
        self.address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self._questions = msgspec.msgpack.Decoder[CurveRequest](CurveRequest)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(_LOOK_MS):
                caller, number, *frames = self._socket.recv_multipart(copy=False)
                answer, data = self._answer(frames)
                self._socket.send_multipart(
                    [caller, number, msgspec.msgpack.encode(answer), *data], copy=False
                )

    def _answer(self, frames: list[zmq.Frame]) -> tuple[CurveReply, list[Bytes]]:
        try:
            question = self._questions.decode(frames[0].buffer)
            if question.epoch != self._epoch:
                return Denied(f"it is of epoch {question.epoch}, which is over"), []
            match question:
                case WriteBlocks():
                    return self._write(question, frames[1:]), []
                case ReadBlocks(layers=layers, blocks=blocks):
                    return Done(), gather(self._pool, range(*layers), blocks)
                case _:
                    return Done(), []
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            log.warning("a question about KV was not understood (%s)", type(error).__name__)
            return Denied("it was not understood"), []

    def _write(self, question: WriteBlocks, frames: list[zmq.Frame]) -> CurveReply:
        with self._gate.passing(question.source, question.blocks) as allowed:
            if not allowed:
                return Denied(f"no lease of {question.source} is for these blocks")
            scatter(self._pool, range(*question.layers), question.blocks, frames)
        return Done()
