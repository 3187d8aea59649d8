"""Two tenants with the same prompts: the short form of bench/mooncake/tenants.py, by what answers say, not by times."""

import subprocess
import sys
from pathlib import Path

from support.flags import ENGINE, SPLIT

SCRIPT = Path(__file__).parents[2] / "bench" / "mooncake" / "tenants.py"


def test_no_answer_tells_that_another_was_there(tiny_model_dir, tmp_path):
    """Neither from the engine's memory nor from the host's store; one's own prompt is found again."""
    store = ("--kv-store-dram", "4MiB", "--kv-store-disk", f"{tmp_path / 'kv'}:8MiB")
    short = ("--model", tiny_model_dir("llama"), "--pairs", "4", "--tokens", "200", "--counters")
    ended = subprocess.run(
        [sys.executable, SCRIPT, *short, "--", *ENGINE, *SPLIT, *store],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "tokens cached: as it should be" in ended.stdout
