"""Transport `emulated`: moves no memory, but takes the time that the machines' network would.

Hand-offs of an instance leave one after the other, each with all of the link, as its sender sends them. That
other senders write to the same machine at the same time is not seen: an instance knows its own link only.
"""

from collections.abc import Sequence

import msgspec

from twofold.cluster.timing import ps
from twofold.engine.base import KvLayout
from twofold.engine.emulated.prefills import Clock, PrefillTimes
from twofold.handoff import Lease
from twofold.transport.base import Connection, MemoryDescriptor, check_layout, moved_bytes


class EmulatedPort(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance is on the network: its machine, and what it may send or receive per second.

    `local_bytes_per_s` is for peers on the same machine. `latency_s` and `sync_s` are those of
    `performance.transfer.TransferModel`.
    """

    machine: str
    bytes_per_s: float
    local_bytes_per_s: float
    latency_s: float
    sync_s: float

    def rate_to(self, peer: "EmulatedPort") -> float:
        """Bytes per second of a transfer that is alone."""
        if peer.machine == self.machine:
            return self.local_bytes_per_s
        return min(self.bytes_per_s, peer.bytes_per_s)


class _Link:
    """The way out of one instance; `free_at` is when what was sent last has left."""

    def __init__(self, port: EmulatedPort, prefills: PrefillTimes, clock: Clock) -> None:
        self.port, self.prefills, self.clock = port, prefills, clock
        self.free_at = 0


class EmulatedConnection:
    """The way to one peer. A hand-off that begins while its prompt is computed is layer-wise, and synchronises."""

    def __init__(self, link: _Link, layout: KvLayout, peer: EmulatedPort) -> None:
        self._link, self._layout = link, layout
        self._rate = link.port.rate_to(peer)
        self._layer_wise: set[int] = set()  # hand-offs under way, by their last block

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:  # noqa: ARG002
        """Returns when the bytes would be there."""
        return sum(self._write(layer, source_blocks) for layer in layers)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:  # noqa: ARG002
        """Returns when the bytes would be here. They come over the link of the reader."""
        link, size = self._link, moved_bytes(self._layout, layers, len(source_blocks))
        latency = ps(link.port.latency_s) if layers.start == 0 else 0
        link.free_at = max(link.clock.now() + latency, link.free_at) + ps(size / self._rate)
        link.clock.sleep_until(link.free_at)
        return size

    def probe(self, nbytes: int) -> None:
        link = self._link
        duration = ps(link.port.latency_s) + ps(nbytes / self._rate)
        link.clock.sleep_until(link.clock.now() + duration)

    def _write(self, layer: int, source_blocks: Sequence[int]) -> int:
        link, size = self._link, len(source_blocks) * self._layout.layer_bytes_per_block(layer)
        last = layer == len(self._layout.layers) - 1
        begin = self._begin(source_blocks) if layer == 0 else self._ready(source_blocks, layer)
        link.free_at = max(begin, link.free_at) + ps(size / self._rate)
        landed = link.free_at
        if last and source_blocks[-1] in self._layer_wise:
            self._layer_wise.discard(source_blocks[-1])
            landed += ps(link.port.sync_s)
        link.clock.sleep_until(landed)
        return size

    def close(self) -> None:
        self._layer_wise.clear()

    def _begin(self, blocks: Sequence[int]) -> int:
        now = self._link.clock.now()
        if now < self._link.prefills.end(blocks):
            self._layer_wise.add(blocks[-1])
        else:
            self._layer_wise.discard(blocks[-1])
        return now + ps(self._link.port.latency_s)

    def _ready(self, blocks: Sequence[int], layer: int) -> int:
        """A layer leaves when it is computed, however late this process hears of it."""
        return self._link.prefills.ready(blocks, layer)


class EmulatedTransport:
    """What peers are told of this instance's KV cache, and the link to theirs."""

    writes_outlive_lease = False

    def __init__(
        self,
        instance: str,
        epoch: int,
        layout: KvLayout,
        num_blocks: int,
        port: EmulatedPort,
        prefills: PrefillTimes,
        clock: Clock,
    ) -> None:
        self._link = _Link(port, prefills, clock)
        self.descriptor = MemoryDescriptor(
            instance=instance,
            epoch=epoch,
            address=msgspec.json.encode(port).decode(),
            num_blocks=num_blocks,
            layout=layout,
        )

    def connect(self, peer: MemoryDescriptor) -> Connection:
        check_layout(self.descriptor, peer)
        port = msgspec.json.decode(peer.address, type=EmulatedPort)
        return EmulatedConnection(self._link, self.descriptor.layout, port)

    def publish(self, blocks: Sequence[int]) -> None:
        """There is nothing in them."""

    def add_checksums(self, layers: range, blocks: Sequence[int], sums: list[int], *, landed: bool) -> None:
        """What is not there arrives undamaged."""

    def granted(self, lease: Lease) -> None:
        """Nobody writes anything."""

    def ended(self, lease: Lease) -> None:
        """The same."""

    def close(self) -> None: ...
