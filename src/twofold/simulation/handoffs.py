"""Hand-offs in the simulator: leases, KV caches on their way, and what happens when they land or are given up."""

from collections.abc import Callable
from typing import Final

from twofold.handoff import HandoffMode
from twofold.performance.transfer import TransferModel
from twofold.scheduling.instance import InstanceScheduler
from twofold.simulation.instance import VirtualInstance
from twofold.simulation.kernel import Kernel, Order, ps
from twofold.simulation.life import Life
from twofold.simulation.network import Landed, Network

_LAYER_WISE: Final = HandoffMode.LAYER_WISE
_SERIALIZED: Final = HandoffMode.SERIALIZED


class Handoffs:
    """Drives the hand-off protocol of DESIGN: lease, layers or all at once, landing; both ends are told.

    A layer-wise hand-off begins when the first layer is computed and ends no earlier than one layer's transfer
    and the synchronisation after the last: with a link to itself it takes what `TransferModel` says.

    Room on the decode instance is reserved when a request arrives or, where instances may come to prefill for each
    other, when its prefill starts (`docs/decisions/0007`).
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        instances: dict[str, VirtualInstance],
        times: TransferModel,
        retry_s: float | None,
        reserve_at_arrival: bool,
        landed: Callable[[Life], None],
    ) -> None:
        self._kernel, self._network, self._instances = kernel, network, instances
        self.kv_bytes_per_token = times.kv_bytes_per_token
        self._times = times
        self._sync = ps(times.sync_s)
        self._retry = None if retry_s is None else ps(retry_s)
        self._at_arrival = reserve_at_arrival
        self._on_landed = landed
        self._asking = 0  # requests that will ask for a lease again
        self._waiting: dict[str, Life] = {}  # requests that were promised a lease
        self._when_sent: Landed = self._sent  # made once, not for every transfer

    def expect(self, life: Life) -> None:
        """A request was placed on two instances."""
        if self._retry is None and self._at_arrival:
            self._reserve(life)

    def _reserve(self, life: Life) -> None:
        decode = self._instances[life.decode]
        self._waiting[life.id] = life
        decode.scheduler.reserve(life.request, life.prefill)
        self.grant(decode)

    def grant(self, instance: VirtualInstance) -> None:
        """Room may have been made on an instance."""
        if not instance.scheduler.lease_queue.size:
            return
        for lease in instance.scheduler.grant(self._kernel.now):
            request_id = lease.request_id
            life = self._waiting[request_id]
            del self._waiting[request_id]
            life.lease = lease
            if life.first_token is not None:
                self._send_all(life)
            elif life.prefill_started is not None and life.mode is _LAYER_WISE:
                self._send(life, max(self._kernel.now, life.first_layer))

    def prefill_started(self, life: Life, end: int) -> None:
        """A prompt is being computed until picosecond `end`."""
        now = self._kernel.now
        life.first_layer = now + (end - now) // self._times.layers
        if self._retry is None and not self._at_arrival:
            self._reserve(life)
        elif life.lease is not None and life.mode is _LAYER_WISE:
            self._send(life, life.first_layer)

    def prefilled(self, life: Life) -> None:
        """The first token is out."""
        if life.lease is None:
            if self._retry is not None:
                self._ask(life)
        elif life.handoff_started is None:
            self._send_all(life)
        elif life.layers_sent is not None:
            self._land_after_tail(life)

    def give_up(self, life: Life) -> None:
        """The request is over before its KV cache landed: nothing of it is read or written any more."""
        if life.id in self._waiting:
            del self._waiting[life.id]
        for name in (life.prefill, life.decode):
            instance = self._instances[name]
            if instance.load is not None:
                _forget(instance.scheduler, life)
                self.grant(instance)

    def _ask(self, life: Life) -> None:
        if life.ended:
            return
        decode = self._instances[life.decode]
        life.lease = decode.scheduler.lease_now(life.request, life.prefill, self._kernel.now)
        if life.lease is not None:
            self._send_all(life)
        elif (
            self._kernel.pending > self._asking
        ):  # else nothing else is left to happen: there will never be room
            self._asking += 1
            at = self._kernel.now + (self._retry or 0)
            self._kernel.schedule(at, Order.RETRY + life.number, self._ask_again, life)

    def _ask_again(self, life: Life) -> None:
        self._asking -= 1
        self._ask(life)

    def _send_all(self, life: Life) -> None:
        """All layers at once: serialized, or a lease that came too late for anything else."""
        life.mode = _SERIALIZED
        self._send(life, self._kernel.now)

    def _send(self, life: Life, start: int) -> None:
        life.handoff_started = start
        size = life.prompt_tokens * self.kv_bytes_per_token
        source, target = self._instances[life.prefill].machine, self._instances[life.decode].machine
        self._network.send(life.number, source, target, size, start, self._when_sent, life)

    def _sent(self, life: Life) -> None:
        if life.ended:
            return
        if life.mode is _LAYER_WISE:
            life.layers_sent = self._kernel.now
            if life.first_token is not None:
                self._land_after_tail(life)
        else:
            self._land(life)

    def _land_after_tail(self, life: Life) -> None:
        """The last layer leaves when prefill ends, and both ends synchronise."""
        assert life.first_token is not None  # noqa: S101  (tells the type checker)
        source, target = self._instances[life.prefill].machine, self._instances[life.decode].machine
        size = life.prompt_tokens * self.kv_bytes_per_token
        layer = ps(size / self._times.layers / self._network.bytes_per_s(source, target))
        at = max(self._kernel.now, life.first_token + layer) + self._sync
        self._kernel.schedule(at, Order.TRANSFER + life.number, self._land, life)

    def _land(self, life: Life) -> None:
        if life.ended:
            return
        assert life.lease is not None  # noqa: S101  (tells the type checker)
        life.handoff_ended = self._kernel.now
        request_id = life.id
        prefill, decode = self._instances[life.prefill], self._instances[life.decode]
        prefill.scheduler.handed_off(request_id)
        decode.scheduler.landed(request_id, life.lease.epoch)
        self._on_landed(life)
        self.grant(decode)
        self.grant(prefill)
        decode.poke()
        prefill.poke()


def _forget(scheduler: InstanceScheduler, life: Life) -> None:
    request_id = life.id
    scheduler.abort(request_id)
    scheduler.handed_off(request_id)
    if life.lease is not None and life.lease.request_id in scheduler.leases:
        scheduler.end_lease(request_id, scheduler.leases.epoch)
