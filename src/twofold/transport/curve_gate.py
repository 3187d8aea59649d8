"""Which blocks may be written for peers on other hosts just now."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Gate:
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
