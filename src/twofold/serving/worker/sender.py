"""Outgoing KV hand-offs: a thread writes computed layers into leased blocks while the engine computes later layers."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from twofold.engine.base import KvLayout
from twofold.errors import TwofoldError
from twofold.handoff import HandoffMode, Lease
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import HandoffOffered
from twofold.serving.worker.peers import PeerDirectory

BYTES_PER_WRITE = 1 << 20  # maximum size of a transfer of several layers; each transfer has a fixed cost


def layers_per_transfer(layout: KvLayout) -> Callable[[int], int]:
    """Return a function that computes the number of layers per transfer from the number of blocks."""
    per_block = max(layout.layer_bytes_per_block(layer) for layer in range(len(layout.layers)))
    return lambda blocks: max(1, BYTES_PER_WRITE // (per_block * max(1, blocks)))


class SenderAction(Enum):
    """Next action of the sender thread for an outgoing hand-off."""

    WAIT = auto()
    WRITE = auto()
    OFFER = auto()  # let the target read
    END = auto()


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    """State of an outgoing hand-off."""

    request_id: str
    target: str
    mode: HandoffMode
    blocks: Sequence[int] = ()  # of this worker
    lease: Lease | None = None
    tokens: list[int] | None = None  # the first output token, and draft tokens, after the prefill
    layers_computed: int = 0
    layers_sent: int = 0  # written to the leased blocks
    bytes_moved: int = 0
    started_s: float | None = None
    offered: bool = False  # pull mode: the target may read the blocks
    taken: bool = False  # pull mode: the target no longer reads the blocks
    cancelled: bool = False
    error: str | None = None
    queued: bool = False
    checksums: list[int] | None = None  # one per block

    @property
    def sent_blocks(self) -> Sequence[int]:
        """Blocks that the target has not cached."""
        return self.blocks if self.lease is None else self.blocks[self.lease.cached_blocks :]

    @property
    def sendable(self) -> int:
        """Number of layers that may be written to the leased blocks at this moment."""
        if self.lease is None or self.mode is HandoffMode.PULL:
            return 0
        if self.mode is HandoffMode.SERIALIZED and self.tokens is None:
            return 0
        return self.layers_computed

    def next_action(self, num_layers: int) -> SenderAction:
        if self.offered:
            return SenderAction.END if self.taken else SenderAction.WAIT
        if self.cancelled:
            return SenderAction.END
        if self.layers_sent < self.sendable:
            return SenderAction.WRITE
        if self.tokens is None or self.lease is None:
            return SenderAction.WAIT
        if self.mode is HandoffMode.PULL:
            return SenderAction.OFFER
        return SenderAction.END if self.layers_sent == num_layers else SenderAction.WAIT


WriteLayers = Callable[[OutgoingHandoff, range], int]
OnHandoff = Callable[[OutgoingHandoff], None]


class HandoffSender:
    """Queue of outgoing hand-offs, with a thread that sends each KV layer once it is computed. Thread-safe."""

    def __init__(
        self, num_layers: int, clock: Callable[[], float], layers_at_once: Callable[[int], int] = lambda _blocks: 1
    ) -> None:
        self._num_layers = num_layers
        self._clock = clock
        self._layers_at_once = layers_at_once  # maximum number of layers in one write, by number of blocks
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._ready: deque[OutgoingHandoff] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, write_layers: WriteLayers, offer: OnHandoff, ended: OnHandoff) -> None:
        """Start the thread. It calls `write_layers` to write layers to the target, `offer` to let the target read all
        blocks (pull mode), and `ended` once per hand-off.
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
        """Register the hand-off of a queued request to `target`."""
        with self._changed:
            self._outgoing[request_id] = OutgoingHandoff(request_id, target, mode)

    def begin(self, request_id: str, blocks: Sequence[int]) -> bool:
        """Record a request's KV blocks before its last prefill batch starts. Return False if it has no hand-off."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.blocks = tuple(blocks)
            return outgoing is not None

    def layer_computed(self, request_ids: Iterable[str], layer: int) -> None:
        """Record that all layers up to `layer` have been computed for the requests `request_ids`."""
        with self._changed:
            for request_id in request_ids:
                outgoing = self._outgoing.get(request_id)
                if outgoing is not None:
                    outgoing.layers_computed = layer + 1
                    self._queue(outgoing)

    def prefilled(self, request_id: str, tokens: list[int]) -> bool:
        """Record the first token of a prefill, and its draft tokens. Return False if the hand-off has already ended."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.tokens = tokens
                self._queue(outgoing)
            return outgoing is not None

    def lease(self, lease: Lease) -> bool:
        """Record a lease that the target has granted; return False if the hand-off has ended."""
        with self._changed:
            outgoing = self._outgoing.get(lease.request_id)
            if outgoing is None or outgoing.cancelled:
                return False
            outgoing.lease = lease
            self._queue(outgoing)
            return True

    def taken(self, request_id: str, *, complete: bool) -> None:
        """Record that the receiver in a pull-mode hand-off stopped reading; `complete` says if all KV was read."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None and outgoing.offered:
                outgoing.taken = True
                outgoing.cancelled = outgoing.cancelled or not complete
                self._queue(outgoing)

    def cancel(self, request_id: str) -> bool:
        """Cancel a hand-off; return False if it is unknown."""
        with self._changed:
            outgoing = self._outgoing.get(request_id)
            if outgoing is not None:
                outgoing.cancelled = True  # offered blocks are kept until the target stops reading
                self._queue(outgoing)
            return outgoing is not None

    def cancel_to(self, target: str) -> None:
        """Cancel all hand-offs to a dead instance."""
        with self._changed:
            for outgoing in self._outgoing.values():
                if outgoing.target == target:
                    outgoing.cancelled = outgoing.taken = True
                    self._queue(outgoing)

    def _queue(self, outgoing: OutgoingHandoff) -> None:
        if not outgoing.queued and outgoing.next_action(self._num_layers) is not SenderAction.WAIT:
            outgoing.queued = True
            self._ready.append(outgoing)
            self._changed.notify()

    def _run(self, write_layers: WriteLayers, offer: OnHandoff, ended: OnHandoff) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if self._closed:
                    return
                outgoing = self._ready.popleft()
                outgoing.queued = False
                action = outgoing.next_action(self._num_layers)
                # Few layers at a time, so that hand-offs share the link and a cancelled hand-off stops soon.
                sent, most = outgoing.layers_sent, self._layers_at_once(len(outgoing.sent_blocks))
                layers = range(sent, min(outgoing.sendable, sent + most))
                if action is SenderAction.END:  # from now on, no other thread can queue it
                    del self._outgoing[outgoing.request_id]
                elif action is not SenderAction.WAIT and outgoing.started_s is None:
                    outgoing.started_s = self._clock()
                outgoing.offered = outgoing.offered or action is SenderAction.OFFER
            if action is SenderAction.WRITE:
                moved = write_layers(outgoing, layers)
                with self._changed:
                    outgoing.bytes_moved += moved
                    outgoing.layers_sent = layers.stop
                    self._queue(outgoing)
            elif action is SenderAction.OFFER:
                offer(outgoing)
            elif action is SenderAction.END:
                ended(outgoing)


class HandoffWriter:
    """Writes layers into the blocks of peers, or lets peers read blocks. Called on the sender thread."""

    def __init__(self, sender: HandoffSender, peers: PeerDirectory, outbox: Outbox, *, checksums: bool) -> None:
        self._sender, self._peers, self._outbox = sender, peers, outbox
        self._checksums = checksums

    def write_layers(self, outgoing: OutgoingHandoff, layers: range) -> int:
        """Write layers into the leased blocks; return the number of bytes. An error cancels the hand-off."""
        lease, blocks = outgoing.lease, outgoing.sent_blocks
        assert lease is not None  # noqa: S101  (for the type checker: the sender writes only under a lease)
        if not blocks:
            return 0
        try:
            with self._peers.connected(lease.instance, lease.epoch) as connection:
                moved = connection.write(layers, blocks, lease.blocks[: len(blocks)])
        except TwofoldError as error:
            outgoing.cancelled, outgoing.error = True, str(error)
            return 0
        self._add_checksums(outgoing, layers)
        return moved

    def offer(self, outgoing: OutgoingHandoff) -> None:
        """Let the target read the blocks of a completed prefill (pull mode)."""
        lease, blocks, own = outgoing.lease, outgoing.sent_blocks, self._peers.own_memory
        assert lease is not None  # noqa: S101  (as above)
        assert outgoing.tokens is not None  # noqa: S101
        inbox = self._peers.inbox(lease.instance)
        if inbox is None:  # the target is dead
            self._sender.taken(outgoing.request_id, complete=False)
            return
        self._peers.transport.publish(blocks)
        self._add_checksums(outgoing, range(len(own.layout.layers)))
        offered = HandoffOffered(
            request_id=outgoing.request_id,
            epoch=lease.epoch,
            source=own.instance,
            source_epoch=own.epoch,
            blocks=tuple(blocks),
            tokens=outgoing.tokens,
            checksums=outgoing.checksums,
        )
        self._outbox.send(inbox, offered)

    def _add_checksums(self, outgoing: OutgoingHandoff, layers: range) -> None:
        if self._checksums:
            blocks = outgoing.sent_blocks
            outgoing.checksums = outgoing.checksums or [0] * len(blocks)
            self._peers.transport.add_checksums(layers, blocks, outgoing.checksums, landed=False)
