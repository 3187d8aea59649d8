"""The receiver thread of a worker, and what peers say of hand-offs to it."""

import logging
from collections.abc import Callable

from twofold.errors import TwofoldError
from twofold.serving.messages import HandoffEnded, HandoffOffered, HandoffTaken
from twofold.serving.worker.receiver import IncomingHandoff
from twofold.serving.worker.state import WorkerState

log = logging.getLogger(__name__)


def offered(state: WorkerState, message: HandoffOffered) -> None:
    """A source lets us read the KV of a request; to be called with the lock held.

    From here on the blocks are held by our own reading, not by a lease of the source: it writes nothing.
    """
    scheduler, request_id = state.scheduler, message.request_id
    incoming = IncomingHandoff(
        request_id=request_id,
        source=message.source,
        epoch=message.epoch,
        first_token=message.first_token,
        blocks=(),
        source_blocks=message.blocks,
        source_epoch=message.source_epoch,
        checksums=message.checksums,
    )
    if message.epoch != scheduler.leases.epoch:
        log.warning("%s will not read KV for %s of epoch %d", state.instance, request_id, message.epoch)
        _tell_source(state, incoming, None)
    elif scheduler.read_started(request_id, message.epoch):
        incoming.blocks = tuple(scheduler.blocks_of(request_id))[: len(message.blocks)]
        state.receiver.add(incoming)
    else:
        _tell_source(state, incoming, None)


def written(state: WorkerState, message: HandoffEnded) -> None:
    """A source has written the KV of a request; to be called with the lock held."""
    lease = state.scheduler.leases.find(message.request_id)
    if lease is None or message.first_token is None or message.checksums is None:
        landed(state, message.request_id, message.epoch, message.first_token)
        return
    incoming = IncomingHandoff(
        request_id=message.request_id,
        source=lease.source,
        epoch=message.epoch,
        first_token=message.first_token,
        blocks=lease.blocks[: len(message.checksums)],
        checksums=message.checksums,
    )
    state.receiver.add(incoming)


def landed(state: WorkerState, request_id: str, epoch: int, first_token: int | None) -> None:
    """The KV of a request is complete here; to be called with the lock held."""
    if first_token is not None and state.scheduler.kv_received(request_id, epoch):
        _decode(state, request_id, first_token)


def _decode(state: WorkerState, request_id: str, first_token: int) -> None:
    state.landing.landed(request_id, state.scheduler.blocks_of(request_id))
    state.sequences[request_id].append(first_token)


def _tell_source(state: WorkerState, incoming: IncomingHandoff, bytes_moved: int | None) -> None:
    inbox = state.peers.inbox(incoming.source)
    if inbox is not None:
        taken = HandoffTaken(
            request_id=incoming.request_id, epoch=incoming.source_epoch, bytes_moved=bytes_moved
        )
        state.outbox.send(inbox, taken)


class HandoffReader:
    """Reads hand-offs that were offered, compares checksums, and passes complete ones on to be decoded."""

    def __init__(self, state: WorkerState, layers_at_once: Callable[[int], int]) -> None:
        self._state = state
        self._layers_at_once = layers_at_once

    def receive(self, incoming: IncomingHandoff) -> None:
        """Notes the error of a source that cannot be read, and of contents that are not what was sent."""
        try:
            if incoming.source_blocks is not None:
                self._read(incoming)
            if incoming.complete and incoming.checksums is not None:
                self._check(incoming)
        except TwofoldError as error:
            incoming.error = incoming.error or str(error)

    def _read(self, incoming: IncomingHandoff) -> None:
        assert incoming.source_blocks is not None  # noqa: S101  (tells the type checker)
        layers = range(self._num_layers)
        step = self._layers_at_once(len(incoming.blocks))
        with self._state.peers.connected(incoming.source, incoming.source_epoch) as connection:
            for first in layers[::step]:
                if not incoming.complete:
                    return
                some = layers[first : first + step]
                incoming.bytes_moved += connection.read(some, incoming.source_blocks, incoming.blocks)

    def _check(self, incoming: IncomingHandoff) -> None:
        found = [0] * len(incoming.blocks)
        layers, transport = range(self._num_layers), self._state.peers.transport
        transport.add_checksums(layers, incoming.blocks, found, landed=True)
        wrong = sum(ours != theirs for ours, theirs in zip(found, incoming.checksums or (), strict=True))
        if wrong:
            incoming.error = (
                f"{wrong} of {len(found)} KV blocks from {incoming.source} arrived at {self._state.instance} "
                "with another checksum than they left with"
            )

    def ended(self, incoming: IncomingHandoff) -> None:
        """Nothing of it is read any more."""
        state, request_id = self._state, incoming.request_id
        with state.changed:
            if incoming.pulled:
                if state.scheduler.read_ended(request_id, complete=incoming.complete):
                    _decode(state, request_id, incoming.first_token)
            elif incoming.complete:
                landed(state, request_id, incoming.epoch, incoming.first_token)
            else:
                state.scheduler.end_lease(request_id, incoming.epoch)
            if incoming.error is not None:
                state.fail(request_id, incoming.error)
            state.grant()
            state.changed.notify()
        if incoming.pulled:
            _tell_source(state, incoming, incoming.bytes_moved if incoming.complete else None)

    @property
    def _num_layers(self) -> int:
        return len(self._state.peers.own_memory.layout.layers)
