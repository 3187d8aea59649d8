"""The hand-off sender: a thread that writes computed layers into leased blocks while later layers compute."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from twofold.handoff import HandoffMode, Lease
from twofold.serving.worker.outgoing import Outgoing

WriteLayer = Callable[[Outgoing, int], int]
Ended = Callable[[Outgoing], None]


class HandoffSender:
    """Sends each hand-off layer by layer, in the order in which layers become ready.

    All methods may be called from any thread.
    """

    def __init__(self, num_layers: int, clock: Callable[[], float]) -> None:
        self._num_layers = num_layers
        self._clock = clock
        self._outgoing: dict[str, Outgoing] = {}
        self._ready: deque[Outgoing] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, write_layer: WriteLayer, ended: Ended) -> None:
        """Start the thread that sends.

        `write_layer(outgoing, layer)` moves one layer and returns its bytes; `ended(outgoing)` is told once
        that nothing of it will be read or written any more, after success (all layers sent) and after
        `cancel` alike. Both are called from that thread only: no write is under way when `ended` is called.
        """
        arguments = (write_layer, ended)
        self._thread = threading.Thread(target=self._run, args=arguments, name="handoff-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def expect(self, request_id: str, target: str, mode: HandoffMode) -> None:
        """A request that is going to be handed off was queued."""
        with self._changed:
            self._outgoing[request_id] = Outgoing(request_id, target, mode)

    def begin(self, request_id: str, blocks: Sequence[int]) -> bool:
        """Its prefill starts, into these local blocks. False if it is not to be handed off."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.blocks = tuple(blocks)
            return outgoing is not None

    def layer_computed(self, request_ids: Iterable[str], layer: int) -> None:
        """The KV of `layer` is complete for these requests; others may be computing already."""
        with self._changed:
            for request_id in request_ids:
                outgoing = self._outgoing.get(request_id)
                if outgoing is not None:
                    outgoing.layers_computed = layer + 1
                    self._queue(outgoing)

    def prefilled(self, request_id: str, first_token: int) -> bool:
        """The prefill is over and has made the first token. False if the hand-off is over already."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.first_token = first_token
                self._queue(outgoing)
            return outgoing is not None

    def lease(self, lease: Lease) -> bool:
        """The target has made room. False if this hand-off is not, or no longer, wanted."""
        with self._changed:
            outgoing = self._outgoing.get(lease.request_id)
            if outgoing is None or outgoing.cancelled:
                return False
            outgoing.lease = lease
            self._queue(outgoing)
            return True

    def cancel(self, request_id: str) -> bool:
        """Send no more of it; `ended` will then be called. False if there is no such hand-off, or none any more."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.cancelled = True
                self._queue(outgoing)
            return outgoing is not None

    def cancel_to(self, target: str) -> None:
        """Cancel every hand-off to `target`."""
        with self._changed:
            for outgoing in self._outgoing.values():
                if outgoing.target == target:
                    outgoing.cancelled = True
                    self._queue(outgoing)

    def _queue(self, outgoing: Outgoing) -> None:
        if not outgoing.queued and outgoing.needs_sender:
            outgoing.queued = True
            self._ready.append(outgoing)
            self._changed.notify()

    def _run(self, write_layer: WriteLayer, ended: Ended) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if self._closed:
                    return
                outgoing = self._ready.popleft()
                outgoing.queued = False
                layer = self._next_layer(outgoing)
                over = layer is None and (outgoing.cancelled or self._complete(outgoing))
                if over:  # from here on nobody finds it, so nobody can queue it again
                    del self._outgoing[outgoing.request_id]
            if layer is not None:
                self._send(outgoing, layer, write_layer)
            elif over:
                ended(outgoing)

    def _next_layer(self, outgoing: Outgoing) -> int | None:
        wanted = not outgoing.cancelled and outgoing.layers_sent < outgoing.sendable
        return outgoing.layers_sent if wanted else None

    def _complete(self, outgoing: Outgoing) -> bool:
        return outgoing.first_token is not None and outgoing.layers_sent == self._num_layers

    def _send(self, outgoing: Outgoing, layer: int, write_layer: WriteLayer) -> None:
        """One layer at a time, so that hand-offs share the link and a cancelled one stops soon."""
        if outgoing.started_s is None:
            outgoing.started_s = self._clock()
        moved = write_layer(outgoing, layer)
        with self._changed:
            outgoing.bytes_moved += moved
            outgoing.layers_sent += 1
            self._queue(outgoing)
