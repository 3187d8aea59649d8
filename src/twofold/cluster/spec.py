"""Cluster specs: pools of instances, the model that all instances serve, and policies."""

import re
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.kvcache.eviction import create_eviction
from twofold.scheduling.cluster.shared import OwnLoad
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS
from twofold.workload.blocks import BLOCK_TOKENS

SATURATING: Final = "auto"  # max_num_batched_tokens: the shortest prompt that saturates the instance
TOKEN_BUDGET: Final = 2048
MAX_CONTROLLERS: Final = 10_000
CONTROL_ROUTERS: Final = tuple(name for name in FIXED_ROLE_ROUTERS if name not in FORECASTING_ROUTERS)
_MAX_DELAY_S: Final = 1e6
_CACHE_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>tokens|[KMGT]?i?B)", re.IGNORECASE)
_POWERS: Final = "KMGT"


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prefix cache of each machine with prefill instances: a DRAM tier and an optional disk tier.

    Sizes of tiers are in tokens (`3000000 tokens`) or bytes (`128GiB`). Raises ConfigurationError for invalid values.
    """

    dram: str
    disk: str | None = None
    eviction: str = "lru"
    block_tokens: int = BLOCK_TOKENS  # a trace with prefix blocks fixes them
    dram_bytes_per_s: float | None = None  # to one instance; by default, PCIe 4.0 per accelerator
    disk_bytes_per_s: float | None = None  # to one instance; by default, of one NVMe drive

    def __post_init__(self) -> None:
        create_eviction(self.eviction)
        require(self.block_tokens >= 1, f"block_tokens must be at least 1, not {self.block_tokens}")
        for _, size in self.tier_sizes:
            cache_size_tokens(size, 1)
        for field in ("dram_bytes_per_s", "disk_bytes_per_s"):
            speed = getattr(self, field)
            require(speed is None or 1.0 <= speed < float("inf"), f"{field} must be at least 1, not {speed}")

    @property
    def tier_sizes(self) -> tuple[tuple[str, str], ...]:
        """Return the name and the configured size (such as `128GiB`) of each cache tier, fastest tier first."""
        return (("dram", self.dram),) if self.disk is None else (("dram", self.dram), ("disk", self.disk))


def cache_size_tokens(text: str, kv_bytes_per_token: int) -> int:
    """Convert a size such as `3000000 tokens` or `128GiB` to tokens. Raises ConfigurationError if it is malformed."""
    found = _CACHE_SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"invalid prefix cache size {text!r}: write 3000000 tokens, or bytes as in 128GiB")
    number, unit = float(found["number"]), found["unit"].lower()
    if unit == "tokens":
        return int(number)
    power = _POWERS.find(unit[0].upper()) + 1
    return int(number * (1024.0 if "i" in unit else 1000.0) ** power) // kv_bytes_per_token


def parse_cache(text: str) -> CacheSpec:
    """Parse a `CacheSpec` from `128GiB` or `dram=3000000 tokens,disk=2TB,eviction=lfu`. Raises ConfigurationError."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        field = name.strip() if given else "dram"
        if field in fields or field not in CacheSpec.__struct_fields__:
            known = ", ".join(CacheSpec.__struct_fields__)
            raise ConfigurationError(f"unknown or repeated setting {part.strip()!r}: give each of {known} at most once")
        fields[field] = (value if given else name).strip()
    try:
        return msgspec.convert(fields, CacheSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"invalid prefix cache {text!r}: {error}") from error


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Number of controllers, and timing of instances' load reports. Raises ConfigurationError if out of range."""

    controllers: int = 1  # each places a share of the cluster's requests
    reports_every_s: float = 0.2  # between reports of an instance or cell; 0: a report of every change
    report_delay_s: float = 0.0  # until a report arrives
    own_load: OwnLoad = OwnLoad.FOLLOWED  # how a controller counts its own requests between reports

    def __post_init__(self) -> None:
        known = 1 <= self.controllers <= MAX_CONTROLLERS
        require(known, f"controllers must be from 1 to {MAX_CONTROLLERS}, not {self.controllers}")
        for field in ("reports_every_s", "report_delay_s"):
            seconds = getattr(self, field)
            within = 0.0 <= seconds <= _MAX_DELAY_S
            require(within, f"{field} must be seconds from 0 to {_MAX_DELAY_S:g}, not {seconds}")


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pool: equal machines with instances of one role."""

    machines: int
    machine: str
    role: Role
    tensor_parallel: int | None = None  # accelerators of a stage, all on one machine; None: all of the machine
    pipeline_parallel: int = 1  # stages of an instance, possibly on several machines
    # Accelerators of a machine over which whole experts are spread: those of one instance, or of several, which then
    # share the experts (attention data parallelism). None: each expert is divided like the attention.
    expert_parallel: int | None = None
    instances: int | None = None  # None: as many as fit
    nodes: str | None = None  # pools with the same name share their machines
    batcher: str | None = None  # None: the default of the role


class InstanceFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure of an instance at `at_s` seconds, and its restart at `back_s` seconds (None: never)."""

    instance: str
    at_s: float
    back_s: float | None = None


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster: its pools of instances, the model that they serve, and the policies and limits of its scheduling."""

    pools: tuple[PoolSpec, ...]
    model: str
    performance: str = "auto"
    router: str = ""  # empty: `jsq` if all pools are mixed, else `splitwise`
    handoff: str = "by-size"  # a hand-off mode or policy
    # The token budget. For batchers of whole prompts, `auto` is the shortest prompt that saturates an instance.
    max_num_batched_tokens: int | Literal["auto"] = TOKEN_BUDGET
    # Maximum tokens of a chunk in pipelined prefill pools, whose stages compute chunks of one prompt at the same time.
    pipeline_chunk: int | None = None
    inline_tbt_s: float | None = None  # longest iteration with prompts and decodes of the batcher `inlined`
    max_num_seqs: int = 512
    block_size: int = 16
    memory_utilization: float = 0.95  # share of accelerator memory for weights and KV
    contention: bool = True  # False: each KV transfer gets the full bandwidth
    link_bytes_per_s: float | None = None  # None: the network of the machines, as for the latency
    link_latency_s: float | None = None
    kv_bytes_per_token: int | None = None  # None: computed from the model
    kv_capacity_tokens: int | None = None  # of an instance; None: computed from the model
    swap_space_bytes: int | None = None  # host memory of an instance for decodes swapped out when KV memory is full
    swap_bytes_per_s: float | None = None  # None: PCIe 4.0 per accelerator
    kv_cache: CacheSpec | None = None
    cells: int | msgspec.UnsetType = msgspec.UNSET  # groups of each role's instances, for two-level routers
    control: ControlSpec | msgspec.UnsetType = msgspec.UNSET
    profiles: tuple[str, ...] = ()  # files of `twofold characterize` or `calibrate live`, added to the catalog
    rules: str = "twofold"  # or those of another simulator (docs/simulation.md)
    failures: tuple[InstanceFailure, ...] = ()

    def __post_init__(self) -> None:
        """Choose the default router."""
        if not self.router:
            mixed = bool(self.pools) and all(pool.role is Role.MIXED for pool in self.pools)
            # `splitwise` would hand requests off between colocated instances.
            msgspec.structs.force_setattr(self, "router", "jsq" if mixed else "splitwise")


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """Rules for KV memory, KV transfers and pipelines in a simulation: Twofold's or another simulator's."""

    help: str
    memory: KvReservation = FULL_RESERVATION  # when a request reserves KV, and how much
    # Interval of attempts to reserve decode memory after the prefill. None: it is reserved when the request arrives.
    lease_retry_s: float | None = None
    over_all_tokens: bool = False  # TPOT is per output token, not per gap between tokens
    endless_memory: bool = False
    instant_handoff: bool = False  # KV transfers take no time
    stagewise: bool = False  # pipeline stages form batches independently


RULES: dict[str, ClusterRules] = {
    "twofold": ClusterRules("memory and KV transfer as in a live service"),
    "splitwise-sim": ClusterRules(
        "KV reservation, retries and TBT of SplitwiseSim",
        KvReservation(output_at_decode_start=True, extra=1),
        lease_retry_s=1.0,
        over_all_tokens=True,
    ),
    "distserve-published": ClusterRules(
        "pipeline stages, TPOT and unlimited memory of simdistserve, without KV transfer time",
        over_all_tokens=True,
        endless_memory=True,
        instant_handoff=True,
        stagewise=True,
    ),
}


def cluster_rules(name: str) -> ClusterRules:
    """Return the named set of simulation rules, such as `splitwise-sim`.

    The rules cover KV memory, KV transfers, pipelines and TPOT. Raises ConfigurationError for an unknown name.
    """
    require(name in RULES, f"unknown rules {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name]
