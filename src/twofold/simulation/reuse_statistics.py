"""Statistics of prefix reuse: hits by tier, fetches, and hot blocks."""

from collections.abc import Sequence
from typing import Final

import msgspec

from twofold.request import BlockKey
from twofold.simulation.histogram import Histogram
from twofold.simulation.tally import Tally

_MICRO: Final = 10**6
_HOTTEST: Final = 10
_MANY: Final = 1 << 20


class TierHits(msgspec.Struct, frozen=True):
    """Blocks found in one tier of the prefill instance's cache."""

    tier: str
    blocks: int


class HotBlock(msgspec.Struct, frozen=True):
    """The number of prompts with a block, and of caches where they were prefilled."""

    uses: int
    caches: int


class ReuseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse of the computed prompts.

    `blocks` counts all blocks of the prompts, `hits` those in the local cache by tier, and `fetched` those from other
    caches. `reused_tokens` are prompt tokens that were not computed. `requests` counts prompts by prefill instance.
    `hottest` are the blocks of the most prompts. `ttft_error` is the relative error of the predicted TTFT, None if the
    router does not predict it.
    """

    caches: int
    blocks: int
    hits: tuple[TierHits, ...]
    fetched: int
    prompt_tokens: int
    reused_tokens: int
    requests: dict[str, int]
    hottest: tuple[HotBlock, ...]
    ttft_error: Histogram | None

    @property
    def hit_rate(self) -> float:
        """The share of blocks found in any cache."""
        return (sum(tier.blocks for tier in self.hits) + self.fetched) / self.blocks if self.blocks else 0.0

    @property
    def largest_share(self) -> float:
        """The share of prompts on the busiest instance."""
        given = sum(self.requests.values())
        return max(self.requests.values()) / given if given else 0.0

    @property
    def spread(self) -> float:
        """The mean share of caches that have a hot block."""
        if not self.hottest:
            return 0.0
        return sum(block.caches for block in self.hottest) / (len(self.hottest) * self.caches)


class ReuseStatistics:
    """Collects statistics of prefix reuse. With many blocks, those of a single prompt are dropped."""

    def __init__(self, tiers: Sequence[str], caches: Sequence[str], instances: Sequence[str]) -> None:
        self._tiers = tuple(tiers)
        self._hits = [0] * len(tiers)
        self._bits = {name: 1 << number for number, name in enumerate(caches)}
        self._requests = dict.fromkeys(instances, 0)
        self._blocks = self._fetched = self._prompt_tokens = self._reused_tokens = 0
        self._uses: dict[BlockKey, int] = {}
        self._where: dict[
            BlockKey, int
        ] = {}  # the bits of the caches where prompts with a block were prefilled
        self._most = _MANY
        self._error = Tally()

    def placed(self, instance: str) -> None:
        """Count a prompt placed on an instance."""
        self._requests[instance] += 1

    def prefilled(
        self,
        cache: str,
        keys: Sequence[BlockKey],
        hits: Sequence[int],
        fetched: int,
        prompt_tokens: int,
        reused_tokens: int,
    ) -> None:
        """Count the blocks of a computed prompt: `hits` by tier and `fetched` ones."""
        self._blocks += len(keys)
        self._fetched += fetched
        self._prompt_tokens += prompt_tokens
        self._reused_tokens += reused_tokens
        for tier, blocks in enumerate(hits):
            self._hits[tier] += blocks
        bit, uses, where = self._bits[cache], self._uses, self._where
        for key in keys:
            uses[key] = uses.get(key, 0) + 1
            where[key] = where.get(key, 0) | bit
        if len(uses) > self._most:
            self._forget_single()

    def predicted(self, ttft_s: float, real_s: float) -> None:
        """Compare a predicted with the actual TTFT."""
        self._error.add(round(abs(ttft_s - real_s) / real_s * _MICRO))

    def result(self) -> ReuseResult:
        hottest = sorted(self._uses, key=lambda key: -self._uses[key])[:_HOTTEST]
        return ReuseResult(
            caches=len(self._bits),
            blocks=self._blocks,
            hits=tuple(map(TierHits, self._tiers, self._hits)),
            fetched=self._fetched,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            requests=self._requests,
            hottest=tuple(HotBlock(self._uses[key], self._where[key].bit_count()) for key in hottest),
            ttft_error=Histogram.of(self._error, 1 / _MICRO) if self._error.high >= 0 else None,
        )

    def _forget_single(self) -> None:
        self._uses = {key: uses for key, uses in self._uses.items() if uses > 1}
        self._where = {key: self._where[key] for key in self._uses}
        self._most = max(_MANY, 2 * len(self._uses))
