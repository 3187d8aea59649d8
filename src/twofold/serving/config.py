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
    """Configuration of the engine in each worker."""

    model: str  # directory or, for the emulated engine, name in the catalog
    engine: str = "torch"  # key of `engine.registry.ENGINES`
    tokenizer: str | None = None  # directory; default: the model directory
    vocab_size: int | None = None
    dtype: str = "auto"
    device: str = "cpu"  # or auto, which each host resolves
    block_size: int = 16
    kv_cache_bytes: int | None = None  # per worker; None selects a default for the device
    gpu_memory_utilization: float | None = None  # for weights, activations and KV of all workers on a GPU
    # Host memory of decode workers for swapping. If set, sequences allocate KV blocks as they grow.
    swap_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    prefix_caching: bool = False  # keep prompt KV until its blocks are needed
    retained_share: float = 0.25  # of the blocks, which requests may pin
    engine_args: dict[Role, tuple[str, ...]] = {}  # flags of vLLM for the workers of each role
    adapters: dict[str, str] = {}  # directories of LoRA adapters by name
    eviction: str = "lru"  # policy of `kvcache.eviction`, for engine memory and host stores

    @property
    def traits(self) -> EngineTraits:
        return ENGINES[self.engine]

    def context(self, model_len: int) -> int:
        """Return the configured context length, by default `model_len`. Raises ConfigurationError beyond that."""
        if self.max_model_len is None:
            return model_len
        if self.max_model_len > model_len:
            raise ConfigurationError(f"--max-model-len {self.max_model_len:,} is more than the model's {model_len:,}")
        return self.max_model_len


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one worker."""

    instance: str
    role: Role
    batcher: str
    max_num_batched_tokens: int
    measures_budget: bool = False  # measure the token budget at start, up to `max_num_batched_tokens`
    cores: tuple[int, ...] = ()  # empty means all CPU cores
    threads: int = 1
    split: Sharding = UNSHARDED  # tensor and pipeline parallelism

    def largest_batch(self, max_model_len: int) -> int:
        """Return the most tokens in an iteration, given the longest prompt: whole prompts may exceed the budget."""
        whole = BATCHERS[self.batcher].prefills and not BATCHERS[self.batcher].cuts_prompts
        return max(self.max_num_batched_tokens, max_model_len if whole else 0)


class JoinTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of workers that join from other hosts: batching policy of each role, and token budget."""

    batchers: dict[Role, str]
    max_num_batched_tokens: TokenBudget | None = None

    def worker(self, instance: str, role: Role) -> WorkerConfig:
        """Return the configuration of a joining worker."""
        batcher, budget = self.batchers[role], self.max_num_batched_tokens
        # Its host assigns CPU cores later.
        return WorkerConfig(
            instance=instance,
            role=role,
            batcher=batcher,
            max_num_batched_tokens=budget if isinstance(budget, int) else BATCHERS[batcher].live_token_budget,
            measures_budget=budget == AUTO and BATCHERS[batcher].whole_prompts,
        )


class ReplanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of re-planning: cluster to simulate, SLO and required attainment."""

    cluster: ClusterSpec
    slo: Slo
    attainment: float = 0.9
    replicas: bool = False  # workers may also be retired and restarted
    rules: ReplanRules = ReplanRules()
    catalog: tuple[str, ...] = ()  # files that extend the catalog
    search_limit_s: float = 60.0  # maximum duration of a search


class OverloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of overload control, which rejects requests that would miss the SLO."""

    rule: str  # name in `scheduling.admission.overload`
    cluster: ClusterSpec  # describes the speed of the workers
    slo: Slo
    catalog: tuple[str, ...] = ()  # files that extend the catalog


class InlineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the batcher `inlined`, which limits predicted iteration times."""

    times: IterationTimes  # predictions
    tbt_s: float  # limit


class ForecastConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Source of predicted prefill times for routers: performance models or measurements."""

    cluster: ClusterSpec | None = None  # with the performance models; None means measurements of the workers
    catalog: tuple[str, ...] = ()  # files that extend the catalog


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of each host's KV store: bytes in memory and, if `disk_dir` is set, bytes on disk."""

    memory_bytes: int
    disk_dir: str | None = None
    disk_bytes: int = 0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a complete service. Optional features are None if off."""

    engine: EngineConfig
    workers: tuple[WorkerConfig, ...]
    run_dir: str  # private directory with the service's sockets
    router: str = "jsq"
    handoff: str = HandoffMode.LAYER_WISE.value
    transport: str = DEFAULT_TRANSPORT
    kv_checksums: bool = False
    lease_s: float = 30.0
    max_restart_delay_s: float = LONGEST_S  # limit of the growing delay before a failing worker restarts
    journal_dir: str | None = None  # for journals of scheduling decisions
    cluster: ClusterSpec | None = None  # of an emulated service
    catalog: tuple[str, ...] = ()
    log_format: str = "text"
    network: HostNetwork | None = None  # one of several hosts
    terms: JoinTerms | None = None  # workers that join from other hosts
    replan: ReplanConfig | None = None  # role changes when traffic shifts
    overload: OverloadConfig | None = None  # rejection of requests that would miss the SLO
    inline: InlineConfig | None = None  # limited time of mixed iterations
    forecast: ForecastConfig | None = None  # prediction-based routers
    store: StoreConfig | None = None  # prefixes kept on this host

    @property
    def host(self) -> str:
        """Name of this host; empty on the host that started the service."""
        return HOME if self.network is None else self.network.host

    def measures(self, worker: WorkerConfig) -> bool:
        """Return whether `worker` measures its prefill speed and the speed of its links when it starts."""
        # This needs a worker that may hand off KV, and an engine that runs a model.
        roles = {each.role for each in self.workers}
        moves = self.router not in FIXED_ROLE_ROUTERS
        # A decoding worker may join later from another host.
        splits = moves or self.network is not None or {Role.PREFILL, Role.DECODE} <= roles
        return self.engine.traits.runs_model and splits and (moves or worker.role is Role.PREFILL)

    def reuses(self, worker: WorkerConfig) -> bool:
        """Return whether `worker` caches prefixes."""
        # A worker that only decodes needs no KV again that it has received or generated.
        return self.engine.prefix_caching and BATCHERS[worker.batcher].reuses_prefix

    def measured_pairs(self) -> list[tuple[str, str]]:
        """Return the (source, target) pairs of workers whose links are measured when the service starts."""
        return [
            (source.instance, target.instance)
            for source in self.workers
            for target in self.workers
            if self.measures(source) and target.role.decodes and target is not source
        ]

    def inbox(self, name: str) -> str:
        """Return the inbox address of process `name` on this host."""
        return f"ipc://{self.run_dir}/{name}.sock"

    def worker_inbox(self, instance: str, pid: int) -> str:
        """Return the inbox address of a worker."""
        return self.inbox(f"{instance}-{pid}")  # changes with each restart

    @property
    def controller(self) -> str:
        """Address at which processes on this host reach the controller's inbox."""
        network = self.network
        elsewhere = network is not None and network.host != HOME
        return network.controller if network is not None and elsewhere else self.inbox(CONTROLLER)

    @property
    def store_inbox(self) -> str:
        """Inbox address of this host's KV store."""
        return self.inbox(STORE)


CONTROLLER = "controller"
STORE = "store"
