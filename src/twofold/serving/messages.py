"""Messages between the processes of a service, grouped by sender and receiver."""

import msgspec

from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.request import BlockChain, BlockKey, Generation, Request, SamplingParams, TokenOutput
from twofold.scheduling.instance.status import InstanceStatus
from twofold.security.network import HOME
from twofold.serving.config import ServiceConfig
from twofold.transport.base import MemoryDescriptor


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of an instance: its KV cache, its inbox for processes on its host, and its inbox for other hosts."""

    inbox: str
    memory: MemoryDescriptor
    host: str = HOME
    outside: str | None = None

    def inbox_from(self, host: str) -> str:
        """Return the address at which a sender on `host` reaches this peer's inbox."""
        return self.inbox if host == self.host or self.outside is None else self.outside


class Peers(Message, frozen=True, kw_only=True):
    """Addresses of all registered instances of the service."""

    peers: list[Peer]


class StoreFetch(msgspec.Struct, frozen=True, kw_only=True):
    """Command to fetch the first `blocks` blocks of a prompt from another host's KV store within `limit_s` seconds."""

    host: str
    address: str
    blocks: int
    limit_s: float = 5.0


class Prefill(Message, frozen=True, kw_only=True):
    """Command to prefill a request, then hand off the KV to `target`, or decode locally if `target` is None."""

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False  # report the start of the prefill, so that the controller reserves blocks on `target`
    fetch: StoreFetch | None = None  # first fetch a prefix from another host's KV store


class Reserve(Message, frozen=True, kw_only=True):
    """Command to reserve blocks for a request and lease them to the prefill worker `source`."""

    request: Request
    sampling: SamplingParams
    source: str
    # The end of the prompt: all of it if the decode worker recomputes KV or samples by earlier tokens, otherwise the
    # tokens of its incomplete last block, with which the output continues `chain`.
    prompt_token_ids: list[int] = []
    chain: BlockChain | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Command to abort a request and release its blocks."""

    request_id: str


class InstanceFenced(Message, frozen=True, kw_only=True):
    """Command to stop KV transfers to an instance that is being killed."""

    instance: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """Report that the process of an instance has exited."""

    instance: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """Message to a worker: the service refuses its registration for `reason`. The worker then exits."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Command to exit at once."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """Acknowledgement of a heartbeat. `said_s` is the heartbeat's send time, on the clock of the heartbeat's sender."""

    said_s: float


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """Report that a worker is ready."""

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None  # measured
    now_s: float = 0.0  # send time on the worker's monotonic clock


class LinkMeasured(Message, frozen=True, kw_only=True):
    """Report of the measured link speed from `source` to `target`."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """Heartbeat of a worker. `batch_s` is the age of its current batch in seconds."""

    instance: str
    epoch: int
    batch_s: float = 0.0
    said_s: float = 0.0  # send time on the watchdog clock
    now_s: float = 0.0  # the same time on the worker's monotonic clock


class PrefillStarted(Message, frozen=True, kw_only=True):
    """Report that a prefill has started."""

    request_id: str


class LeaseGranted(Message, frozen=True, kw_only=True):
    """Lease on blocks of a decode worker, for the prefill worker."""

    lease: Lease


class Status(Message, frozen=True, kw_only=True):
    """Report of a worker's current numbers of sequences and KV blocks, sent when they change."""

    instance: str
    epoch: int
    status: InstanceStatus
    number: int


class StepDone(Status, frozen=True, kw_only=True):
    """Report of a completed iteration: its new tokens, and the requests whose prefill it started."""

    started_s: float  # on the worker's monotonic clock
    started: list[str]  # ids of requests
    tokens: list[tuple[str, TokenOutput]]


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that an instance has added to its prefix cache (`stored`) or removed (`removed`)."""

    instance: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]


class HandoffReport(Message, frozen=True, kw_only=True):
    """Report that `instance` has transferred the KV of a request. Times are on the clock of `instance`."""

    instance: str
    request_id: str
    started_s: float
    ended_s: float
    bytes_moved: int


class RequestFailed(Message, frozen=True, kw_only=True):
    """Report that a request failed on `instance`."""

    instance: str
    request_id: str
    reason: str


# -- worker to worker; HandoffEnded also from the controller if a request ends before its lease is forwarded ------


class HandoffEnded(Message, frozen=True, kw_only=True):
    """Message to a decode instance: a hand-off has ended. `tokens`: the first and its drafts; None if KV is missing."""

    request_id: str
    epoch: int
    tokens: list[int] | None = None
    error: str | None = None
    checksums: list[int] | None = None


class HandoffOffered(Message, frozen=True, kw_only=True):
    """Permission for a decode instance to read the KV in `blocks` of `source`."""

    request_id: str
    epoch: int
    source: str
    source_epoch: int
    blocks: tuple[int, ...]
    tokens: list[int]  # the first output token, and the draft tokens that follow it
    checksums: list[int] | None = None


class HandoffTaken(Message, frozen=True, kw_only=True):
    """Report of a decode instance that it has read the KV of a request. `complete` is false if reading failed."""

    request_id: str
    epoch: int
    complete: bool


class Heartbeat(Message, frozen=True, kw_only=True):
    """Heartbeat of a prefill instance to a decode instance. It renews the prefill instance's leases."""

    source: str


# -- between controller and hosts ----------------------------------------------------------------------------------


class HostJoins(Message, frozen=True, kw_only=True):
    """Request of a host to join the service with a given number of workers per role."""

    host: str
    life: int  # identifies the host's launcher process
    inbox: str
    version: str
    model: str
    workers: dict[Role, int]


class HostWelcome(Message, frozen=True, kw_only=True):
    """Answer to a host whose request to join is accepted: the configuration of the service."""

    life: int
    config: ServiceConfig


class HostRefused(Message, frozen=True, kw_only=True):
    """Message to a host: it cannot join the service, or cannot remain in it."""

    life: int
    reason: str


class HostUnknown(Message, frozen=True, kw_only=True):
    """Message to a host: it must join again, for example after a restart of the service."""

    life: int


class WorkerLife(msgspec.Struct, frozen=True, array_like=True):
    """State of a worker on a joined host: number of starts, and whether its process runs."""

    life: int
    runs: bool


class HostAlive(Message, frozen=True, kw_only=True):
    """Heartbeat of a host with the state of its workers; the last one before the host leaves has `leaves` set."""

    host: str
    life: int
    inbox: str
    said_s: float
    workers: dict[str, WorkerLife]
    leaves: bool = False


class HostFailed(Message, frozen=True, kw_only=True):
    """Report that a host leaves the service because it cannot run its workers."""

    host: str
    life: int
    reason: str


class StartWorker(Message, frozen=True, kw_only=True):
    """Command to a host to start a worker. `life` counts the starts of the worker, including this one."""

    instance: str
    life: int


class KillWorker(Message, frozen=True, kw_only=True):
    """Command to a host to kill a worker. The host ignores it if the worker has restarted meanwhile."""

    instance: str
    life: int


class HostFinish(Message, frozen=True, kw_only=True):
    """Message to a host: the service has ended."""


# -- store to controller --------------------------------------------------------------------------------------------


class StoreChanged(Message, frozen=True, kw_only=True):
    """Report of the block keys that the KV store of a host has added (`stored`) or removed (`removed`)."""

    host: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]
    address: str | None = None


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tier (memory or disk) of a KV store."""

    capacity: int
    blocks: int
    hits: int
    removals: dict[str, int]


class StoreStatus(Message, frozen=True, kw_only=True):
    """Counters of a host's KV store since its start."""

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
