"""State shared by the threads of a worker: scheduler, sequences, peers and unfinished hand-offs."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twofold.engine.grammar import GrammarMatchers
from twofold.handoff import Lease
from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.cache import CacheChanges
from twofold.kvcache.prefix import later_keys
from twofold.request import BlockChain, BlockKey, Request, SamplingParams, TokenOutput, TokenScore
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.heartbeat import ParentWatchdog, watchdog_clock
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import (
    BlocksChanged,
    HandoffEnded,
    LeaseGranted,
    Message,
    PrefillStarted,
    RequestFailed,
    Status,
    StepDone,
)
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.prefixes import PrefixSource
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender


class WorkerScheduler(Protocol):
    """Interface of a worker's scheduler. Callers of its methods must hold the worker's lock."""

    @property
    def leases(self) -> LeaseTable: ...
    def submit(self, request: Request, *, decodes_here: bool) -> None: ...
    def reserve(self, request: Request, source: str) -> None: ...
    def grant(self, now: float) -> list[Lease]: ...
    def kv_received(self, request_id: str, epoch: int) -> bool: ...
    def end_lease(self, request_id: str, epoch: int) -> None: ...
    def read_started(self, request_id: str, epoch: int) -> bool: ...
    def read_ended(self, request_id: str, *, complete: bool) -> bool: ...
    def peer_lost(self, source: str) -> list[str]: ...
    def handed_off(self, request_id: str) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def status(self) -> InstanceStatus: ...


class KvLanding:
    """Handler of KV blocks received from peers.

    The base class does nothing, because the peers write directly to the engine's KV pool. If peers write to host
    memory instead, a subclass copies the received blocks to the engine's KV pool.
    """

    def received(self, request_id: str, blocks: Sequence[int]) -> None:
        """Register received KV blocks, which go to the engine's pool before the next batch. Needs the worker's lock."""

    def take(self) -> list[Sequence[int]]:
        """Take the received KV blocks that are not yet copied to the engine's pool. Needs the worker's lock."""
        return []

    def drop(self, request_id: str) -> None:
        """Unregister the blocks of an aborted request. Requires the worker's lock."""

    def copy(self, block_lists: Sequence[Sequence[int]]) -> None:
        """Copy received KV blocks to the engine's pool. The caller must not hold the worker's lock."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens and sampling parameters of a request.

    `token_ids` begins at position `offset` of the request, because a decode worker may lack the prompt's tokens.
    `block_keys` are the keys of the full blocks of the prompt, and then of the output if `chain` is given.
    """

    sampling: SamplingParams
    offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    generated: int = 0  # output tokens
    drafts: list[int] = field(default_factory=list)  # that a peer has computed after the first token
    block_keys: list[BlockKey] = field(default_factory=list)
    chain: BlockChain | None = None
    stored_blocks: int = 0  # leading blocks that were queued for the host's store
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of the chunks computed so far
    _stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._stop_token_ids = frozenset(self.sampling.stop_token_ids)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.generated += 1

    def slice(self, start: int, count: int) -> list[int]:
        """Return `count` tokens of the request from position `start` on."""
        return self.token_ids[start - self.offset : start - self.offset + count]

    def fill_block(self, end: int) -> bool:
        """Add the key of the block that token `end` − 1 fills; return False if it fills none, or the block has no key.

        Call this with the end of each decode iteration, in order.
        """
        chain = self.chain
        if chain is None or end % chain.block_size:
            return False
        self.block_keys.extend(later_keys(chain, self.block_keys, self.slice(end - chain.block_size, chain.block_size)))
        return True

    def ends_with(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """Return whether a sampled token ends the output: it is EOS or a stop token of the request."""
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        return is_eos or token_id in self._stop_token_ids


class ControllerDeadline:
    """Timer that kills a worker on a remote host if the controller no longer acknowledges its heartbeats."""

    def start(self) -> None:
        """Start the timer. Call this before the worker registers."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even if its threads hang
        self._watchdog = ParentWatchdog(watchdog_clock())
        self._set_timer()

    def heard(self, said_s: float) -> None:
        """Extend the deadline after the controller has acknowledged the heartbeat sent at `said_s`."""
        self._watchdog.acknowledged(said_s)
        self._set_timer()

    def _set_timer(self) -> None:
        shortest_s = 1e-6  # zero would disarm the timer
        signal.setitimer(signal.ITIMER_REAL, max(shortest_s, self._watchdog.left_s(watchdog_clock())))


@dataclass(eq=False, kw_only=True)
class SharedWorkerState:
    """State shared by a worker's threads.

    The lock `changed` guards the scheduler and the token sequences. To avoid deadlocks, acquire `changed` before
    the lock of the `HandoffSender`.
    """

    # No thread holds the lock `changed` while a batch runs or a block is copied.
    instance: str
    scheduler: WorkerScheduler
    sender: HandoffSender
    receiver: HandoffReceiver
    landing: KvLanding
    peers: PeerDirectory
    outbox: Outbox
    controller: str
    sequences: dict[str, TokenSequence] = field(default_factory=dict)
    blocks: CacheChanges = field(default_factory=CacheChanges)
    prefixes: PrefixSource = field(default_factory=PrefixSource)
    grammars: GrammarMatchers | None = None  # of constrained requests
    changed: threading.Condition = field(default_factory=threading.Condition)
    deadline: ControllerDeadline | None = None
    ranks_alive: Callable[[], bool] = lambda: True
    announced: set[str] = field(default_factory=set)  # requests with a prefill start to report to the controller
    batches_started_s: deque[float] = field(default_factory=deque)  # start times of running batches, oldest first
    closing: bool = False
    _reported: InstanceStatus | None = None
    _reports: int = 0

    @property
    def epoch(self) -> int:
        """Epoch of this worker; a restarted worker has another one."""
        return self.scheduler.leases.epoch

    # -- with the lock held -------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Grant queued lease requests while blocks are free, and report the leases to the controller."""
        for lease in self.scheduler.grant(time.monotonic()):
            self.tell(LeaseGranted(lease=lease))

    def prefill_starts(self, request_id: str) -> None:
        """Report the start of a request's prefill if the controller waits for this report."""
        if request_id in self.announced:
            self.announced.remove(request_id)
            self.tell(PrefillStarted(request_id=request_id))

    def abort(self, request_id: str) -> None:
        """Abort a request in any state."""
        self.sequences.pop(request_id, None)
        self.announced.discard(request_id)
        self.landing.drop(request_id)
        self.receiver.cancel(request_id)  # blocks are freed after the last transfer that accesses them
        self.scheduler.abort(request_id)
        if not self.sender.cancel(request_id):
            self.scheduler.handed_off(request_id)

    def fail(self, request_id: str, reason: str) -> None:
        """Abort a request, and report the reason for its failure to the controller."""
        self.abort(request_id)
        self.tell(RequestFailed(instance=self.instance, request_id=request_id, reason=reason))

    def next_report(self) -> Status:
        """Return a report of the current status, with the next serial number."""
        self._reported = self.scheduler.status()
        self._reports += 1
        return Status(instance=self.instance, epoch=self.epoch, status=self._reported, number=self._reports)

    def report_changes(self) -> None:
        """Report the status and the cached prompt blocks to the controller if they have changed."""
        before = self._reported
        report = self.next_report()
        if report.status != before:
            self.tell(report)
        self.report_blocks()

    def report_blocks(self) -> None:
        """Report newly cached and evicted prompt blocks to the controller."""
        stored, removed = self.blocks.take()
        if stored or removed:
            self.tell(BlocksChanged(instance=self.instance, epoch=self.epoch, stored=stored, removed=removed))

    # -- with or without the lock -----------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Send a message to the controller."""
        self.outbox.send(self.controller, message)

    def tell_peer(self, instance: str, message: Message) -> None:
        """Send a message to a peer, unless the peer has left the service."""
        inbox = self.peers.inbox(instance)
        if inbox is not None:
            self.outbox.send(inbox, message)

    def tell_step(
        self, report: Status, started_s: float, started: list[str], tokens: list[tuple[str, TokenOutput]]
    ) -> None:
        """Send an iteration's results to the controller: tokens, ids of prompts that began prefill, and the status."""
        self.tell(
            StepDone(
                instance=self.instance,
                epoch=self.epoch,
                started_s=started_s,
                started=started,
                tokens=tokens,
                status=report.status,
                number=report.number,
            )
        )

    def prefill_ended(self, request_id: str, tokens: list[int] | None) -> None:
        """Pass the first token of a completed prefill, and draft tokens, to its hand-off; without tokens, cancel it."""
        sender = self.sender
        if not (sender.cancel(request_id) if tokens is None else sender.prefilled(request_id, tokens)):
            with self.changed:
                self.scheduler.handed_off(request_id)

    def end_lease(
        self,
        lease: Lease,
        tokens: list[int] | None = None,
        error: str | None = None,
        checksums: list[int] | None = None,
    ) -> None:
        """Notify the decode worker that no more KV will be written under a lease."""
        ended = HandoffEnded(
            request_id=lease.request_id, epoch=lease.epoch, tokens=tokens, error=error, checksums=checksums
        )
        self.tell_peer(lease.instance, ended)
