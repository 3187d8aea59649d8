"""A store that is killed at any moment: the short form of bench/mooncake/store_crash.py."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "bench" / "mooncake" / "store_crash.py"


def test_no_torn_block_is_ever_read():
    """Killed in the middle of gets and puts, clients too; requests go on, the disk recovers, capacity is kept."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "6", "--clients", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "torn blocks read         0 " in ended.stdout
