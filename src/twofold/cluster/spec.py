"""What a cluster's description says of the memory that its machines keep KV of prompts in, to reuse it.

What a cluster's description says of those who route: how many there are, and how late they know of the load.

What is simulated: pools of instances, the model they serve, and the policies that run them.
"""

import re
from typing import Final, Literal

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.kvcache.eviction import create_eviction
from twofold.scheduling.cluster.shared import OwnLoad
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, FORECASTING_ROUTERS

_ROOM = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?) ?(?P<unit>tokens|[KMGT]?i?B)", re.IGNORECASE)
_POWERS: Final = "KMGT"


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The prefix cache of each machine whose instances prefill: a tier in its memory and, if there is `disk`, another.

    Room is a number of tokens, as in `3000000 tokens`, or of bytes, as in `128GiB`. `eviction` says which block goes
    first. `dram_bytes_per_s` is how quickly an instance gets KV from the memory of its machine, what PCIe 4.0 gives
    each of its accelerators if None; `disk_bytes_per_s` from its disk, what one NVMe drive may give if None.
    Raises ConfigurationError for what cannot be.
    """

    dram: str
    disk: str | None = None
    eviction: str = "lru"
    dram_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        create_eviction(self.eviction)
        for text in (self.dram, self.disk):
            if text is not None:
                cache_size_tokens(text, 1)
        for field in ("dram_bytes_per_s", "disk_bytes_per_s"):
            speed = getattr(self, field)
            if speed is not None and not 1.0 <= speed < float("inf"):
                raise ConfigurationError(f"{field} {speed} moves nothing: give at least 1")

    @property
    def rooms(self) -> tuple[tuple[str, str], ...]:
        """Every tier that there is and its room, the fastest first."""
        return (("dram", self.dram),) if self.disk is None else (("dram", self.dram), ("disk", self.disk))


def cache_size_tokens(text: str, kv_bytes_per_token: int) -> int:
    """Tokens that there is room for; raises ConfigurationError where `text` says neither tokens nor bytes."""
    found = _ROOM.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(
            f"{text!r} is no room for a prefix cache: write 3000000 tokens, or bytes as in 128GiB"
        )
    number, unit = float(found["number"]), found["unit"].lower()
    if unit == "tokens":
        return int(number)
    power = _POWERS.find(unit[0].upper()) + 1
    return int(number * (1024.0 if "i" in unit else 1000.0) ** power) // kv_bytes_per_token


def parse_cache(text: str) -> CacheSpec:
    """The cache of a line such as `128GiB` or `dram=3000000 tokens,disk=2TB,eviction=lfu`."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        field = name.strip() if given else "dram"
        if field in fields or field not in CacheSpec.__struct_fields__:
            known = ", ".join(CacheSpec.__struct_fields__)
            raise ConfigurationError(f"{part.strip()!r} is not understood: give each of {known} at most once")
        fields[field] = (value if given else name).strip()
    try:
        return msgspec.convert(fields, CacheSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{text!r} is no prefix cache: {error}") from error


MAX_CONTROLLERS = 10_000
_MOST_SECONDS = 1e6
CONTROL_ROUTERS = tuple(name for name in FIXED_ROLE_ROUTERS if name not in FORECASTING_ROUTERS)


class ControlSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`controllers` that requests are dealt among; each routes by what is reported to it and by its own requests.

    Every instance, or with a router of cells every cell, says what it has `reports_every_s` seconds after it last did,
    if that is something else by then; at once with 0. It is heard `report_delay_s` later. `own_load` is what a
    controller knows of its own requests meanwhile. Raises ConfigurationError for what cannot be.
    """

    controllers: int = 1
    reports_every_s: float = 0.2
    report_delay_s: float = 0.0
    own_load: OwnLoad = OwnLoad.FOLLOWED

    def __post_init__(self) -> None:
        if not 1 <= self.controllers <= MAX_CONTROLLERS:
            raise ConfigurationError(
                f"controllers must be from 1 to {MAX_CONTROLLERS}, not {self.controllers}"
            )
        for field in ("reports_every_s", "report_delay_s"):
            seconds = getattr(self, field)
            if not 0.0 <= seconds <= _MOST_SECONDS:
                raise ConfigurationError(f"{field} cannot be {seconds}: it is in seconds, and 0 is at once")


def check_control(router: str) -> None:
    """Raise ConfigurationError where a router cannot go by reports."""
    if router not in CONTROL_ROUTERS:
        raise ConfigurationError(
            f"the router {router} does not go by reports: several controllers, and reports that are late, are for the "
            f"routers {', '.join(CONTROL_ROUTERS)}"
        )


SATURATING: Final = "saturating"  # a token budget: as many as keep the instance busy
TOKEN_BUDGET: Final = 2048


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`machines` equal machines that play one role.

    An instance is a pipeline of `pipeline_parallel` stages of `tensor_parallel` accelerators each (all of a machine if
    None), so a machine may hold several instances, and an instance may span machines; a stage is always on one.
    `instances` says how many there are, as many as the machines hold if None.
    Pools that give the same name in `nodes` share their machines, which must be equal and equally many: the first
    machine of one is the first of the other. Stages are spread evenly: with one instance of two stages in each of
    two pools on the same two machines, first stages are beside each other, and second ones.
    `batcher` None takes the role's own: prefill, decode, or `mixed` for mixed instances.
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
    """An instance ends at `at_s` seconds; with `back_s` it starts again, empty, at that time."""

    instance: str
    at_s: float
    back_s: float | None = None


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and how it is run; names are those of the catalog and of the registries.

    `performance` is one of the performance models by name. `handoff` is a mode or `by-size`.
    `max_num_batched_tokens` is in tokens; `saturating` gives each pool of whole prompts the length from which a
    prompt keeps its
    instances busy (`performance.saturation`).
    With `pipeline_chunk` pools of several stages that only prefill take longer prompts in chunks of at most so many
    tokens, which is then the budget of their iterations: stages compute chunks of one prompt at once.
    With the batcher `inlined` prompts join decodes while an iteration is expected to take at most `inline_tbt_s`.
    `link_bytes_per_s` overrides what the machines' own networks give; `contention` False lets every transfer
    have all of it. `memory_utilization` is the share of accelerator memory that weights and KV may fill.
    `kv_bytes_per_token` overrides the model's own, and `kv_capacity_tokens` what the memory of an instance holds.
    With `swap_space_bytes` decodes take memory as they go, and those that came last are swapped out to so much memory
    of the host, for each instance, when there is none left; they get there and back at `swap_bytes_per_s`, or at what
    PCIe 4.0 gives each accelerator.
    With `kv_cache` machines keep KV of prompts, and prompts that name their blocks (`Request.prefix_blocks`) reuse it.
    `cells` divides the instances of each role into so many groups, the first of one with the first of the others, for
    routers that route in two levels. `control` has several controllers route, by reports that may be old.
    `profile` is a file that `twofold calibrate live` wrote: the machine `host` is then a worker on that host, whose
    cores all workers and the gateway share. `rules` is `twofold`, or `splitwise-sim` or `distserve-published` for the
    rules of those simulators where they differ (see docs/simulation.md).
    """

    pools: tuple[PoolSpec, ...]
    model: str
    performance: str = "auto"
    router: str = "splitwise"
    handoff: str = "by-size"
    max_num_batched_tokens: int | Literal["saturating"] = TOKEN_BUDGET
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
    profile: str | None = None
    rules: str = "twofold"
    failures: tuple[InstanceFailure, ...] = ()
