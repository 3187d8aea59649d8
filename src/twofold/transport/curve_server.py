"""Server of the transport `curve`: messages, lease checks, and the thread that serves remote peers.

KV data follows a message as two frames per layer: the keys and the values of all blocks.
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
from twofold.security.guard import ENCRYPTION_BYTES, Context, Guard
from twofold.transport.base import SCRATCH_BYTES

Bytes = bytes | memoryview


class WriteBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request to write the attached data into leased blocks."""

    source: str
    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Request to read the given layers of the given blocks."""

    epoch: int
    layers: tuple[int, int]
    blocks: tuple[int, ...]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Request that measures the connection. The server ignores the attached bytes."""

    epoch: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Reply to a request that succeeded. A reply to `ReadBlocks` has the KV data attached."""


class Denied(msgspec.Struct, frozen=True, tag=True):
    """Reply to a request that the server did not execute."""

    reason: str


CurveRequest = WriteBlocks | ReadBlocks | Probe
CurveReply = Done | Denied


def gather(pool: KvPool, layers: range, blocks: Sequence[int]) -> list[Bytes]:
    """Copy the given layers of `blocks` into buffers, two per layer: keys and values."""
    take = torch.tensor(blocks, device=pool.device)
    return [
        part.index_select(0, take).cpu().numpy().reshape(-1).data for layer in layers for part in pool.block_rows(layer)
    ]


def scatter(pool: KvPool, layers: range, blocks: Sequence[int], frames: Sequence[zmq.Frame]) -> None:
    """Write `frames`, the keys and values from `gather`, into `blocks`. Raises ValueError for a wrong frame size."""
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
    """Current leases of remote peers, which determine the blocks that each peer may write."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, str], frozenset[int]] = {}
        self._lock = threading.Lock()

    def open(self, source: str, request_id: str, blocks: Sequence[int]) -> None:
        with self._lock:
            self._leases[source, request_id] = frozenset(blocks)

    def close(self, source: str, request_id: str) -> None:
        with self._lock:  # waits for a running write
            self._leases.pop((source, request_id), None)

    @contextmanager
    def passing(self, source: str, blocks: Sequence[int]) -> Iterator[bool]:
        """Yield whether `source` has a lease on all given blocks. Leases cannot end before the context exits."""
        with self._lock:
            yield any(holder == source and leased.issuperset(blocks) for (holder, _), leased in self._leases.items())


log = logging.getLogger(__name__)

_LOOK_MS = 200


class CurveServer:
    """Thread that executes the requests of remote peers, one at a time."""

    def __init__(
        self, context: Context, guard: Guard, host_address: str, epoch: int, pool: KvPool, gate: LeaseGate
    ) -> None:
        self._epoch, self._pool, self._gate = epoch, pool, gate
        self._socket = context.socket(zmq.ROUTER)
        guard.listen(self._socket, host_address, bulk=True)
        largest = max(pool.layout.layer_bytes_per_block(layer) for layer in range(len(pool.layout.layers)))
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(SCRATCH_BYTES, largest * pool.num_blocks) + ENCRYPTION_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its identity
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
                self._socket.send_multipart([caller, number, msgspec.msgpack.encode(answer), *data], copy=False)

    def _answer(self, frames: list[zmq.Frame]) -> tuple[CurveReply, list[Bytes]]:
        try:
            question = self._questions.decode(frames[0].buffer)
            if question.epoch != self._epoch:
                return Denied(f"epoch {question.epoch} is over"), []
            match question:
                case WriteBlocks():
                    return self._write(question, frames[1:]), []
                case ReadBlocks(layers=layers, blocks=blocks):
                    return Done(), gather(self._pool, range(*layers), blocks)
                case _:
                    return Done(), []
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            log.warning("malformed KV request (%s)", type(error).__name__)
            return Denied("malformed request"), []

    def _write(self, question: WriteBlocks, frames: list[zmq.Frame]) -> CurveReply:
        with self._gate.passing(question.source, question.blocks) as allowed:
            if not allowed:
                return Denied(f"{question.source} has no lease on these blocks")
            scatter(self._pool, range(*question.layers), question.blocks, frames)
        return Done()
