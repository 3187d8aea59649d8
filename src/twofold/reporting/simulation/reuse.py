"""What came of reuse, as facts for people and as numbers for programs."""

from collections.abc import Iterator

import msgspec

from twofold.reporting.simulation.statistics import Statistics
from twofold.simulation.reuse_statistics import ReuseResult


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """`hits` has, by tier, the share of blocks that prompts found where they were prefilled, and `fetched` the share
    that came from another cache. `requests` counts prompts by instance. `hottest` are the blocks that most prompts
    had: how many, and at how many of the `caches` they were prefilled. `ttft_error` is a share of the real time."""

    caches: int
    blocks: int
    hits: dict[str, float]
    fetched: float
    hit_rate: float
    prompt_tokens: int
    reused_tokens: int
    requests: dict[str, int]
    largest_share: float
    hottest: list[tuple[int, int]]
    ttft_error: Statistics | None

    @classmethod
    def of(cls, result: ReuseResult) -> "ReuseReport":
        blocks = max(1, result.blocks)
        return cls(
            caches=result.caches,
            blocks=result.blocks,
            hits={tier.tier: tier.blocks / blocks for tier in result.hits},
            fetched=result.fetched / blocks,
            hit_rate=result.hit_rate,
            prompt_tokens=result.prompt_tokens,
            reused_tokens=result.reused_tokens,
            requests=result.requests,
            largest_share=result.largest_share,
            hottest=[(block.uses, block.caches) for block in result.hottest],
            ttft_error=None if result.ttft_error is None else Statistics.of(result.ttft_error),
        )


def reuse_lines(result: ReuseResult) -> Iterator[tuple[str, str]]:
    """A label and a text for each."""
    report = ReuseReport.of(result)
    tiers = ", ".join(f"{share:.1%} in {tier}" for tier, share in report.hits.items())
    yield "Blocks found", f"{report.hit_rate:.1%}: {tiers}, {report.fetched:.1%} in other caches"
    share = report.reused_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    yield "Prompt tokens reused", f"{report.reused_tokens:,} ({share:.1%})"
    yield "Largest share of prompts", f"{report.largest_share:.1%}, of {len(report.requests)} instances"
    yield "Caches with the hottest blocks", f"{result.spread * result.caches:.1f} of {result.caches}"
    error = report.ttft_error
    if error is not None:
        yield "Predicted TTFT off by", f"{error.p50:.1%} (median)"
