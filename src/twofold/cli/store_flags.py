"""What the flags of `twofold serve` and `twofold join` say of what is kept of prompts, and of the store of a host."""

from pathlib import Path

from twofold.cli.sizes import parse_size
from twofold.errors import ConfigurationError
from twofold.kvcache.eviction import EVICTIONS
from twofold.serving.config import StoreConfig
from twofold.serving.store.disk import check_directory


def check_eviction(rule: str | None) -> None:
    """Raises ConfigurationError for a rule that there is not; None is none given."""
    if rule is not None and rule not in EVICTIONS:
        raise ConfigurationError(f"--kv-eviction {rule!r} is unknown: choose one of {', '.join(EVICTIONS)}")


def store_config(dram: str | None, disk: str | None) -> StoreConfig | None:
    """The store that the flags ask for; raises ConfigurationError."""
    if dram is None:
        if disk is not None:
            raise ConfigurationError(
                "--kv-store-disk takes what --kv-store-dram has no room for: give that too"
            )
        return None
    memory_bytes = parse_size(dram, "--kv-store-dram")
    if disk is None:
        return StoreConfig(memory_bytes=memory_bytes)
    directory, separator, size = disk.rpartition(":")
    if not (separator and directory):
        raise ConfigurationError(
            f"--kv-store-disk {disk!r} is not a directory and a size: write them as in /var/kv:100GiB"
        )
    disk_bytes, path = parse_size(size, "--kv-store-disk"), Path(directory).absolute()
    check_directory(path, disk_bytes)
    return StoreConfig(memory_bytes=memory_bytes, disk_dir=str(path), disk_bytes=disk_bytes)
