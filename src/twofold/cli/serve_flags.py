"""The flags of `twofold serve` that say what to serve."""

from dataclasses import dataclass
from pathlib import Path

from twofold.cli.serve_overload import OverloadFlags
from twofold.cli.serve_ray import RayFlags
from twofold.cli.serve_replan import ReplanFlags
from twofold.scheduling.cluster.breaker import LONGEST_S
from twofold.serving.config import StoreConfig, TokenBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of `twofold serve` that say what to serve; None where one is not given."""

    model: str | None = None
    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    cluster: Path | None = None
    catalog: tuple[Path, ...] = ()
    router: str | None = None
    tp: int | None = None
    pp: int | None = None
    prefill_tp: int | None = None
    prefill_pp: int | None = None
    decode_tp: int | None = None
    decode_pp: int | None = None
    pipeline_chunk: int | None = None
    handoff: str | None = None
    transport: str | None = None
    kv_checksums: bool = False
    pin_cores: bool | None = None
    listen_workers: str | None = None
    cluster_key: Path | None = None
    journal: Path | None = None
    max_restart_delay: float = LONGEST_S
    engine: str = "torch"
    dtype: str | None = None
    device: str | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space: int | None = None
    store: StoreConfig | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    prefix_caching: bool | None = None
    cache_retention_share: float | None = None
    kv_eviction: str | None = None
    max_num_batched_tokens: TokenBudget | None = None
    enable_chunked_prefill: bool | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    log_format: str = "text"
    profile: Path | None = None
    replan: ReplanFlags | None = None
    ray: RayFlags | None = None
    overload: OverloadFlags | None = None
    inline_tbt: float | None = None

    @property
    def emulated(self) -> bool:
        return self.engine == "emulated"

    @property
    def pinned(self) -> bool:
        """Workers that compute here get cores of their own unless it is said otherwise; others sleep on any."""
        if self.ray is not None:
            return False
        return not self.emulated if self.pin_cores is None else self.pin_cores

    @property
    def over_hosts(self) -> bool:
        """Whether workers may be on other hosts."""
        return self.listen_workers is not None or self.ray is not None

    @property
    def degrees(self) -> list[tuple[str, int | None]]:
        """What was said of tensor and pipeline ranks: of all workers, and then of those of a phase."""
        return [
            ("--tp", self.tp),
            ("--pp", self.pp),
            ("--prefill-tp", self.prefill_tp),
            ("--prefill-pp", self.prefill_pp),
            ("--decode-tp", self.decode_tp),
            ("--decode-pp", self.decode_pp),
        ]
