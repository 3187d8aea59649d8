"""The way to a Ray cluster, where there is none; it needs no Ray but where that is said."""

import importlib.util

import pytest

from twofold.bench.services import free_port
from twofold.errors import ConfigurationError
from twofold.raycluster.cluster import connect, head_endpoint
from twofold.security.network import TcpEndpoint

has_ray = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    """And what needs it."""
    with pytest.raises(ConfigurationError, match=r"--launcher ray needs Ray.*twofold\[ray\]"):
        connect("auto", "--launcher ray")


@pytest.mark.skipif(not has_ray, reason="needs Ray")
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there_is_one_sentence():
    """Within seconds: Ray itself would go on asking."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError, match=f"no Ray cluster at {address}: Connection refused"):
        connect(address, "--ray")


def test_the_head_is_found_as_ray_finds_it(monkeypatch, tmp_path):
    """What the environment says, else what was started last on this host."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="no Ray cluster is known here"):
        head_endpoint("auto")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert head_endpoint("auto") == TcpEndpoint("10.0.0.1", 6379)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert head_endpoint("auto") == TcpEndpoint("10.0.0.2", 6379)
    with pytest.raises(ConfigurationError, match="'head' names no Ray cluster"):
        head_endpoint("head")
    with pytest.raises(ConfigurationError, match="Ray's client, which is not enough"):
        head_endpoint("ray://head:10001")
