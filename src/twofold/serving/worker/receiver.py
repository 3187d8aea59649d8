"""Incoming KV hand-offs: a thread reads KV from peers, or verifies the checksums of KV that peers have written."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twofold.errors import TwofoldError
from twofold.serving.worker.peers import PeerDirectory


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingHandoff:
    """State of an incoming KV hand-off after the prefill has ended."""

    request_id: str
    source: str  # the prefill worker
    epoch: int
    tokens: list[int]  # the first output token, and draft tokens
    blocks: Sequence[int]
    source_blocks: Sequence[int] | None = None  # None: not in pull mode
    source_epoch: int = 0
    checksums: Sequence[int] | None = None
    started_s: float = field(default_factory=time.monotonic)
    bytes_moved: int = 0
    cancelled: bool = False
    error: str | None = None

    @property
    def complete(self) -> bool:
        return not self.cancelled and self.error is None

    @property
    def pulled(self) -> bool:
        return self.source_blocks is not None


OnIncoming = Callable[[IncomingHandoff], None]


class HandoffReceiver:
    """Queue of incoming hand-offs, with a thread that receives them in order. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[IncomingHandoff] = deque()
        self._current: IncomingHandoff | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, receive: OnIncoming, ended: OnIncoming) -> None:
        """Start a thread that calls `receive` and then `ended` for each hand-off.

        If a queued hand-off has been cancelled or has failed, the thread calls only `ended`.
        """
        self._thread = threading.Thread(target=self._run, args=(receive, ended), name="handoff-receiver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def add(self, incoming: IncomingHandoff) -> None:
        with self._changed:
            self._waiting.append(incoming)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Cancel the hand-off of an aborted request."""
        for incoming in self._select(lambda each: each.request_id == request_id):
            incoming.cancelled = True

    def reads_from(self, source: str) -> bool:
        """Return whether a read from this peer is in progress or queued."""
        return bool(self._select(lambda each: each.source == source and each.pulled))

    def cancel_from(self, source: str) -> None:
        """Fail all reads from a peer that has died."""
        for incoming in self._select(lambda each: each.source == source and each.pulled):
            incoming.error = incoming.error or f"{source} ended during the hand-off"

    def _select(self, wanted: Callable[[IncomingHandoff], bool]) -> list[IncomingHandoff]:
        with self._changed:
            current = () if self._current is None else (self._current,)
            return [incoming for incoming in (*self._waiting, *current) if wanted(incoming)]

    def _run(self, receive: OnIncoming, ended: OnIncoming) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                incoming = self._current = self._waiting.popleft()
            if incoming.complete:
                receive(incoming)
            with self._changed:
                self._current = None
            ended(incoming)


class HandoffReader:
    """Reads KV from peers and verifies checksums, on the receiver thread."""

    def __init__(self, peers: PeerDirectory, layers_at_once: Callable[[int], int]) -> None:
        self._peers = peers
        self._layers_at_once = layers_at_once
        self._layers = range(len(peers.own_memory.layout.layers))

    def receive(self, incoming: IncomingHandoff) -> None:
        """Read and verify a hand-off. Errors are recorded in `incoming.error`."""
        try:
            if incoming.source_blocks:
                self._read(incoming, incoming.source_blocks)
            if incoming.complete and incoming.checksums is not None:
                self._verify(incoming, incoming.checksums)
        except TwofoldError as error:
            incoming.error = incoming.error or str(error)

    def _read(self, incoming: IncomingHandoff, source_blocks: Sequence[int]) -> None:
        step = self._layers_at_once(len(incoming.blocks))
        with self._peers.connected(incoming.source, incoming.source_epoch) as connection:
            for first in self._layers[::step]:
                if not incoming.complete:
                    return
                layers = self._layers[first : first + step]
                incoming.bytes_moved += connection.read(layers, source_blocks, incoming.blocks)

    def _verify(self, incoming: IncomingHandoff, expected: Sequence[int]) -> None:
        found = [0] * len(incoming.blocks)
        self._peers.transport.add_checksums(self._layers, incoming.blocks, found, landed=True)
        wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
        if wrong:
            own = self._peers.own_memory.instance
            incoming.error = (
                f"checksum mismatch in {wrong} of {len(found)} KV blocks sent from {incoming.source} to {own}"
            )
