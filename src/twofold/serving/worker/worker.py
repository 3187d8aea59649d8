"""The worker: drives one instance scheduler with a real clock, a real engine and real messages.

Three threads share the scheduler under one lock that is never held while a batch runs or a block is copied:

    main      next_batch → engine.run → complete → tokens to the controller
    inbox     receives messages and applies them at once; renews and expires leases
    sender    writes computed layers into the leased blocks of peers
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twofold.batch import Batch, BatchItem
from twofold.engine.base import Engine, Sampled, SequenceStep
from twofold.errors import TwofoldError
from twofold.handoff import Lease
from twofold.instance import Role
from twofold.request import Phase, TokenOutput
from twofold.scheduling.instance import InstanceScheduler, InstanceStatus, Outcome
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.messages import (
    Abort,
    HandoffEnded,
    HandoffReport,
    Heartbeat,
    InstanceLost,
    LeaseGranted,
    Message,
    Peer,
    Peers,
    Prefill,
    Registered,
    RequestFailed,
    Reserve,
    Shutdown,
    Status,
    StepDone,
    ToWorker,
)
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.live import LiveSequence
from twofold.serving.worker.outgoing import Outgoing
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.sender import HandoffSender

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Started:
    """A batch about to run: what the engine needs, taken while the lock was held."""

    batch: Batch
    steps: list[SequenceStep]
    handing_off: list[str]
    landed: list[Sequence[int]]
    now: float


class Worker:
    """One instance at work. `run` returns when the worker is told to shut down."""

    def __init__(
        self,
        *,
        instance: str,
        role: Role,
        scheduler: InstanceScheduler,
        engine: Engine,
        eos_token_ids: frozenset[int],
        peers: PeerDirectory,
        landing: Landing,
        inbox: Inbox[ToWorker],
        outbox: Outbox,
        controller: str,
        lease_s: float,
    ) -> None:
        self._instance, self._role = instance, role
        self._scheduler, self._engine, self._eos = scheduler, engine, eos_token_ids
        self._peers, self._landing = peers, landing
        self._inbox, self._outbox, self._controller = inbox, outbox, controller
        self._lease_s = lease_s
        self._sequences: dict[str, LiveSequence] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._reported: InstanceStatus | None = None
        self._reports = 0
        self._heartbeat_s = time.monotonic()
        layers = len(engine.layout.layers)
        self._sender = HandoffSender(layers, time.monotonic, self._write_layer, self._handoff_over)

    # -- main thread: iterations --------------------------------------------------------------------------------

    def run(self) -> None:
        """Register, then run batches until told to stop."""
        receiver = threading.Thread(target=self._receive_forever, name="inbox", daemon=True)
        peer = Peer(inbox=self._inbox.address, memory=self._peers.own_memory)
        self._tell(Registered(peer=peer, role=self._role, status=self._scheduler.status()))
        self._sender.start()
        receiver.start()
        while (started := self._next_batch()) is not None:
            self._landing.bring(started.landed)
            on_layer = (
                partial(self._sender.layer_computed, started.handing_off) if started.handing_off else None
            )
            try:
                sampled = self._engine.run(started.steps, on_layer)
            except Exception as error:
                log.exception("%s could not run a batch", self._instance)
                self._fail_batch(started.batch, f"{type(error).__name__} on {self._instance}")
            else:
                self._complete(started, sampled)
        receiver.join()
        self._sender.close()
        self._outbox.close(linger_s=1.0)

    def _next_batch(self) -> _Started | None:
        """Wait for work; None when the worker is to end."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                batch = self._scheduler.next_batch(now)
                if batch is not None:
                    steps = [self._step(item) for item in batch.items]
                    return _Started(batch, steps, self._begin_handoffs(batch), self._landing.take(), now)
                self._report_status()
                self._changed.wait()
            return None

    def _step(self, item: BatchItem) -> SequenceStep:
        sequence = self._sequences[item.request_id]
        return SequenceStep(
            request_id=item.request_id,
            token_ids=sequence.slice(item.context_tokens, item.num_tokens),
            start=item.context_tokens,
            block_table=tuple(self._scheduler.blocks.blocks_of(item.request_id)),
            sampling=sequence.sampling if item.samples else None,
            output_index=sequence.generated,
        )

    def _begin_handoffs(self, batch: Batch) -> list[str]:
        """Requests whose prompt this batch completes and whose KV then travels."""
        completed = [i.request_id for i in batch.items if i.phase is Phase.PREFILL and i.samples]
        blocks_of = self._scheduler.blocks.blocks_of
        return [rid for rid in completed if self._sender.begin(rid, blocks_of(rid))]

    def _complete(self, started: _Started, sampled: list[Sampled | None]) -> None:
        drawn = {
            item.request_id: sample
            for item, sample in zip(started.batch.items, sampled, strict=True)
            if sample is not None
        }
        with self._changed:
            outcomes = self._scheduler.complete(started.batch, self._stopped(drawn))
            tokens = [(o.request_id, self._token(o, drawn[o.request_id])) for o in outcomes]
            leases = self._scheduler.grant(time.monotonic())
            status = self._reported = self._scheduler.status()
            number = self._reports = self._reports + 1
        self._tell(
            StepDone(
                instance=self._instance,
                started_s=started.now,
                started=[i.request_id for i in started.batch.items if i.context_tokens == 0],
                tokens=tokens,
                status=status,
                number=number,
            )
        )
        self._announce(leases)
        for outcome in outcomes:
            request_id = outcome.request_id
            if outcome.hands_off:
                sending = self._sender.prefilled(request_id, drawn[request_id].token_id)
            else:
                sending = outcome.finish_reason is None or self._sender.cancel(request_id)
            if not sending:
                with self._changed:
                    self._scheduler.handed_off(request_id)

    def _fail_batch(self, batch: Batch, reason: str) -> None:
        """The engine could not run it (out of memory, say): its requests fail, others go on."""
        with self._changed:
            for item in batch.items:
                self._fail(item.request_id, reason)
            self._scheduler.complete(batch)
            self._announce(self._scheduler.grant(time.monotonic()))

    def _stopped(self, drawn: dict[str, Sampled]) -> set[str]:
        return {
            request_id
            for request_id, sample in drawn.items()
            if (sequence := self._sequences.get(request_id)) is not None
            and sequence.ends_with(sample.token_id, self._eos)
        }

    def _token(self, outcome: Outcome, sample: Sampled) -> TokenOutput:
        if outcome.finish_reason is not None or outcome.hands_off:
            del self._sequences[outcome.request_id]
        else:
            self._sequences[outcome.request_id].append(sample.token_id)
        return TokenOutput(
            index=outcome.index,
            token_id=sample.token_id,
            logprob=sample.logprob,
            top_logprobs=sample.top_logprobs,
            finish_reason=outcome.finish_reason,
        )

    # -- inbox thread: messages -----------------------------------------------------------------------------------

    def _receive_forever(self) -> None:
        patience_s = min(0.5, self._lease_s / 8)
        looked_s = time.monotonic()
        while not self._closing:
            for message in self._inbox.receive(patience_s):
                with self._changed:
                    self._handle(message)
                    self._announce(self._scheduler.grant(time.monotonic()))
                    self._changed.notify()
            looked_s = self._keep_leases(looked_s)
        self._outbox.close(linger_s=1.0)

    def _handle(self, message: ToWorker) -> None:
        """One message of the controller or of a peer; the lock is held."""
        match message:
            case Prefill():
                self._accept(message)
            case Reserve():
                self._reserve(message)
            case LeaseGranted(lease=lease):
                if not self._sender.lease(lease):
                    self._end_lease(lease)
            case HandoffEnded():
                self._land(message)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case Heartbeat(source=source):
                self._scheduler.leases.renew(source, time.monotonic())
            case Peers(peers=peers):
                self._peers.update(peers)
            case InstanceLost(instance=instance):
                self._lose(instance)
            case Shutdown():
                self._closing = True

    def _accept(self, message: Prefill) -> None:
        generation, request = message.generation, message.generation.request
        self._sequences[request.id] = LiveSequence(generation.sampling, token_ids=generation.prompt_token_ids)
        if message.target is not None and message.mode is not None:
            self._sender.expect(request.id, message.target, message.mode)
        self._scheduler.submit(request, decodes_here=message.target is None)

    def _reserve(self, message: Reserve) -> None:
        request = message.request
        self._sequences[request.id] = LiveSequence(message.sampling, offset=request.prompt_tokens)
        self._scheduler.reserve(request, message.source)

    def _land(self, message: HandoffEnded) -> None:
        request_id = message.request_id
        if message.epoch != self._scheduler.leases.epoch:
            log.warning("%s refused KV of epoch %d for %s", self._instance, message.epoch, request_id)
            return
        if message.first_token is None:
            self._scheduler.end_lease(request_id, message.epoch)
            if message.error is not None:
                self._fail(request_id, message.error)
        elif self._scheduler.landed(request_id, message.epoch):
            self._landing.landed(request_id, self._scheduler.blocks.blocks_of(request_id))
            self._sequences[request_id].append(message.first_token)

    def _abort(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        self._landing.drop(request_id)
        self._scheduler.abort(request_id)
        if not self._sender.cancel(request_id):
            self._scheduler.handed_off(request_id)

    def _fail(self, request_id: str, reason: str) -> None:
        self._abort(request_id)
        self._tell(RequestFailed(request_id=request_id, reason=reason))

    def _lose(self, instance: str) -> None:
        """A dead peer writes no more, and what was on its way to it has nowhere to go."""
        inbox = self._peers.inbox(instance)
        self._peers.remove(instance)
        self._sender.cancel_to(instance)
        for request_id in self._scheduler.lose_source(instance):
            self._fail(request_id, f"{instance} ended during the hand-off")
        if inbox is not None:
            self._outbox.forget(inbox)

    def _keep_leases(self, looked_s: float) -> float:
        """Show peers that we live, and fail requests whose KV comes from a source that does not; returns the time."""
        now = time.monotonic()
        if now - self._heartbeat_s > self._lease_s / 4:
            self._heartbeat_s = now
            for address in self._peers.inboxes():
                self._outbox.send(address, Heartbeat(source=self._instance))
        with self._changed:
            if now - looked_s > self._lease_s / 4:  # we were stopped: heartbeats may still lie unread
                self._scheduler.leases.renew_all(now)
            for lease in self._scheduler.leases.expired(now):
                self._fail(lease.request_id, f"{lease.source} went silent during the hand-off")
            self._report_status()
        return now

    # -- sender thread: hand-offs -------------------------------------------------------------------------------

    def _write_layer(self, outgoing: Outgoing, layer: int) -> int:
        lease = outgoing.lease
        assert lease is not None  # noqa: S101  (the sender sends under a lease only; tells the type checker so)
        try:
            connection = self._peers.connection(lease.instance, lease.epoch)
            return connection.write(layer, outgoing.blocks, lease.blocks[: len(outgoing.blocks)])
        except TwofoldError as error:
            outgoing.give_up(str(error))
            return 0

    def _handoff_over(self, outgoing: Outgoing) -> None:
        complete = not outgoing.cancelled
        if complete and outgoing.started_s is not None:
            report = HandoffReport(
                request_id=outgoing.request_id,
                started_s=outgoing.started_s,
                ended_s=time.monotonic(),
                bytes_moved=outgoing.bytes_moved,
            )
            self._tell(report)
        if outgoing.lease is not None:
            first_token = outgoing.first_token if complete else None
            self._end_lease(outgoing.lease, first_token, outgoing.error)
        with self._changed:
            self._scheduler.handed_off(outgoing.request_id)
            self._announce(self._scheduler.grant(time.monotonic()))
            self._changed.notify()  # blocks became free: a waiting prompt may start

    # -- any thread -----------------------------------------------------------------------------------------------

    def _end_lease(self, lease: Lease, first_token: int | None = None, error: str | None = None) -> None:
        inbox = self._peers.inbox(lease.instance)
        if inbox is not None:
            ended = HandoffEnded(
                request_id=lease.request_id, epoch=lease.epoch, first_token=first_token, error=error
            )
            self._outbox.send(inbox, ended)

    def _announce(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._tell(LeaseGranted(lease=lease))

    def _report_status(self) -> None:
        status = self._scheduler.status()
        if status != self._reported:
            self._reported = status
            self._reports += 1
            self._tell(Status(instance=self._instance, status=status, number=self._reports))

    def _tell(self, message: Message) -> None:
        self._outbox.send(self._controller, message)
