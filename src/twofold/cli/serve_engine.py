"""Which engine the flags of `twofold serve` ask for: of a model that is there, or of machines that are not."""

from pathlib import Path

import msgspec

from twofold.cli.serve_flags import Flags
from twofold.cli.serve_refusals import check_choice, refuse
from twofold.cli.store_flags import check_eviction
from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES
from twofold.errors import ConfigurationError
from twofold.serving.config import EngineConfig, ServiceConfig
from twofold.serving.gateway.tokenizer import load_tokenizer
from twofold.serving.launch.model_source import find_model

DTYPES = ("auto", "float32", "bfloat16", "float16")


def model_engine(flags: Flags, block_size: int, max_num_seqs: int, swap_bytes: int | None) -> EngineConfig:
    """MODEL runs, on torch or by vLLM; raises ConfigurationError, and ModelError where there is no such model."""
    dtype = flags.dtype or "auto"
    check_choice("--dtype", dtype, DTYPES)
    if flags.model is None:
        raise ConfigurationError("give MODEL: a model directory or a hub id, or use --engine emulated")
    return EngineConfig(
        engine=flags.engine,
        model=str(find_model(flags.model)),
        tokenizer=_tokenizer(flags.tokenizer)[0],
        dtype=dtype,
        device=flags.device or "cpu",
        block_size=block_size,
        kv_cache_bytes=flags.kv_cache_memory_bytes,
        swap_bytes=swap_bytes,
        max_model_len=flags.max_model_len,
        max_num_seqs=max_num_seqs,
        prefix_caching=flags.prefix_caching is not False,
    )


def usual_block_size(flags: Flags) -> int:
    """Tokens in a block; vLLM's on a CPU are multiples of 32."""
    return ENGINES[flags.engine].cpu_block_size if (flags.device or "cpu") == "cpu" else 16


def emulated_engine(flags: Flags, spec: ClusterSpec) -> EngineConfig:
    """Nothing runs; the model of the cluster takes its time there. Raises ConfigurationError."""
    tokenizer, known_tokens = _tokenizer(flags.tokenizer)
    return EngineConfig(
        engine="emulated",
        model=spec.model,
        tokenizer=tokenizer,
        vocab_size=flags.vocab_size or known_tokens,  # its tokens should mean something to its tokenizer
        block_size=spec.block_size,
        max_model_len=flags.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        prefix_caching=flags.prefix_caching is True,  # the simulation of its machines has none
    )


def with_eviction(flags: Flags, config: ServiceConfig) -> ServiceConfig:
    """What is kept of prompts, and what goes first; raises ConfigurationError where nothing is."""
    for flag, value in (
        ("--kv-eviction", flags.kv_eviction),
        ("--cache-retention-share", flags.cache_retention_share),
    ):
        if not config.engine.prefix_caching:
            refuse(flag, value, "is for what --prefix-caching keeps, and that is switched off")
    check_eviction(flags.kv_eviction)
    engine = msgspec.structs.replace(
        config.engine,
        eviction=flags.kv_eviction or config.engine.eviction,
        retained_share=config.engine.retained_share
        if flags.cache_retention_share is None
        else flags.cache_retention_share,
    )
    return msgspec.structs.replace(config, engine=engine)


def _tokenizer(directory: Path | None) -> tuple[str | None, int | None]:
    """The directory, if there is a tokenizer in it, and how many tokens that knows."""
    if directory is None:
        return None, None
    loaded = load_tokenizer(directory)
    if loaded is None:
        raise ConfigurationError(f"--tokenizer {directory} is not a directory with a tokenizer")
    return str(directory.absolute()), loaded.backend.get_vocab_size()
