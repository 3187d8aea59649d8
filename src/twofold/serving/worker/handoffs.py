"""The sender thread of a worker: what it does with a layer, and with a hand-off that is over."""

import time

from twofold.errors import TwofoldError
from twofold.serving.messages import HandoffReport
from twofold.serving.worker.outgoing import Outgoing
from twofold.serving.worker.state import WorkerState


class Handoffs:
    """Writes layers into the blocks of peers, and tells both ends when a hand-off is over."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    def write_layer(self, outgoing: Outgoing, layer: int) -> int:
        """Returns the bytes moved; a peer that cannot be written to ends the hand-off with an error."""
        lease = outgoing.lease
        assert lease is not None  # noqa: S101  (the sender sends under a lease only; tells the type checker so)
        try:
            connection = self._state.peers.connection(lease.instance, lease.epoch)
            return connection.write(layer, outgoing.blocks, lease.blocks[: len(outgoing.blocks)])
        except TwofoldError as error:
            outgoing.give_up(str(error))
            return 0

    def over(self, outgoing: Outgoing) -> None:
        """Nothing of it will be read or written any more."""
        state, complete = self._state, not outgoing.cancelled
        if complete and outgoing.started_s is not None:
            report = HandoffReport(
                request_id=outgoing.request_id,
                started_s=outgoing.started_s,
                ended_s=time.monotonic(),
                bytes_moved=outgoing.bytes_moved,
            )
            state.tell(report)
        if outgoing.lease is not None:
            first_token = outgoing.first_token if complete else None
            state.end_lease(outgoing.lease, first_token, outgoing.error)
        with state.changed:
            state.scheduler.handed_off(outgoing.request_id)
            state.grant()
            state.changed.notify()  # blocks became free: a waiting prompt may start
