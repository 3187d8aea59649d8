"""The trade-off of KV capacity: what DRAM, and disk behind it, give a trace at every size, on each node or pooled."""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from twofold.errors import ConfigurationError
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
from twofold.workload.rescale import BLOCK_TOKENS


class CapacityQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes are machines whose instances, of so many `accelerators` each, prefill `model` as `performance` says.

    As many nodes as the prefill of the trace keeps busy without any reuse, if `nodes` is None. `dram_gb` of each node
    is in front of the disk, as much as pays if None. An instance reads from another node at its share of the machine's
    network, or at `link_bytes_per_s`.
    """

    model: Model
    machine: Machine
    performance: PerformanceModel
    accelerators: int
    dram: StorageTier
    disk: StorageTier
    nodes: int | None = None
    dram_gb: float | None = None
    link_bytes_per_s: float | None = None

    @property
    def share(self) -> float:
        """What an instance has of its machine."""
        return self.accelerators / self.machine.count

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.model.kv_bytes_per_token


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: `local` with a cache on each node, to which requests come in turn; `pool` as one cache of all nodes,
    None where there is one node. `behind_gb` of each node are in front of it."""

    tier: StorageTier
    behind_gb: float
    local: CapacityCurve
    pool: CapacityCurve | None

    @property
    def preferred(self) -> CapacityCurve:
        """The pool, where there is one."""
        return self.pool or self.local


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers in order, and what they are judged by: `busy` accelerators prefill the trace where nothing is reused.

    `disk_alone` is the last tier without the one above it. `highest_reuse` is the share of the trace's blocks that came
    before.
    """

    question: CapacityQuery
    nodes: int
    requests: int
    blocks: int
    highest_reuse: float
    duration_s: float
    busy: float
    tiers: tuple[TierPlan, ...]
    disk_alone: TierPlan


def capacity_plan(requests: Sequence[Request], question: CapacityQuery) -> CapacityPlan:
    """Raises ConfigurationError for requests whose blocks are not known, or that all come at once."""
    blocks = sum(len(request.prefix_blocks) for request in requests)
    if not blocks:
        raise ConfigurationError(
            "--kv-capacity needs a trace whose prompts have block ids, as those of Mooncake have: this one has none"
        )
    duration_s = requests[-1].arrival_s - requests[0].arrival_s
    if duration_s <= 0:
        raise ConfigurationError(
            "--kv-capacity needs a trace of some duration: all its requests come at once"
        )
    busy = sum(_whole_s(question, request) for request in requests) / duration_s
    nodes = question.nodes or math.ceil(busy / (question.machine.count // question.accelerators))
    trace = _Trace(requests, question, nodes, blocks, duration_s)
    dram = trace.tier(question.dram, 0.0)
    alone = trace.tier(question.disk, 0.0)
    dram_gb = dram.preferred.best().gb_per_node if question.dram_gb is None else question.dram_gb
    distinct = len({key for request in requests for key in request.prefix_blocks})
    return CapacityPlan(
        question=question,
        nodes=nodes,
        requests=len(requests),
        blocks=blocks,
        highest_reuse=1 - distinct / blocks,
        duration_s=duration_s,
        busy=busy * question.accelerators,
        tiers=(dram, trace.tier(question.disk, dram_gb) if dram_gb else alone),
        disk_alone=alone,
    )


def _whole_s(question: CapacityQuery, request: Request) -> float:
    prompt = request.prompt_tokens
    return question.performance.prefill_s(prompt, prompt * prompt)


class _Trace:
    """The requests by the cache that they share, with the least capacity of each block in each arrangement."""

    def __init__(
        self,
        requests: Sequence[Request],
        question: CapacityQuery,
        nodes: int,
        blocks: int,
        duration_s: float,
    ) -> None:
        self._question, self._nodes, self._blocks, self._duration_s = question, nodes, blocks, duration_s
        self._of_caches = {
            caches: [list(requests[start::caches]) for start in range(caches)] for caches in {1, nodes}
        }
        self._least = {
            caches: [least_capacities([request.prefix_blocks for request in group]) for group in groups]
            for caches, groups in self._of_caches.items()
        }

    def tier(self, tier: StorageTier, behind_gb: float) -> TierPlan:
        """A tier behind so much DRAM of each node."""
        pool = self._curve(tier, behind_gb, 1) if self._nodes > 1 else None
        return TierPlan(
            tier=tier, behind_gb=behind_gb, local=self._curve(tier, behind_gb, self._nodes), pool=pool
        )

    def _curve(self, tier: StorageTier, behind_gb: float, caches: int) -> CapacityCurve:
        question = self._question
        terms = CapacityTerms(
            caches=caches,
            nodes=self._nodes,
            blocks=self._blocks,
            block_gb=question.block_bytes / 1e9,
            duration_s=self._duration_s,
            accelerators=question.accelerators,
            second_price=question.machine.price_per_h * question.share / 3600,
            gb_price=tier.price_per_gb_h,
        )
        above = terms.blocks_of(behind_gb)
        first_s, tier_s = (self._block_s(each, caches) for each in (question.dram, tier))
        saved = [
            self._saved_s(request, least, above, first_s, tier_s)
            for group, flat in zip(self._of_caches[caches], self._least[caches], strict=True)
            for request, least in zip(group, _by_request(group, flat), strict=True)
        ]
        least = np.concatenate(self._least[caches])
        return CapacityCurve(
            terms, np.where(least < NEVER, np.maximum(least - above, 0), NEVER), np.concatenate(saved)
        )

    def _saved_s(self, request: Request, least: Blocks, above: int, first_s: float, tier_s: float) -> Seconds:
        """What each block saves in this tier; those that the DRAM above it has save nothing more."""
        there, in_first = int((least < NEVER).sum()), int((least <= above).sum())
        saved_s = np.zeros(len(least))
        loads_s = [first_s] * in_first + [tier_s] * (there - in_first)
        saved_s[:there] = savings_s(self._question.performance, request.prompt_tokens, loads_s)
        saved_s[:in_first] = 0.0
        return saved_s

    def _block_s(self, tier: StorageTier, caches: int) -> float:
        """Seconds to load a block into an instance. In a pool it may be on any node, on average."""
        question = self._question
        own = tier.bytes_per_s * question.share
        network = question.link_bytes_per_s or question.machine.network_bytes_per_s * question.share
        here = 1 / self._nodes if caches == 1 else 1.0
        return question.block_bytes * (here / own + (1 - here) / min(own, network))


def _by_request(group: Sequence[Request], flat: Blocks) -> Iterator[Blocks]:
    start = 0
    for request in group:
        end = start + len(request.prefix_blocks)
        yield flat[start:end]
        start = end
