"""Simulated hand-offs: leases on blocks of the decode instance, and KV transfers into these blocks."""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.cluster.spec import ClusterRules
from twofold.cluster.timing import PS, ps
from twofold.events import RequestEvents
from twofold.handoff import HandoffMode
from twofold.performance.transfer import TransferModel
from twofold.simulation.instance import SimulatedInstance
from twofold.simulation.kernel import Event, EventOrder, Kernel, VirtualNetwork
from twofold.simulation.observers.base import KvTransfer, Observer
from twofold.simulation.statistics import NEVER, RunStatistics, SimulatedRequest

_LAYER_WISE: Final = HandoffMode.LAYER_WISE
_PULL: Final = HandoffMode.PULL
_SERIALIZED: Final = HandoffMode.SERIALIZED


@mypyc_attr(free_list_len=1)
class _Sent(Event):
    __slots__ = ("handoffs", "request")

    def __init__(self, handoffs: "SimulatedHandoffs", request: SimulatedRequest) -> None:
        # The network sets `at`, the end of the transfer.
        self.order = EventOrder.TRANSFER + request.number
        self.handoffs = handoffs
        self.request = request

    def happen(self) -> None:
        self.handoffs.sent(self.request)


class SimulatedHandoffs:
    """Simulates hand-offs: lease on the decode instance, KV transfer, and release of the prefill instance's blocks."""

    def __init__(
        self,
        kernel: Kernel,
        network: VirtualNetwork,
        events: RequestEvents,
        statistics: RunStatistics,
        observers: Sequence[Observer],
        times: TransferModel,
        rules: ClusterRules,
        reserve_at_arrival: bool,
    ) -> None:
        self._kernel, self._network, self._events = kernel, network, events
        self._statistics, self._observers = statistics, tuple(observers)
        self._kv_bytes_per_token, self._layers = times.kv_bytes_per_token, times.layers
        self._sync = ps(times.sync_s)
        self._retry = None if rules.lease_retry_s is None else ps(rules.lease_retry_s)
        # Decode memory is reserved at arrival or, for pull hand-offs and if instances change roles, at the start of the
        # prefill (`docs/decisions/0007`).
        self._at_arrival, self._instant = reserve_at_arrival, rules.instant_handoff
        self._asking = 0  # requests that retry until they get a lease
        self._waiting: dict[str, SimulatedRequest] = {}  # requests in the lease queue of their decode instance

    def expect(self, life: SimulatedRequest) -> None:
        """Reserve KV memory on the decode instance of a newly placed request.

        Do nothing if the simulated cluster reserves decode memory later, when the prefill starts or ends.
        """
        if self._retry is None and self._at_arrival and life.mode is not _PULL:
            self._reserve(life)

    def _reserve(self, life: SimulatedRequest) -> None:
        self._waiting[life.id] = life
        life.decode.scheduler.reserve(life.request, life.prefill.name)
        self.grant(life.decode)

    def grant(self, instance: SimulatedInstance) -> None:
        """Grant queued lease requests that fit into an instance's free KV memory, and start their KV transfers."""
        if not instance.scheduler.lease_queue.size:
            return
        for lease in instance.scheduler.grant(self._kernel.now):
            life = self._waiting.pop(lease.request_id)
            life.lease = lease
            if life.first_token != NEVER:
                self._send_all(life)
            elif life.prefill_started != NEVER and self._by_layers(life):
                self._send(life, max(self._kernel.now, life.first_layer))

    def prefill_started(self, life: SimulatedRequest, end: int) -> None:
        """Record that the prefill of a request with a hand-off starts now and ends at picosecond `end`."""
        now = self._kernel.now
        life.first_layer = now + (end - now) // self._layers
        if self._retry is None and not (self._at_arrival and life.mode is not _PULL):
            self._reserve(life)
        elif life.lease is not None and self._by_layers(life):
            self._send(life, life.first_layer)

    def prefilled(self, life: SimulatedRequest) -> None:
        """Continue the hand-off of a request whose prefill has just ended.

        If no KV transfer has begun, send all layers once the decode instance has leased blocks to the request. A
        layer-wise transfer that has already begun continues until the last layer is sent.
        """
        if life.lease is None:
            if self._retry is not None:
                self._asking += 1
                self._ask(life)
        elif life.handoff_started == NEVER:
            self._send_all(life)
        elif life.layers_sent != NEVER:
            self._land_after_tail(life)

    def give_up(self, life: SimulatedRequest) -> None:
        """Cancel the hand-off of a request that has ended, and free its KV on both instances."""
        self._waiting.pop(life.id, None)
        for instance in (life.prefill, life.decode):
            if instance.load is None:
                continue
            scheduler = instance.scheduler
            scheduler.abort(life.id)
            scheduler.handed_off(life.id)
            if life.lease is not None and life.lease.request_id in scheduler.leases:
                scheduler.end_lease(life.id, scheduler.leases.epoch)
            self.grant(instance)

    def _ask(self, life: SimulatedRequest) -> None:
        self._asking -= 1
        if life.ended:
            return
        life.lease = life.decode.scheduler.lease_now(life.request, life.prefill.name, self._kernel.now)
        if life.lease is not None:
            self._send_all(life)
        elif self._kernel.pending > self._asking:  # otherwise no other event is left, and memory will never become free
            self._asking += 1
            at = self._kernel.now + (self._retry or 0)
            self._kernel.schedule(at, EventOrder.RETRY + life.number, self._ask, life)

    def _by_layers(self, life: SimulatedRequest) -> bool:
        return life.mode is _LAYER_WISE and not self._instant

    def _send_all(self, life: SimulatedRequest) -> None:
        life.mode = _SERIALIZED  # also if the lease came too late for a layer-wise transfer
        if self._instant:
            life.handoff_started = self._kernel.now
            self._land(life)
        else:
            self._send(life, self._kernel.now)

    def _send(self, life: SimulatedRequest, start: int) -> None:
        life.handoff_started = start
        self._network.send(life.prefill.link, life.decode.link, self._size(life), start, _Sent(self, life))

    def _size(self, life: SimulatedRequest) -> int:
        return (life.prompt_tokens - life.cached_tokens) * self._kv_bytes_per_token

    def sent(self, life: SimulatedRequest) -> None:
        """Process the end of a request's KV transfer."""
        if life.ended:
            return
        if life.mode is _LAYER_WISE:
            life.layers_sent = self._kernel.now
            if life.first_token != NEVER:
                self._land_after_tail(life)
        else:
            self._land(life)

    def _land_after_tail(self, life: SimulatedRequest) -> None:
        # The last layer is sent after the end of the prefill, followed by the synchronization.
        layer = ps(self._size(life) / self._layers / life.prefill.link.bytes_per_s(life.decode.link))
        at = max(self._kernel.now, life.first_token + layer) + self._sync
        self._kernel.schedule(at, EventOrder.TRANSFER + life.number, self._land, life)

    def _land(self, life: SimulatedRequest) -> None:
        if life.ended:
            return
        assert life.lease is not None  # noqa: S101  (tells the type checker)
        life.handoff_ended = self._kernel.now
        prefill, decode = life.prefill, life.decode
        prefill.scheduler.handed_off(life.id)
        decode.scheduler.kv_received(life.id, life.lease.epoch)
        self._statistics.handoffs += 1
        self._events.handed_off(life.id, life.handoff_started / PS, self._kernel.now / PS)
        if self._observers:
            times = life.handoff_started, life.handoff_ended
            transfer = KvTransfer(life.id, prefill.name, decode.name, *times, self._size(life))
            for observer in self._observers:
                observer.transfer(transfer)
        self.grant(decode)
        self.grant(prefill)
        decode.poke()
        prefill.poke()
