"""The inbox thread of a worker: receives messages and applies them immediately, even while a batch runs."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from twofold.request import SamplingParams
from twofold.serving import messages
from twofold.serving.controller.heartbeat import ALIVE_S, watchdog_clock
from twofold.serving.controller.mailbox import Inbox
from twofold.serving.worker.receiver import IncomingHandoff
from twofold.serving.worker.sender import OutgoingHandoff
from twofold.serving.worker.state import SharedWorkerState, TokenSequence

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)


class HandoffEvents:
    """Handles hand-off messages from peers, and the completion or failure of this worker's own KV transfers."""

    def __init__(self, state: SharedWorkerState) -> None:
        self._state = state

    # -- with the lock held -------------------------------------------------------------------------------------

    def offered(self, message: messages.HandoffOffered) -> None:
        """Queue a read of KV that a peer offers."""
        state, request_id = self._state, message.request_id
        lease = state.scheduler.leases.find(request_id)
        incoming = IncomingHandoff(
            request_id=request_id,
            source=message.source,
            epoch=message.epoch,
            tokens=message.tokens,
            blocks=() if lease is None else lease.blocks[: len(message.blocks)],
            source_blocks=message.blocks,
            source_epoch=message.source_epoch,
            checksums=message.checksums,
        )
        if message.epoch != state.epoch:
            log.warning("%s ignores an offer of KV for %s with epoch %d", state.instance, request_id, message.epoch)
            self._reply(incoming, complete=False)
        elif lease is not None and state.scheduler.read_started(request_id, message.epoch):
            state.receiver.add(incoming)
        else:
            self._reply(incoming, complete=False)

    def ended(self, message: messages.HandoffEnded) -> None:
        """Handle the message that a hand-off to this worker has ended, successfully or not."""
        state, request_id = self._state, message.request_id
        if message.epoch != state.epoch:
            log.warning("%s ignores KV for %s with epoch %d", state.instance, request_id, message.epoch)
            return
        if message.tokens is None:
            state.scheduler.end_lease(request_id, message.epoch)
            if message.error is not None:
                state.fail(request_id, message.error)
            return
        lease = state.scheduler.leases.find(request_id)
        if lease is None:
            return
        if message.checksums is None:
            self._written(request_id, message.epoch, message.tokens, lease.blocks)
            return
        incoming = IncomingHandoff(
            request_id=request_id,
            source=lease.source,
            epoch=message.epoch,
            tokens=message.tokens,
            blocks=lease.blocks[: len(message.checksums)],
            checksums=message.checksums,
        )
        state.receiver.add(incoming)

    def _written(self, request_id: str, epoch: int, tokens: list[int], blocks: Sequence[int]) -> None:
        if self._state.scheduler.kv_received(request_id, epoch):
            self._received(request_id, tokens, blocks)

    def _received(self, request_id: str, tokens: list[int], blocks: Sequence[int]) -> None:
        state = self._state
        state.landing.received(request_id, blocks)
        sequence = state.sequences[request_id]
        sequence.append(tokens[0])
        sequence.drafts = tokens[1:]

    # -- without the lock, on the receiver and sender threads ---------------------------------------------------------

    def received(self, incoming: IncomingHandoff) -> None:
        """Accept the KV of an incoming hand-off, or fail its request on an error. Called on the receiver thread."""
        state, request_id = self._state, incoming.request_id
        if incoming.pulled and incoming.complete:
            self._report(request_id, incoming.started_s, incoming.bytes_moved)
        with state.changed:
            if incoming.pulled:
                if state.scheduler.read_ended(request_id, complete=incoming.complete):
                    self._received(request_id, incoming.tokens, incoming.blocks)
            elif incoming.complete:
                self._written(request_id, incoming.epoch, incoming.tokens, incoming.blocks)
            else:
                state.scheduler.end_lease(request_id, incoming.epoch)
            if incoming.error is not None:
                state.fail(request_id, incoming.error)
            state.grant()
            state.changed.notify()
        if incoming.pulled:
            self._reply(incoming, complete=incoming.complete)

    def sent(self, outgoing: OutgoingHandoff) -> None:
        """End an outgoing hand-off: report it, end its lease and free its blocks. Called on the sender thread."""
        state, complete = self._state, not outgoing.cancelled
        if complete and outgoing.started_s is not None and not outgoing.offered:
            self._report(outgoing.request_id, outgoing.started_s, outgoing.bytes_moved)
        if outgoing.lease is not None and not outgoing.offered:
            tokens = outgoing.tokens if complete else None
            state.end_lease(outgoing.lease, tokens, outgoing.error, outgoing.checksums)
        with state.changed:
            state.scheduler.handed_off(outgoing.request_id)
            state.grant()
            state.changed.notify()  # the freed blocks may let a prompt start

    def _report(self, request_id: str, started_s: float, bytes_moved: int) -> None:
        report = messages.HandoffReport(
            instance=self._state.instance,
            request_id=request_id,
            started_s=started_s,
            ended_s=time.monotonic(),
            bytes_moved=bytes_moved,
        )
        self._state.tell(report)

    def _reply(self, incoming: IncomingHandoff, *, complete: bool) -> None:
        taken = messages.HandoffTaken(request_id=incoming.request_id, epoch=incoming.source_epoch, complete=complete)
        self._state.tell_peer(incoming.source, taken)


class InboxLoop:
    """Loop of the inbox thread: applies messages, sends heartbeats, and fails requests with expired leases."""

    def __init__(
        self, state: SharedWorkerState, events: HandoffEvents, inbox: Inbox[messages.ToWorker], lease_s: float
    ) -> None:
        self._state, self._events, self._inbox, self._lease_s = state, events, inbox, lease_s
        self._heartbeat_s = time.monotonic()
        self._alive_s = 0.0

    def run(self) -> None:
        """Receive and apply messages until shutdown."""
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

    def _apply(self, message: messages.ToWorker) -> None:  # noqa: C901, PLR0912  (one flat match over the message types)
        state = self._state
        match message:
            case messages.Prefill():
                self._accept(message)
            case messages.Reserve():
                self._reserve(message)
            case messages.LeaseGranted(lease=lease):
                if not state.sender.lease(lease):
                    state.end_lease(lease)
            case messages.HandoffEnded():
                self._events.ended(message)
            case messages.HandoffOffered():
                self._events.offered(message)
            case messages.HandoffTaken(request_id=request_id, complete=complete):
                if message.epoch == state.epoch:
                    state.sender.taken(request_id, complete=complete)
            case messages.Abort(request_id=request_id):
                state.abort(request_id)
            case messages.Heartbeat(source=source):
                state.scheduler.leases.renew(source, time.monotonic())
            case messages.Peers(peers=peers):
                state.peers.update(peers)
            case messages.InstanceFenced(instance=instance):
                state.peers.fence(instance)
            case messages.InstanceLost(instance=instance):
                self._lose(instance)
            case messages.HeartbeatAck(said_s=said_s):
                if state.deadline is not None:
                    state.deadline.heard(said_s)
            case messages.WorkerRefused(reason=reason):
                sys.stderr.write(f"twofold: {state.instance} was refused: {reason}\n")
                state.closing = True
            case messages.Shutdown():
                state.closing = True

    def _accept(self, message: messages.Prefill) -> None:
        state, generation, request = self._state, message.generation, message.generation.request
        keys = request.prefix_blocks
        state.sequences[request.id] = TokenSequence(
            generation.sampling, token_ids=generation.prompt_token_ids, block_keys=list(keys), chain=generation.chain
        )
        if message.target is not None and message.mode is not None:
            state.sender.expect(request.id, message.target, message.mode)
            if message.announce:
                state.announced.add(request.id)
        queue = partial(state.scheduler.submit, request, decodes_here=message.target is None)
        bring = partial(state.prefixes.bring, request.id, keys, queue, message.fetch)
        compiling = self._compile(generation.sampling)
        if compiling is None or compiling.done():
            bring()
        else:  # a batch must not wait
            compiling.add_done_callback(lambda _: self._compiled(request.id, bring))

    def _compile(self, sampling: SamplingParams) -> "Future[LLMatcher] | None":
        constraint, grammars = sampling.constraint, self._state.grammars
        return None if constraint is None or grammars is None else grammars.compile(constraint)

    def _compiled(self, request_id: str, bring: Callable[[], None]) -> None:
        # On the thread that compiles.
        with self._state.changed:
            if request_id in self._state.sequences:  # not aborted
                bring()
                self._state.changed.notify()

    def _reserve(self, message: messages.Reserve) -> None:
        state, request, prompt = self._state, message.request, message.prompt_token_ids
        state.sequences[request.id] = TokenSequence(
            message.sampling,
            offset=request.prompt_tokens - len(prompt),
            token_ids=prompt,
            block_keys=list(request.prefix_blocks),
            chain=message.chain,
            # The prefill worker stores the prompt on its host.
            stored_blocks=0 if state.peers.elsewhere(message.source) else len(request.prefix_blocks),
        )
        self._compile(message.sampling)  # complete long before the KV arrives
        state.scheduler.reserve(request, message.source)

    def _lose(self, instance: str) -> None:
        state = self._state
        inbox, elsewhere = state.peers.inbox(instance), state.peers.elsewhere(instance)
        receives = bool(state.scheduler.leases.held_by(instance)) or state.receiver.reads_from(instance)
        if elsewhere and state.peers.transport.writes_outlive_lease and receives:
            log.error("%s ends too: writes of %s may still arrive in its memory", state.instance, instance)
            os._exit(1)
        state.peers.remove(instance)
        state.sender.cancel_to(instance)
        state.receiver.cancel_from(instance)
        for request_id in state.scheduler.peer_lost(instance):
            state.fail(request_id, f"{instance} ended during the hand-off")
        if inbox is not None:
            state.outbox.forget(inbox)

    def _keep_leases(self, looked_s: float) -> float:
        state, now = self._state, time.monotonic()
        if now - self._heartbeat_s > self._lease_s / 4:
            self._heartbeat_s = now
            for peer in state.peers.others():
                state.outbox.send(peer.inbox_from(state.peers.host), messages.Heartbeat(source=state.instance))
        with state.changed:
            if now - looked_s > self._lease_s / 4:  # this process was stopped: heartbeats may be unread
                state.scheduler.leases.renew(None, now)
            for lease in state.scheduler.leases.expired(now):
                state.fail(lease.request_id, f"{lease.source} went silent during the hand-off")
            state.report_changes()
            batch_s = now - state.batches_started_s[0] if state.batches_started_s else 0.0
        # A worker counts as alive only if this thread gets the lock and all ranks respond.
        if now - self._alive_s >= ALIVE_S and state.ranks_alive():
            self._alive_s = now
            said_s = watchdog_clock()
            name, epoch = state.instance, state.epoch
            state.tell(messages.Alive(instance=name, epoch=epoch, batch_s=batch_s, said_s=said_s, now_s=now))
        return now
