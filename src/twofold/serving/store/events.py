"""Queues between the threads of a store."""

import os
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Queue from any thread to one consumer, which can poll it like a socket.

    `fileno` is readable while it has items.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self._event, 1)

    def drain(self) -> Iterator[T]:
        """All queued items, without waiting."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while not self._items.empty():
            yield self._items.get()

    def close(self) -> None:
        """Close the queue. No thread may use it after this call."""
        os.close(self._event)
