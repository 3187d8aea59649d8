"""What the threads of a worker ask of its scheduler, whoever that is: ours, or the engine's own.

Where leased blocks land: in the memory that the engine computes on, unless something else is said.

The tokens of a request that is alive on a worker.

What the controller is to be told of the blocks of prompts that a worker has.

The end of a worker on another host that does not hear the controller any more (see `serving/tether.py`).

What the four threads of a worker share, and what any of them may do.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twofold.handoff import Lease
from twofold.instance import Role
from twofold.kvcache.cache import CacheObserver, RemovalReason
from twofold.kvcache.leases import LeaseTable
from twofold.request import BlockKey, Request, SamplingParams
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.controller.heartbeat import ParentWatchdog, watchdog_clock
from twofold.serving.controller.mailbox import Outbox
from twofold.serving.messages import BlocksChanged, HandoffEnded, LeaseGranted, Message, RequestFailed, Status
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.prefixes import PrefixSource
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender


class WorkerScheduler(Protocol):
    """As `InstanceScheduler`, which says what each of these does. All are called with the worker's lock held."""

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

    def blocks_of(self, request_id: str) -> Sequence[int]: ...

    def status(self) -> InstanceStatus: ...


class KvLanding:
    """Peers write into the engine's own pool, so that what has landed is where it has to be.

    `PoolLanding` is for engines whose pool peers cannot write into.
    """

    def landed(self, request_id: str, blocks: Sequence[int]) -> None:
        """These blocks are complete; they are brought over before the next batch."""

    def take(self) -> list[Sequence[int]]:
        """The blocks to bring over now; to be called where `landed` is."""
        return []

    def drop(self, request_id: str) -> None:
        """The request is over: its blocks may be given to another."""

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        """Copy all layers of these blocks; to be called by the thread that runs the engine."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Known token ids of a request from position `offset` on, and how to sample the next.

    An instance that decodes what another prefilled never sees the prompt: its `offset` is the prompt's length.
    `generated` counts the output tokens known here, `prefix_blocks` are the keys of the prompt's full blocks,
    which only those find that have the same `cache_salt`.
    """

    sampling: SamplingParams
    offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    generated: int = 0
    prefix_blocks: tuple[BlockKey, ...] = ()
    cache_salt: str = ""

    def append(self, token_id: int) -> None:
        """The next output token."""
        self.token_ids.append(token_id)
        self.generated += 1

    def slice(self, start: int, count: int) -> list[int]:
        """The tokens at positions `start` … `start + count − 1`."""
        return self.token_ids[start - self.offset : start - self.offset + count]

    def ends_with(self, token_id: int, eos_token_ids: frozenset[int]) -> bool:
        """Whether this sampled token ends the output."""
        is_eos = token_id in eos_token_ids and not self.sampling.ignore_eos
        return is_eos or token_id in self.sampling.stop_token_ids


class CacheChanges(CacheObserver):
    """Notes what has come and gone since it was told last; what did both meanwhile is as it was.

    Guarded by the lock that guards the memory that it watches.
    """

    def __init__(self) -> None:
        self._changes: dict[BlockKey, bool] = {}  # whether it is there now

    def stored(self, key: BlockKey) -> None:
        self._note(key, there=True)

    def removed(self, key: BlockKey, reason: RemovalReason) -> None:  # noqa: ARG002  (it is gone, whatever the reason)
        self._note(key, there=False)

    def take(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """The blocks that have come, and those that are gone."""
        changes, self._changes = self._changes, {}
        stored = [key for key, there in changes.items() if there]
        return stored, [key for key, there in changes.items() if not there]

    def _note(self, key: BlockKey, *, there: bool) -> None:
        # A block comes and goes in turn, so a second change takes the first one back.
        if self._changes.pop(key, None) is None:
            self._changes[key] = there


_AT_ONCE_S = 1e-6  # nothing at all would take the alarm back


class ControllerDeadline:
    """Nothing, on the controller's own host: workers die with it there."""

    def start(self) -> None:
        """To be called before the controller hears of this worker."""

    def heard(self, said_s: float) -> None:
        """The controller has heard what was said at `said_s`."""


class AlarmDeadline(ControllerDeadline):
    """The kernel ends the process, by SIGALRM, so that it ends also where all of its threads hang or are stopped."""

    def start(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._tether = ParentWatchdog(watchdog_clock())
        self._set()

    def heard(self, said_s: float) -> None:
        self._tether.acknowledged(said_s)
        self._set()

    def _set(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(_AT_ONCE_S, self._tether.left_s(watchdog_clock())))


@dataclass(eq=False, kw_only=True)
class WorkerState:
    """One instance's scheduler, sequences and ties to others.

    `changed` guards the scheduler and `sequences`, and wakes the main thread when there may be work. It is
    never held while a batch runs or a block is copied. Where the sender's lock is taken too, it comes second.
    """

    instance: str
    role: Role
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
    changed: threading.Condition = field(default_factory=threading.Condition)
    tether: ControllerDeadline = field(default_factory=ControllerDeadline)
    lives: Callable[[], bool] = lambda: True  # whether the other ranks do, if it has some
    announced: set[str] = field(default_factory=set)  # requests the controller waits to see started
    batches_started_s: deque[float] = field(default_factory=deque)  # of those under way, the oldest first
    closing: bool = False
    _reported: InstanceStatus | None = None
    _reports: int = 0

    @property
    def epoch(self) -> int:
        """The number of this life of the instance."""
        return self.scheduler.leases.epoch

    # -- with the lock held -------------------------------------------------------------------------------------

    def grant(self) -> None:
        """Grant what leases there is room for now; to be called when blocks may have become free."""
        for lease in self.scheduler.grant(time.monotonic()):
            self.tell(LeaseGranted(lease=lease))

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever it is waiting for; its blocks become free when nothing touches them."""
        self.sequences.pop(request_id, None)
        self.announced.discard(request_id)
        self.landing.drop(request_id)
        self.receiver.cancel(request_id)
        self.scheduler.abort(request_id)
        if not self.sender.cancel(request_id):
            self.scheduler.handed_off(request_id)

    def fail(self, request_id: str, reason: str) -> None:
        """The same, and the controller is told why."""
        self.abort(request_id)
        self.tell(RequestFailed(instance=self.instance, request_id=request_id, reason=reason))

    def receives_from(self, instance: str) -> bool:
        """Whether KV of a request may be on its way from there."""
        return bool(self.scheduler.leases.held_by(instance)) or self.receiver.reads_from(instance)

    def next_report(self) -> Status:
        """The accounts as they are, numbered."""
        self._reported = self.scheduler.status()
        self._reports += 1
        return Status(instance=self.instance, epoch=self.epoch, status=self._reported, number=self._reports)

    def report_changes(self) -> None:
        """Tell the controller the accounts if they differ from what it was told last."""
        before = self._reported
        report = self.next_report()
        if report.status != before:
            self.tell(report)
        self.tell_blocks()

    def tell_blocks(self) -> None:
        """Tell the controller which blocks of prompts came and went; the lock keeps what two threads say in order."""
        stored, removed = self.blocks.take()
        if stored or removed:
            self.tell(BlocksChanged(instance=self.instance, epoch=self.epoch, stored=stored, removed=removed))

    # -- with or without it ---------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Send a message to the controller."""
        self.outbox.send(self.controller, message)

    def end_lease(
        self,
        lease: Lease,
        first_token: int | None = None,
        error: str | None = None,
        checksums: list[int] | None = None,
    ) -> None:
        """Tell the lease's instance that nothing more will be written under it."""
        inbox = self.peers.inbox(lease.instance)
        if inbox is not None:
            ended = HandoffEnded(
                request_id=lease.request_id,
                epoch=lease.epoch,
                first_token=first_token,
                error=error,
                checksums=checksums,
            )
            self.outbox.send(inbox, ended)
