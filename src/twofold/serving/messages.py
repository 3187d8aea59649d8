"""Messages between the processes of a service, grouped by sender and receiver."""

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
    """Base class of all messages. The encoded message contains the name of its class."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of an instance: its KV `memory`, its `inbox` for its own host, and `outside` for other hosts."""

    inbox: str
    memory: MemoryDescriptor
    host: str = HOME
    outside: str | None = None

    def inbox_from(self, host: str) -> str:
        """Return the inbox address of this instance for a sender on `host`."""
        return self.inbox if host == self.host or self.outside is None else self.outside


class Peers(Message, frozen=True, kw_only=True):
    """Message with the addresses of all registered instances of the service."""

    peers: list[Peer]


class StoreFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to fetch a prompt's first `blocks` blocks from another host's KV store within `limit_s` seconds."""

    host: str
    address: str
    blocks: int
    limit_s: float = 5.0


class Prefill(Message, frozen=True, kw_only=True):
    """Command to prefill a request, and then to decode it or, if `target` is set, to hand its KV off to `target`. With
    `announce`, the worker reports the start of the prefill, and the controller then reserves blocks on `target`. With
    `fetch`, the worker first fetches a prefix from another host's KV store.
    """

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False
    fetch: StoreFetch | None = None


class Reserve(Message, frozen=True, kw_only=True):
    """Command to reserve blocks for a request once enough are free, and to lease them to the prefill worker `source`.
    The prompt is included for engines that recompute KV on the decode worker.
    """

    request: Request
    sampling: SamplingParams
    source: str
    prompt_token_ids: list[int] | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Command to abort a request and release its blocks."""

    request_id: str


class InstanceFenced(Message, frozen=True, kw_only=True):
    """Command to stop KV transfers to an instance that is being killed but may still write."""

    instance: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """Report that the process of an instance has exited, so that it no longer writes KV."""

    instance: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """Command to a worker to exit, because the service has refused its registration for `reason`."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command to exit at once."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Acknowledgement of a heartbeat that another host sent at `said_s`, a time on that host's clock."""

    said_s: float


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """Report that a worker is ready. All workers must have the same `model` fingerprint. `prefill` is the measured
    prefill speed, if any. `now_s` is the send time on the worker's monotonic clock.
    """

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None
    now_s: float = 0.0


class LinkMeasured(Message, frozen=True, kw_only=True):
    """Report of the link speed from `source` to `target`, measured when `source` first connects to `target`."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat of a worker, whose current batch has run for `batch_s` seconds. The heartbeat was sent at `said_s` on
    the watchdog clock, which is `now_s` on the worker's monotonic clock.
    """

    instance: str
    epoch: int
    batch_s: float = 0.0
    said_s: float = 0.0
    now_s: float = 0.0


class PrefillStarted(Message, frozen=True, kw_only=True):
    """Report that a prefill has started. The controller then reserves blocks on the decode instance."""

    request_id: str


class LeaseGranted(Message, frozen=True, kw_only=True):
    """Lease on blocks of a decode worker, which the controller forwards to the prefill worker."""

    lease: Lease


class StepDone(Message, frozen=True, kw_only=True):
    """Report of a completed iteration, which started at `started_s` on the worker's monotonic clock. `started` lists
    the requests whose prefill began. `epoch` identifies the worker process; `number` increases with each report.
    """

    instance: str
    epoch: int
    started_s: float
    started: list[str]
    tokens: list[tuple[str, TokenOutput]]
    status: InstanceStatus
    number: int


class Status(Message, frozen=True, kw_only=True):
    """Report that a worker's status changed outside an iteration. See StepDone for `epoch` and `number`."""

    instance: str
    epoch: int
    status: InstanceStatus
    number: int


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that an instance has added to its prefix cache (`stored`) or removed (`removed`)."""

    instance: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]


class HandoffReport(Message, frozen=True, kw_only=True):
    """Report that `instance` has moved the KV of a hand-off: the prefill instance by writing, or the decode instance by
    reading. Times are on the clock of `instance`. After a read, this report precedes the first decoded token.
    """

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
    """Message to the target of a hand-off that the source no longer writes to the leased blocks. `first_token` is the
    output token of the prefill, or None if the KV is incomplete after an abort or `error`.
    """

    request_id: str
    epoch: int
    first_token: int | None = None
    error: str | None = None
    checksums: list[int] | None = None


class HandoffOffered(Message, frozen=True, kw_only=True):
    """Permission for the target of a pulled hand-off to read the KV in `blocks` of `source`."""

    request_id: str
    epoch: int
    source: str
    source_epoch: int
    blocks: tuple[int, ...]
    first_token: int
    checksums: list[int] | None = None


class HandoffTaken(Message, frozen=True, kw_only=True):
    """Report of a decode instance to the prefill instance that reading the KV succeeded (`complete`) or failed."""

    request_id: str
    epoch: int
    complete: bool


class Heartbeat(Message, frozen=True, kw_only=True):
    """Heartbeat from the source of hand-offs to a target, which renews the leases granted to the source."""

    source: str


# -- between controller and hosts ----------------------------------------------------------------------------------


class HostJoins(Message, frozen=True, kw_only=True):
    """Request of a host to join with a number of workers by role, repeated until it is answered. `life` identifies the
    host's launcher process, `inbox` is its address, and `model` is the fingerprint of the host's model.
    """

    host: str
    life: int
    inbox: str
    version: str
    model: str
    workers: dict[Role, int]


class HostWelcome(Message, frozen=True, kw_only=True):
    """Answer to an admitted host: configuration of the service and of the host's workers, without hardware settings."""

    life: int
    config: ServiceConfig


class HostRefused(Message, frozen=True, kw_only=True):
    """Message that a host cannot join or remain in the service because of `reason`."""

    life: int
    reason: str


class HostUnknown(Message, frozen=True, kw_only=True):
    """Message to a host that the controller does not know, for example after a restart. The host must join again."""

    life: int


class WorkerLife(msgspec.Struct, frozen=True, array_like=True):
    """State of a worker on a joined host: number of starts so far (`life`), and whether its process runs (`runs`)."""

    life: int
    runs: bool


class HostAlive(Message, frozen=True, kw_only=True):
    """Heartbeat of a host's launcher with the state of its workers. With `leaves`, the host leaves the service."""

    host: str
    life: int
    inbox: str
    said_s: float
    workers: dict[str, WorkerLife]
    leaves: bool = False


class HostFailed(Message, frozen=True, kw_only=True):
    """Report that a host leaves the service because it cannot run its workers; `reason` states why."""

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
    """Message that the service has ended. The host exits after its workers have exited."""


# -- store to controller --------------------------------------------------------------------------------------------


class StoreChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that the KV store of `host` has added (`stored`) or removed (`removed`). `epoch`
    identifies the store process. Other hosts fetch blocks from `address`, if set.
    """

    host: str
    epoch: int
    stored: list[bytes]
    removed: list[bytes]
    address: str | None = None


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tier (memory, disk) of a KV store: capacity, blocks in use, reused blocks, removals by reason."""

    capacity: int
    blocks: int
    hits: int
    removals: dict[str, int]


class StoreStatus(Message, frozen=True, kw_only=True):
    """Counters of a host's KV store since its start. `tiers` are ordered from the fastest to the slowest."""

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
