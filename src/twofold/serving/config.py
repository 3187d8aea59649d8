"""Configuration of a service, created by the command line and read by every process."""

from typing import Final, Literal

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.engine.registry import ENGINES, EngineTraits
from twofold.errors import ConfigurationError
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.performance.profile import IterationTimes
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.breaker import LONGEST_S
from twofold.scheduling.replan.replanner import ReplanRules
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.security.network import HOME, HostNetwork
from twofold.slo import Slo
from twofold.transport.registry import DEFAULT_TRANSPORT

# `auto`: each worker measures at start how many prompt tokens saturate an iteration.
AUTO: Final = "auto"
TokenBudget = int | Literal["auto"]

DEFAULT_VOCAB_SIZE = 32_000  # of emulated models


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the engine in each worker.

    `engine` is a key of `engine.registry.ENGINES`. For the emulated engine, `model` is a name in the catalog.
    `tokenizer` is a directory, by default the model directory. `kv_cache_bytes` is per worker; None selects a default
    for the device. With `swap_bytes`, sequences allocate KV blocks as they grow, and decode workers swap to this much
    host memory. With `prefix_caching`, prompt KV stays cached until its blocks are needed. Requests may pin up to
    `retained_share` of the blocks. `eviction` is a policy of `kvcache.eviction`, for engine memory and host stores.
    """

    model: str
    engine: str = "torch"
    tokenizer: str | None = None
    vocab_size: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    swap_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    prefix_caching: bool = False
    retained_share: float = 0.25
    eviction: str = "lru"

    @property
    def traits(self) -> EngineTraits:
        return ENGINES[self.engine]

    def context(self, model_len: int) -> int:
        """Return `max_model_len` (default: `model_len` of the model). Raises ConfigurationError above `model_len`."""
        if self.max_model_len is None:
            return model_len
        if self.max_model_len > model_len:
            raise ConfigurationError(f"--max-model-len {self.max_model_len:,} is more than the model's {model_len:,}")
        return self.max_model_len


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one worker. Empty `cores` mean all CPU cores. With `measures_budget`, the worker measures its
    token budget at start, up to `max_num_batched_tokens`. `split` is its tensor and pipeline parallelism. Its ranks are
    numbered from `first_rank`; no two ranks of the service have the same number.
    """

    instance: str
    role: Role
    batcher: str
    max_num_batched_tokens: int
    measures_budget: bool = False
    cores: tuple[int, ...] = ()
    threads: int = 1
    split: Sharding = UNSHARDED
    first_rank: int = 0


class JoinTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration for workers that join from other hosts: batcher per role, and token budget per batch."""

    batchers: dict[Role, str]
    max_num_batched_tokens: TokenBudget | None = None

    def worker(self, instance: str, role: Role) -> WorkerConfig:
        """Return the configuration of a joining worker, without CPU cores, which its host assigns later."""
        batcher, budget = self.batchers[role], self.max_num_batched_tokens
        return WorkerConfig(
            instance=instance,
            role=role,
            batcher=batcher,
            max_num_batched_tokens=budget if isinstance(budget, int) else BATCHERS[batcher].live_token_budget,
            measures_budget=budget == AUTO and BATCHERS[batcher].whole_prompts,
        )


class ReplanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of re-planning: cluster to simulate, SLO and attainment to reach. With `replicas`, workers may also
    be retired and restarted. `catalog` lists files that extend the catalog. A search ends after `search_limit_s`.
    """

    cluster: ClusterSpec
    slo: Slo
    attainment: float = 0.9
    replicas: bool = False
    rules: ReplanRules = ReplanRules()
    catalog: tuple[str, ...] = ()
    search_limit_s: float = 60.0


class OverloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of overload control, which rejects requests that would miss the SLO. `rule` is a name in
    `scheduling.admission.overload`. `cluster` describes the speed of the workers; `catalog` lists more catalog files.
    """

    rule: str
    cluster: ClusterSpec
    slo: Slo
    catalog: tuple[str, ...] = ()


class InlineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the batcher `inlined`: limits iteration times, as predicted by `times`, to `tbt_s` seconds."""

    times: IterationTimes
    tbt_s: float


class ForecastConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Source of predicted prefill times for routers: the performance models of `cluster` or, if None, measurements of
    the workers. `catalog` lists files that extend the catalog for `cluster`.
    """

    cluster: ClusterSpec | None = None
    catalog: tuple[str, ...] = ()


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the KV store on each host: bytes in memory and, if `disk_dir` is set, on disk."""

    memory_bytes: int
    disk_dir: str | None = None
    disk_bytes: int = 0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a complete service.

    `run_dir` holds the service's sockets. Journals of scheduling decisions are written to `journal_dir`, if set. The
    delay before a failing worker restarts grows up to `max_restart_delay_s`. `cluster` and `catalog` describe the
    cluster of an emulated service. Features are None if off: `network` (name of this host among several), `terms`
    (workers that join from other hosts), `replan` (role changes when traffic shifts), `overload` (rejection of requests
    that would miss the SLO), `inline` (limited time of mixed iterations), `forecast` (prediction-based routers),
    `store` (prefixes kept on this host).
    """

    engine: EngineConfig
    workers: tuple[WorkerConfig, ...]
    run_dir: str
    router: str = "jsq"
    handoff: str = HandoffMode.LAYER_WISE.value
    transport: str = DEFAULT_TRANSPORT
    kv_checksums: bool = False
    lease_s: float = 30.0
    max_restart_delay_s: float = LONGEST_S
    journal_dir: str | None = None
    cluster: ClusterSpec | None = None
    catalog: tuple[str, ...] = ()
    log_format: str = "text"
    network: HostNetwork | None = None
    terms: JoinTerms | None = None
    replan: ReplanConfig | None = None
    overload: OverloadConfig | None = None
    inline: InlineConfig | None = None
    forecast: ForecastConfig | None = None
    store: StoreConfig | None = None

    @property
    def host(self) -> str:
        """Name of this host; empty on the host that started the service."""
        return HOME if self.network is None else self.network.host

    def measures(self, worker: WorkerConfig) -> bool:
        """Return whether `worker` measures prefill speed and links. This needs a worker that may hand off KV, and an
        engine that runs a model.
        """
        roles = {each.role for each in self.workers}
        moves = self.router not in FIXED_ROLE_ROUTERS
        # A decoding worker may join later from another host.
        splits = moves or self.network is not None or {Role.PREFILL, Role.DECODE} <= roles
        return self.engine.traits.runs_model and splits and (moves or worker.role is Role.PREFILL)

    def reuses(self, worker: WorkerConfig) -> bool:
        """Return whether `worker` caches prefixes. This needs prefix caching, a worker that may prefill, and a batcher
        that supports prefix reuse.
        """
        prefills = worker.role.prefills or self.router not in FIXED_ROLE_ROUTERS
        return self.engine.prefix_caching and prefills and BATCHERS[worker.batcher].reuses_prefix

    def measured_pairs(self) -> list[tuple[str, str]]:
        """Return the (source, target) pairs of workers whose links are measured when the service starts."""
        return [
            (source.instance, target.instance)
            for source in self.workers
            for target in self.workers
            if self.measures(source) and target.role.decodes and target is not source
        ]

    def inbox(self, name: str) -> str:
        """Return the inbox address of process `name` on this host: a socket in the private directory `run_dir`."""
        return f"ipc://{self.run_dir}/{name}.sock"

    def worker_inbox(self, instance: str, pid: int) -> str:
        """Return the inbox address of a worker. It contains the process id `pid`, so it changes with each restart."""
        return self.inbox(f"{instance}-{pid}")

    @property
    def controller(self) -> str:
        """Address of the controller's inbox for processes on this host."""
        network = self.network
        elsewhere = network is not None and network.host != HOME
        return network.controller if network is not None and elsewhere else self.inbox(CONTROLLER)

    @property
    def store_inbox(self) -> str:
        """Inbox address of this host's KV store, unchanged by a restart of the store."""
        return self.inbox(STORE)


CONTROLLER = "controller"
STORE = "store"
