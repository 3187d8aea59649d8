"""What the four threads of a worker share, and what any of them may do."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twofold.handoff import Lease
from twofold.instance import Role
from twofold.scheduling.instance import InstanceStatus
from twofold.serving.mailbox import Outbox
from twofold.serving.messages import (
    BlocksChanged,
    HandoffEnded,
    LeaseGranted,
    Message,
    RequestFailed,
    Status,
)
from twofold.serving.worker.block_changes import BlockChanges
from twofold.serving.worker.deadline import Deadline
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.live import LiveSequence
from twofold.serving.worker.peers import PeerDirectory
from twofold.serving.worker.prefixes import Prefixes
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.scheduling import WorkerScheduler
from twofold.serving.worker.sender import HandoffSender


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
    landing: Landing
    peers: PeerDirectory
    outbox: Outbox
    controller: str
    sequences: dict[str, LiveSequence] = field(default_factory=dict)
    blocks: BlockChanges = field(default_factory=BlockChanges)
    prefixes: Prefixes = field(default_factory=Prefixes)
    changed: threading.Condition = field(default_factory=threading.Condition)
    tether: Deadline = field(default_factory=Deadline)
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
