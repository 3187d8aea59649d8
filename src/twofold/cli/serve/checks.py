"""Reject flags of `twofold serve` that would have no effect, or that contradict each other or the cluster file."""

from collections.abc import Iterable
from pathlib import Path

from twofold.cli.serve.settings import ServeSettings
from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.serving.config import ServiceConfig, WorkerConfig


def refuse(flag: str, value: object, why: str) -> None:
    """Raise ConfigurationError if the flag is given."""
    if value is not None and value is not False:
        raise ConfigurationError(f"{flag} {why}")


def refuse_all(flags: Iterable[tuple[str, object]], why: str) -> None:
    """Raise ConfigurationError for the first flag that is given."""
    for flag, value in flags:
        refuse(flag, value, why)


def check_use(settings: ServeSettings) -> None:
    """Raise ConfigurationError for flags that have no effect with the chosen engine, launcher and policies."""
    _check_launcher(settings)
    if not settings.replan:
        given = (
            ("--attainment", settings.attainment),
            ("--retire", settings.retire),
            ("--min-between", settings.min_between),
        )
        refuse_all(given, "needs --replan")
    predicts = settings.replan or settings.overload is not None or settings.inline_tbt is not None
    if not predicts and settings.router not in FORECASTING_ROUTERS:
        users = ", ".join(FORECASTING_ROUTERS)
        why = f"needs --replan, --overload, --inline-tbt or a router that predicts ({users})"
        refuse("--profile", settings.profile, why)
    if settings.pipeline_chunk is not None:
        why = "excludes --pipeline-chunk, which sets the tokens of an iteration"
        refuse("--max-num-batched-tokens", settings.max_num_batched_tokens, why)
    if settings.emulated:
        _check_emulated(settings)
        return
    refuse("--vocab-size", settings.vocab_size, "needs --engine emulated: other engines read it from the model")
    if settings.cluster is None:
        refuse("--catalog", settings.catalog or None, "needs --cluster, whose machines it describes")
    if settings.engine == "vllm":
        _check_vllm(settings)


def _check_launcher(settings: ServeSettings) -> None:
    if settings.launcher != "ray":
        given = (
            ("--ray-address", settings.ray_address),
            ("--ray-resources", settings.ray_resources),
            ("--ray-link-label", settings.ray_link_label),
        )
        refuse_all(given, "needs --launcher ray")
        return
    local = (
        ("--cluster", settings.cluster),
        ("--kv-store-dram", settings.kv_store_dram),
        ("--pin-cores", settings.pin_cores if settings.pin_cores is None else True),
        ("--overload", settings.overload),
        ("--inline-tbt", settings.inline_tbt),
    )
    refuse_all(local, "is for workers of this host: leave it out with --launcher ray")
    if settings.transport == "shared_memory":
        raise ConfigurationError(
            "--transport shared_memory works within a host only: with --launcher ray use curve, nixl or mooncake"
        )


def _check_emulated(settings: ServeSettings) -> None:
    if settings.cluster is None:
        raise ConfigurationError("--engine emulated needs --cluster FILE, with the machines to emulate")
    refuse("MODEL", settings.model, "is not used with --engine emulated: the cluster file names the model")
    unused = (
        ("--dtype", settings.dtype),
        ("--device", settings.device),
        ("--transport", settings.transport),
        ("--kv-checksums", settings.kv_checksums),
        ("--kv-store-dram", settings.kv_store_dram),
        *settings.degrees,
        ("--pipeline-chunk", settings.pipeline_chunk),
    )
    refuse_all(unused, "has no effect with --engine emulated, which computes nothing")
    size = settings.kv_cache_memory_bytes
    refuse("--kv-cache-memory-bytes", size, "needs --engine torch: an emulated machine has its own memory")


def _check_vllm(settings: ServeSettings) -> None:
    unsupported = (
        ("--batcher", settings.batcher),
        ("--swap-space", settings.swap_space),
        ("--kv-store-dram", settings.kv_store_dram),
        ("--kv-eviction", settings.kv_eviction),
        ("--cache-retention-share", settings.cache_retention_share),
        ("--journal", settings.journal),
        ("--pipeline-chunk", settings.pipeline_chunk),
        ("--inline-tbt", settings.inline_tbt),
        *settings.degrees,
    )
    refuse_all(unsupported, "needs --engine torch: vLLM has its own scheduler and block pool")
    ENGINES["vllm"].check_installed()


def check_repeats(settings: ServeSettings, file: Path, spec: ClusterSpec, workers: tuple[WorkerConfig, ...]) -> None:
    """Raise ConfigurationError for a flag that contradicts the cluster file; repeating it is valid."""
    roles = [worker.role for worker in workers]
    for flag, given, planned in (
        ("--prefill", settings.prefill, roles.count(Role.PREFILL)),
        ("--decode", settings.decode, roles.count(Role.DECODE)),
        ("--colocated", settings.colocated, roles.count(Role.MIXED)),
        ("--router", settings.router, spec.router),
        ("--handoff", settings.handoff, spec.handoff),
        ("--block-size", settings.block_size, spec.block_size),
        ("--max-num-seqs", settings.max_num_seqs, spec.max_num_seqs),
        ("--max-num-batched-tokens", settings.max_num_batched_tokens, spec.max_num_batched_tokens),
        ("--swap-space", settings.swap_space, spec.swap_space_bytes),
    ):
        if given is not None and given != planned:
            raise ConfigurationError(f"{flag} {given} contradicts --cluster {file}, which has {planned}")
    chunked = any(worker.batcher == "chunked-prefill" for worker in workers)
    if settings.enable_chunked_prefill not in {None, chunked}:
        raise ConfigurationError(
            f"--enable-chunked-prefill contradicts --cluster {file}, whose pools name their batchers"
        )


def check_reuse(settings: ServeSettings, config: ServiceConfig) -> None:
    """Raise ConfigurationError for prefix caching with batchers that recompute every prompt."""
    batchers = {worker.batcher for worker in config.workers}
    if settings.enable_prefix_caching and batchers and not any(BATCHERS[batcher].reuses_prefix for batcher in batchers):
        raise ConfigurationError(
            f"--enable-prefix-caching has no effect with the batcher {min(batchers)}, which computes whole prompts"
        )


def check_store(config: ServiceConfig) -> None:
    """Raise ConfigurationError for options that the KV store of a host does not support."""
    if config.store is None:
        return
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--kv-store-dram needs workers of one process: leave out --tp and --pp")
    if not config.engine.prefix_caching:
        raise ConfigurationError("--kv-store-dram needs --enable-prefix-caching")
    unsupported = (("--swap-space", config.engine.swap_bytes), ("--journal", config.journal_dir))
    refuse_all(unsupported, "excludes --kv-store-dram")


def check_inline(settings: ServeSettings, config: ServiceConfig) -> None:
    """Raise ConfigurationError for options that --inline-tbt does not support."""
    if settings.inline_tbt is None:
        return
    if not settings.colocated:
        raise ConfigurationError("--inline-tbt needs workers that run both phases: give --colocated N")
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--inline-tbt needs workers of one process: leave out --tp and --pp")
    unsupported = (
        ("--batcher", settings.batcher),
        ("--swap-space", settings.swap_space),
        ("--journal", settings.journal),
        ("--enable-chunked-prefill", settings.enable_chunked_prefill),
        ("--replan", settings.replan),
    )
    refuse_all(unsupported, "excludes --inline-tbt")
