"""Which flags of `twofold serve` are mistakes: they would change nothing, or deny what is said elsewhere."""

from pathlib import Path

from twofold.cli.serve_flags import Flags
from twofold.cli.serve_ray import check_ray
from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.serving.config import ServiceConfig, WorkerConfig


def check_use(flags: Flags) -> None:
    """Raises ConfigurationError for flags that would change nothing; so do all that follow, for what they are about."""
    check_ray(flags)
    others = (flags.replan, flags.overload, flags.inline_tbt)
    if all(each is None for each in others) and flags.router not in FORECASTING_ROUTERS:
        why = "is for --replan, --overload, --inline-tbt and the routers " + ", ".join(FORECASTING_ROUTERS)
        refuse("--profile", flags.profile, f"{why}: give one of them too")
    if flags.pipeline_chunk is not None:
        why = "is for iterations of whole prompts: with --pipeline-chunk those have as many tokens as a chunk"
        refuse("--max-num-batched-tokens", flags.max_num_batched_tokens, why)
    if not flags.emulated:
        refuse("--vocab-size", flags.vocab_size, "is for --engine emulated: this one has a model that knows")
        if flags.cluster is None:
            refuse("--catalog", flags.catalog or None, "describes the machines of --cluster: give that too")
        if flags.engine == "vllm":
            _refuse_for_vllm(flags)
        return
    if flags.cluster is None:
        raise ConfigurationError(
            "--engine emulated needs --cluster FILE: the machines whose time it is to take"
        )
    refuse("MODEL", flags.model, "is not needed: the file of --cluster names the model to emulate")
    for name, value in (
        ("--dtype", flags.dtype),
        ("--device", flags.device),
        ("--transport", flags.transport),
        ("--kv-checksums", flags.kv_checksums or None),
        ("--kv-store-dram", flags.store),
        *flags.degrees,
        ("--pipeline-chunk", flags.pipeline_chunk),
    ):
        refuse(name, value, "means nothing to --engine emulated, which computes nothing")
    size = flags.kv_cache_memory_bytes
    refuse("--kv-cache-memory-bytes", size, "is for --engine torch: an emulated machine has its own memory")


def _refuse_for_vllm(flags: Flags) -> None:
    """What vLLM does in its own way, or not at all."""
    for name, value in (
        ("--swap-space", flags.swap_space),
        ("--kv-store-dram", flags.store),
        ("--kv-eviction", flags.kv_eviction),
        ("--cache-retention-share", flags.cache_retention_share),
        ("--journal", flags.journal),
        ("--pipeline-chunk", flags.pipeline_chunk),
        ("--inline-tbt", flags.inline_tbt),
        *flags.degrees,
    ):
        refuse(name, value, "is for --engine torch: vLLM has a scheduler and a block pool of its own")
    ENGINES["vllm"].check_installed()


def check_repeats(flags: Flags, file: Path, spec: ClusterSpec, workers: tuple[WorkerConfig, ...]) -> None:
    """A flag may repeat what the file says, and not deny it."""
    roles = [worker.role for worker in workers]
    chunked = any(worker.batcher == "chunked-prefill" for worker in workers)
    for flag, given, said in (
        ("--prefill", flags.prefill, roles.count(Role.PREFILL)),
        ("--decode", flags.decode, roles.count(Role.DECODE)),
        ("--colocated", flags.colocated, roles.count(Role.MIXED)),
        ("--router", flags.router, spec.router),
        ("--handoff", flags.handoff, spec.handoff),
        ("--block-size", flags.block_size, spec.block_size),
        ("--max-num-seqs", flags.max_num_seqs, spec.max_num_seqs),
        ("--max-num-batched-tokens", flags.max_num_batched_tokens, spec.max_num_batched_tokens),
        ("--swap-space", flags.swap_space, spec.swap_space_bytes),
    ):
        if given is not None and given != said:
            raise ConfigurationError(
                f"{flag} {given} contradicts --cluster {file}, which says {said}: change one of them"
            )
    if flags.enable_chunked_prefill not in {None, chunked}:
        raise ConfigurationError(
            f"--enable-chunked-prefill contradicts --cluster {file}, whose pools name their batchers: leave it out"
        )


def check_reuse(flags: Flags, config: ServiceConfig) -> None:
    """Prompts that begin alike are of no use to batchers that take all of them whole."""
    batchers = {worker.batcher for worker in config.workers}
    if flags.prefix_caching and batchers and not any(BATCHERS[batcher].reuses_prefix for batcher in batchers):
        raise ConfigurationError(
            f"--prefix-caching is not for the batcher {min(batchers)}, which takes prompts as long as they are"
        )


def check_store(flags: Flags, config: ServiceConfig) -> None:
    """What the store of a host does not go with."""
    if flags.store is None:
        return
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--kv-store-dram is for workers of one process: leave out --tp and --pp")
    if not config.engine.prefix_caching:
        raise ConfigurationError(
            "--kv-store-dram keeps what --prefix-caching finds: leave out --no-prefix-caching"
        )
    for flag, value in (("--swap-space", config.engine.swap_bytes), ("--journal", config.journal_dir)):
        refuse(flag, value, "excludes --kv-store-dram")


def check_inline(flags: Flags, config: ServiceConfig) -> None:
    """What prompts that join decodes do not go with."""
    if flags.inline_tbt is None:
        return
    if not flags.colocated:
        raise ConfigurationError("--inline-tbt is for workers that do both phases: give --colocated N")
    if any(worker.split != UNSHARDED for worker in config.workers):
        raise ConfigurationError("--inline-tbt knows workers of one process: leave out --tp and --pp")
    for flag, value in (
        ("--swap-space", flags.swap_space),
        ("--journal", flags.journal),
        ("--enable-chunked-prefill", flags.enable_chunked_prefill or None),
        ("--replan", flags.replan),
    ):
        refuse(flag, value, "excludes --inline-tbt")


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigurationError for a value that is not one of those that there are."""
    if value not in choices:
        raise ConfigurationError(f"{flag} {value!r} is unknown: choose one of {', '.join(choices)}")


def refuse(flag: str, value: object, why: str) -> None:
    """Raises ConfigurationError where the flag was given."""
    if value is not None:
        raise ConfigurationError(f"{flag} {why}")
