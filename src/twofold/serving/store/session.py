"""A client's session with one epoch of a store, and its pending requests."""

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from twofold.errors import ConfigurationError
from twofold.serving.store import messages
from twofold.serving.store.memory import SlotMemory

R = TypeVar("R", messages.LookupResult, messages.HeldBlocks, messages.LeasedSlots, messages.FetchResult)
SendOperation = Callable[[int, int, messages.StoreOperation], None]  # (epoch, number, operation)


class PendingRequest:
    """A request to one epoch of a store; `memory` belongs to that epoch."""

    def __init__(
        self, number: int, memory: SlotMemory, send: Callable[[messages.StoreOperation], None], timeout_s: float
    ) -> None:
        self.number, self.memory, self.send = number, memory, send
        self.timed_out = False
        self._timeout_s = timeout_s
        self._replies: SimpleQueue[messages.StoreResult | None] = SimpleQueue()

    def wait(self, kind: type[R], extra_s: float = 0.0) -> R | None:
        """Wait for the next reply; None if the store is dead or does not reply within its timeout plus `extra_s`."""
        try:
            wait = self._replies.get(timeout=extra_s + self._timeout_s)
        except Empty:
            self.timed_out = True
            return None
        return wait if isinstance(wait, kind) else None

    def receive(self, wait: messages.StoreResult | None) -> None:
        self._replies.put(wait)


class StoreSession:
    """One epoch of a store: its memory, its pending requests, and its end (`fileno` becomes readable)."""

    def __init__(self, welcome: messages.Welcome, send: SendOperation, timeout_s: float) -> None:
        """Open the store's memory. Raises ConfigurationError or OSError if that epoch is over."""
        self.epoch = welcome.epoch
        self._send, self._timeout_s = send, timeout_s
        self._pending: dict[int, PendingRequest] = {}
        self._ended = False
        self._pidfd = os.pidfd_open(welcome.pid)
        try:
            self._memory = SlotMemory.open(welcome.address, welcome.slots, welcome.block_bytes)
        except ConfigurationError:
            os.close(self._pidfd)
            raise

    def fileno(self) -> int:
        return self._pidfd

    def begin(self, number: int) -> PendingRequest:
        request = PendingRequest(
            number, self._memory, lambda what: self._send(self.epoch, number, what), self._timeout_s
        )
        self._pending[number] = request
        if self._ended:
            request.receive(None)
        return request

    def forget(self, request: PendingRequest) -> None:
        """Ignore further replies to a request."""
        self._pending.pop(request.number, None)

    def receive(self, message: messages.StoreReply) -> None:
        request = self._pending.get(message.number)
        if request is not None:
            request.receive(message.what)

    def end(self) -> None:
        """End all pending requests. The memory stays mapped for current readers."""
        if not self._ended:
            self._ended = True
            for request in list(self._pending.values()):
                request.receive(None)
            self._memory.close()
            os.close(self._pidfd)
