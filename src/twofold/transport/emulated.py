"""Transport `emulated`: moves no data, but takes a network's time. Hand-offs of an instance follow each other."""

from collections.abc import Sequence

import msgspec

from twofold.cluster.timing import ps
from twofold.engine.emulated import MonotonicClock, PrefillTimes
from twofold.transport.base import Connection, KvCacheSpec, MemoryDescriptor, Transport


class EmulatedPort(msgspec.Struct, frozen=True, kw_only=True):
    """Emulated network link of an instance, with latencies in seconds and bandwidths in bytes per second."""

    machine: str
    bytes_per_s: float
    local_bytes_per_s: float
    latency_s: float
    sync_s: float

    def rate_to(self, peer: "EmulatedPort") -> float:
        """Return the bandwidth to the peer in bytes per second."""
        if peer.machine == self.machine:
            return self.local_bytes_per_s
        return min(self.bytes_per_s, peer.bytes_per_s)


class EmulatedConnection:
    """Emulated link to a peer."""

    def __init__(self, link: "EmulatedTransport", peer: EmulatedPort) -> None:
        self._link, self._layout = link, link.descriptor.layout
        self._rate = link.port.rate_to(peer)
        self._layer_wise: set[int] = set()  # last blocks of running layer-wise hand-offs

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Sleep until the layers would have arrived at the peer; return their size in bytes."""
        return sum(self._write(layer, source_blocks) for layer in layers)

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        """Sleep until the KV of `layers` would have arrived from the peer; return the KV's size in bytes."""
        link, size = self._link, self._layout.bytes_of(layers, len(source_blocks))
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
        # A layer leaves as soon as it is computed, even if this process notices later.
        begin = self._begin(source_blocks) if layer == 0 else link.prefills.ready(source_blocks, layer)
        link.free_at = max(begin, link.free_at) + ps(size / self._rate)
        landed = link.free_at
        if last and source_blocks[-1] in self._layer_wise:
            self._layer_wise.discard(source_blocks[-1])
            landed += ps(link.port.sync_s)  # a hand-off that began before its prefill ended takes longer
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


class EmulatedTransport(Transport):
    """Transport of an emulated instance, which stores no KV."""

    def __init__(self, spec: KvCacheSpec, port: EmulatedPort, prefills: PrefillTimes, clock: MonotonicClock) -> None:
        self.port, self.prefills, self.clock = port, prefills, clock
        self.free_at = 0  # end of the last transfer, in picoseconds
        self.descriptor = spec.descriptor(msgspec.json.encode(port).decode())

    def connect_to(self, peer: MemoryDescriptor) -> Connection:
        return EmulatedConnection(self, msgspec.json.decode(peer.address, type=EmulatedPort))
