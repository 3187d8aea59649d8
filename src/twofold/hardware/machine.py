"""Accelerators, machines, links and tiers: what can be bought, what it can do, what it costs and what it draws."""

import msgspec

from twofold.hardware.quantities import Count, NotNegative, Positive, Share, Text


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. FLOP/s are dense bf16 peaks; bandwidths are bytes per second; power is in watts.

    `interconnect_bytes_per_s` is what it can send to its neighbours in the machine, in one direction: half of
    what data sheets print, which add both.
    """

    name: Text
    memory_bytes: Count
    memory_bytes_per_s: Positive
    flops_per_s: Positive
    interconnect_bytes_per_s: Positive
    tdp_w: Positive
    source: Text
    date: Text


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A server of `count` equal accelerators.

    `network_bytes_per_s` is what the whole machine can send (and receive) at once: all of its NICs together.
    `price_per_h` is in US dollars. `tdp_w` is what a data centre must provision; `idle_w` what it draws when no
    batch runs. `power_cap` is the share of an accelerator's TDP that it is capped to (1.0: not capped).
    `power_units` is the machine's power as the notebooks of SplitwiseSim count it, where they do.
    """

    name: Text
    accelerator: Accelerator
    count: Count
    network_bytes_per_s: Positive
    price_per_h: NotNegative
    tdp_w: Positive
    idle_w: NotNegative
    source: Text
    date: Text
    power_cap: Share = 1.0
    power_units: Positive | None = None

    @property
    def memory_bytes(self) -> int:
        return self.count * self.accelerator.memory_bytes


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of connection, in one direction. `latency_s` is the fixed cost of starting a transfer."""

    name: Text
    bytes_per_s: Positive
    latency_s: NotNegative
    source: Text
    date: Text


class StorageTier(msgspec.Struct, frozen=True, kw_only=True):
    """What KV caches can be kept in beside accelerators. A GB is 10^9 bytes, prices are in US dollars.

    `bytes_per_s` is what one machine can read of it, into all its accelerators together.
    """

    name: Text
    price_per_gb_h: NotNegative
    bytes_per_s: Positive
    source: Text
    date: Text
