"""Tests of `twofold keygen`, `twofold join` and `twofold serve --listen-workers`."""

import socket
import stat
import sys

import pytest

from twofold.bench.services import free_port
from twofold.cli.main import main
from twofold.cli.serve.join import JoinSettings, host_config
from twofold.instance import Role
from twofold.security.key import write_key
from twofold.security.network import HostNetwork
from twofold.serving.config import EngineConfig, ServiceConfig

LISTEN = "tcp://127.0.0.1:7600"


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return str(tiny_model_dir("llama"))


@pytest.fixture
def key(tmp_path):
    write_key(tmp_path / "key")
    return tmp_path / "key"


def test_keygen_writes_a_key_and_shows_none(monkeypatch, capsys, tmp_path, refused):
    file = tmp_path / "key"
    monkeypatch.setattr(sys, "argv", ["twofold", "keygen", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().splitlines()[-1] not in said.out + said.err
    assert "already exists" in refused("keygen", file)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--listen-workers", LISTEN], "needs --cluster-key FILE"),
        (["--cluster-key", "KEY"], "--cluster-key needs --listen-workers"),
        (["--listen-workers", "127.0.0.1:7600", "--cluster-key", "KEY"], "write tcp://ADDRESS:PORT"),
        (["--listen-workers", "tcp://0.0.0.0:7600", "--cluster-key", "KEY"], "is a wildcard"),
        (["--listen-workers", LISTEN, "--cluster-key", "/nowhere"], "cannot read"),
        (["--decode", "0"], "needs at least --prefill 1 and --decode 1"),
    ],
)
def test_a_service_that_could_not_be_joined(model, key, refused, flags, sentence):
    """`--listen-workers` and `--cluster-key` must both be valid."""
    given = [str(key) if flag == "KEY" else flag for flag in flags]
    assert sentence in refused("serve", model, *given)


def test_a_key_that_others_can_read_is_not_used(model, key, refused):
    """`twofold serve` and `twofold join` reject a key file that other users can read."""
    key.chmod(0o644)
    assert "chmod 600" in refused("serve", model, "--listen-workers", LISTEN, "--cluster-key", key)
    flags = ["--cluster-key", key, "--model", model, "--decode", "1"]
    assert "chmod 600" in refused("join", LISTEN, *flags)


def test_a_port_that_is_taken(model, key, refused):
    """If the port of `--listen-workers` is in use, `twofold serve` fails before it loads the model."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--listen-workers", address, "--cluster-key", key, "--port", free_port()]
        assert f"{address}: Address already in use" in refused("serve", model, *flags)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": []}, "give the workers of this host"),
        ({"controller": "10.0.0.1"}, "write tcp://ADDRESS:PORT"),
        ({"name": ["--name", "two words"]}, "is not valid"),
        ({"name": ["--kv-eviction", "fifo"]}, "choose one of lru, lfu, length-aware"),
        ({"name": ["--address", "no.such.host.invalid"]}, "cannot resolve"),
        ({"model": "/nowhere"}, "twofold model create"),
    ],
)
def test_a_host_that_cannot_join(model, key, refused, changes, sentence):
    """`twofold join` reports invalid flags before it connects to the controller."""
    flags = {"controller": LISTEN, "model": model, "workers": ["--decode", "1"], "name": []} | changes
    assert sentence in refused(
        "join",
        flags["controller"],
        *("--cluster-key", key, "--model", flags["model"]),
        *flags["workers"],
        *flags["name"],
    )


def test_a_cluster_file_names_all_workers(key, refused, tmp_path):
    """`--listen-workers` and `--cluster` exclude each other."""
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: llama2-70b\npools:\n"
        "  - {machines: 1, machine: dgx-h100, role: prefill}\n"
        "  - {machines: 1, machine: dgx-h100, role: decode}\n"
    )
    flags = ["--engine", "emulated", "--cluster", file, "--listen-workers", LISTEN, "--cluster-key", key]
    assert "excludes --cluster" in refused("serve", *flags)


def test_a_colocated_service_may_have_all_its_workers_elsewhere(model, key):
    """With `--colocated 0 --listen-workers`, a service starts no worker itself."""
    from twofold.cli.serve.config import service_config
    from twofold.cli.serve.settings import ServeSettings

    joined = service_config(ServeSettings(model=model, colocated=0, listen_workers=LISTEN, cluster_key=key))
    assert joined.workers == ()
    assert list(joined.terms.batchers) == [Role.MIXED]
    assert [worker.role for worker in service_config(ServeSettings(model=model, colocated=0)).workers] == [
        Role.PREFILL,
        Role.DECODE,
    ]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [({}, (7, 0.5)), ({"kv_cache_memory_bytes": 9}, (9, 0.5)), ({"gpu_memory_utilization": 0.8}, (None, 0.8))],
)
def test_a_host_may_size_its_own_kv_cache(flags, sizes, tmp_path):
    engine = EngineConfig(model="m", kv_cache_bytes=7, gpu_memory_utilization=0.5)
    service = ServiceConfig(engine=engine, workers=(), run_dir="")
    settings = JoinSettings(controller="tcp://10.0.0.1:7600", cluster_key=tmp_path, model="m", **flags)
    network = HostNetwork(host="h", address="10.0.0.2", key_file="k", controller="tcp://10.0.0.1:7600")
    made = host_config(service, settings, network, tmp_path).engine
    assert (made.kv_cache_bytes, made.gpu_memory_utilization) == sizes
