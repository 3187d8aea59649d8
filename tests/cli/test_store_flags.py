"""The store of a host as flags say it: one sentence for what cannot be had."""

import pytest

from twofold.cli.store_flags import check_eviction, store_config
from twofold.errors import ConfigurationError


def test_memory_alone_and_with_a_disk(tmp_path):
    """Sizes as everywhere; the directory is made, and its path may have colons."""
    assert store_config(None, None) is None
    assert store_config("1GiB", None).memory_bytes == 1 << 30
    config = store_config("1GiB", f"{tmp_path}/a:b:64MiB")
    assert (config.disk_dir, config.disk_bytes) == (f"{tmp_path}/a:b", 64 << 20)
    assert (tmp_path / "a:b").is_dir()


@pytest.mark.parametrize(
    ("dram", "disk", "said"),
    [
        (None, "/tmp:1GiB", "give that too"),
        ("much", None, "is not a size"),
        ("1GiB", "/tmp", "is not a directory and a size"),
        ("1GiB", ":1GiB", "is not a directory and a size"),
        ("1GiB", "/tmp/x:much", "--kv-store-disk 'much' is not a size"),
        ("1GiB", "/proc/nowhere:1GiB", "cannot use"),
    ],
)
def test_what_cannot_be_had_is_refused(dram, disk, said):
    """It says which flag, and what would be right."""
    with pytest.raises(ConfigurationError, match=said):
        store_config(dram, disk)


def test_rules_of_eviction():
    """Those that there are are named to who asks for another."""
    for rule in (None, "lru", "lfu", "length-aware"):
        check_eviction(rule)
    with pytest.raises(ConfigurationError, match="'fifo' is unknown: choose one of lru, lfu, length-aware"):
        check_eviction("fifo")
