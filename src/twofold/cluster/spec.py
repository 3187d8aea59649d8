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

SATURATING: Final = "auto"  # max_num_batched_tokens: the shortest prompt that saturates the instance
TOKEN_BUDGET: Final = 2048
MAX_CONTROLLERS: Final = 10_000
CONTROL_ROUTERS: Final = tuple(name for name in FIXED_ROLE_ROUTERS if name not in FORECASTING_ROUTERS)
_MAX_DELAY_S: Final = 1e6
_CACHE_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>tokens|[KMGT]?i?B)", re.IGNORECASE)
_POWERS: Final = "KMGT"


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prefix cache of each machine with prefill instances: a DRAM tier and an optional disk tier.

    `dram` and `disk` are sizes in tokens (`3000000 tokens`) or bytes (`128GiB`). `dram_bytes_per_s` and
    `disk_bytes_per_s` are bandwidths to one instance, by default PCIe 4.0 per accelerator and one NVMe drive. Raises
    ConfigurationError for an unknown eviction policy, a malformed size or a bandwidth below 1 byte/s.
    """

    dram: str
    disk: str | None = None
    eviction: str = "lru"
    dram_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        create_eviction(self.eviction)
        for _, size in self.tier_sizes:
            cache_size_tokens(size, 1)
        for field in ("dram_bytes_per_s", "disk_bytes_per_s"):
            speed = getattr(self, field)
            require(speed is None or 1.0 <= speed < float("inf"), f"{field} must be at least 1, not {speed}")

    @property
    def tier_sizes(self) -> tuple[tuple[str, str], ...]:
        """Return the (name, size) pair of each cache tier, fastest tier first."""
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
    """Several controllers, each of which places a share of the cluster's requests by delayed load reports.

    Each instance, or each cell (group of instances), reports its load, if changed, every `reports_every_s` seconds, or
    at once if this is 0. Reports arrive `report_delay_s` seconds later. `own_load` selects how a controller counts its
    own requests between reports. Raises ConfigurationError for values out of range.
    """

    controllers: int = 1
    reports_every_s: float = 0.2
    report_delay_s: float = 0.0
    own_load: OwnLoad = OwnLoad.FOLLOWED

    def __post_init__(self) -> None:
        known = 1 <= self.controllers <= MAX_CONTROLLERS
        require(known, f"controllers must be from 1 to {MAX_CONTROLLERS}, not {self.controllers}")
        for field in ("reports_every_s", "report_delay_s"):
            seconds = getattr(self, field)
            within = 0.0 <= seconds <= _MAX_DELAY_S
            require(within, f"{field} must be seconds from 0 to {_MAX_DELAY_S:g}, not {seconds}")


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pool: equal machines with instances of one role.

    An instance is a pipeline of `pipeline_parallel` stages, each on `tensor_parallel` accelerators of one machine
    (None: all). A machine may hold several instances, and an instance may span machines. `instances` None is as many as
    fit. `batcher` None is the default of the role. Pools with the same `nodes` name share their machines; each pool
    spreads its stages evenly over the machines.
    """

    machines: int
    machine: str
    role: Role
    tensor_parallel: int | None = None
    pipeline_parallel: int = 1
    instances: int | None = None
    nodes: str | None = None
    batcher: str | None = None


class InstanceFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure of an instance at `at_s` seconds, and restart without requests and cache at `back_s` (None: never)."""

    instance: str
    at_s: float
    back_s: float | None = None


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and its policies. Machines and models are named as in the catalog, policies as in their registries.

    Batching: `max_num_batched_tokens` is the token budget; for batchers of whole prompts, `auto` is the length of the
    shortest prompt that saturates an instance (`performance.queueing`). `pipeline_chunk` is the maximum chunk size, in
    tokens, of pipelined prefill pools, whose stages compute chunks of one prompt at the same time. `inline_tbt_s` is
    the longest iteration, in seconds, that the batcher `inlined` may create by adding prompts to decodes.

    Memory: `memory_utilization` is the share of accelerator memory for weights and KV. `kv_bytes_per_token` and
    `kv_capacity_tokens` (per instance) override the values computed from the model. `swap_space_bytes` is host memory
    per instance, to which the decodes admitted last are swapped out when KV memory is full. `swap_bytes_per_s` is the
    swap bandwidth (None: PCIe 4.0 per accelerator). `kv_cache` configures prefix caches.

    Network: `link_bytes_per_s` and `link_latency_s` override the network of the machines. Without `contention`, each
    transfer gets the full bandwidth.

    Control: `handoff` is a hand-off mode or policy. `cells` is the number of groups into which two-level routers divide
    the instances of each role. `control` configures several controllers with delayed load reports.

    `profiles` are files of `twofold characterize` or `twofold calibrate live`. Each adds the measured machine to the
    catalog. `rules` selects Twofold's scheduling rules or another simulator's (docs/simulation.md).
    """

    pools: tuple[PoolSpec, ...]
    model: str
    performance: str = "auto"
    router: str = "splitwise"
    handoff: str = "by-size"
    max_num_batched_tokens: int | Literal["auto"] = TOKEN_BUDGET
    pipeline_chunk: int | None = None
    inline_tbt_s: float | None = None
    max_num_seqs: int = 512
    block_size: int = 16
    memory_utilization: float = 0.95
    contention: bool = True
    link_bytes_per_s: float | None = None
    link_latency_s: float | None = None
    kv_bytes_per_token: int | None = None
    kv_capacity_tokens: int | None = None
    swap_space_bytes: int | None = None
    swap_bytes_per_s: float | None = None
    kv_cache: CacheSpec | None = None
    cells: int | msgspec.UnsetType = msgspec.UNSET
    control: ControlSpec | msgspec.UnsetType = msgspec.UNSET
    profiles: tuple[str, ...] = ()
    rules: str = "twofold"
    failures: tuple[InstanceFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """Behaviour in which Twofold and other simulators differ.

    `memory` states when a request reserves KV, and how much. With `lease_retry_s` None, decode memory is reserved when
    a request arrives; otherwise it is reserved after the prefill, with a retry every `lease_retry_s` seconds. With
    `over_all_tokens`, TPOT is the decode time per output token, not per gap between tokens. `endless_memory` removes
    the KV limit. With `instant_handoff`, KV transfers take no time. With `stagewise`, pipeline stages form batches
    independently.
    """

    help: str
    memory: KvReservation = FULL_RESERVATION
    lease_retry_s: float | None = None
    over_all_tokens: bool = False
    endless_memory: bool = False
    instant_handoff: bool = False
    stagewise: bool = False


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
    """Return the `ClusterRules` named `name`; raises ConfigurationError for an unknown name."""
    require(name in RULES, f"unknown rules {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name]
