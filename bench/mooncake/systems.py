"""Cluster specs of the systems compared in Mooncake's papers, and of stronger colocated baselines.

Each machine is a DGX-A100 with one LLaMA2-70B instance on 8 accelerators and a link of 100 GB/s (800 Gb/s). Iteration
times are roofline estimates.
"""

from msgspec.structs import replace

from twofold.cluster.spec import TOKEN_BUDGET, CacheSpec, ClusterSpec, PoolSpec
from twofold.instance import Role

MACHINE, MODEL = "dgx-a100", "llama2-70b"
CHUNK_TOKENS = 512  # vLLM's chunk size at the time
HOST = CacheSpec(dram="3000000 tokens")  # the paper's cache in a machine's DRAM
# Blocks cached on accelerators need no loading but share memory with running requests; about a third remains.
OWN = CacheSpec(dram="1000000 tokens", dram_bytes_per_s=1e15)
BASE = ClusterSpec(pools=(), model=MODEL, performance="roofline", link_bytes_per_s=100e9)


def mooncake(prefill: int, decode: int) -> ClusterSpec:
    """Return Mooncake's cluster: split phases, the Conductor, and prefix caches in the memory of prefill machines."""
    pools = tuple(
        PoolSpec(machines=machines, machine=MACHINE, role=role)
        for machines, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
    )
    return replace(BASE, pools=pools, router="conductor", kv_cache=HOST)


def vllm(machines: int, *, individually: bool = False, prefix_caching: bool = False) -> ClusterSpec:
    """Return the vLLM baseline of the Mooncake papers: a colocated cluster that runs whole prompts before decodes."""
    return replace(
        BASE,
        pools=(_both(machines, "prefill-first"),),
        router="jsq-pending",
        max_num_seqs=1 if individually else BASE.max_num_seqs,
        kv_cache=OWN if prefix_caching else None,
    )


def chunked(machines: int, *, caches: bool = False) -> ClusterSpec:
    """Return a colocated cluster with chunked prefill."""
    return replace(
        BASE,
        pools=(_both(machines, "chunked-prefill"),),
        router="conductor" if caches else "jsq-pending",
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_cache=HOST if caches else None,
    )


def inlined(machines: int, tbt_s: float) -> ClusterSpec:
    """Return a colocated cluster that adds whole prompts to a decode batch while the predicted iteration
    time is at most `tbt_s` seconds.
    """
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
