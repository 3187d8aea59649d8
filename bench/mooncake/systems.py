"""The systems that Mooncake's papers compare, and colocated ones that are stronger, as clusters to simulate.

A machine is a DGX-A100 (the papers' A800 but for NVLink) with one instance of LLaMA2-70B on its 8 accelerators and a
link of 100 GB/s (800 Gb/s). Times are the roofline's, because nobody published any of prompts that long.
"""

from msgspec.structs import replace

from twofold.cluster.spec import TOKEN_BUDGET, CacheSpec, ClusterSpec, PoolSpec
from twofold.instance import Role

MACHINE, MODEL = "dgx-a100", "llama2-70b"
CHUNK_TOKENS = 512  # of vLLM's chunked prefill then
HOST = CacheSpec(dram="3000000 tokens")  # the paper's, in the memory of a machine
# What an accelerator has cached needs no loading, and shares its memory with what is served: about a third is left.
OWN = CacheSpec(dram="1000000 tokens", dram_bytes_per_s=1e15)
BASE = ClusterSpec(pools=(), model=MODEL, performance="roofline", link_bytes_per_s=100e9)


def mooncake(prefill: int, decode: int) -> ClusterSpec:
    """Phases on machines of their own, the Conductor, and caches in the memory of those that prefill."""
    pools = tuple(
        PoolSpec(machines=machines, machine=MACHINE, role=role)
        for machines, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
    )
    return replace(BASE, pools=pools, router="conductor", kv_cache=HOST)


def vllm(machines: int, *, individually: bool = False, prefix_caching: bool = False) -> ClusterSpec:
    """The papers' baseline: whole prompts before decodes, which stand still meanwhile.

    Requests go to the instance with the fewest pending tokens. `individually` has each serve one after the other.
    """
    return replace(
        BASE,
        pools=(_both(machines, "prefill-first"),),
        router="jsq-pending",
        max_num_seqs=1 if individually else BASE.max_num_seqs,
        kv_cache=OWN if prefix_caching else None,
    )


def chunked(machines: int, *, caches: bool = False) -> ClusterSpec:
    """Prompts in chunks beside decodes; with `caches` also all else that Mooncake has: the caches and the Conductor."""
    return replace(
        BASE,
        pools=(_both(machines, "chunked-prefill"),),
        router="conductor" if caches else "jsq-pending",
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_cache=HOST if caches else None,
    )


def inlined(machines: int, tbt_s: float) -> ClusterSpec:
    """Whole prompts beside decodes where an iteration may take that long, with the caches and the Conductor."""
    return replace(
        BASE,
        pools=(_both(machines, "inlined"),),
        router="conductor",
        max_num_batched_tokens=TOKEN_BUDGET,
        inline_tbt_s=tbt_s,
        kv_cache=HOST,
    )


def _both(machines: int, batcher: str) -> PoolSpec:
    return PoolSpec(machines=machines, machine=MACHINE, role=Role.MIXED, batcher=batcher)
