"""Prefix-cache isolation between two tenants."""

import subprocess
import sys
from pathlib import Path

from support.flags import ENGINE, SPLIT

SCRIPT = Path(__file__).parents[2] / "bench" / "mooncake" / "tenants.py"


def test_tenants_do_not_see_each_others_cache(tiny_model_dir, tmp_path):
    store = ("--kv-store-dram", "4MiB", "--kv-store-disk", f"{tmp_path / 'kv'}:8MiB")
    short = ("--model", tiny_model_dir("llama"), "--pairs", "4", "--tokens", "200", "--counters")
    ended = subprocess.run(
        [sys.executable, SCRIPT, *short, "--", *ENGINE, *SPLIT, *store], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tokens cached: as expected" in ended.stdout
