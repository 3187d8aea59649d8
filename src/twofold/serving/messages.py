"""Every message between the processes of a service, typed, with who sends it to whom."""

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
    """Root of all messages; `tag` puts the class name on the wire."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance can be reached: its inbox and its KV cache.

    `inbox` is for those on its own `host`, `outside` for those on others.
    """

    inbox: str
    memory: MemoryDescriptor
    host: str = HOME
    outside: str | None = None

    def inbox_from(self, host: str) -> str:
        """The address of its inbox for somebody on `host`."""
        return self.inbox if host == self.host or self.outside is None else self.outside


class Peers(Message, frozen=True, kw_only=True):
    """All instances of the service, as far as they are known."""

    peers: list[Peer]


class StoreFetch(msgspec.Struct, frozen=True, kw_only=True):
    """The store of `host` has so many leading blocks of a prompt, and gives them to other stores at `address`.

    What has not come after `limit_s` is computed.
    """

    host: str
    address: str
    blocks: int
    limit_s: float = 5.0


class Prefill(Message, frozen=True, kw_only=True):
    """Prefill this request; then decode it too, or hand it to `target`.

    With `announce` the worker says when its prefill starts, because room on `target` is asked for only then.
    With `fetch` the store of its own host first brings the beginning of the prompt from that of another.
    """

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False
    fetch: StoreFetch | None = None


class Reserve(Message, frozen=True, kw_only=True):
    """Lease blocks for this request to `source`, which prefills it, as soon as there is room.

    The prompt itself is for engines that may compute it once more, when they have given away what came of it.
    """

    request: Request
    sampling: SamplingParams
    source: str
    prompt_token_ids: list[int] | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Forget this request."""

    request_id: str


class InstanceFenced(Message, frozen=True, kw_only=True):
    """An instance was given up, and may yet live: write nothing to it any more. What it writes may still come."""

    instance: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """An instance is gone: it will write no more."""

    instance: str


class WorkerRefused(Message, frozen=True, kw_only=True):
    """This worker cannot be part of the service, for this reason: end."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """End now."""


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """To another host: what you said at `said_s`, on your clock, was heard. See `Tether`."""

    said_s: float


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """The worker is ready to be given work. `model` names what it computes: all workers must agree on it.

    `prefill` is how fast it does, where that was measured; `now_s` is its monotonic clock.
    """

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None
    now_s: float = 0.0


class LinkMeasured(Message, frozen=True, kw_only=True):
    """What the link between two workers carries, as the source measured it when it first met the target."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """The worker lives and applies messages; its batch under way, if there is one, has run for `batch_s` seconds.

    `said_s` is when it said so on the clock of `Tether`, `now_s` on its monotonic clock.
    """

    instance: str
    epoch: int
    batch_s: float = 0.0
    said_s: float = 0.0
    now_s: float = 0.0


class PrefillStarted(Message, frozen=True, kw_only=True):
    """The prefill of an announced request starts: now is the time to ask for room on its target."""

    request_id: str


class LeaseGranted(Message, frozen=True, kw_only=True):
    """To the controller, and on to the lease's source if its request is still alive."""

    lease: Lease


class StepDone(Message, frozen=True, kw_only=True):
    """An iteration is over. `started` are the requests whose prefill began with it; times are monotonic seconds.

    `number` counts the reports of status: they come over two ways, and an older one may come later. `epoch` says
    in which life of the instance all this happened.
    """

    instance: str
    epoch: int
    started_s: float
    started: list[str]
    tokens: list[tuple[str, TokenOutput]]
    status: InstanceStatus
    number: int


class Status(Message, frozen=True, kw_only=True):
    """The accounts of a worker changed while it ran no batch; see StepDone for `epoch` and `number`."""

    instance: str
    epoch: int
    status: InstanceStatus
    number: int


class BlocksChanged(Message, frozen=True, kw_only=True):
    """Blocks, by key, that prompts find on an instance from now on, and blocks that they do not find there any more."""

    instance: str
    epoch: int
    stored: list[BlockKey]
    removed: list[BlockKey]


class HandoffReport(Message, frozen=True, kw_only=True):
    """A hand-off is complete, says `instance`: `bytes_moved` travelled between these times (its monotonic seconds)."""

    instance: str
    request_id: str
    started_s: float
    ended_s: float
    bytes_moved: int


class RequestFailed(Message, frozen=True, kw_only=True):
    """This request cannot go on, says `instance`; `reason` is one sentence."""

    instance: str
    request_id: str
    reason: str


# -- worker to worker, and controller to worker for a request that ended before its lease was passed on -----------


class HandoffEnded(Message, frozen=True, kw_only=True):
    """The source will not write to this lease any more.

    `first_token` is the output token that the prefill made, if the KV cache is complete; None if the hand-off
    was given up, either because its request is over or because of an `error`.
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
    """Pull: the target reads nothing any more from the source, which offered it in this `epoch` of its own.

    `bytes_moved` is None if it did not read all of it.
    """

    request_id: str
    epoch: int
    bytes_moved: int | None


class Heartbeat(Message, frozen=True, kw_only=True):
    """The source is alive: its leases last."""

    source: str


# -- between the controller and other hosts that run workers -------------------------------------------------------


class HostJoins(Message, frozen=True, kw_only=True):
    """A host offers workers, so many of each role. Repeated until it is answered.

    `life` is this run of its launcher, `inbox` where that is reached, and `model` what it would serve.
    """

    host: str
    life: int
    inbox: str
    version: str
    model: str
    workers: dict[Role, int]


class HostWelcome(Message, frozen=True, kw_only=True):
    """The service as this host is to run it: its own workers, and the engine but for what each host has of its own."""

    life: int
    config: ServiceConfig


class HostRefused(Message, frozen=True, kw_only=True):
    """This host cannot be part of the service, for this reason."""

    life: int
    reason: str


class HostUnknown(Message, frozen=True, kw_only=True):
    """The service, which is perhaps another by now, does not know this life of the host: it is to join anew."""

    life: int


class WorkerLife(msgspec.Struct, frozen=True, array_like=True):
    """One worker of a host: how often it was started, and whether the last of them runs."""

    life: int
    runs: bool


class HostAlive(Message, frozen=True, kw_only=True):
    """The launcher of a host lives, and how its workers are. `leaves`: it will start none any more."""

    host: str
    life: int
    inbox: str
    said_s: float
    workers: dict[str, WorkerLife]
    leaves: bool = False


class HostFailed(Message, frozen=True, kw_only=True):
    """A host cannot run its workers, for this reason, and has ended."""

    host: str
    life: int
    reason: str


class StartWorker(Message, frozen=True, kw_only=True):
    """Start a worker, for the `life`-th time. To be done once, however often it is said."""

    instance: str
    life: int


class KillWorker(Message, frozen=True, kw_only=True):
    """End this life of a worker by force. To be done once, however often it is said."""

    instance: str
    life: int


class HostFinish(Message, frozen=True, kw_only=True):
    """The service has ended: end when the workers have, as they are told to."""


# -- store of a host to controller -----------------------------------------------------------------------------------


class StoreChanged(Message, frozen=True, kw_only=True):
    """Blocks, by key, that the store of `host` has from now on, and blocks that it has no more.

    `epoch` names a life of the store: what an earlier one had in memory is gone with it; each life begins with one of
    these. `address` is where stores of other hosts reach this life, if they do.
    """

    host: str
    epoch: int
    stored: list[bytes]
    removed: list[bytes]
    address: str | None = None


class StoreTier(msgspec.Struct, frozen=True, kw_only=True):
    """Memory or disk of a store: its blocks, how many of them were used, and how many went, by reason."""

    capacity: int
    blocks: int
    hits: int
    removals: dict[str, int]


class StoreStatus(Message, frozen=True, kw_only=True):
    """The accounts of a host's store since this life of it began; `tiers` by name, the fastest first."""

    host: str
    epoch: int
    tiers: dict[str, StoreTier]
    bytes_moved: dict[str, int]


ToWorker = (
    Peers
    | Prefill
    | Reserve
    | LeaseGranted
    | Abort
    | InstanceFenced
    | InstanceLost
    | WorkerRefused
    | Shutdown
    | HeartbeatAck
    | HandoffEnded
    | HandoffOffered
    | HandoffTaken
    | Heartbeat
)
ToController = (
    Registered
    | LinkMeasured
    | Alive
    | PrefillStarted
    | LeaseGranted
    | StepDone
    | Status
    | BlocksChanged
    | HandoffReport
    | RequestFailed
    | StoreChanged
    | StoreStatus
    | HostJoins
    | HostAlive
    | HostFailed
)
ToHost = HostWelcome | HostRefused | HostUnknown | StartWorker | KillWorker | HostFinish | HeartbeatAck
