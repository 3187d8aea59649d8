"""The way of transport `curve` to a peer on another host."""

import threading
from collections.abc import Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from twofold.engine.torch.pool import KvPool
from twofold.errors import InstanceLostError, StaleEpochError
from twofold.transport.base import MemoryDescriptor, moved_bytes
from twofold.transport.curve_frames import (
    Answer,
    Bytes,
    Denied,
    Probe,
    Question,
    Read,
    Write,
    gather,
    scatter,
)

_LOOK_MS = 50  # how soon a caller that waits sees that it waits in vain


class CurveConnection:
    """Asks the peer's `CurveServer`; one question at a time, from whichever thread.

    A connection that breaks takes questions and answers with it, so the question is then asked again: to do any of
    them twice does no harm.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        instance: str,
        peer: MemoryDescriptor,
        engine_pool: KvPool,
        landing_pool: KvPool,
    ) -> None:
        self._socket, self._instance, self._peer = socket, instance, peer
        self._engine_pool, self._landing_pool = engine_pool, landing_pool
        self._breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._answers = msgspec.msgpack.Decoder[Answer](Answer)
        self._lock = threading.Lock()
        self._closed = False
        self._asked = 0

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        question = Write(self._instance, self._peer.epoch, (layers.start, layers.stop), tuple(target_blocks))
        self._ask(question, gather(self._engine_pool, layers, source_blocks))
        return moved_bytes(self._peer.layout, layers, len(source_blocks))

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        frames = self._ask(Read(self._peer.epoch, (layers.start, layers.stop), tuple(source_blocks)))
        scatter(self._landing_pool, layers, target_blocks, frames)
        return moved_bytes(self._peer.layout, layers, len(source_blocks))

    def probe(self, nbytes: int) -> None:
        self._ask(Probe(self._peer.epoch), [bytes(nbytes)])

    def close(self) -> None:
        """Whoever waits for an answer sees it soon, and closes the sockets then."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _ask(self, question: Question, data: Sequence[Bytes] = ()) -> list[zmq.Frame]:
        """What came with the answer. Raises InstanceLostError when closed before it came, StaleEpochError if denied."""
        try:
            with self._lock:
                self._asked += 1
                frames = [self._asked.to_bytes(8), msgspec.msgpack.encode(question), *data]
                _number, answer, *found = self._answer(frames)
        finally:
            if self._closed:
                self.close()
        said = self._answers.decode(answer.buffer)
        if isinstance(said, Denied):
            raise StaleEpochError(f"{self._peer.instance} refused KV: {said.reason}")
        return found

    def _answer(self, frames: list[Bytes]) -> list[zmq.Frame]:
        """Send, and send again where the connection broke, until the answer to this question is there."""
        asked = False
        while not self._closed:
            if not asked:
                self._socket.send_multipart(frames, copy=False)
                asked = True
            if self._socket.poll(_LOOK_MS):
                found = self._socket.recv_multipart(copy=False)
                if found[0].bytes == frames[0]:
                    return found
            while self._breaks.poll(0):
                recv_monitor_message(self._breaks)
                asked = False
        raise InstanceLostError(f"{self._peer.instance} is gone")

    def _end(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._breaks.close(linger=0)
        self._socket.close(linger=0)
