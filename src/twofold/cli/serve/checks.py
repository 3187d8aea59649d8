"""Validation of the flags of `twofold serve`: unused flags, and contradictions with other flags or a cluster file."""

from pathlib import Path
from typing import Final

from twofold.cli.serve.engine_args import PHASE_ENGINE_ARGS
from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import flag_name, refuse
from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.serving.config import ServiceConfig, WorkerConfig

PHASE_SIZES: Final = "prefill_tp prefill_pp decode_tp decode_pp"
_SIZES: Final = f"tp pp {PHASE_SIZES}"


def check_use(settings: ServeSettings) -> None:
    """Raise ConfigurationError for a flag without effect with the chosen engine, launcher and policies."""
    _check_launcher(settings)
    if not settings.replan:
        refuse(settings, "attainment retire min_between", "needs --replan")
    predicts = settings.replan or settings.overload is not None or settings.inline_tbt is not None
    if not predicts and settings.router not in FORECASTING_ROUTERS:
        users = ", ".join(FORECASTING_ROUTERS)
        refuse(settings, "profile", f"needs --replan, --overload, --inline-tbt or a router that predicts ({users})")
    if settings.pipeline_chunk is not None:
        why = "excludes --pipeline-chunk, which sets the tokens of an iteration"
        refuse(settings, "max_num_batched_tokens", why)
    if settings.engine != "vllm":
        refuse(settings, f"engine_args {PHASE_ENGINE_ARGS} lora_modules", "needs --engine vllm")
    if settings.kv_cache_memory_bytes is not None:
        refuse(settings, "gpu_memory_utilization", "excludes --kv-cache-memory-bytes, which sets the size")
    if settings.emulated:
        _check_emulated(settings)
        return
    refuse(settings, "vocab_size", "needs --engine emulated: other engines read it from the model")
    if settings.cluster is None:
        refuse(settings, "catalog", "needs --cluster, whose machines it describes")
    if settings.engine == "vllm":
        _check_vllm(settings)


def _check_launcher(settings: ServeSettings) -> None:
    if settings.launcher != "ray":
        refuse(settings, "ray_address ray_resources ray_link_label", "needs --launcher ray")
        return
    why = "is for workers of this host: leave it out with --launcher ray"
    refuse(settings, "cluster kv_store_dram", why)
    if settings.pin_cores is not None:  # --no-pin-cores has no effect either
        raise ConfigurationError(f"--pin-cores {why}")
    refuse(settings, "overload inline_tbt", why)
    if settings.transport == "shared_memory":
        raise ConfigurationError(
            "--transport shared_memory works within a host only: with --launcher ray use curve, nixl or mooncake"
        )


def _check_emulated(settings: ServeSettings) -> None:
    if settings.cluster is None:
        raise ConfigurationError("--engine emulated needs --cluster FILE, with the machines to emulate")
    refuse(settings, "model", "is not used with --engine emulated: the cluster file names the model")
    unused = f"dtype device transport kv_checksums kv_store_dram {_SIZES} pipeline_chunk"
    unused += " kv_cache_memory_bytes gpu_memory_utilization"
    refuse(settings, unused, "has no effect with --engine emulated, which computes nothing")


def _check_vllm(settings: ServeSettings) -> None:
    own = "batcher swap_space kv_store_dram kv_eviction cache_retention_share journal pipeline_chunk inline_tbt"
    refuse(settings, own, "needs --engine torch: vLLM has its own scheduler and block pool")
    ENGINES["vllm"].check_installed()


def check_repeats(settings: ServeSettings, file: Path, spec: ClusterSpec, workers: tuple[WorkerConfig, ...]) -> None:
    """Raise ConfigurationError if a flag contradicts the cluster file."""
    roles = [worker.role for worker in workers]
    planned: dict[str, object] = {
        "prefill": roles.count(Role.PREFILL),
        "decode": roles.count(Role.DECODE),
        "colocated": roles.count(Role.MIXED),
        "router": spec.router,
        "handoff": spec.handoff,
        "block_size": spec.block_size,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "swap_space": spec.swap_space_bytes,
    }
    for name, value in planned.items():
        given = getattr(settings, name)
        if given is not None and given != value:
            raise ConfigurationError(f"{flag_name(name)} {given} contradicts --cluster {file}, which has {value}")
    chunked = any(worker.batcher == "chunked-prefill" for worker in workers)
    if settings.enable_chunked_prefill not in {None, chunked}:
        raise ConfigurationError(
            f"--enable-chunked-prefill contradicts --cluster {file}, whose pools name their batchers"
        )


def check_reuse(settings: ServeSettings, config: ServiceConfig) -> None:
    """Raise ConfigurationError if prefix caching is enabled and no worker's batcher can use cached prefixes."""
    batchers = {worker.batcher for worker in config.workers}
    if settings.enable_prefix_caching and batchers and not any(BATCHERS[batcher].reuses_prefix for batcher in batchers):
        raise ConfigurationError(
            f"--enable-prefix-caching has no effect with the batcher {min(batchers)}, which computes whole prompts"
        )


def check_store(config: ServiceConfig) -> None:
    """Raise ConfigurationError if the KV store is enabled along with incompatible options."""
    if config.store is None:
        return
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--kv-store-dram needs workers of one process: leave out --tp and --pp")
    require(config.engine.prefix_caching, "--kv-store-dram needs --enable-prefix-caching")
    for flag, value in (("--swap-space", config.engine.swap_bytes), ("--journal", config.journal_dir)):
        require(value is None, f"{flag} excludes --kv-store-dram")


def check_inline(settings: ServeSettings, config: ServiceConfig) -> None:
    """Raise ConfigurationError if --inline-tbt is combined with options that it does not support."""
    if settings.inline_tbt is None:
        return
    require(bool(settings.colocated), "--inline-tbt needs workers that run both phases: give --colocated N")
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--inline-tbt needs workers of one process: leave out --tp and --pp")
    refuse(settings, "batcher swap_space journal enable_chunked_prefill replan", "excludes --inline-tbt")
