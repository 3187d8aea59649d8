"""How many KV blocks each worker gets, checked against the machine before anything is allocated."""

import sys
from pathlib import Path

import msgspec

from twofold.engine.base import KvLayout
from twofold.errors import ConfigurationError

MIB = 2**20
DEFAULT_KV_CACHE_BYTES = 1024 * MIB


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of every worker of a service, and the context length that it serves.

    Each has `swap_blocks` more in the memory of the host, if it decodes.
    """

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
    """Divide memory into blocks; raises ConfigurationError when a request or the workers would not fit.

    `available_bytes` is what the machine can still give to all workers together, of which `swapping` have `swap_bytes`
    to swap out to.
    """
    wanted = kv_cache_bytes if kv_cache_bytes is not None else DEFAULT_KV_CACHE_BYTES
    num_blocks = wanted // layout.bytes_per_block
    needed_blocks = -(-max_model_len // layout.block_size)
    if num_blocks < needed_blocks:
        needed = needed_blocks * layout.bytes_per_block
        raise ConfigurationError(
            f"a KV cache of {wanted / MIB:,.1f} MiB holds {num_blocks * layout.block_size:,} tokens and one "
            f"request may need {max_model_len:,}: set --kv-cache-memory-bytes to at least "
            f"{-(-needed // MIB)}MiB or lower --max-model-len"
        )
    swap_blocks = 0 if swap_bytes is None else swap_bytes // layout.bytes_per_block
    if swap_bytes is not None and swap_blocks < needed_blocks:
        least = -(-needed_blocks * layout.bytes_per_block // MIB)
        raise ConfigurationError(
            f"--swap-space of {swap_bytes / MIB:,.1f} MiB holds {swap_blocks * layout.block_size:,} tokens and one "
            f"request may need {max_model_len:,}: set it to at least {least}MiB"
        )
    swap_total = layout.pool_bytes(swap_blocks) * swapping
    total = layout.pool_bytes(num_blocks) * workers + swap_total
    if total > available_bytes:
        raise ConfigurationError(
            f"{workers} workers with a KV cache of {wanted / MIB:,.0f} MiB each need {total / MIB:,.0f} MiB and "
            f"this machine has {available_bytes / MIB:,.0f} MiB left: lower --kv-cache-memory-bytes"
            f"{' or --swap-space' if swap_total else ''}"
        )
    return MemoryPlan(
        layout=layout, num_blocks=num_blocks, max_model_len=max_model_len, swap_blocks=swap_blocks
    )


def available_memory() -> int:
    """Bytes that can still be had: of the host without swapping (MemAvailable), and within our control group."""
    return min(_host_memory(), _group_memory(Path("/sys/fs/cgroup")))


def _host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigurationError("/proc/meminfo does not say how much memory is available")


def _group_memory(group: Path) -> int:
    """What a container's limit (cgroup v2) leaves; no bound where there is none."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - int(used))
