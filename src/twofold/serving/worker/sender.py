"""One hand-off on its way out: what is computed, what is sent, and what is still missing.

The hand-off sender: a thread that writes computed layers into leased blocks while later layers compute.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from twofold.handoff import HandoffMode, Lease


class SenderAction(Enum):
    """What the sender has to do next for a hand-off."""

    NOTHING = auto()
    WRITE = auto()  # layers that may be sent
    OFFER = auto()  # its target may read it
    END = auto()


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    """The sending side of one hand-off.

    `layers_computed` counts the layers whose KV is complete in the local `blocks`, `layers_sent` those that
    are in the lease's blocks. `first_token` is set once the prefill is over. A pulled hand-off is `offered` to its
    target, and nothing frees its blocks until that has `taken` them, or will not read them any more.
    `checksums` are those of the blocks, as far as they were sent.
    """

    request_id: str
    target: str
    mode: HandoffMode
    blocks: Sequence[int] = ()
    lease: Lease | None = None
    first_token: int | None = None
    layers_computed: int = 0
    layers_sent: int = 0
    bytes_moved: int = 0
    started_s: float | None = None
    offered: bool = False
    taken: bool = False
    cancelled: bool = False
    error: str | None = None
    queued: bool = False
    checksums: list[int] = field(default_factory=list)

    @property
    def sendable(self) -> int:
        """How many layers, counted from the first, may be sent now."""
        if self.lease is None or self.mode is HandoffMode.PULL:
            return 0
        if self.mode is HandoffMode.SERIALIZED and self.first_token is None:
            return 0
        return self.layers_computed

    def turn(self, num_layers: int) -> SenderAction:
        """What is to be done next."""
        if self.offered:
            return SenderAction.END if self.taken else SenderAction.NOTHING
        if self.cancelled:
            return SenderAction.END
        if self.layers_sent < self.sendable:
            return SenderAction.WRITE
        if self.first_token is None or self.lease is None:
            return SenderAction.NOTHING
        if self.mode is HandoffMode.PULL:
            return SenderAction.OFFER
        return SenderAction.END if self.layers_sent == num_layers else SenderAction.NOTHING

    def give_up(self, error: str) -> None:
        """It cannot be completed; the request fails for this reason."""
        self.cancelled, self.error = True, error


WriteLayers = Callable[[OutgoingHandoff, range], int]
Offer = Callable[[OutgoingHandoff], None]
Ended = Callable[[OutgoingHandoff], None]


def one_layer(_blocks: int) -> int:
    return 1


class HandoffSender:
    """Sends each hand-off layer by layer, in the order in which layers become ready.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        num_layers: int,
        clock: Callable[[], float],
        layers_at_once: Callable[[int], int] = one_layer,
    ) -> None:
        """`layers_at_once` says, for a number of blocks, how many layers are sent in one write if that many wait."""
        self._num_layers = num_layers
        self._clock = clock
        self._layers_at_once = layers_at_once
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._ready: deque[OutgoingHandoff] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, write_layers: WriteLayers, offer: Offer, ended: Ended) -> None:
        """Start the thread that sends.

        `write_layers(outgoing, layers)` moves layers and returns their bytes; `offer(outgoing)` tells the target of
        a pulled hand-off that it may read; `ended(outgoing)` is told once that nothing of it will be read or written
        any more, after success (all layers sent or taken) and after `cancel` alike. All are called from that thread
        only: no write is under way when `ended` is called.
        """
        arguments = (write_layers, offer, ended)
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
            self._outgoing[request_id] = OutgoingHandoff(request_id, target, mode)

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

    def taken(self, request_id: str, bytes_moved: int | None) -> None:
        """The target of a pulled hand-off will read no more of it; None if it did not get all of it."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None and outgoing.offered:
                outgoing.taken = True
                outgoing.cancelled = outgoing.cancelled or bytes_moved is None
                outgoing.bytes_moved = bytes_moved or 0
                self._queue(outgoing)

    def cancel(self, request_id: str) -> bool:
        """Send no more of it; `ended` will then be called: for what was offered, when the target has taken it.

        False if there is no such hand-off, or none any more.
        """
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.cancelled = True
                self._queue(outgoing)
            return outgoing is not None

    def cancel_to(self, target: str) -> None:
        """Cancel every hand-off to `target`, which is dead: it reads nothing any more either."""
        with self._changed:
            for outgoing in self._outgoing.values():
                if outgoing.target == target:
                    outgoing.cancelled = outgoing.taken = True
                    self._queue(outgoing)

    def _queue(self, outgoing: OutgoingHandoff) -> None:
        if not outgoing.queued and outgoing.turn(self._num_layers) is not SenderAction.NOTHING:
            outgoing.queued = True
            self._ready.append(outgoing)
            self._changed.notify()

    def _run(self, write_layers: WriteLayers, offer: Offer, ended: Ended) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if self._closed:
                    return
                outgoing = self._ready.popleft()
                outgoing.queued = False
                turn = outgoing.turn(self._num_layers)
                layers = self._next_layers(outgoing)
                if turn is SenderAction.END:  # from here on nobody finds it, so nobody can queue it again
                    del self._outgoing[outgoing.request_id]
                elif turn is not SenderAction.NOTHING and outgoing.started_s is None:
                    outgoing.started_s = self._clock()
                outgoing.offered = outgoing.offered or turn is SenderAction.OFFER
            if turn is SenderAction.WRITE:
                self._send(outgoing, layers, write_layers)
            elif turn is SenderAction.OFFER:
                offer(outgoing)
            elif turn is SenderAction.END:
                ended(outgoing)

    def _next_layers(self, outgoing: OutgoingHandoff) -> range:
        """A few layers at a time, so that hand-offs share the link and a cancelled one stops soon."""
        sent = outgoing.layers_sent
        return range(sent, min(outgoing.sendable, sent + self._layers_at_once(len(outgoing.blocks))))

    def _send(self, outgoing: OutgoingHandoff, layers: range, write_layers: WriteLayers) -> None:
        moved = write_layers(outgoing, layers)
        with self._changed:
            outgoing.bytes_moved += moved
            outgoing.layers_sent = layers.stop
            self._queue(outgoing)
