"""Crash test of a KV store; a short form of bench/mooncake/store_crash.py."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "bench" / "mooncake" / "store_crash.py"


def test_reads_no_torn_block_after_crashes():
    """No partly written block is read after the store or a client is killed."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "6", "--clients", "2"], capture_output=True, text=True, check=False
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "torn blocks read         0 " in ended.stdout
