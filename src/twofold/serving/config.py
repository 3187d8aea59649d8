"""What a service is made of: one value, written by the command line and read by every process."""

from typing import Final, Literal

import msgspec

from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.handoff import HandoffMode
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.performance.host_profile import PackedTimes
from twofold.scheduling.batchers import NEVER_REUSING, WHOLE_PROMPTS
from twofold.scheduling.cluster.breaker import LONGEST_S
from twofold.scheduling.replan.replanner import ReplanRules
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS
from twofold.security.network import HOME, HostNetwork
from twofold.slo import Slo
from twofold.transport.registry import DEFAULT_TRANSPORT

DEFAULT_TOKEN_BUDGET = {
    "prefill": 2048,
    "decode": 2048,
    "mixed": 2048,
    "inlined": 2048,
    "chunked-prefill": 512,
    "splitwise": 2048,
}

# Prompt tokens of an iteration; `auto` are those that keep the worker busy, which it measures when it starts.
AUTO: Final = "auto"
TokenBudget = int | Literal["auto"]

DEFAULT_VOCAB_SIZE = 32_000  # of an emulated model, whose tokens mean nothing


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How each worker runs the model. `kv_cache_bytes` is per worker; None means a default for the device.
    With `swap_bytes` decodes take KV memory as they go, and are swapped out to so much memory of the host, per worker
    that decodes, when there is none left.

    With `prefix_caching` the KV of prompts stays until its memory is wanted, for prompts that begin alike. Of that
    memory a share of `retained_share` may be kept for requests that ask for it. `eviction` names the rule
    (`kvcache.eviction`) by which blocks go, from the engine's memory and from the store of a host.

    `engine` is one of those in `serving.worker.engines`. For `emulated`, `model` is a name of the catalog and
    `vocab_size` says how many tokens there are. `tokenizer` is a directory, where it is not the model's own.
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
    def computes(self) -> bool:
        """Whether there is a model behind it."""
        return self.engine != "emulated"

    @property
    def recomputes(self) -> bool:
        """Whether it may give up a decode's memory and compute its KV once more: then it needs the prompt for that."""
        return self.engine == "vllm"

    def context(self, model_len: int) -> int:
        """The most tokens of a sequence, of the `model_len` that the model can have; raises ConfigurationError."""
        if self.max_model_len is None:
            return model_len
        if self.max_model_len > model_len:
            raise ConfigurationError(
                f"--max-model-len {self.max_model_len:,} is more than the model's {model_len:,}"
            )
        return self.max_model_len


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its role, the batcher that goes with it, and the cores it may run on (empty: any).

    With `measures_budget` the budget is what it measures, and `max_num_batched_tokens` the longest prompt that
    it tries.
    It is `split` over that many ranks, of which the service has `first_rank` before the first of this worker.
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
    """What workers from other hosts are: a batcher for each role that they may have, and its token budget."""

    batchers: dict[Role, str]
    max_num_batched_tokens: TokenBudget | None = None

    def worker(self, instance: str, role: Role) -> WorkerConfig:
        """A worker, yet without cores, which its host gives it."""
        batcher = self.batchers[role]
        budget = (
            self.max_num_batched_tokens
            if isinstance(self.max_num_batched_tokens, int)
            else DEFAULT_TOKEN_BUDGET[batcher]
        )
        return WorkerConfig(
            instance=instance,
            role=role,
            batcher=batcher,
            max_num_batched_tokens=budget,
            measures_budget=self.max_num_batched_tokens == AUTO and batcher in WHOLE_PROMPTS,
        )


class ReplanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What plans are searched by: the workers as they are simulated, and the share of requests to be within the SLO.

    With `replicas` workers that are not needed are ended, and started again when they are. `catalog` are the files that
    extend the catalog for `cluster`. A search that takes longer than `search_limit_s` is
    ended.
    """

    cluster: ClusterSpec
    slo: Slo
    attainment: float = 0.9
    replicas: bool = False
    rules: ReplanRules = ReplanRules()
    catalog: tuple[str, ...] = ()
    search_limit_s: float = 60.0


class OverloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Refuse what would miss `slo`, by a rule of `scheduling.overload`; `cluster` is the workers as they are simulated,
    which says how fast they are, and `catalog` the files that extend the catalog for it."""

    rule: str
    cluster: ClusterSpec
    slo: Slo
    catalog: tuple[str, ...] = ()


class InlineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts join decodes while an iteration is expected to take at most `tbt_s` seconds, by the `times` of a host's
    profile (the batcher `inlined`)."""

    times: PackedTimes
    tbt_s: float


class ForecastConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Routers that predict: by `cluster`, which is the workers as they are simulated, and `catalog`, the files that
    extend the catalog for it; without, by what workers measure when they start."""

    cluster: ClusterSpec | None = None
    catalog: tuple[str, ...] = ()


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The store of each host: bytes of KV in its memory, and on its disk, if it has a directory there of its own."""

    memory_bytes: int
    disk_dir: str | None = None
    disk_bytes: int = 0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole service. `run_dir` holds its sockets; `journal_dir` receives decision journals if set.

    A worker that fails again and again is started again after `max_restart_delay_s` at most.
    `cluster` is what an emulated service emulates, and `catalog` the files that extend the catalog for it.
    `network` is set where workers may be on several hosts, and says which of them this is; `terms` are what
    others join on. `replan` is set where workers change their roles when the traffic shifts, `overload` where
    requests are refused that would be answered too late, `inline` where prompts join decodes only in time,
    `forecast` where the router goes by predictions, and `store` where this host keeps KV of prompts for its workers.
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
        """The name of this host; that of the service's own is empty."""
        return HOME if self.network is None else self.network.host

    def measures(self, worker: WorkerConfig) -> bool:
        """Whether a worker measures how fast it prefills, and its links: if it may hand requests over for real."""
        roles = {each.role for each in self.workers}
        moves = self.router not in FIXED_ROLE_ROUTERS
        # Who decodes may be on another host, and come later.
        splits = moves or self.network is not None or {Role.PREFILL, Role.DECODE} <= roles
        return self.engine.computes and splits and (moves or worker.role is Role.PREFILL)

    def reuses(self, worker: WorkerConfig) -> bool:
        """Whether a worker keeps the KV of prompts for others that begin alike: if it may prefill, and some of them."""
        prefills = worker.role.prefills or self.router not in FIXED_ROLE_ROUTERS
        return self.engine.prefix_caching and prefills and worker.batcher not in NEVER_REUSING

    def measured_pairs(self) -> list[tuple[str, str]]:
        """The links that are measured and used from the start on."""
        return [
            (source.instance, target.instance)
            for source in self.workers
            for target in self.workers
            if self.measures(source) and target.role.decodes and target is not source
        ]

    def inbox(self, name: str) -> str:
        """The address of a process's inbox: a socket in a directory that only its user can enter."""
        return f"ipc://{self.run_dir}/{name}.sock"

    def worker_inbox(self, instance: str, pid: int) -> str:
        """That of one life of a worker: what was meant for an earlier one does not arrive."""
        return self.inbox(f"{instance}-{pid}")

    @property
    def controller(self) -> str:
        """The address of the controller's inbox for processes of this host."""
        network = self.network
        elsewhere = network is not None and network.host != HOME
        return network.controller if network is not None and elsewhere else self.inbox(CONTROLLER)

    @property
    def store_inbox(self) -> str:
        """That of the store of this host, in all of its lives."""
        return self.inbox(STORE)


CONTROLLER = "controller"
STORE = "store"
