"""Tests of API keys of `twofold serve`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twofold.cli.serve.http import check_loopback, masked
from twofold.errors import ConfigurationError

# The program text is on the command line, so it must not contain the keys that it searches for.
PROBE = """
import os, sys
from pathlib import Path
from twofold.cli.options import HttpSettings
from twofold.cli.serve.http import find_keys
ring = find_keys(HttpSettings(api_key=(sys.argv[2], os.environ["TWOFOLD_API_KEY"])))
shown = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
print(ring, b"sk-" b"flag" in shown, b"from-" b"variable" in shown, b"--other" in shown, *os.environ)
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "::1%lo"])
def test_loopback_needs_no_key(address):
    """A service on a loopback address starts without an API key."""
    check_loopback("somewhere", address)


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.0.1", "::", "fe80::1%eth0", "8.8.8.8"])  # noqa: S104
def test_other_machines_need_a_key(address):
    """A service on a public address without an API key is refused with a configuration error."""
    with pytest.raises(ConfigurationError, match="--host somewhere lets other machines in"):
        check_loopback("somewhere", address)


@pytest.mark.parametrize(
    ("held", "hidden"),
    [
        (b"twofold\0--api-key\0sk-1\0--port\x001\0", b"twofold\0--api-key\0****\0--port\x001\0"),
        (b"twofold\0--api-key=sk-1\0", b"twofold\0--api-key=****\0"),
        (b"twofold\0--api-keys\0file\0", b"twofold\0--api-keys\0file\0"),
        (b"twofold\0", b"twofold\0"),
        (b"A=sk-1\0TWOFOLD_API_KEY=sk-1\0B=2\0", b"A=sk-1\0TWOFOLD_API_KEY=****\0B=2\0"),
    ],
)
def test_keys_are_masked_in_arguments_and_variables(held, hidden):
    """Values of `--api-key` and of its variable are masked in null-separated entries."""
    assert masked(held, {"sk-1"}) == hidden


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the system shows no processes as files")
def test_a_process_does_not_show_its_keys():
    """No API key is visible in /proc or in child processes."""
    command = [sys.executable, "-c", PROBE, "--api-key", "sk-flag", "--other"]
    done = subprocess.run(
        command,
        env={**os.environ, "TWOFOLD_API_KEY": "from-variable"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.startswith("KeyRing(key-1, key-2) False False True ")
    assert "TWOFOLD_API_KEY" not in done.stdout
