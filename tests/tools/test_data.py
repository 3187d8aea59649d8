"""`make data` downloads data files and verifies their checksums."""

import hashlib
import runpy
import subprocess
import sys
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.traces import ROOT

TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0000000,10,2\n"


@pytest.fixture
def home(tmp_path):
    """Serve one trace over HTTP, and yield the address of the server."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "trace.csv").write_bytes(TRACE)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(tmp_path, url, sha256):
    listed = tmp_path / "list.toml"
    listed.write_text(f'[[file]]\npath = "traces/one.csv"\nurl = "{url}"\nsha256 = "{sha256}"\n')
    command = [
        sys.executable,
        str(ROOT / "tools" / "data.py"),
        "--list",
        str(listed),
        "--folder",
        str(tmp_path / "data"),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_downloads_a_file_once(tmp_path, home):
    """A second `make data` finds the file present and does not contact the server."""
    digest = hashlib.sha256(TRACE).hexdigest()
    assert run(tmp_path, f"{home}/trace.csv", digest).returncode == 0
    assert (tmp_path / "data" / "traces" / "one.csv").read_bytes() == TRACE
    assert run(tmp_path, "http://127.0.0.1:9/trace.csv", digest).returncode == 0


def test_keeps_nothing_with_another_checksum(tmp_path, home):
    """A download with a wrong checksum fails and is deleted."""
    done = run(tmp_path, f"{home}/trace.csv", "0" * 64)
    assert done.returncode == 1
    assert "traces/one.csv" in done.stderr
    assert not (tmp_path / "data" / "traces" / "one.csv").exists()


def test_reports_a_missing_file(tmp_path, home):
    done = run(tmp_path, f"{home}/absent.csv", "0" * 64)
    assert (done.returncode, "traces/one.csv" in done.stderr) == (1, True)


def test_list_is_complete():
    """Every file in data.toml has an https address and a SHA-256 checksum."""
    for file in tomllib.loads((ROOT / "tools" / "data.toml").read_text())["file"]:
        assert file["url"].startswith("https://")
        assert len(file["sha256"]) == 64
    assert "download" in runpy.run_path(str(ROOT / "tools" / "data.py"))
