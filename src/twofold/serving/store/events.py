"""Threads of a KV store, and the queues between these threads."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Work = TypeVar("Work")
Result = TypeVar("Result")


class EventQueue(Generic[T]):
    """Queue with many producers and one consumer. `fileno()` is readable while the queue has items."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: T) -> None:
        self._items.put(item)
        os.eventfd_write(self._event, 1)

    def get(self) -> T:
        return self._items.get()

    def drain(self) -> Iterator[T]:
        """Yield all queued items without waiting."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        while not self._items.empty():
            yield self._items.get()

    def close(self) -> None:
        """Close the queue; threads must not use it afterwards."""
        os.close(self._event)


class StoreThread(ABC, Generic[Work, Result]):
    """Thread that executes queued work in order. `fileno()` is readable while results are available."""

    def __init__(self, name: str) -> None:
        self._work: EventQueue[Work | None] = EventQueue()
        self._results: EventQueue[Result] = EventQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Execute queued work until None is queued."""

    def fileno(self) -> int:
        return self._results.fileno()

    def put(self, work: Work) -> None:
        """Queue work; any thread may call this."""
        self._work.put(work)

    def take(self) -> Iterator[Result]:
        """Yield the results that have arrived since the last call."""
        return self._results.drain()

    def close(self) -> None:
        """Finish all queued work and stop the thread."""
        self._work.put(None)
        self._thread.join()
        self._work.close()
        self._results.close()
