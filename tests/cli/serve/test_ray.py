"""Tests of `twofold serve --launcher ray`, without Ray."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from twofold.cli.serve.config import service_config
from twofold.cli.serve.ray import launcher_of, worker_resources
from twofold.cli.serve.settings import ServeSettings
from twofold.instance import Role
from twofold.security.key import read_key
from twofold.serving.launch.launcher import LocalLauncher
from twofold.serving.launch.ray.launcher import RayLauncher
from twofold.slo import Slo

RAY = {"launcher": "ray", "ray_address": "127.0.0.1:6379"}
HEAD = ("--launcher", "ray", "--ray-address", "127.0.0.1:6379")


@pytest.fixture
def refusal(refused, monkeypatch, tmp_path):
    """Return a function that runs a command and returns its error message."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return refused


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--launcher", "slurm"], "choose one of local, ray"),
        (["--ray-address", "auto"], "--ray-address needs --launcher ray"),
        (["--launcher", "ray"], "no Ray cluster found on this host: set --ray-address HOST:PORT"),
        (["--launcher", "ray", "--ray-address", "head"], "'head' is not a Ray address"),
        ([*HEAD, "--ray-resources", "CPU"], "write CPU=4,GPU=1"),
        ([*HEAD, "--ray-resources", "CPU=1,CPU=2"], "write CPU=4,GPU=1"),
        ([*HEAD, "--tp", "2"], "moves whole blocks"),
        ([*HEAD, "--kv-store-dram", "1GiB"], "is for workers of this host"),
        ([*HEAD, "--overload", "early", "--slo", "ttft=1"], "is for workers of this host"),
        ([*HEAD, "--pin-cores"], "is for workers of this host"),
        ([*HEAD, "--prefill", "0"], "at least --prefill 1 and --decode 1"),
        ([*HEAD, "--transport", "shared_memory"], "works within a host only"),
    ],
)
def test_mistakes_are_one_sentence(refusal, model, flags, sentence):
    """`twofold serve --launcher ray` rejects invalid flags before it starts a process."""
    assert sentence in refusal("serve", model, *flags)


def test_a_worker_takes_a_cpu_and_a_gpu_where_it_computes_on_one():
    assert worker_resources(ServeSettings(launcher="ray", device="cpu")) == {"CPU": 1.0}
    assert worker_resources(ServeSettings(launcher="ray", device="cuda")) == {"CPU": 1.0, "GPU": 1.0}
    given = ServeSettings(launcher="ray", ray_resources="CPU=8,GPU=0.5,nic=1")
    assert worker_resources(given) == {"CPU": 8, "GPU": 0.5, "nic": 1}


def test_workers_join_by_a_key_and_a_port_of_the_service(model, tmp_path):
    flags = ServeSettings(model=str(model), decode=2, **RAY, ray_resources="CPU=3", ray_link_label="rack")
    config = service_config(flags)
    assert config.transport == "curve"
    assert set(config.terms.batchers) == {Role.PREFILL, Role.DECODE}
    started, launcher = launcher_of(flags, replace(config, run_dir=str(tmp_path)))
    assert isinstance(launcher, RayLauncher)
    network, job = started.network, launcher._job
    read_key(tmp_path / "cluster.key")
    assert not network.controller.endswith(":0")
    assert [(host.worker, host.controller, host.threads) for host in job.hosts] == [
        (name, network.controller, 3) for name in ("prefill-0", "decode-0", "decode-1")
    ]
    assert job.hosts[0].key == (tmp_path / "cluster.key").read_text()
    assert (job.bundle, job.link_label) == ({"CPU": 3.0}, "rack")


def test_listen_workers_sets_the_address_for_ray_workers(model, tmp_path):
    """With `--listen-workers`, workers on Ray connect to the address in this flag."""
    key = tmp_path / "key"
    from twofold.security.key import write_key

    write_key(key)
    flags = ServeSettings(model=str(model), listen_workers="tcp://127.0.0.1:7611", cluster_key=key, **RAY)
    config = service_config(flags)
    assert launcher_of(flags, config)[0].network == config.network
    assert config.network.controller == "tcp://127.0.0.1:7611"


def test_replanning_knows_the_workers_on_ray(model, host):
    """Re-planning may start and stop workers on Ray."""
    flags = ServeSettings(model=str(model), **RAY, replan=True, profile=host, slo=Slo(ttft_s=1.0), retire=True)
    replan = service_config(flags).replan
    assert replan.replicas
    assert [pool.role for pool in replan.cluster.pools] == [Role.PREFILL, Role.DECODE]


def test_without_ray_workers_are_local(model):
    """By default, workers are local processes and the commands do not import Ray."""
    flags = ServeSettings(model=str(model))
    config = service_config(flags)
    same, launcher = launcher_of(flags, config)
    assert same is config
    assert isinstance(launcher, LocalLauncher)
    program = (
        "import sys, twofold.cli.main, twofold.cli.serve.run, twofold.cli.plan.run, twofold.cli.plan.query; "
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
