"""A client's view of one epoch of a store, and of its running requests."""

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from twofold.errors import ConfigurationError
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.messages import (
    FetchResult,
    HeldBlocks,
    LeasedSlots,
    LookupResult,
    StoreOperation,
    StoreReply,
    StoreResult,
    Welcome,
)

R = TypeVar("R", LookupResult, HeldBlocks, LeasedSlots, FetchResult)
SendOperation = Callable[[int, int, StoreOperation], None]  # (epoch, number of the question, what is asked)


class PendingRequest:
    """Something that is asked of one life of a store, and what that answers; `memory` is that life's."""

    def __init__(
        self, number: int, memory: SlotMemory, send: Callable[[StoreOperation], None], timeout_s: float
    ) -> None:
        self.number, self.memory, self.send = number, memory, send
        self.timed_out = False  # it was not answered in time
        self._timeout_s = timeout_s
        self._replies: SimpleQueue[StoreResult | None] = SimpleQueue()

    def wait(self, kind: type[R], extra_s: float = 0.0) -> R | None:
        """Wait for the next answer; None where there will be none, because the store is dead or silent.

        It is silent when `after_s`, which it was given for the answer, and the patience with it are over.
        """
        try:
            wait = self._replies.get(timeout=extra_s + self._timeout_s)
        except Empty:
            self.timed_out = True
            return None
        return wait if isinstance(wait, kind) else None

    def receive(self, wait: StoreResult | None) -> None:
        self._replies.put(wait)


class StoreSession:
    """A life of a store: its epoch, its memory, its end (`fileno` is readable then) and the questions under way."""

    def __init__(self, welcome: Welcome, send: SendOperation, timeout_s: float) -> None:
        """Raises ConfigurationError or OSError where that life is over."""
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
        """Nothing that is still answered to it matters."""
        self._pending.pop(request.number, None)

    def receive(self, message: StoreReply) -> None:
        request = self._pending.get(message.number)
        if request is not None:
            request.receive(message.what)

    def end(self) -> None:
        """This life is over: no question will be answered any more. Its memory stays, for those who still read it."""
        if not self._ended:
            self._ended = True
            for request in list(self._pending.values()):
                request.receive(None)
            self._memory.close()
            os.close(self._pidfd)
