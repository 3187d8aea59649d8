"""The sender thread of a worker: what it does with layers, and with a hand-off that is over."""

import time
from collections.abc import Callable

from twofold.engine.base import KvLayout
from twofold.errors import TwofoldError
from twofold.serving.messages import HandoffOffered, HandoffReport
from twofold.serving.worker.sender import OutgoingHandoff
from twofold.serving.worker.state import WorkerState

# As many layers go together as have this many bytes, if that many wait: each transfer costs something.
BYTES_AT_ONCE = 1 << 20


def layers_at_once(layout: KvLayout) -> Callable[[int], int]:
    """For a number of blocks, how many layers to move together; at least one."""
    per_block = max(layout.layer_bytes_per_block(layer) for layer in range(len(layout.layers)))
    return lambda blocks: max(1, BYTES_AT_ONCE // (per_block * max(1, blocks)))


class HandoffWriter:
    """Writes layers into the blocks of peers, or lets peers read them; tells both ends when a hand-off is over."""

    def __init__(self, state: WorkerState, *, checksums: bool) -> None:
        self._state = state
        self._checksums = checksums

    def write_layers(self, outgoing: OutgoingHandoff, layers: range) -> int:
        """Returns the bytes moved; a peer that cannot be written to ends the hand-off with an error."""
        lease, blocks = outgoing.lease, outgoing.blocks
        assert lease is not None  # noqa: S101  (the sender sends under a lease only; tells the type checker so)
        try:
            with self._state.peers.connected(lease.instance, lease.epoch) as connection:
                moved = connection.write(layers, blocks, lease.blocks[: len(blocks)])
        except TwofoldError as error:
            outgoing.give_up(str(error))
            return 0
        self._add_checksums(outgoing, layers)
        return moved

    def offer(self, outgoing: OutgoingHandoff) -> None:
        """The target of a pulled hand-off may read it: it has room (we have its lease) and all layers are computed."""
        state, lease = self._state, outgoing.lease
        assert lease is not None  # noqa: S101  (as above)
        assert outgoing.first_token is not None  # noqa: S101
        inbox = state.peers.inbox(lease.instance)
        if inbox is None:  # dead, so it reads nothing
            state.sender.taken(outgoing.request_id, None)
            return
        state.peers.transport.publish(outgoing.blocks)
        self._add_checksums(outgoing, range(len(state.peers.own_memory.layout.layers)))
        offered = HandoffOffered(
            request_id=outgoing.request_id,
            epoch=lease.epoch,
            source=state.instance,
            source_epoch=state.peers.own_memory.epoch,
            blocks=tuple(outgoing.blocks),
            first_token=outgoing.first_token,
            checksums=outgoing.checksums if self._checksums else None,
        )
        state.outbox.send(inbox, offered)

    def over(self, outgoing: OutgoingHandoff) -> None:
        """Nothing of it will be read or written any more."""
        state, complete = self._state, not outgoing.cancelled
        if complete and outgoing.started_s is not None:
            report = HandoffReport(
                instance=state.instance,
                request_id=outgoing.request_id,
                started_s=outgoing.started_s,
                ended_s=time.monotonic(),
                bytes_moved=outgoing.bytes_moved,
            )
            state.tell(report)
        if outgoing.lease is not None and not outgoing.offered:
            first_token = outgoing.first_token if complete else None
            sums = outgoing.checksums if self._checksums else None
            state.end_lease(outgoing.lease, first_token, outgoing.error, sums)
        with state.changed:
            state.scheduler.handed_off(outgoing.request_id)
            state.grant()
            state.changed.notify()  # blocks became free: a waiting prompt may start

    def _add_checksums(self, outgoing: OutgoingHandoff, layers: range) -> None:
        if self._checksums:
            outgoing.checksums = outgoing.checksums or [0] * len(outgoing.blocks)
            transport = self._state.peers.transport
            transport.add_checksums(layers, outgoing.blocks, outgoing.checksums, landed=False)
