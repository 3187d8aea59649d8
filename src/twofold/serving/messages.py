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
    """Base of all messages; `tag` sends the class name."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of an instance: its KV cache, its `inbox` for its own `host`, and `outside` for other hosts."""

    inbox: str
    memory: MemoryDescriptor
    host: str = HOME
    outside: str | None = None

    def inbox_from(self, host: str) -> str:
        """Return the inbox address for a sender on `host`."""
        return self.inbox if host == self.host or self.outside is None else self.outside


class Peers(Message, frozen=True, kw_only=True):
    """All registered instances of the service."""

    peers: list[Peer]


class StoreFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to fetch the first `blocks` of a prompt from the store of `host` at `address`.

    Blocks that have not arrived after `limit_s` are computed.
    """

    host: str
    address: str
    blocks: int
    limit_s: float = 5.0


class Prefill(Message, frozen=True, kw_only=True):
    """Prefill a request, then decode it or hand it over to `target`.

    With `announce`, the worker reports the start of the prefill, at which room on `target` is requested. With
    `fetch`, its host's store first fetches a prefix from another host.
    """

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False
    fetch: StoreFetch | None = None


class Reserve(Message, frozen=True, kw_only=True):
    """Lease blocks for a request to its prefill worker `source` as soon as there is room.

    Engines that may recompute the KV of a decode get the prompt as well.
    """

    request: Request
    sampling: SamplingParams
    source: str
    prompt_token_ids: list[int] | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Drop a request."""

    request_id: str


class InstanceFenced(Message, frozen=True, kw_only=True):
    """Stop writing to a fenced instance, which may still run and write."""

    instance: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """An instance has ended and writes no more."""

    instance: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """The worker cannot join the service and must exit."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Exit now."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Acknowledges the heartbeat that a process on another host sent at `said_s`, by its own clock."""

    said_s: float


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """The worker is ready.

    All workers must agree on the fingerprint `model`. `prefill` is the measured prefill speed, if any; `now_s` is the
    worker's monotonic clock.
    """

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None
    now_s: float = 0.0


class LinkMeasured(Message, frozen=True, kw_only=True):
    """Speed of the link between two workers, measured by the source when it first met the target."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat of a worker, whose current batch has run for `batch_s` seconds.

    `said_s` is the send time on the clock of `ParentWatchdog`, `now_s` on the monotonic clock.
    """

    instance: str
    epoch: int
    batch_s: float = 0.0
    said_s: float = 0.0
    now_s: float = 0.0


class PrefillStarted(Message, frozen=True, kw_only=True):
    """The prefill of an announced request starts: request room on its target."""

    request_id: str


class LeaseGranted(Message, frozen=True, kw_only=True):
    """A lease was granted: the controller forwards it to the lease's source if the request is still live."""

    lease: Lease


class StepDone(Message, frozen=True, kw_only=True):
    """An iteration has ended. `started` lists the requests whose prefill began with it; times are monotonic seconds.

    Status reports take two paths, so `number` orders them. `epoch` identifies the worker process.
    """

    instance: str
    epoch: int
    started_s: float
    started: list[str]
    tokens: list[tuple[str, TokenOutput]]
    status: InstanceStatus
    number: int


class Status(Message, frozen=True, kw_only=True):
    """Status of a worker that changed outside of a batch; see StepDone for `epoch` and `number`."""

    instance: str
    epoch: int
    status: InstanceStatus
    number: int


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Keys of the blocks that were added to and removed from an instance's prefix cache."""

    instance: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]


class HandoffReport(Message, frozen=True, kw_only=True):
    """A completed hand-off of `bytes_moved` bytes, with times on the monotonic clock of `instance`."""

    instance: str
    request_id: str
    started_s: float
    ended_s: float
    bytes_moved: int


class RequestFailed(Message, frozen=True, kw_only=True):
    """A request failed on `instance`; `reason` is one sentence."""

    instance: str
    request_id: str
    reason: str


# -- worker to worker; HandoffEnded also from the controller if a request ends before its lease is forwarded ------


class HandoffEnded(Message, frozen=True, kw_only=True):
    """The source will not write to this lease any further.

    `first_token` is the output of the prefill if the KV cache is complete. It is None after an abort or an `error`.
    """

    request_id: str
    epoch: int
    first_token: int | None = None
    error: str | None = None
    checksums: list[int] | None = None


class HandoffOffered(Message, frozen=True, kw_only=True):
    """Pull: the target, which granted a lease in this `epoch`, may read the KV cache from these blocks."""

    request_id: str
    epoch: int
    source: str
    source_epoch: int
    blocks: tuple[int, ...]
    first_token: int
    checksums: list[int] | None = None


class HandoffTaken(Message, frozen=True, kw_only=True):
    """Pull: the target has finished reading from the source, which made its offer in this `epoch`.

    `bytes_moved` is None if the read is incomplete.
    """

    request_id: str
    epoch: int
    bytes_moved: int | None


class Heartbeat(Message, frozen=True, kw_only=True):
    """The source is alive, which extends its leases."""

    source: str


# -- between controller and hosts ----------------------------------------------------------------------------------


class HostJoins(Message, frozen=True, kw_only=True):
    """A host offers a number of workers by role; repeated until it is answered.

    `life` identifies its launcher process, `inbox` is the launcher's address, `model` the fingerprint of its model.
    """

    host: str
    life: int
    inbox: str
    version: str
    model: str
    workers: dict[Role, int]


class HostWelcome(Message, frozen=True, kw_only=True):
    """Configuration for an admitted host, with its workers; host-specific engine settings are left to the host."""

    life: int
    config: ServiceConfig


class HostRefused(Message, frozen=True, kw_only=True):
    """The host cannot join the service, for this reason."""

    life: int
    reason: str


class HostUnknown(Message, frozen=True, kw_only=True):
    """The controller, perhaps a restarted one, does not know this launcher process: the host must join again."""

    life: int


class WorkerLife(msgspec.Struct, frozen=True, array_like=True):
    """State of a host's worker: the number of its starts, and whether the last process runs."""

    life: int
    runs: bool


class HostAlive(Message, frozen=True, kw_only=True):
    """Heartbeat of a host's launcher, with the state of its workers. With `leaves`, it will start no more workers."""

    host: str
    life: int
    inbox: str
    said_s: float
    workers: dict[str, WorkerLife]
    leaves: bool = False


class HostFailed(Message, frozen=True, kw_only=True):
    """The host cannot run its workers, for this reason, and has ended."""

    host: str
    life: int
    reason: str


class StartWorker(Message, frozen=True, kw_only=True):
    """Start a worker for the `life`-th time. Idempotent."""

    instance: str
    life: int


class KillWorker(Message, frozen=True, kw_only=True):
    """Kill this life of a worker. Idempotent."""

    instance: str
    life: int


class HostFinish(Message, frozen=True, kw_only=True):
    """The service has ended: exit once the workers have exited."""


# -- store to controller --------------------------------------------------------------------------------------------


class StoreChanged(Message, frozen=True, kw_only=True):
    """Keys of the blocks that were added to and removed from the store of `host`.

    `epoch` identifies the store process; each process starts with such a message. `address` is the store's address
    for other hosts, if any.
    """

    host: str
    epoch: int
    stored: list[bytes]
    removed: list[bytes]
    address: str | None = None


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier (memory or disk) of a store: blocks in use, reused blocks, and removals by reason."""

    capacity: int
    blocks: int
    hits: int
    removals: dict[str, int]


class StoreStatus(Message, frozen=True, kw_only=True):
    """Counters of a host's store since its start, with tiers by name, fastest first."""

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
