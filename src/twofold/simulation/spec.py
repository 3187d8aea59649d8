"""What is simulated: pools of instances, the model they serve, and the policies that run them."""

from typing import Final, Literal

import msgspec

from twofold.instance import Role
from twofold.simulation.cache_spec import CacheSpec
from twofold.simulation.control_spec import ControlSpec

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


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance ends at `at_s` seconds; with `back_s` it starts again, empty, at that time."""

    instance: str
    at_s: float
    back_s: float | None = None


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and how it is run; names are those of the catalog and of the registries.

    `performance` is one of the performance models by name. `handoff` is a mode or `by-size`.
    `max_num_batched_tokens` is in tokens; `saturating` gives each pool of whole prompts the length from which a prompt keeps its
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
    failures: tuple[Failure, ...] = ()
