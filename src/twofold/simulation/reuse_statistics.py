"""What came of reuse in a run: whose blocks were used where, gathered as it happens."""

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
    """Blocks that were found in one tier where the prompt was prefilled."""

    tier: str
    blocks: int


class HotBlock(msgspec.Struct, frozen=True):
    """A block that many prompts have: how many, and at how many caches they were prefilled."""

    uses: int
    caches: int


class ReuseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the prompts that were prefilled.

    `blocks` is what they had in all; `hits` were there, and `fetched` came from another cache. `reused_tokens` were not
    computed. `requests` says how many prompts each instance that could prefill was given. `hottest` are the blocks
    that most prompts had. `ttft_error` is how far the predicted time to the first token was off, as a share of the real
    one; None where the router predicts none.
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
        """The share of blocks that were in a cache, wherever."""
        return (sum(tier.blocks for tier in self.hits) + self.fetched) / self.blocks if self.blocks else 0.0

    @property
    def largest_share(self) -> float:
        """Of the prompts, that of the instance that got most."""
        given = sum(self.requests.values())
        return max(self.requests.values()) / given if given else 0.0

    @property
    def spread(self) -> float:
        """To what share of the caches the hottest blocks came, on average."""
        if not self.hottest:
            return 0.0
        return sum(block.caches for block in self.hottest) / (len(self.hottest) * self.caches)


class ReuseStatistics:
    """Memory grows with the blocks that several prompts have; those of one only are forgotten when there are many."""

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
        """A prompt was given to an instance."""
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
        """A prompt with these blocks is computed: `hits` of them, by tier, were there, and `fetched` came."""
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
        """The first token came after `real_s` seconds instead of `ttft_s`."""
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
