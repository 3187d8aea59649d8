"""Capacity planning of KV caches: DRAM and disk sizes for a trace, with one cache per node or one for all nodes."""

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from twofold.errors import ConfigurationError, require
from twofold.hardware.specs import Machine, Model, StorageTier
from twofold.performance.base import PerformanceModel
from twofold.planning.capacity.curve import (
    NEVER,
    Blocks,
    CapacityCurve,
    CapacityTerms,
    Seconds,
    least_capacities,
    savings_s,
)
from twofold.request import Request
from twofold.workload.blocks import BLOCK_TOKENS


class CapacityQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a capacity plan: prefill nodes and cache tiers."""

    model: Model
    machine: Machine
    performance: PerformanceModel
    accelerators: int  # per instance
    dram: StorageTier
    disk: StorageTier
    nodes: int | None = None  # default: as many as prefilling the trace without reuse keeps busy
    dram_gb: float | None = None  # per node; default: the size with the highest net savings
    link_bytes_per_s: float | None = None  # per instance; default: its share of the machine's network bandwidth

    @property
    def share(self) -> float:
        """Accelerators per instance as a fraction of the accelerators per machine."""
        return self.accelerators / self.machine.count

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.model.kv_bytes_per_token


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate versus capacity of a cache tier, for node-local caches and for a shared cache."""

    tier: StorageTier
    behind_gb: float  # DRAM per node in front of the tier, whose hits do not count
    local: CapacityCurve  # one cache per node, with round-robin routing
    pool: CapacityCurve | None  # one cache for all nodes; None for a single node

    @property
    def preferred(self) -> CapacityCurve:
        """Capacity curve of the shared cache, or of the local cache if there is only one node."""
        return self.pool or self.local


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates of all cache tiers by capacity, for one trace."""

    query: CapacityQuery
    nodes: int
    requests: int
    blocks: int
    highest_reuse: float  # share of blocks seen earlier in the trace: the highest possible hit rate
    duration_s: float
    busy: float  # mean number of accelerators that prefilling the trace without reuse keeps busy
    tiers: tuple[TierPlan, ...]
    disk_alone: TierPlan  # without a DRAM tier


def capacity_plan(requests: Sequence[Request], query: CapacityQuery) -> CapacityPlan:
    """Evaluate KV cache sizes for a trace. Raises ConfigurationError without block ids, or if all arrive at once."""
    blocks = sum(len(request.prefix_blocks) for request in requests)
    require(blocks > 0, "--kv-capacity needs a trace with block ids, such as Mooncake's: this trace has none")
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    if duration_s <= 0:
        raise ConfigurationError("--kv-capacity needs a trace with a duration: all requests of this one arrive at once")
    prompts = (request.prompt_tokens for request in requests)
    busy = sum(query.performance.prefill_s(tokens, tokens * tokens) for tokens in prompts) / duration_s
    nodes = query.nodes or math.ceil(busy / (query.machine.count // query.accelerators))
    trace = _Trace(requests, query, nodes, blocks, duration_s)
    dram = trace.tier(query.dram, 0.0)
    alone = trace.tier(query.disk, 0.0)
    dram_gb = dram.preferred.best().gb_per_node if query.dram_gb is None else query.dram_gb
    distinct = len({key for request in requests for key in request.prefix_blocks})
    return CapacityPlan(
        query=query,
        nodes=nodes,
        requests=len(requests),
        blocks=blocks,
        highest_reuse=1 - distinct / blocks,
        duration_s=duration_s,
        busy=busy * query.accelerators,
        tiers=(dram, trace.tier(query.disk, dram_gb) if dram_gb else alone),
        disk_alone=alone,
    )


class _Trace:
    def __init__(
        self, requests: Sequence[Request], query: CapacityQuery, nodes: int, blocks: int, duration_s: float
    ) -> None:
        self._query, self._nodes, self._blocks, self._duration_s = query, nodes, blocks, duration_s
        # Requests per cache, for one cache and for one cache per node.
        self._of_caches = {caches: [list(requests[start::caches]) for start in range(caches)] for caches in {1, nodes}}
        # Smallest cache in which each block hits.
        self._least = {
            caches: [least_capacities([request.prefix_blocks for request in group]) for group in groups]
            for caches, groups in self._of_caches.items()
        }

    def tier(self, tier: StorageTier, behind_gb: float) -> TierPlan:
        pool = self._curve(tier, behind_gb, 1) if self._nodes > 1 else None
        return TierPlan(tier=tier, behind_gb=behind_gb, local=self._curve(tier, behind_gb, self._nodes), pool=pool)

    def _curve(self, tier: StorageTier, behind_gb: float, caches: int) -> CapacityCurve:
        query = self._query
        terms = CapacityTerms(
            caches=caches,
            nodes=self._nodes,
            blocks=self._blocks,
            block_gb=query.block_bytes / 1e9,
            duration_s=self._duration_s,
            accelerators=query.accelerators,
            second_price=query.machine.price_per_h * query.share / 3600,
            gb_price=tier.price_per_gb_h,
        )
        # DRAM and this tier are modelled as one LRU cache, with its most recently used blocks in DRAM.
        above = terms.blocks_of(behind_gb)
        first_s, tier_s = (self._block_s(each, caches) for each in (query.dram, tier))
        saved = [
            self._saved_s(request, least, above, first_s, tier_s)
            for group, flat in zip(self._of_caches[caches], self._least[caches], strict=True)
            for request, least in zip(group, _by_request(group, flat), strict=True)
        ]
        least = np.concatenate(self._least[caches])
        return CapacityCurve(terms, np.where(least < NEVER, np.maximum(least - above, 0), NEVER), np.concatenate(saved))

    def _saved_s(self, request: Request, least: Blocks, above: int, first_s: float, tier_s: float) -> Seconds:
        """Return the prefill seconds per prompt block that a hit in a tier saves, if it loads a block in `tier_s`."""
        there, in_first = int((least < NEVER).sum()), int((least <= above).sum())
        saved_s = np.zeros(len(least))
        loads_s = [first_s] * in_first + [tier_s] * (there - in_first)
        saved_s[:there] = savings_s(self._query.performance, request.prompt_tokens, loads_s)
        saved_s[:in_first] = 0.0  # found in DRAM
        return saved_s

    def _block_s(self, tier: StorageTier, caches: int) -> float:
        """Return the mean seconds to load a block from `tier`."""
        query = self._query
        own = tier.bytes_per_s * query.share
        network = query.link_bytes_per_s or query.machine.network_bytes_per_s * query.share
        # A single cache is spread evenly over all nodes.
        here = 1 / self._nodes if caches == 1 else 1.0
        return query.block_bytes * (here / own + (1 - here) / min(own, network))


def _by_request(group: Sequence[Request], flat: Blocks) -> list[Blocks]:
    ends = list(accumulate(len(request.prefix_blocks) for request in group))
    return np.split(flat, ends)[:-1]  # nothing is after the last end
