"""Memory plan: the KV blocks of each worker, checked against the machine's memory before allocation."""

import sys
from pathlib import Path

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import require
from twofold.serving.telemetry.host import memory_bytes

MIB = 2**20
DEFAULT_KV_CACHE_BYTES = 1024 * MIB


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Context length in tokens, and numbers of KV blocks in a worker's device memory and swap space."""

    layout: KvLayout
    num_blocks: int
    max_model_len: int
    swap_blocks: int = 0


def plan_memory(
    layout: KvLayout,
    *,
    kv_cache_bytes: int | None,
    max_model_len: int,
    workers: int,
    available_bytes: int,
    swap_bytes: int | None = None,
    swapping: int = 0,
) -> MemoryPlan:
    """Return the numbers of KV and swap blocks per worker. Raises ConfigurationError if memory is insufficient."""
    wanted = kv_cache_bytes if kv_cache_bytes is not None else DEFAULT_KV_CACHE_BYTES
    num_blocks = wanted // layout.bytes_per_block
    needed_blocks = -(-max_model_len // layout.block_size)
    least = f"{-(-needed_blocks * layout.bytes_per_block // MIB)}MiB"
    require(
        num_blocks >= needed_blocks,
        f"a KV cache of {wanted / MIB:,.1f} MiB holds {num_blocks * layout.block_size:,} tokens, and one "
        f"request may need {max_model_len:,}: set --kv-cache-memory-bytes to at least {least} or lower --max-model-len",
    )
    swap_blocks = 0 if swap_bytes is None else swap_bytes // layout.bytes_per_block
    require(
        swap_bytes is None or swap_blocks >= needed_blocks,
        f"--swap-space of {(swap_bytes or 0) / MIB:,.1f} MiB holds {swap_blocks * layout.block_size:,} tokens and one "
        f"request may need {max_model_len:,}: set it to at least {least}",
    )
    swap_total = layout.pool_bytes(swap_blocks) * swapping
    total = layout.pool_bytes(num_blocks) * workers + swap_total
    require(
        total <= available_bytes,
        f"{workers} workers with a KV cache of {wanted / MIB:,.0f} MiB each need {total / MIB:,.0f} MiB and "
        f"this machine has {available_bytes / MIB:,.0f} MiB left: lower --kv-cache-memory-bytes"
        f"{' or --swap-space' if swap_total else ''}",
    )
    return MemoryPlan(layout=layout, num_blocks=num_blocks, max_model_len=max_model_len, swap_blocks=swap_blocks)


def available_memory() -> int:
    """Return the available memory in bytes: the host's MemAvailable, limited by the container's cgroup."""
    return min(memory_bytes("MemAvailable"), _group_memory(Path("/sys/fs/cgroup")))


def _group_memory(group: Path) -> int:
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return sys.maxsize  # no cgroup v2
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(used))
