"""The controller: places requests on workers, passes leases on, and brings tokens back in order.

It is the one place where the life of a request is known as a whole, and the only sender of requests, leases
and aborts to workers. So a worker hears of a request before it hears of its lease, and a lease that is granted
after its request ended is given back from here.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from twofold.errors import RequestError
from twofold.handoff import Lease
from twofold.request import FinishReason, Generation, Request, TokenOutput
from twofold.scheduling.cluster import ClusterScheduler, Placement
from twofold.serving.live_request import LiveRequest
from twofold.serving.mailbox import Inbox, Outbox
from twofold.serving.messages import (
    Abort,
    HandoffEnded,
    HandoffReport,
    InstanceLost,
    LeaseGranted,
    Message,
    Peer,
    Peers,
    Prefill,
    Registered,
    RequestFailed,
    Reserve,
    Shutdown,
    Status,
    StepDone,
    ToController,
)
from twofold.serving.service import ServedModel
from twofold.serving.snapshot import InstanceState, ServiceSnapshot
from twofold.serving.telemetry import Telemetry
from twofold.timeline import Moment, Recorder

log = logging.getLogger(__name__)


class Controller:
    """Implements `Service` for the gateway over the workers of one service."""

    def __init__(
        self,
        *,
        model: ServedModel,
        cluster: ClusterScheduler,
        inbox: Inbox[ToController],
        outbox: Outbox,
        telemetry: Telemetry,
        expected: frozenset[str],
    ) -> None:
        self.model = model
        self._cluster = cluster
        self._inbox, self._outbox = inbox, outbox
        self._telemetry = telemetry
        self._recorder = Recorder(sinks=[telemetry.observe])
        self._expected = expected
        self._peers: dict[str, Peer] = {}
        self._live: dict[str, LiveRequest] = {}
        self._reports: dict[str, int] = {}
        self._all_registered = asyncio.Event()

    # -- life of the controller ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to receive; to be called inside the running event loop."""
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._drain)
        self._drain()

    async def wait_ready(self) -> None:
        """Wait until every expected worker has registered."""
        await self._all_registered.wait()

    def shutdown(self) -> None:
        """Tell every worker to end, and stop receiving."""
        for instance in list(self._peers):
            self._send(instance, Shutdown())
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._outbox.close(linger_s=1.0)
        self._inbox.close()

    # -- Service, for the gateway -----------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request could be admitted: all workers came up, and both phases have one that is alive."""
        roles = [load.role for load in self._cluster.pools]
        both = any(role.prefills for role in roles) and any(role.decodes for role in roles)
        return self._all_registered.is_set() and both

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._telemetry.exposition()

    def snapshot(self) -> ServiceSnapshot:
        """The service now and lately."""
        return self._telemetry.snapshot(self._recorder.live)

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenOutput, None]:
        """Yield output tokens in order. Closing the generator early aborts the request on every worker."""
        live = self._admit(generation.request)
        try:
            self._place(generation, live.placement)
            while True:
                output = await live.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._retire(live)

    # -- requests ---------------------------------------------------------------------------------------------------

    def stop(self, request_id: str) -> None:
        """The client has all it asked for, found in the text: end the request as finished, not as aborted."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._abort(live)
            self._close(live, FinishReason.STOP)

    def _admit(self, request: Request) -> LiveRequest:
        now = time.monotonic()
        placement = self._cluster.arrive(request, now) if self.ready() else None
        if placement is None:
            raise RequestError("the service is not ready: a worker is missing", status=503, code="not_ready")
        live = self._live[request.id] = LiveRequest(request.id, placement)
        self._telemetry.arrived(request)
        timeline = self._recorder.arrive(request, request.arrival_s)
        timeline.prefill_instance, timeline.decode_instance = placement.route.prefill, placement.route.decode
        self._recorder.mark(request.id, Moment.ROUTED, now)
        return live

    def _place(self, generation: Generation, placement: Placement) -> None:
        route = placement.route
        if not route.splits:
            self._send(route.prefill, Prefill(generation=generation))
            return
        self._send(route.prefill, Prefill(generation=generation, target=route.decode, mode=placement.mode))
        reserve = Reserve(request=generation.request, sampling=generation.sampling, source=route.prefill)
        self._send(route.decode, reserve)

    def _retire(self, live: LiveRequest) -> None:
        """The client has everything, and then the request is not alive any more, or has gone."""
        if self._live.pop(live.id, None) is not None:
            self._abort(live)
            self._close(live, FinishReason.ABORT)

    def _abort(self, live: LiveRequest) -> None:
        route = live.placement.route
        for instance in {route.prefill, route.decode}:
            self._send(instance, Abort(request_id=live.id))

    def _close(self, live: LiveRequest, reason: FinishReason) -> None:
        self._cluster.ended(live.id)
        self._recorder.end(live.id, reason)

    def _fail(self, request_id: str, reason: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._abort(live)
            self._close(live, FinishReason.ERROR)
            live.fail(reason)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)

    def _handle(self, message: ToController) -> None:
        match message:
            case StepDone():
                self._step_done(message)
            case LeaseGranted(lease=lease):
                self._pass_on(lease)
            case Status():
                self._note_status(message)
            case HandoffReport(request_id=request_id):
                self._recorder.mark(request_id, Moment.HANDOFF_STARTED, message.started_s)
                self._recorder.mark(request_id, Moment.HANDOFF_ENDED, message.ended_s)
                self._telemetry.handoff(message)
                self._cluster.handed_off(request_id)
            case RequestFailed(request_id=request_id, reason=reason):
                self._fail(request_id, reason)
            case Registered():
                self._register(message)

    def _register(self, message: Registered) -> None:
        instance = message.peer.memory.instance
        self._peers[instance] = message.peer
        self._cluster.add_instance(instance, message.role)
        self._telemetry.role(instance, message.role)
        self._telemetry.state(instance, InstanceState.UP)
        self._telemetry.status(instance, message.status)
        if self._expected <= self._peers.keys():
            for each in self._peers:
                self._send(each, Peers(peers=list(self._peers.values())))
            self._all_registered.set()

    def _note_status(self, message: Status | StepDone) -> None:
        """Reports come over two ways: an older one that comes later, or after the worker's end, is dropped."""
        instance = message.instance
        if instance in self._peers and message.number > self._reports.get(instance, 0):
            self._reports[instance] = message.number
            self._telemetry.status(instance, message.status)

    def _step_done(self, message: StepDone) -> None:
        now = time.monotonic()
        self._note_status(message)
        self._telemetry.step(message.instance, len(message.tokens))
        for request_id in message.started:
            self._recorder.mark(request_id, Moment.PREFILL_STARTED, message.started_s)
        for request_id, output in message.tokens:
            live = self._live.get(request_id)
            if live is None:
                continue
            if output.index == 0:
                self._cluster.prefilled(request_id)
            elif output.index == 1:
                self._recorder.mark(request_id, Moment.DECODE_STARTED, message.started_s)
            for ordered in live.push(output):
                self._recorder.token(request_id, now)
                if ordered.finish_reason is not None:
                    self._finish(live, ordered.finish_reason)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        route = live.placement.route
        if route.splits and live.next_index == 1:  # it ended with its first token: nothing will be decoded
            self._send(route.decode, Abort(request_id=live.id))
        del self._live[live.id]
        self._close(live, reason)

    def _pass_on(self, lease: Lease) -> None:
        """A lease goes to its source while its request lives; otherwise nothing was, or will be, written."""
        if lease.request_id in self._live:
            self._send(lease.source, LeaseGranted(lease=lease))
        else:
            self._send(lease.instance, HandoffEnded(request_id=lease.request_id, epoch=lease.epoch))

    def lose(self, instance: str) -> None:
        """A worker's process has ended: its requests fail, and its peers are told."""
        peer = self._peers.pop(instance, None)
        if peer is None:
            return
        log.error("%s has ended; its requests fail", instance)
        for request_id in self._cluster.remove_instance(instance):
            self._fail(request_id, f"the worker {instance} ended")
        for each in self._peers:
            self._send(each, InstanceLost(instance=instance))
        self._telemetry.remove(instance)
        self._outbox.forget(peer.inbox)

    def lose_all(self) -> None:
        """Every worker's process has ended, or is about to."""
        for instance in list(self._peers):
            self.lose(instance)

    def _send(self, instance: str, message: Message) -> None:
        peer = self._peers.get(instance)
        if peer is not None:
            self._outbox.send(peer.inbox, message)
