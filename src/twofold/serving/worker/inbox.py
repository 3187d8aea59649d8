"""The inbox thread of a worker: messages are applied at once, also while a batch runs."""

import logging
import os
import sys
import time
from functools import partial

from twofold.serving.controller.heartbeat import ALIVE_S, watchdog_clock
from twofold.serving.controller.mailbox import Inbox
from twofold.serving.messages import (
    Abort,
    Alive,
    HandoffEnded,
    HandoffOffered,
    HandoffTaken,
    Heartbeat,
    HeartbeatAck,
    InstanceFenced,
    InstanceLost,
    LeaseGranted,
    Peers,
    Prefill,
    Reserve,
    Shutdown,
    ToWorker,
    WorkerRefused,
)
from twofold.serving.worker import arrivals
from twofold.serving.worker.state import TokenSequence, WorkerState

log = logging.getLogger(__name__)


class InboxLoop:
    """Applies what the controller and peers say; shows peers that we live, and sees when they do not."""

    def __init__(self, state: WorkerState, inbox: Inbox[ToWorker], lease_s: float) -> None:
        self._state, self._inbox, self._lease_s = state, inbox, lease_s
        self._heartbeat_s = time.monotonic()
        self._alive_s = 0.0

    def run(self) -> None:
        """Receive until told to shut down."""
        state = self._state
        patience_s = min(ALIVE_S / 2, self._lease_s / 8)
        looked_s = time.monotonic()
        while not state.closing:
            for message in self._inbox.receive(patience_s):
                with state.changed:
                    self._apply(message)
                    state.grant()
                    state.changed.notify()
            looked_s = self._keep_leases(looked_s)

    def _apply(self, message: ToWorker) -> None:  # noqa: C901, PLR0912  (one flat match over the kinds of messages)
        state = self._state
        match message:
            case Prefill():
                self._accept(message)
            case Reserve():
                self._reserve(message)
            case LeaseGranted(lease=lease):
                if not state.sender.lease(lease):
                    state.end_lease(lease)
            case HandoffEnded():
                self._land(message)
            case HandoffOffered():
                arrivals.offered(state, message)
            case HandoffTaken(request_id=request_id, bytes_moved=bytes_moved):
                if message.epoch == state.scheduler.leases.epoch:
                    state.sender.taken(request_id, bytes_moved)
            case Abort(request_id=request_id):
                state.abort(request_id)
            case Heartbeat(source=source):
                state.scheduler.leases.renew(source, time.monotonic())
            case Peers(peers=peers):
                state.peers.update(peers)
            case InstanceFenced(instance=instance):
                state.peers.fence(instance)
            case InstanceLost(instance=instance):
                self._lose(instance)
            case HeartbeatAck(said_s=said_s):
                state.tether.heard(said_s)
            case WorkerRefused(reason=reason):
                sys.stderr.write(f"twofold: {state.instance} was refused: {reason}\n")
                state.closing = True
            case Shutdown():
                state.closing = True

    def _accept(self, message: Prefill) -> None:
        state, generation, request = self._state, message.generation, message.generation.request
        keys = request.prefix_blocks
        state.sequences[request.id] = TokenSequence(
            generation.sampling,
            token_ids=generation.prompt_token_ids,
            prefix_blocks=keys,
            cache_salt=generation.cache_salt,
        )
        if message.target is not None and message.mode is not None:
            state.sender.expect(request.id, message.target, message.mode)
            if message.announce:
                state.announced.add(request.id)
        queue = partial(state.scheduler.submit, request, decodes_here=message.target is None)
        state.prefixes.bring(request.id, keys, queue, message.fetch)

    def _reserve(self, message: Reserve) -> None:
        request, prompt = message.request, message.prompt_token_ids
        sequence = (
            TokenSequence(message.sampling, offset=request.prompt_tokens)
            if prompt is None
            else TokenSequence(message.sampling, token_ids=prompt)
        )
        self._state.sequences[request.id] = sequence
        self._state.scheduler.reserve(request, message.source)

    def _land(self, message: HandoffEnded) -> None:
        state, request_id = self._state, message.request_id
        if message.epoch != state.scheduler.leases.epoch:
            log.warning("%s refused KV of epoch %d for %s", state.instance, message.epoch, request_id)
            return
        if message.first_token is None:
            state.scheduler.end_lease(request_id, message.epoch)
            if message.error is not None:
                state.fail(request_id, message.error)
        else:
            arrivals.written(state, message)

    def _lose(self, instance: str) -> None:
        """A dead peer writes no more, and what was on its way to it has nowhere to go."""
        state = self._state
        inbox, elsewhere = state.peers.inbox(instance), state.peers.elsewhere(instance)
        if elsewhere and state.peers.transport.writes_outlive_lease and state.receives_from(instance):
            log.error("%s ends too: what %s has sent may yet arrive in its memory", state.instance, instance)
            os._exit(1)
        state.peers.remove(instance)
        state.sender.cancel_to(instance)
        state.receiver.cancel_from(instance)
        for request_id in state.scheduler.peer_lost(instance):
            state.fail(request_id, f"{instance} ended during the hand-off")
        if inbox is not None:
            state.outbox.forget(inbox)

    def _keep_leases(self, looked_s: float) -> float:
        """Show peers that we live, and fail requests whose KV comes from a source that does not; returns the time."""
        state, now = self._state, time.monotonic()
        if now - self._heartbeat_s > self._lease_s / 4:
            self._heartbeat_s = now
            for address in state.peers.inboxes():
                state.outbox.send(address, Heartbeat(source=state.instance))
        with state.changed:
            if now - looked_s > self._lease_s / 4:  # we were stopped: heartbeats may still lie unread
                state.scheduler.leases.renew_all(now)
            for lease in state.scheduler.leases.expired(now):
                state.fail(lease.request_id, f"{lease.source} went silent during the hand-off")
            state.report_changes()
            batch_s = now - state.batches_started_s[0] if state.batches_started_s else 0.0
        # Said where the lock could be had, and the other ranks were heard: a worker that lacks either hangs.
        if now - self._alive_s >= ALIVE_S and state.lives():
            self._alive_s = now
            said_s = watchdog_clock()
            state.tell(
                Alive(instance=state.instance, epoch=state.epoch, batch_s=batch_s, said_s=said_s, now_s=now)
            )
        return now
