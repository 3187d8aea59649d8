"""Prefix cache settings of a cluster: parsing and errors."""

import pytest

from support.clusters import dump_cluster
from twofold.cluster.file import parse_cluster, read_cluster
from twofold.cluster.spec import CacheSpec, ClusterSpec, cache_size_tokens, parse_cache
from twofold.errors import ConfigurationError

FILE = """
model: llama2-70b
router: conductor
pools:
- {{machines: 1, machine: a100, role: prefill}}
- {{machines: 1, machine: a100, role: decode}}
kv_cache: {}
"""


@pytest.mark.parametrize(
    ("room", "tokens"),
    [
        ("3000000 tokens", 3_000_000),
        ("1 tokens", 1),
        ("1000B", 100),
        ("1kB", 100),
        ("1.5 GiB", 161_061_273),
        ("2TB", 200_000_000_000),
        ("5B", 0),
    ],
)
def test_cache_sizes_are_in_tokens_or_bytes(room, tokens):
    """Cache sizes in bytes are converted to tokens."""
    # A token has ten bytes of KV.
    assert cache_size_tokens(room, 10) == tokens


@pytest.mark.parametrize("room", ["", "3000000", "-1 tokens", "many tokens", "1 GHz", "1e9 B", "GiB"])
def test_rejects_sizes_without_a_unit(room):
    with pytest.raises(ConfigurationError, match="invalid prefix cache size"):
        cache_size_tokens(room, 10)


def test_parses_the_sizes_of_cache_tiers():
    """`--kv-cache` lists a size for each tier. A size without a tier applies to DRAM."""
    assert parse_cache("128GiB") == CacheSpec(dram="128GiB")
    line = "dram=3000000 tokens, disk=2TB,eviction=lfu,disk_bytes_per_s=3e9"
    assert parse_cache(line) == CacheSpec(dram="3000000 tokens", disk="2TB", eviction="lfu", disk_bytes_per_s=3e9)
    assert [tier for tier, _ in parse_cache(line).tier_sizes] == ["dram", "disk"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("128GiB,1TB", "at most once"),
        ("ram=1GB", "unknown or repeated setting 'ram=1GB'"),
        ("disk=1TB", "missing required field `dram`"),
        ("128GiB,eviction=newest", "unknown eviction policy 'newest'"),
        ("128GiB,dram_bytes_per_s=0", "must be at least 1"),
        ("128GiB,disk_bytes_per_s=quick", "invalid prefix cache"),
    ],
)
def test_rejects_invalid_settings(line, reason):
    with pytest.raises(ConfigurationError, match=reason):
        parse_cache(line)


def test_caches_round_trip_through_cluster_files():
    spec = read_cluster(FILE.format("{dram: 3000000 tokens, disk: 1TB, eviction: lfu}"), "cluster.yaml")
    assert spec.kv_cache == CacheSpec(dram="3000000 tokens", disk="1TB", eviction="lfu")
    assert read_cluster(dump_cluster(spec), "again.yaml") == spec
    plain = parse_cluster("1xa100:prefill,1xa100:decode", model="llama2-70b")
    assert "kv_cache" not in dump_cluster(plain)
    assert isinstance(plain, ClusterSpec)
    assert plain.kv_cache is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{dram: 128GiB, evict: lru}", "unknown field evict .did you mean eviction"),
        ("{dram: 3000000}", "kv_cache.dram: expected str, got int"),
        ("{dram: 3 dozen}", "cluster.yaml: invalid prefix cache size '3 dozen'"),
        ("{disk: 1TB}", "missing required field dram"),
    ],
)
def test_file_errors_name_the_field(value, reason):
    with pytest.raises(ConfigurationError, match=reason):
        read_cluster(FILE.format(value), "cluster.yaml")
