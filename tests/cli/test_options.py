"""Shared parsers of command-line option values."""

from pathlib import Path

import pytest

from twofold.cli.options import StoreSettings, check_outputs, parse_batchers, parse_budget, parse_disk, parse_size
from twofold.errors import ConfigurationError
from twofold.instance import Role


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("2KiB", 2048), ("2k", 2000), ("1.5GiB", 3 * 2**29), ("500MB", 500_000_000)]
)
def test_parses_binary_and_decimal_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "GiB", "1X", "1e400"])
def test_rejects_invalid_sizes(text):
    with pytest.raises(ConfigurationError, match="not a size"):
        parse_size(text)


def test_parses_a_token_budget():
    assert (parse_budget("512", "--b"), parse_budget("auto", "--b")) == (512, "auto")


@pytest.mark.parametrize("text", ["", "0", "-1", "1e3", "saturating", "²"])
def test_rejects_invalid_token_budgets(text):
    with pytest.raises(ConfigurationError, match="not a number of tokens or auto"):
        parse_budget(text, "--b")


def test_parses_batchers_of_all_roles_or_of_one():
    assert parse_batchers("mixed", "--batcher") == dict.fromkeys(Role, "mixed")
    assert parse_batchers("prefill=prefill-balanced,decode=decode", "--batcher") == {
        Role.PREFILL: "prefill-balanced",
        Role.DECODE: "decode",
    }


@pytest.mark.parametrize(("text", "reason"), [("fastest", "choose one of prefill"), ("p=mixed", "'p' is not one")])
def test_rejects_invalid_batchers(text, reason):
    with pytest.raises(ConfigurationError, match=reason):
        parse_batchers(text, "--batcher")


def test_store_of_memory_and_disk(tmp_path):
    assert StoreSettings().store_config() is None
    assert StoreSettings(kv_store_dram=1 << 30).store_config().memory_bytes == 1 << 30
    disk = parse_disk(f"{tmp_path}/a:b:64MiB", "--kv-store-disk")
    config = StoreSettings(kv_store_dram=1 << 30, kv_store_disk=disk).store_config()
    assert (config.disk_dir, config.disk_bytes) == (f"{tmp_path}/a:b", 64 << 20)
    assert (tmp_path / "a:b").is_dir()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("/tmp", "is not a directory and a size"),
        (":1GiB", "is not a directory and a size"),
        ("/tmp/x:much", "--kv-store-disk 'much' is not a size"),
    ],
)
def test_rejects_invalid_disk_spaces(text, reason):
    with pytest.raises(ConfigurationError, match=reason):
        parse_disk(text, "--kv-store-disk")


def test_rejects_a_store_that_cannot_be_made():
    with pytest.raises(ConfigurationError, match="give that too"):
        StoreSettings(kv_store_disk=(Path("/tmp"), 1)).store_config()
    with pytest.raises(ConfigurationError, match="/proc/nowhere"):
        StoreSettings(kv_store_dram=1, kv_store_disk=(Path("/proc/nowhere"), 1)).store_config()


def test_rejects_output_files_that_collide():
    check_outputs({"html": Path("a"), "event_log": Path("b")}, ["c"])
    with pytest.raises(ConfigurationError, match="--html and --event-log both write a"):
        check_outputs({"html": Path("a"), "event_log": Path("a")}, [])
    with pytest.raises(ConfigurationError, match="--html a is an input file"):
        check_outputs({"html": Path("a")}, ["a"])
