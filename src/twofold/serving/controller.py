"""The controller: places requests on workers, passes leases on, and brings tokens back in order.

It is the one place where the life of a request is known as a whole, and the only sender of requests, leases
and aborts to workers. So a worker hears of a request before it hears of its lease, and a lease that is granted
after its request ended is given back from here. A request whose worker is lost begins another attempt; one that
nobody can take just now waits.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable

from twofold.errors import (
    ConfigurationError,
    InstanceLostError,
    RequestError,
    StaleEpochError,
    TwofoldError,
)
from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.kvcache.index import PrefixIndex
from twofold.request import FinishReason, Generation, TokenOutput
from twofold.scheduling.admission import Admission
from twofold.scheduling.breaker import BreakerState
from twofold.scheduling.cluster import ClusterScheduler
from twofold.scheduling.outcome import InstanceStatus
from twofold.scheduling.overload.control import OverloadControl
from twofold.scheduling.overload.ledger import Newcomer
from twofold.scheduling.replan_log import Decision
from twofold.serving.admitting import deadline_passed, refused
from twofold.serving.config import ReplanConfig
from twofold.serving.fleet import ALIVE_S, Fleet
from twofold.serving.host_stores import HostStores
from twofold.serving.hosts import Hosts
from twofold.serving.live_request import Attempt, LiveRequest
from twofold.serving.mailbox import Inbox
from twofold.serving.measured_paths import MeasuredPaths
from twofold.serving.messages import (
    Abort,
    Alive,
    BlocksChanged,
    HandoffEnded,
    HandoffReport,
    HostAlive,
    HostFailed,
    HostJoins,
    InstanceFenced,
    InstanceLost,
    LeaseGranted,
    LinkMeasured,
    Prefill,
    PrefillStarted,
    Refused,
    Registered,
    RequestFailed,
    Reserve,
    Shutdown,
    Status,
    StepDone,
    StoreChanged,
    StoreStatus,
    ToController,
)
from twofold.serving.prompt_keys import PromptKeys
from twofold.serving.replanning import LiveReplanning
from twofold.serving.roles import Roles
from twofold.serving.service import PoolMember, ServedModel
from twofold.serving.snapshot import InstanceState, ServiceSnapshot
from twofold.serving.telemetry import Telemetry
from twofold.timeline import Moment, Recorder

log = logging.getLogger(__name__)


# A request that was lost so often without a token in between may be what ends the workers.
MAX_IN_VAIN = 8


class Controller:
    """Implements `Service` for the gateway over the workers of one service.

    With `roles_move`, or a pulled hand-off, room on the decode instance is asked for when a prefill starts
    (docs/decisions/0007).
    With `prompt_keys` workers keep what they have computed of prompts, and say what they have.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: ClusterScheduler,
        admission: Admission,
        fleet: Fleet,
        inbox: Inbox[ToController],
        telemetry: Telemetry,
        paths: MeasuredPaths,
        overload: OverloadControl | None = None,
        hosts: Hosts | None = None,
        roles_move: bool = False,
        replan: ReplanConfig | None = None,
        prompt_keys: PromptKeys | None = None,
    ) -> None:
        self.model = model
        self._cluster = cluster
        self._admission = admission
        self._fleet = fleet
        self._inbox = inbox
        self._telemetry = telemetry
        self._paths = paths
        self._overload = overload
        self._hosts = hosts
        self._roles = Roles(cluster, fleet, move=roles_move)
        self._prompt_keys = prompt_keys
        self._prefixes = PrefixIndex()
        self._stores = HostStores()
        self._replanning = None if replan is None else LiveReplanning(replan, cluster.pools, self)
        watches = () if self._replanning is None else (self._replanning.observe,)
        self._recorder = Recorder(sinks=(telemetry.observe, *watches))
        self._live: dict[str, LiveRequest] = {}
        self._attempts: dict[str, LiveRequest] = {}  # by the attempt that runs now
        self._reports: dict[str, int] = {}
        self._newcomers: dict[str, Registered] = {}  # not in the cluster yet
        self._statuses: dict[str, InstanceStatus] = {}
        self._ready, self._idle = asyncio.Event(), asyncio.Event()
        self._draining = False
        self._watch: asyncio.Task[None] | None = None
        cluster.on_move = telemetry.role
        telemetry.admission(admission)
        if overload is not None:
            telemetry.overload(overload.ledger)

    # -- life of the controller ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; to be called inside the running event loop."""
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain)
        self._met()
        self._drain()

    @property
    def watches(self) -> bool:
        """Whether a worker that ends is started again: not before all that are there from the start on were up."""
        return self._watch is not None

    async def wait_ready(self) -> None:
        """Wait until every expected worker has registered, and there are some for both phases."""
        await self._ready.wait()

    async def drain(self) -> None:
        """Take no more requests, and wait until those that are here have ended."""
        self._draining = True
        if self._live:
            await self._idle.wait()

    def shutdown(self) -> None:
        """Tell every worker to end, and stop receiving."""
        if self._watch is not None:
            self._watch.cancel()
        if self._replanning is not None:
            self._replanning.close()
        self._fleet.tell_all(Shutdown())
        if self._hosts is not None:
            self._hosts.finish()
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._fleet.close()
        self._inbox.close()

    # -- Service, for the gateway -----------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would be placed at once: both phases have a worker that may be given one."""
        return self._ready.is_set() and not self._draining and self._roles.able

    def pools(self) -> list[PoolMember]:
        """Every worker, with the role that it plays now."""
        return self._roles.members(self._statuses)

    def set_role(self, instance: str, role: Role) -> None:
        """Let a worker play another role from the next request on. What it has goes on as it began."""
        self._roles.set(instance, role)
        self._place_waiting()

    def retire(self, instance: str) -> None:
        """Give a worker nothing new, and end it when it has ended what it has."""
        self._cluster.pause(instance)
        self._fleet.retire(instance)
        self._telemetry.state(instance, InstanceState.DRAINING)

    def want(self, instance: str, role: Role) -> None:
        """Start a worker that was retired, in this role; one that has not ended yet goes on."""
        self._fleet.want(instance, role, time.monotonic())
        if self._cluster.pools.get(instance) is not None:
            self._cluster.set_role(instance, role)
            self._resume(instance)

    def retired(self) -> list[str]:
        """The workers that have retired and may be started again."""
        return self._fleet.retired()

    def replans(self) -> list[str]:
        """What re-planning has decided lately, a sentence each with when that was."""
        return [] if self._replanning is None else self._replanning.said(time.monotonic())

    def replanned(self, decision: Decision) -> None:
        """Re-planning has decided something, and done it."""
        self._telemetry.replanned(decision)

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        """The service now and lately."""
        return self._telemetry.snapshot(self._recorder.live)

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every worker."""
        live = self._admit(generation)
        try:
            while True:
                output = await live.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            # The client has everything, and then the request has ended already, or has gone.
            self._end(live, FinishReason.ABORT)

    def stop(self, request_id: str) -> None:
        """The client has all it asked for, found in the text: end the request as finished, not as aborted."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, FinishReason.STOP)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _admit(self, generation: Generation) -> LiveRequest:
        if self._draining or not self._ready.is_set():
            what = "is about to end" if self._draining else "is starting"
            raise RequestError(f"the service {what} and takes no requests", status=503, code="not_ready")
        request = generation.request
        live = LiveRequest(generation)
        if self._replanning is not None:
            self._replanning.arrived(request)
        refusal = self._admission.offer(live.ticket, time.monotonic())
        if refusal is not None:
            if self._replanning is not None:
                self._replanning.refused(request.id)
            self._telemetry.rejected(request, refusal.reason.replace("-", "_"))
            raise refused(refusal)
        if self._prompt_keys is not None:
            live.generation = self._prompt_keys.name(generation)
        self._live[request.id] = live
        self._telemetry.arrived(request)
        live.timeline = self._recorder.arrive(request, request.arrival_s)
        if self._replanning is not None:
            self._replanning.taken(live.timeline)
        self._place_waiting()
        return live

    def _place(self, live: LiveRequest) -> bool:
        """Begin an attempt; False if no instance can take it now."""
        generation, now = live.what_is_left(), time.monotonic()
        placement = self._cluster.arrive(generation.request, now)
        if placement is None:
            return False
        attempt, route = live.begin(generation, placement), placement.route
        self._attempts[attempt.id] = live
        self._expect(live, attempt, now)
        self._recorder.mark(live.id, Moment.ROUTED, now)
        live.timeline.prefill_instance, live.timeline.decode_instance = route.prefill, route.decode
        for instance in {route.prefill, route.decode}:
            if self._fleet.breaker(instance).begin(attempt.id):
                self._cluster.pause(instance)
        if not route.splits:
            self._fleet.send(route.prefill, Prefill(generation=generation))
            return True
        # Room is asked for when the prompt starts: then, and not sooner, its KV is on its way.
        announce = self._roles.move or placement.mode is HandoffMode.PULL
        prefill = Prefill(generation=generation, target=route.decode, mode=placement.mode, announce=announce)
        self._fleet.send(route.prefill, prefill)
        if not announce:
            self._reserve(attempt)
        return True

    def _expect(self, live: LiveRequest, attempt: Attempt, now: float) -> None:
        """Overload control knows of the attempt, and says when its first token will come."""
        if self._overload is not None:
            newcomer = Newcomer.of(attempt.generation.request, attempt.placement.route)
            live.predicted_ttft_s = self._overload.ledger.ttft(newcomer, now) if live.attempts == 1 else None
            self._overload.placed(newcomer, now)

    def _reserve(self, attempt: Attempt) -> None:
        generation, route = attempt.generation, attempt.placement.route
        reserve = Reserve(request=generation.request, sampling=generation.sampling, source=route.prefill)
        self._fleet.send(route.decode, reserve)

    def _place_waiting(self) -> None:
        """Those that wait, as far as somebody can take them, in the order that admission gives them."""
        now = time.monotonic()
        while (ticket := self._admission.next(now)) is not None:
            if not self._place(self._live[ticket.id]):
                self._admission.put_back(ticket, now)
                return

    def _close_attempt(self, live: LiveRequest, *, abort: bool, complete: bool = False) -> None:
        """Its attempt, if there is one, is over; workers that still hold something of it are told to `abort`."""
        attempt = live.attempt
        if attempt is None:
            return
        if self._overload is not None:
            made = live.next_index - attempt.first_index if complete else None
            self._overload.ended(attempt.id, time.monotonic(), made)
        del self._attempts[attempt.id]
        live.lose()
        self._cluster.ended(attempt.id)
        route = attempt.placement.route
        for instance in {route.prefill, route.decode}:
            if abort:
                self._fleet.send(instance, Abort(request_id=attempt.id))
            if self._fleet.breaker(instance).release(attempt.id):
                self._resume(instance)

    def _end(self, live: LiveRequest, reason: FinishReason, *, abort: bool = True) -> None:
        """A request is over, whatever it was doing; what ended before stays as it ended."""
        if self._live.pop(live.id, None) is None:
            return
        self._admission.ended(live.id, time.monotonic())
        self._close_attempt(live, abort=abort, complete=reason.complete)
        self._recorder.end(live.id, reason)
        if self._draining and not self._live:
            self._idle.set()

    def _fail(self, live: LiveRequest, error: TwofoldError) -> None:
        self._end(live, FinishReason.ERROR)
        live.fail(error)

    def _replay(self, live: LiveRequest, instance: str, reason: str) -> None:
        """The attempt is lost, on `instance`; the next one begins, or waits until somebody can take it."""
        stage = live.stage
        self._close_attempt(live, abort=True)
        if live.in_vain >= MAX_IN_VAIN:
            self._fail(
                live, InstanceLostError(f"the request was lost {live.in_vain} times in a row: {reason}")
            )
            return
        log.info("request %s is replayed after %d tokens: %s", live.id, live.next_index, reason)
        self._telemetry.replayed(live.id, instance, stage)
        self._admission.put_back(live.ticket, time.monotonic())

    # -- messages ---------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)

    def _handle(self, message: ToController) -> None:  # noqa: C901, PLR0912  (one flat match over the kinds of messages)
        match message:
            case StepDone():
                self._step_done(message)
            case Alive():
                self._fleet.heard(message, time.monotonic())
            case PrefillStarted(request_id=attempt_id):
                live = self._attempts.get(attempt_id)
                if live is not None and live.attempt is not None:
                    self._reserve(live.attempt)
            case LeaseGranted(lease=lease):
                self._pass_on(lease)
            case Status():
                self._note_status(message)
            case BlocksChanged():
                self._blocks_changed(message)
            case StoreChanged():
                self._stores.changed(message)
            case StoreStatus():
                self._telemetry.store(message)
            case HandoffReport():
                self._handed_off(message)
            case RequestFailed(instance=instance, request_id=attempt_id, reason=reason):
                live = self._attempts.get(attempt_id)
                if live is not None:
                    self._replay(live, instance, reason)
                    self._place_waiting()
            case Registered():
                self._register(message)
            case LinkMeasured():
                self._paths.measured(message)
                self._telemetry.paths(self._paths)
            case HostJoins() | HostAlive() | HostFailed():
                self._host_said(message)

    def _host_said(self, message: HostJoins | HostAlive | HostFailed) -> None:
        hosts, now = self._hosts, time.monotonic()
        if hosts is None:
            return
        if isinstance(message, HostJoins):
            joined = hosts.joins(message, now)
            self._dismiss(joined.gone)
            for instance, role in joined.workers.items():
                self._fleet.expect(instance, role)
        elif isinstance(message, HostFailed) or message.leaves:
            if isinstance(message, HostFailed):
                log.error("host %s: %s", message.host, message.reason)
            self._dismiss(hosts.leaves(message.host, message.life))
        else:
            for instance in hosts.alive(message, now):
                self.exited(instance)

    def _dismiss(self, instances: Iterable[str]) -> None:
        """Workers that have ended, and will not be started again."""
        for instance in instances:
            self.exited(instance)
            self._fleet.dismiss(instance)

    def _register(self, message: Registered) -> None:
        instance, now = message.peer.memory.instance, time.monotonic()
        try:
            self._fleet.register(message, now)
        except (ConfigurationError, StaleEpochError) as error:
            log.error("%s", error)  # noqa: TRY400  (it is one sentence about a worker, not a fault of ours)
            self._fleet.refuse(message, Refused(reason=str(error)))
            if self._hosts is not None and isinstance(error, ConfigurationError):
                self._hosts.refuse_worker(instance, str(error))
            return
        self._reports[instance] = 0
        self._paths.registered(message)
        self._newcomers[instance] = message
        if self._fleet.complete:
            self._let_in()
        self._met()
        self._place_waiting()

    def _let_in(self) -> None:
        """Newcomers join in the order of the plan, as in a simulation: among equals routers prefer who joined first."""
        for instance, member in self._fleet.members.items():
            message = self._newcomers.pop(instance, None)
            if message is not None:
                memory = message.peer.memory
                # A worker that comes back plays the role that it had.
                self._cluster.add_instance(
                    instance, member.role, memory.num_blocks * memory.layout.block_size
                )
                self._telemetry.role(instance, member.role)
                self._tell_state(instance)
                self._took_note(instance, message.status)

    def _met(self) -> None:
        """When all have come that are there from the start on they are watched, and serve if that is enough."""
        if self._fleet.complete and self._watch is None:
            self._watch = asyncio.create_task(self._keep_watch())
        if self._fleet.complete and self._roles.able:
            self._ready.set()

    def _note_status(self, message: Status | StepDone) -> None:
        """Reports come over two ways: an older one that comes later, or after the worker's end, is dropped."""
        instance = message.instance
        if self._fleet.is_current(instance, message.epoch) and message.number > self._reports[instance]:
            self._reports[instance] = message.number
            self._took_note(instance, message.status)

    def _took_note(self, instance: str, status: InstanceStatus) -> None:
        self._statuses[instance] = status
        self._telemetry.status(instance, status)
        if self._roles.move:
            self._cluster.waits(instance, status.waiting)

    def _blocks_changed(self, message: BlocksChanged) -> None:
        if self._fleet.is_current(message.instance, message.epoch):
            self._prefixes.removed(message.instance, message.removed)
            self._prefixes.stored(message.instance, message.stored)

    def _step_done(self, message: StepDone) -> None:
        now, started_s = time.monotonic(), self._fleet.ours(message.instance, message.started_s)
        self._note_status(message)
        self._telemetry.step(message.instance, len(message.tokens))
        self._learn_pace(message, now - started_s)
        for attempt_id in message.started:
            live = self._attempts.get(attempt_id)
            if live is not None:
                self._recorder.mark(live.id, Moment.PREFILL_STARTED, started_s)
        for attempt_id, output in message.tokens:
            live = self._attempts.get(attempt_id)
            if live is not None:
                self._token(live, output, message.instance, started_s, now)

    def _learn_pace(self, message: StepDone, seconds: float) -> None:
        """Overload control follows how quick decodes are; iterations with prompts it times by their first tokens."""
        if (
            self._overload is not None
            and message.tokens
            and all(output.index for _, output in message.tokens)
        ):
            self._overload.ledger.stepped(message.instance, len(message.tokens), seconds)

    def _token(
        self, live: LiveRequest, output: TokenOutput, instance: str, started_s: float, now: float
    ) -> None:
        attempt = live.attempt
        assert attempt is not None  # noqa: S101  (it was found by its attempt; tells the type checker so)
        if output.index == 0:
            self._cluster.prefilled(attempt.id, now)
            if self._prompt_keys is not None:
                prompt_tokens = attempt.generation.request.prompt_tokens
                self._telemetry.prefilled(instance, prompt_tokens, output.reused_tokens)
        elif output.index == 1:
            self._recorder.mark(live.id, Moment.DECODE_STARTED, started_s)
        if output.index < 2 and self._fleet.breaker(instance).succeed(attempt.id, now):
            self._resume(instance)
        if output.index == 0 and not self._decodes(live, attempt, output, now):
            return
        for ordered in live.push(output):
            self._recorder.token(live.id, now)
            if ordered.finish_reason is not None:
                # One that ended with its first token is still expected where it was to be decoded.
                unused = attempt.placement.route.splits and live.next_index == attempt.first_index + 1
                self._end(live, ordered.finish_reason, abort=unused)

    def _decodes(self, live: LiveRequest, attempt: Attempt, output: TokenOutput, now: float) -> bool:
        """Whether a request goes on whose prompt is computed: once its client has a token it does."""
        if self._overload is None:
            return True
        if live.predicted_ttft_s is not None:
            self._telemetry.predicted(live.predicted_ttft_s, now - live.generation.request.arrival_s)
        sure = live.next_index > 0 or output.finish_reason is not None
        reason = self._overload.prefilled(attempt.id, now, sure=sure)
        if reason is None:
            return True
        newcomer = Newcomer.of(attempt.generation.request, attempt.placement.route)
        self._telemetry.rejected(live.generation.request, reason.replace("-", "_"))
        self._fail(live, refused(self._overload.refusal(newcomer, reason, now)))
        return False

    def _handed_off(self, message: HandoffReport) -> None:
        live = self._attempts.get(message.request_id)
        if live is not None:
            live.handed_off = True
            fleet, source = self._fleet, message.instance
            self._recorder.mark(live.id, Moment.HANDOFF_STARTED, fleet.ours(source, message.started_s))
            self._recorder.mark(live.id, Moment.HANDOFF_ENDED, fleet.ours(source, message.ended_s))
        self._telemetry.handoff(message)
        self._cluster.handed_off(message.request_id)

    def _pass_on(self, lease: Lease) -> None:
        """A lease goes to its source while its request lives; otherwise nothing was, or will be, written."""
        if lease.request_id in self._attempts:
            self._fleet.send(lease.source, LeaseGranted(lease=lease))
        else:
            self._fleet.send(lease.instance, HandoffEnded(request_id=lease.request_id, epoch=lease.epoch))

    # -- workers ----------------------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._drain()  # what they said while this process had no time is heard before they are judged
            if self._hosts is not None:
                for instance in self._hosts.look(time.monotonic(), self._fleet.heard_s):
                    self.exited(instance)
            looked = self._fleet.look(time.monotonic())
            for instance in looked.lost:
                self._lose(instance)
                self._fleet.tell_all(InstanceFenced(instance=instance))
            for instance in looked.restarted:
                self._telemetry.restarted(instance)
            self._end_retiring()
            self._place_waiting()
            self._expire(time.monotonic())
            self._telemetry.held(self._admission.waiting)

    def _end_retiring(self) -> None:
        """Workers that are not wanted end when nothing of any request is left there."""
        for instance in self._fleet.retiring():
            load = self._cluster.pools.get(instance)
            if load is not None and not load.requests:
                self._fleet.send(instance, Shutdown())

    def _expire(self, now: float) -> None:
        """Nobody waits for the answers to these any more."""
        for ticket in self._admission.expired(now):
            self._telemetry.deadline_missed()
            self._fail(self._live[ticket.id], deadline_passed())

    def exited(self, instance: str) -> None:
        """A worker's process has ended: it writes no more, and its peers are told so."""
        if self._fleet.exited(instance, time.monotonic()):
            if self._fleet.members[instance].retired:
                log.info("%s has retired", instance)
            else:
                log.error("%s has ended", instance)
            self._lose(instance)
        self._fleet.tell_all(InstanceLost(instance=instance))
        self._place_waiting()

    def fail_all(self, reason: str) -> None:
        """The service cannot go on."""
        self._draining = True
        for live in list(self._live.values()):
            self._fail(live, InstanceLostError(reason))

    def _lose(self, instance: str) -> None:
        """A worker works no more; what it held begins anew elsewhere."""
        self._telemetry.remove(instance)
        self._prefixes.lost(instance)
        self._statuses.pop(instance, None)
        self._newcomers.pop(instance, None)
        for attempt_id in self._cluster.remove_instance(instance):
            live = self._attempts.get(attempt_id)
            if live is not None:
                self._replay(live, instance, f"{instance} was lost")

    def _tell_state(self, instance: str) -> None:
        half_open = self._fleet.breaker(instance).state is BreakerState.HALF_OPEN
        self._telemetry.state(instance, InstanceState.HALF_OPEN if half_open else InstanceState.UP)

    def _resume(self, instance: str) -> None:
        if self._fleet.members[instance].retired:
            return
        self._tell_state(instance)
        self._cluster.resume(instance)
        self._place_waiting()
