"""Metrics of the stores of hosts: what they say of themselves."""

from twofold.serving.messages import StoreStatus, StoreTier
from twofold.serving.registry import Registry

_OWN_HOST = "home"  # what the service's own host is called here


class StoreMetrics:
    """Blocks, hits and evictions of each tier, and the bytes that went each way."""

    def __init__(self, registry: Registry) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._blocks = gauge("kv_store_blocks", "KV blocks in the store of a host.", "host", "tier")
        self._capacity = gauge("kv_store_capacity_blocks", "KV blocks that it has room for.", "host", "tier")
        self._hits = counter("kv_store_hits", "KV blocks of a store that prompts used.", "host", "tier")
        self._removals = counter(
            "kv_store_removals",
            "KV blocks that went from a tier of a store, by why.",
            "host",
            "tier",
            "reason",
        )
        self._moved = counter(
            "kv_store_bytes",
            "Bytes loaded from a store by workers, stored in it, read from its disk and written to it, brought from "
            "the stores of other hosts and sent to those.",
            "host",
            "way",
        )
        self._last: dict[str, StoreStatus] = {}

    def status(self, status: StoreStatus) -> None:
        """The accounts of a store since its life began: another life begins at nothing."""
        host, before = status.host or _OWN_HOST, self._last.get(status.host)
        if before is not None and before.epoch != status.epoch:
            before = None
        self._last[status.host] = status
        for name, tier in status.tiers.items():
            self._tier(host, name, tier, None if before is None else before.tiers.get(name))
        for way, count in status.bytes_moved.items():
            self._moved.labels(host, way).inc(
                count - (0 if before is None else before.bytes_moved.get(way, 0))
            )

    def _tier(self, host: str, name: str, tier: StoreTier, before: StoreTier | None) -> None:
        self._blocks.labels(host, name).set(tier.blocks)
        self._capacity.labels(host, name).set(tier.capacity)
        self._hits.labels(host, name).inc(tier.hits - (0 if before is None else before.hits))
        for reason, count in tier.removals.items():
            self._removals.labels(host, name, reason).inc(
                count - (0 if before is None else before.removals.get(reason, 0))
            )
