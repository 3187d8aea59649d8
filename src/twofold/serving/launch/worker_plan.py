"""Plan the workers of a service from flags or a cluster spec: roles, batchers, ranks and cores."""

import os
from collections.abc import Mapping, Sequence

import msgspec

from twofold.cluster.layout import share_cores
from twofold.cluster.profiles import instance_profiles, instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.scheduling.batchers import BATCHERS, INLINED
from twofold.scheduling.routers import LIVE_ROUTERS
from twofold.serving.config import AUTO, JoinTerms, ServiceConfig, TokenBudget, WorkerConfig
from twofold.transport.registry import DEFAULT_TRANSPORT


def plan_workers(
    *,
    prefill: int,
    decode: int,
    colocated: int,
    chunked_prefill: bool,
    max_num_batched_tokens: TokenBudget | None,
    pin_cores: bool,
    inlines: bool = False,
    roles_move: bool = False,
    others_join: bool = False,
    batchers: Mapping[Role, str] | None = None,
) -> tuple[WorkerConfig, ...]:
    """Return the workers with roles, batchers and cores; raises ConfigurationError for invalid counts.

    With `inlines`, whole prompts join decodes within a latency bound. With `roles_move`, every worker can run both
    phases, with Splitwise's batcher. With `others_join`, a phase may be missing here because other hosts can join.
    `batchers` replace the batchers of some roles.
    """
    if colocated and (prefill or decode):
        raise ConfigurationError("--colocated excludes --prefill and --decode: a service is either split or colocated")
    if not colocated and not (prefill and decode) and not others_join:
        raise ConfigurationError("a split service needs at least --prefill 1 and --decode 1 (or use --colocated N)")
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: colocated}
    terms = join_terms(
        colocated=colocated > 0,
        chunked_prefill=chunked_prefill,
        max_num_batched_tokens=max_num_batched_tokens,
        inlines=inlines,
        roles_move=roles_move,
        batchers=batchers,
    )
    workers = [terms.worker(f"{role.value}-{i}", role) for role, count in counts.items() for i in range(count)]
    return with_cores(workers, pin_cores=pin_cores)


def join_terms(
    *,
    colocated: bool,
    chunked_prefill: bool,
    max_num_batched_tokens: TokenBudget | None,
    inlines: bool = False,
    roles_move: bool = False,
    batchers: Mapping[Role, str] | None = None,
) -> JoinTerms:
    """Return the batcher of each role, `batchers` if given; raises ConfigurationError if none can use the budget."""
    chosen = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    if colocated:
        whole = INLINED if inlines else "mixed"
        chosen = {Role.MIXED: "chunked-prefill" if chunked_prefill and not inlines else whole}
    if roles_move:
        chosen = dict.fromkeys(Role, "splitwise")
    chosen |= {role: name for role, name in (batchers or {}).items() if role in chosen}
    if max_num_batched_tokens == AUTO and not any(BATCHERS[batcher].whole_prompts for batcher in chosen.values()):
        raise ConfigurationError(
            "--max-num-batched-tokens auto needs batchers for whole prompts: leave out chunked prefill "
            "(--no-enable-chunked-prefill) and the router splitwise, or give a number"
        )
    return JoinTerms(batchers=chosen, max_num_batched_tokens=max_num_batched_tokens)


def with_cores(workers: Sequence[WorkerConfig], *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """Return the workers of one host with equal shares of its cores."""
    if not workers:
        return ()
    return tuple(
        msgspec.structs.replace(worker, cores=share if pin_cores else (), threads=len(share))
        for worker, share in zip(workers, share_cores(available_cores(), len(workers)), strict=True)
    )


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def plan_cluster(spec: ClusterSpec, catalog: Catalog, *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """Return a worker for each instance of a cluster, with the simulator's names.

    Raises ConfigurationError for an invalid or simulation-only cluster.
    """
    check_servable(spec)
    kinds = instance_profiles(spec, catalog)
    seats = list(instance_slots(kinds))
    return tuple(
        WorkerConfig(
            instance=seat.name,
            role=seat.profile.pool.role,
            batcher=seat.profile.batcher,
            max_num_batched_tokens=seat.profile.max_num_batched_tokens,
            cores=cores if pin_cores else (),
            threads=len(cores),
        )
        for seat, cores in zip(seats, share_cores(available_cores(), len(seats)), strict=True)
    )


def check_servable(spec: ClusterSpec) -> None:
    """Raise ConfigurationError for clusters that can only be simulated."""
    if spec.router not in LIVE_ROUTERS:
        raise ConfigurationError(
            f"the router {spec.router} is for simulations only: serve with router {', '.join(LIVE_ROUTERS)}"
        )
    if spec.rules != "twofold":
        raise ConfigurationError(f"the rules {spec.rules} are for simulations only: serve with rules twofold")
    if any(pool.pipeline_parallel > 1 for pool in spec.pools):
        raise ConfigurationError(
            "pipelines are for simulations only: serve instances of one stage (pipeline_parallel 1)"
        )
    if spec.inline_tbt_s is not None:
        raise ConfigurationError(
            "an emulated service cannot inline prompts: leave out inline_tbt_s, or serve a model with --inline-tbt"
        )
    if not isinstance(spec.cells, msgspec.UnsetType) or not isinstance(spec.control, msgspec.UnsetType):
        raise ConfigurationError(
            "cells and control are for simulations only: a service has one controller, and each host is a cell"
        )
    if spec.failures:
        raise ConfigurationError("failures are for simulations only: leave them out")


def with_splits(workers: Sequence[WorkerConfig], splits: Mapping[Role, Sharding]) -> tuple[WorkerConfig, ...]:
    """Return the workers with the sharding of their roles; ranks are numbered over all workers."""
    if all(split == UNSHARDED for split in splits.values()):
        return tuple(workers)
    divided, ranks = [], 0
    for worker in workers:
        split = splits.get(worker.role, UNSHARDED)
        divided.append(msgspec.structs.replace(worker, split=split, first_rank=ranks))
        ranks += split.ranks
    return tuple(divided)


def with_chunks(workers: Sequence[WorkerConfig], chunk: int | None) -> tuple[WorkerConfig, ...]:
    """Let workers that prefill on several stages compute prompts in chunks of up to `chunk` tokens.

    Raises ConfigurationError if there is none.
    """
    if chunk is None:
        return tuple(workers)
    chunked = [
        msgspec.structs.replace(worker, batcher="prefill-chunks", max_num_batched_tokens=chunk, measures_budget=False)
        if worker.batcher == "prefill" and worker.split.pipeline > 1
        else worker
        for worker in workers
    ]
    if not any(BATCHERS[worker.batcher].chunked for worker in chunked):
        raise ConfigurationError(
            f"--pipeline-chunk {chunk} needs workers that prefill on several stages: set --prefill-pp 2 or more, "
            "and a router with fixed roles"
        )
    return tuple(chunked)


def check_splits(config: ServiceConfig) -> None:
    """Raise ConfigurationError for sharded workers that cannot run or hand over requests.

    Loading the model checks whether the model can be sharded.
    """
    divided = [worker for worker in config.workers if worker.split != UNSHARDED]
    if not divided:
        return
    first = divided[0]
    if config.transport != DEFAULT_TRANSPORT:
        raise ConfigurationError(
            f"--transport {config.transport} moves whole blocks, not the heads and layers of ranks, so it "
            f"cannot transfer KV {_pair(config, first)}: use {DEFAULT_TRANSPORT}"
        )
    if config.kv_checksums:
        raise ConfigurationError(
            f"--kv-checksums needs whole blocks, which {first.instance} ({first.split}) shards: leave it out"
        )
    if config.engine.swap_bytes is not None:
        raise ConfigurationError(
            f"--swap-space needs whole blocks, which {first.instance} ({first.split}) shards: leave it out"
        )
    if config.journal_dir is not None and any(BATCHERS[worker.batcher].chunked for worker in divided):
        raise ConfigurationError(
            "--journal records one batch at a time, and --pipeline-chunk runs several: leave one of them out"
        )
    if config.engine.device.startswith("cuda:"):
        raise ConfigurationError(
            f"--device {config.engine.device} is one device, and each rank of {first.instance} ({first.split}) needs "
            "its own: use cuda"
        )


def _pair(config: ServiceConfig, divided: WorkerConfig) -> str:
    """Name the first two workers that a sharding affects."""
    for source in config.workers:
        for target in config.workers:
            if source.role is Role.PREFILL and target.role is Role.DECODE and divided in {source, target}:
                return f"from {source.instance} ({source.split}) to {target.instance} ({target.split})"
    return f"from or to {divided.instance} ({divided.split})"
