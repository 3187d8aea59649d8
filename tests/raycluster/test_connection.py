"""Connection to a Ray cluster: choice of the address, and errors."""

import importlib.util

import pytest

from twofold.bench.services import free_port
from twofold.errors import ConfigurationError
from twofold.raycluster.cluster import connect, head_endpoint
from twofold.security.network import TcpEndpoint

has_ray = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_the_error_names_the_missing_extra():
    with pytest.raises(ConfigurationError, match=r"--launcher ray needs Ray.*twofold\[ray\]"):
        connect("auto", "--launcher ray")


@pytest.mark.skipif(not has_ray, reason="needs Ray")
@pytest.mark.filterwarnings("ignore")
def test_an_unreachable_cluster_fails_within_seconds():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError, match=f"no Ray cluster at {address}: Connection refused"):
        connect(address, "--ray")


def test_the_head_is_found_by_environment_then_by_file(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="no Ray cluster found on this host"):
        head_endpoint("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert head_endpoint("auto") == TcpEndpoint("10.0.0.1", 6379)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert head_endpoint("auto") == TcpEndpoint("10.0.0.2", 6379)
    with pytest.raises(ConfigurationError, match="'head' is not a Ray address"):
        head_endpoint("head")
    with pytest.raises(ConfigurationError, match="is an address of Ray's client"):
        head_endpoint("ray://head:10001")
