"""Workers of several ranks: who has how many, and whether KV can travel between them."""

from collections.abc import Mapping, Sequence

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.kvcache.split import UNSPLIT, Split
from twofold.scheduling.batchers import CHUNKED
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.transport.registry import DEFAULT_TRANSPORT


def with_splits(workers: Sequence[WorkerConfig], splits: Mapping[Role, Split]) -> tuple[WorkerConfig, ...]:
    """The workers, each split as its role says; ranks are counted over all of them, where any is split."""
    if all(split == UNSPLIT for split in splits.values()):
        return tuple(workers)
    divided, ranks = [], 0
    for worker in workers:
        split = splits.get(worker.role, UNSPLIT)
        divided.append(msgspec.structs.replace(worker, split=split, first_rank=ranks))
        ranks += split.ranks
    return tuple(divided)


def with_chunks(workers: Sequence[WorkerConfig], chunk: int | None) -> tuple[WorkerConfig, ...]:
    """The workers; those that prefill on several stages compute prompts in chunks of at most so many tokens.

    Raises ConfigurationError where there are none.
    """
    if chunk is None:
        return tuple(workers)
    chunked = [
        msgspec.structs.replace(worker, batcher="prefill-chunks", max_num_batched_tokens=chunk, measures_budget=False)
        if worker.batcher == "prefill" and worker.split.pipeline > 1
        else worker
        for worker in workers
    ]
    if not any(worker.batcher in CHUNKED for worker in chunked):
        raise ConfigurationError(
            f"--pipeline-chunk {chunk} is for workers that prefill on several stages: give --prefill-pp 2 or more, "
            "and a router that leaves roles as they are"
        )
    return tuple(chunked)


def check_splits(config: ServiceConfig) -> None:
    """Raise ConfigurationError where workers that are split cannot be served, or cannot hand requests over.

    Whether the model can be split like this is found out when it is loaded.
    """
    divided = [worker for worker in config.workers if worker.split != UNSPLIT]
    if not divided:
        return
    first = divided[0]
    if config.transport != DEFAULT_TRANSPORT:
        raise ConfigurationError(
            f"--transport {config.transport} moves whole blocks, so KV cannot travel {_pair(config, first)}: only "
            f"{DEFAULT_TRANSPORT} moves the heads and layers of each rank"
        )
    if config.kv_checksums:
        raise ConfigurationError(
            f"--kv-checksums compares whole blocks, and {first.instance} ({first.split}) has none: leave it out"
        )
    if config.engine.swap_bytes is not None:
        raise ConfigurationError(
            f"--swap-space swaps whole blocks, and {first.instance} ({first.split}) has none: leave it out"
        )
    if config.journal_dir is not None and any(worker.batcher in CHUNKED for worker in divided):
        raise ConfigurationError(
            "--journal writes down one batch at a time, and --pipeline-chunk has several under way: leave one of them "
            "out"
        )
    if config.engine.device.startswith("cuda:"):
        raise ConfigurationError(
            f"--device {config.engine.device} is one device, and each rank of {first.instance} ({first.split}) takes "
            "one: write cuda"
        )


def _pair(config: ServiceConfig, divided: WorkerConfig) -> str:
    """The first two workers between which a split matters."""
    for source in config.workers:
        for target in config.workers:
            if source.role is Role.PREFILL and target.role is Role.DECODE and divided in {source, target}:
                return f"from {source.instance} ({source.split}) to {target.instance} ({target.split})"
    return f"from or to {divided.instance} ({divided.split})"
