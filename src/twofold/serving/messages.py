"""Every message between the processes of a service, typed, with who sends it to whom."""

import msgspec

from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.performance.measured import LinkSpeed, PrefillSpeed
from twofold.request import Generation, Request, SamplingParams, TokenOutput
from twofold.scheduling.instance import InstanceStatus
from twofold.transport.base import MemoryDescriptor


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of all messages; `tag` puts the class name on the wire."""


# -- controller to worker -------------------------------------------------------------------------------------


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance can be reached: its inbox and its KV cache."""

    inbox: str
    memory: MemoryDescriptor


class Peers(Message, frozen=True, kw_only=True):
    """All instances of the service, as far as they are known."""

    peers: list[Peer]


class Prefill(Message, frozen=True, kw_only=True):
    """Prefill this request; then decode it too, or hand it to `target`.

    With `announce` the worker says when its prefill starts, because room on `target` is asked for only then.
    """

    generation: Generation
    target: str | None = None
    mode: HandoffMode | None = None
    announce: bool = False


class Reserve(Message, frozen=True, kw_only=True):
    """Lease blocks for this request to `source`, which prefills it, as soon as there is room."""

    request: Request
    sampling: SamplingParams
    source: str


class Abort(Message, frozen=True, kw_only=True):
    """Forget this request."""

    request_id: str


class InstanceLost(Message, frozen=True, kw_only=True):
    """An instance is gone: it will write no more."""

    instance: str


class Refused(Message, frozen=True, kw_only=True):
    """This worker cannot be part of the service, for this reason: end."""

    reason: str


class Shutdown(Message, frozen=True, kw_only=True):
    """End now."""


# -- worker to controller -------------------------------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True):
    """The worker is ready to be given work. `model` names what it computes: all workers must agree on it.

    `prefill` is how fast it does, where that was measured.
    """

    peer: Peer
    role: Role
    model: str
    status: InstanceStatus
    prefill: PrefillSpeed | None = None


class LinkMeasured(Message, frozen=True, kw_only=True):
    """What the link between two workers carries, as the source measured it when it first met the target."""

    source: str
    target: str
    speed: LinkSpeed


class Alive(Message, frozen=True, kw_only=True):
    """The worker lives and applies messages; its batch under way, if there is one, has run for `batch_s` seconds."""

    instance: str
    epoch: int
    batch_s: float = 0.0


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


class HandoffReport(Message, frozen=True, kw_only=True):
    """A hand-off is complete: `bytes_moved` travelled between these times (monotonic seconds)."""

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


ToWorker = (
    Peers
    | Prefill
    | Reserve
    | LeaseGranted
    | Abort
    | InstanceLost
    | Refused
    | Shutdown
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
    | HandoffReport
    | RequestFailed
)
