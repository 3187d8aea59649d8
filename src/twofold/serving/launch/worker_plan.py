"""Plan a service's workers from flags or from a cluster spec: roles, batchers, ranks and cores."""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from twofold.cluster.layout import share_cores
from twofold.cluster.profiles import instance_profiles, instance_slots
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import require
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.scheduling.batchers import BATCHERS, INLINED
from twofold.scheduling.routers import LIVE_ROUTERS
from twofold.serving.config import AUTO, JoinTerms, ServiceConfig, TokenBudget, WorkerConfig
from twofold.transport.registry import DEFAULT_TRANSPORT


class BatchPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that determine the batcher and the token budget of each worker.

    `batchers` maps a role to the name of a batcher, which replaces the batcher that the other settings select.
    With `inlines`, mixed workers add whole prompts to decode batches. `roles_move` says that workers may change
    roles; every worker then has Splitwise's batcher, which runs both phases. With `appends`, decode workers run chunks
    of prompts, too.
    """

    chunked_prefill: bool = True
    max_num_batched_tokens: TokenBudget | None = None
    inlines: bool = False
    roles_move: bool = False
    appends: bool = False
    batchers: Mapping[Role, str] = {}

    def terms(self, *, colocated: bool) -> JoinTerms:
        """Return the batcher of each role and the token budget. Raise ConfigurationError for incompatible settings."""
        chosen = {Role.PREFILL: "prefill", Role.DECODE: "chunked-prefill" if self.appends else "decode"}
        if colocated:
            whole = INLINED if self.inlines else "mixed"
            chosen = {Role.MIXED: "chunked-prefill" if self.chunked_prefill and not self.inlines else whole}
        if self.roles_move:
            chosen = dict.fromkeys(Role, "splitwise")
        chosen |= {role: name for role, name in self.batchers.items() if role in chosen}
        decodes = chosen.get(Role.DECODE)
        require(
            not self.appends or decodes is None or BATCHERS[decodes].prefills,
            f"the router prefills on decode workers, which the batcher {decodes} cannot",
        )
        require(
            self.max_num_batched_tokens != AUTO or any(BATCHERS[batcher].whole_prompts for batcher in chosen.values()),
            "--max-num-batched-tokens auto needs batchers for whole prompts: leave out chunked prefill "
            "(--no-enable-chunked-prefill) and the router splitwise, or give a number",
        )
        return JoinTerms(batchers=chosen, max_num_batched_tokens=self.max_num_batched_tokens)


def plan_workers(
    policies: BatchPolicies, *, prefill: int, decode: int, colocated: int, pin_cores: bool, others_join: bool = False
) -> tuple[WorkerConfig, ...]:
    """Return the workers of a service. Raises ConfigurationError for invalid counts. With `others_join`, `prefill` and
    `decode` may be 0, because other hosts add workers.
    """
    split = prefill and decode
    require(
        not colocated or not (prefill or decode),
        "--colocated excludes --prefill and --decode: a service is either split or colocated",
    )
    require(
        bool(colocated or split or others_join),
        "a split service needs at least --prefill 1 and --decode 1 (or use --colocated N)",
    )
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: colocated}
    terms = policies.terms(colocated=colocated > 0)
    workers = [terms.worker(f"{role.value}-{i}", role) for role, count in counts.items() for i in range(count)]
    return with_cores(workers, pin_cores=pin_cores)


def with_cores(workers: Sequence[WorkerConfig], *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """Assign each worker an equal part of this host's CPU cores. With `pin_cores`, pin workers to their cores."""
    if not workers:
        return ()
    return tuple(
        msgspec.structs.replace(worker, cores=share if pin_cores else (), threads=threads_on(share))
        for worker, share in zip(workers, share_cores(available_cores(), len(workers)), strict=True)
    )


def threads_on(cores: Sequence[int]) -> int:
    """Return the number of threads of a worker with these CPU cores: one per core, but at most OMP_NUM_THREADS."""
    most = os.environ.get("OMP_NUM_THREADS", "")
    return min(len(cores), int(most)) if most.isdecimal() and int(most) > 0 else len(cores)


def available_cores() -> list[int]:
    """Return the CPU cores on which this process may run."""
    return sorted(os.sched_getaffinity(0))


def plan_cluster(spec: ClusterSpec, catalog: Catalog, *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """Return a worker for each instance of a cluster spec. Raises ConfigurationError for a simulation-only spec."""
    check_servable(spec)
    workers = [
        WorkerConfig(
            instance=seat.name,
            role=seat.profile.pool.role,
            batcher=seat.profile.batcher,
            max_num_batched_tokens=seat.profile.max_num_batched_tokens,
        )
        for seat in instance_slots(instance_profiles(spec, catalog))
    ]
    return with_cores(workers, pin_cores=pin_cores)


def pools_of(workers: Sequence[WorkerConfig], machine: str) -> tuple[PoolSpec, ...]:
    """Return the pools of a cluster spec that simulates these workers on machines of type `machine`."""
    kinds = groupby(workers, key=lambda worker: (worker.role, worker.batcher))
    return tuple(
        PoolSpec(machines=len(list(same)), machine=machine, role=role, batcher=batcher)
        for (role, batcher), same in kinds
    )


def check_servable(spec: ClusterSpec) -> None:
    """Raise ConfigurationError for a cluster spec that can only be simulated."""
    require(
        spec.router in LIVE_ROUTERS,
        f"the router {spec.router} is for simulations only: serve with router {', '.join(LIVE_ROUTERS)}",
    )
    require(spec.rules == "twofold", f"the rules {spec.rules} are for simulations only: serve with rules twofold")
    require(
        all(pool.pipeline_parallel <= 1 for pool in spec.pools),
        "pipelines are for simulations only: serve instances of one stage (pipeline_parallel 1)",
    )
    require(
        all(pool.expert_parallel is None for pool in spec.pools),
        "expert parallelism is for simulations only: serve pools without expert_parallel",
    )
    require(
        spec.inline_tbt_s is None,
        "an emulated service cannot inline prompts: leave out inline_tbt_s, or serve a model with --inline-tbt",
    )
    require(
        isinstance(spec.cells, msgspec.UnsetType) and isinstance(spec.control, msgspec.UnsetType),
        "cells and control are for simulations only: a service has one controller, and each host is a cell",
    )
    require(not spec.failures, "failures are for simulations only: leave them out")


def with_splits(workers: Sequence[WorkerConfig], splits: Mapping[Role, Sharding]) -> tuple[WorkerConfig, ...]:
    """Set the sharding of each worker to that of its role in `splits`."""
    return tuple(msgspec.structs.replace(each, split=splits.get(each.role, UNSHARDED)) for each in workers)


def with_chunks(workers: Sequence[WorkerConfig], chunk: int | None) -> tuple[WorkerConfig, ...]:
    """Set the tokens per chunk for prefill on pipeline stages. Raises ConfigurationError if no worker has several."""
    if chunk is None:
        return tuple(workers)
    chunked = [
        msgspec.structs.replace(worker, batcher="prefill-chunks", max_num_batched_tokens=chunk, measures_budget=False)
        if worker.batcher == "prefill" and worker.split.pipeline > 1
        else worker
        for worker in workers
    ]
    require(
        any(BATCHERS[worker.batcher].chunked for worker in chunked),
        f"--pipeline-chunk {chunk} needs workers that prefill on several stages: set --prefill-pp 2 or more, "
        "and a router with fixed roles",
    )
    return tuple(chunked)


def check_splits(config: ServiceConfig) -> None:
    """Raise ConfigurationError if a setting of the service is incompatible with sharded workers."""
    divided = [worker for worker in config.workers if worker.split != UNSHARDED]
    if not divided:
        return
    first = divided[0]
    whole_blocks = f"needs whole blocks, which {first.instance} ({first.split}) shards: leave it out"
    require(
        config.transport == DEFAULT_TRANSPORT,
        f"--transport {config.transport} moves whole blocks, not the heads and layers of ranks, so it "
        f"cannot transfer KV {_pair(config, first)}: use {DEFAULT_TRANSPORT}",
    )
    require(not config.kv_checksums, f"--kv-checksums {whole_blocks}")
    require(config.engine.swap_bytes is None, f"--swap-space {whole_blocks}")
    require(
        config.journal_dir is None or not any(BATCHERS[worker.batcher].chunked for worker in divided),
        "--journal records one batch at a time, and --pipeline-chunk runs several: leave one of them out",
    )


def _pair(config: ServiceConfig, divided: WorkerConfig) -> str:
    for source in config.workers:
        for target in config.workers:
            if source.role is Role.PREFILL and target.role is Role.DECODE and divided in {source, target}:
                return f"from {source.instance} ({source.split}) to {target.instance} ({target.split})"
    return f"from or to {divided.instance} ({divided.split})"
