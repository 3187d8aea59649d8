"""Messages between the processes of a service, by sender and receiver."""

import msgspec

from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.request import BlockKey, Generation, Request, SamplingParams, TokenOutput
from twofold.scheduling.instance.status import InstanceStatus
from twofold.security.network import HOME
from twofold.serving.config import ServiceConfig
from twofold.transport.base import MemoryDescriptor


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages. With `tag`, an encoded message includes its class name."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of an instance: its KV memory, `inbox` for senders on the same `host`, `outside` for other hosts."""

    inbox: str
    memory: MemoryDescriptor
    host: str = HOME
    outside: str | None = None

    def inbox_from(self, host: str) -> str:
        """Return the inbox address of this instance for a sender on `host`."""
        return self.inbox if host == self.host or self.outside is None else self.outside


class Peers(Message, frozen=True, kw_only=True):
    """Message that lists the addresses of all registered instances of the service."""

    peers: list[Peer]


class StoreFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to fetch the first `blocks` blocks of a prompt from the KV store of `host` at `address`.

    The worker computes the blocks that have not arrived after `limit_s`.
    """

    host: str
    address: str
    blocks: int
    limit_s: float = 5.0


class Prefill(Message, frozen=True, kw_only=True):
    """Command to prefill a request, then decode it, or hand it over to `target` if set.

    With `announce`, the worker reports the start of the prefill, and the controller then requests room on `target`.
    With `fetch`, the store of the worker's host first fetches a prefix from another host.
    """

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False
    fetch: StoreFetch | None = None


class Reserve(Message, frozen=True, kw_only=True):
    """Command to lease blocks for a request to its prefill worker `source` as soon as blocks are free.

    Engines that may recompute the KV of a decode receive the prompt as well.
    """

    request: Request
    sampling: SamplingParams
    source: str
    prompt_token_ids: list[int] | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Command to drop a request."""

    request_id: str


class InstanceFenced(Message, frozen=True, kw_only=True):
    """Command to stop writing to a fenced instance. This instance may still run and write."""

    instance: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """Report that an instance has ended and writes no more."""

    instance: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """Report that the receiving worker cannot join the service and must exit."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command to exit at once."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Acknowledgement of the heartbeat that a process on another host sent at `said_s` on that process's clock."""

    said_s: float


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """Report that a worker is ready.

    All workers must have the same model fingerprint `model`. `prefill` is the measured prefill speed, if any; `now_s`
    is the time on the worker's monotonic clock.
    """

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None
    now_s: float = 0.0


class LinkMeasured(Message, frozen=True, kw_only=True):
    """Report of the speed of a link between two workers, measured by the source when it first connects."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat of a worker; its current batch has run for `batch_s` seconds.

    `said_s` is the send time on the clock of `ParentWatchdog`, `now_s` on the monotonic clock.
    """

    instance: str
    epoch: int
    batch_s: float = 0.0
    said_s: float = 0.0
    now_s: float = 0.0


class PrefillStarted(Message, frozen=True, kw_only=True):
    """Report that the prefill of an announced request starts. The controller then requests room on its target."""

    request_id: str


class LeaseGranted(Message, frozen=True, kw_only=True):
    """Report that a lease was granted. The controller forwards the lease to its source if the request is live."""

    lease: Lease


class StepDone(Message, frozen=True, kw_only=True):
    """Report that an iteration has ended.

    `started` lists the requests that began their prefill in this iteration. Times are in monotonic seconds. `number`
    orders this status report among all reports of the worker, `epoch` identifies the worker process.
    """

    instance: str
    epoch: int
    started_s: float
    started: list[str]
    tokens: list[tuple[str, TokenOutput]]
    status: InstanceStatus
    number: int


class Status(Message, frozen=True, kw_only=True):
    """Report of a worker's status that changed outside of a batch; see StepDone for `epoch` and `number`."""

    instance: str
    epoch: int
    status: InstanceStatus
    number: int


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that were added to and removed from an instance's prefix cache."""

    instance: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]


class HandoffReport(Message, frozen=True, kw_only=True):
    """Report of a completed hand-off of `bytes_moved` bytes, with times on the monotonic clock of `instance`."""

    instance: str
    request_id: str
    started_s: float
    ended_s: float
    bytes_moved: int


class RequestFailed(Message, frozen=True, kw_only=True):
    """Report that a request failed on `instance`; `reason` is one sentence."""

    instance: str
    request_id: str
    reason: str


# -- worker to worker; HandoffEnded also from the controller if a request ends before its lease is forwarded ------


class HandoffEnded(Message, frozen=True, kw_only=True):
    """Report that the source of a hand-off writes to its lease no more.

    `first_token` is the output of the prefill if the KV cache is complete. It is None after an abort or an `error`.
    """

    request_id: str
    epoch: int
    first_token: int | None = None
    error: str | None = None
    checksums: list[int] | None = None


class HandoffOffered(Message, frozen=True, kw_only=True):
    """Offer of a pulled hand-off: the target of the lease with this `epoch` may read KV from the source's `blocks`."""

    request_id: str
    epoch: int
    source: str
    source_epoch: int
    blocks: tuple[int, ...]
    first_token: int
    checksums: list[int] | None = None


class HandoffTaken(Message, frozen=True, kw_only=True):
    """Report that the target of a pulled hand-off has finished reading.

    `epoch` is the source's epoch, in which it made the offer. `bytes_moved` is None if the read is incomplete.
    """

    request_id: str
    epoch: int
    bytes_moved: int | None


class Heartbeat(Message, frozen=True, kw_only=True):
    """Heartbeat of the source of hand-offs. It extends the leases of this source."""

    source: str


# -- between controller and hosts ----------------------------------------------------------------------------------


class HostJoins(Message, frozen=True, kw_only=True):
    """Request of a host to join with a number of workers by role, repeated until the service answers.

    `life` identifies the host's launcher process, `inbox` is the launcher's address, `model` the fingerprint of its
    model.
    """

    host: str
    life: int
    inbox: str
    version: str
    model: str
    workers: dict[Role, int]


class HostWelcome(Message, frozen=True, kw_only=True):
    """Answer to an admitted host: the configuration with its workers. The host sets the settings of its hardware."""

    life: int
    config: ServiceConfig


class HostRefused(Message, frozen=True, kw_only=True):
    """Report that the host cannot join the service because of `reason`."""

    life: int
    reason: str


class HostUnknown(Message, frozen=True, kw_only=True):
    """Report that the controller, perhaps restarted, does not know this launcher. Its host must join again."""

    life: int


class WorkerLife(msgspec.Struct, frozen=True, array_like=True):
    """State of a worker on another host: the number of its starts, and whether its last process runs."""

    life: int
    runs: bool


class HostAlive(Message, frozen=True, kw_only=True):
    """Heartbeat of a host's launcher, with the state of its workers. With `leaves`, the host starts no more workers."""

    host: str
    life: int
    inbox: str
    said_s: float
    workers: dict[str, WorkerLife]
    leaves: bool = False


class HostFailed(Message, frozen=True, kw_only=True):
    """Report that a host has ended because it cannot run its workers; `reason` states why."""

    host: str
    life: int
    reason: str


class StartWorker(Message, frozen=True, kw_only=True):
    """Command to start a worker for the `life`-th time. A repeated command has no effect."""

    instance: str
    life: int


class KillWorker(Message, frozen=True, kw_only=True):
    """Command to kill a worker that was started for the `life`-th time. A repeated command has no effect."""

    instance: str
    life: int


class HostFinish(Message, frozen=True, kw_only=True):
    """Report that the service has ended. The host exits once its workers have exited."""


# -- store to controller --------------------------------------------------------------------------------------------


class StoreChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that were added to and removed from the KV store of `host`.

    `epoch` identifies the store process; each process begins with such a report. `address` is the store's address for
    other hosts, if any.
    """

    host: str
    epoch: int
    stored: list[bytes]
    removed: list[bytes]
    address: str | None = None


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tier (memory or disk) of a store: blocks in use, reused blocks, and removals by reason."""

    capacity: int
    blocks: int
    hits: int
    removals: dict[str, int]


class StoreStatus(Message, frozen=True, kw_only=True):
    """Report of the counters of a host's KV store since its start. `tiers` lists the fastest tier first."""

    host: str
    epoch: int
    tiers: dict[str, StoreTier]
    bytes_moved: dict[str, int]


FromPeer = HandoffEnded | HandoffOffered | HandoffTaken | Heartbeat
Order = Peers | Prefill | Reserve | Abort | InstanceFenced | InstanceLost | WorkerRefused
ToWorker = Order | FromPeer | LeaseGranted | Shutdown | HeartbeatAck
WorkerEvent = Registered | LinkMeasured | Alive | Status | BlocksChanged
RequestEvent = PrefillStarted | LeaseGranted | StepDone | HandoffReport | RequestFailed
FromHost = HostJoins | HostAlive | HostFailed
ToController = WorkerEvent | RequestEvent | FromHost | StoreChanged | StoreStatus
ToHost = HostWelcome | HostRefused | HostUnknown | StartWorker | KillWorker | HostFinish | HeartbeatAck
