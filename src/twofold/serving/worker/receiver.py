"""The hand-off receiver: a thread that reads what peers offer, and checks what they have written if asked to."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingHandoff:
    """The receiving side of one hand-off, from when its KV is complete at the source.

    It is read from `source_blocks` of one life (`source_epoch`) of the source into local `blocks`; where the source
    has written it already, there are none, and it is only looked at.
    """

    request_id: str
    source: str
    epoch: int
    first_token: int
    blocks: Sequence[int]
    source_blocks: Sequence[int] | None = None
    source_epoch: int = 0
    checksums: Sequence[int] | None = None
    bytes_moved: int = 0
    cancelled: bool = False
    error: str | None = None

    @property
    def complete(self) -> bool:
        return not self.cancelled and self.error is None

    @property
    def pulled(self) -> bool:
        return self.source_blocks is not None


Receive = Callable[[IncomingHandoff], None]


class HandoffReceiver:
    """Receives hand-offs one after the other, first come first served: the first is then decoded the soonest.

    All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._waiting: deque[IncomingHandoff] = deque()
        self._current: IncomingHandoff | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, receive: Receive, ended: Receive) -> None:
        """Start the thread that receives.

        `receive(incoming)` moves and checks it and notes what went wrong; `ended(incoming)` is told once that
        nothing of it will be read any more. Both are called from that thread only.
        """
        arguments = (receive, ended)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="handoff-receiver", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def add(self, incoming: IncomingHandoff) -> None:
        """Its KV is complete at the source."""
        with self._changed:
            self._waiting.append(incoming)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Its request is over: read no more of it; `ended` will be called."""
        for incoming in self._those(lambda each: each.request_id == request_id):
            incoming.cancelled = True

    def reads_from(self, source: str) -> bool:
        """Whether something is still to be read from there."""
        return bool(self._those(lambda each: each.source == source and each.pulled))

    def cancel_from(self, source: str) -> None:
        """A source is dead: what is still to be read from it fails."""
        for incoming in self._those(lambda each: each.source == source and each.pulled):
            incoming.error = incoming.error or f"{source} ended during the hand-off"

    def _those(self, wanted: Callable[[IncomingHandoff], bool]) -> list[IncomingHandoff]:
        with self._changed:
            current = () if self._current is None else (self._current,)
            return [incoming for incoming in (*self._waiting, *current) if wanted(incoming)]

    def _run(self, receive: Receive, ended: Receive) -> None:
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
