"""The thread of transport `curve` that peers on other hosts ask to write and read the cache for them."""

import logging
import threading

import msgspec
import zmq

from twofold.curve.guard import ENCRYPTION_BYTES, Guard
from twofold.engine.torch.pool import KvPool
from twofold.transport.base import SCRATCH_BYTES
from twofold.transport.curve_frames import (
    Answer,
    Bytes,
    Denied,
    Done,
    Question,
    Read,
    Write,
    gather,
    scatter,
)
from twofold.transport.curve_gate import Gate

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
        gate: Gate,
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
        self._questions = msgspec.msgpack.Decoder[Question](Question)
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

    def _answer(self, frames: list[zmq.Frame]) -> tuple[Answer, list[Bytes]]:
        try:
            question = self._questions.decode(frames[0].buffer)
            if question.epoch != self._epoch:
                return Denied(f"it is of epoch {question.epoch}, which is over"), []
            match question:
                case Write():
                    return self._write(question, frames[1:]), []
                case Read(layers=layers, blocks=blocks):
                    return Done(), gather(self._pool, range(*layers), blocks)
                case _:
                    return Done(), []
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            log.warning("a question about KV was not understood (%s)", type(error).__name__)
            return Denied("it was not understood"), []

    def _write(self, question: Write, frames: list[zmq.Frame]) -> Answer:
        with self._gate.passing(question.source, question.blocks) as allowed:
            if not allowed:
                return Denied(f"no lease of {question.source} is for these blocks")
            scatter(self._pool, range(*question.layers), question.blocks, frames)
        return Done()
