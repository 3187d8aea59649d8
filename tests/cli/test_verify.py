"""`twofold calibrate live` and `twofold verify`, run with a tiny model and real processes."""

import os
import subprocess
import sys

import msgspec
import pytest

from support.hosts import profile
from twofold.cli import calibrate as cli
from twofold.fidelity.service import ServiceDesign, SimulatedService
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import dump_profile, load_profile


def run(*arguments):
    """Run `twofold` in a subprocess."""
    # A calibration measures the CPU time of its own process.
    command = [sys.executable, "-m", "twofold.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def measured(tiny_model_dir, tmp_path_factory):
    """Return the host profile that `twofold calibrate live` writes, and the command's output."""
    path = tmp_path_factory.mktemp("profile") / "host.yaml"
    done = run("calibrate", "live", tiny_model_dir("llama"), "-o", path, "--kv-cache-memory-bytes", "64MiB")
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_a_host_is_measured(measured):
    path, shown = measured
    found = load_profile(path)
    assert found.times.seconds(512, 512 * 512, 0, 0) > found.times.seconds(16, 256, 0, 0) > 0
    assert found.times.seconds(0, 0, 8, 800) > 0
    assert found.host.front.request_s + found.host.front.request_delay_s > 0
    assert found.link.bytes_per_s > 0
    assert None not in (found.times.prefill_error, found.times.decode_error, found.times.mixed_error)
    assert "held-out error" in shown
    assert f"{found.times.decode_error:.1%}" in shown


def test_both_worlds_are_compared(measured, tiny_model_dir):
    """`twofold verify` reports live and simulated metrics at each rate, and exits with 0 if they agree, else with 1."""
    path, _ = measured
    flags = (
        "--num-requests",
        12,
        "--rate",
        5,
        "--rate",
        20,
        "--max-model-len",
        256,
        "--kv-cache-memory-bytes",
        "64MiB",
    )
    done = run("verify", tiny_model_dir("llama"), "--profile", path, *flags, "--json")
    assert done.returncode in {0, 1}, done.stderr
    low, high = msgspec.json.decode(done.stdout)
    assert (low["rate"], high["rate"], low["design"]) == (5.0, 20.0, "1P+1D")
    for load in (low, high):
        assert len(load["live"]) == 2
        assert {run["completed"] for run in (*load["simulated"], *load["live"])} == {12}
        assert load["simulated"][0]["output_tokens"] == load["live"][0]["output_tokens"]


def test_a_measured_host_is_simulated(measured, twofold):
    path, _ = measured
    cluster = ("--cluster", "2xhost:prefill,1xhost:decode", "--profile", path, "--router", "jsq")
    done = twofold(
        "simulate", "azure-conv", *cluster, "--rate", 2, "--num-requests", 20, "--length-scale", 0.1, "--json"
    )
    assert done.code == 0, done.err
    assert msgspec.json.decode(done.out)["counts"]["completed"] == 20


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--loads", "much"), "--loads 'much' is not understood: write multiples as in 0.5,0.9,2"),
        (("--concurrency", "2", "--rate", "3"), "--rate sets arrival times, which --concurrency ignores"),
        (("--think-time", "2"), "--think-time needs --concurrency"),
        (("--colocated", "2", "--prefill", "1"), "--colocated excludes --prefill and --decode"),
        ((), "is a profile of small, and the model is llama"),
    ],
)
def test_mistakes_are_told_before_anything_is_served(flags, sentence, twofold, tiny_model_dir, tmp_path):
    """For invalid flags, `twofold verify` prints a one-line error and exits with 2 before it starts a service."""
    path = tmp_path / "host.yaml"
    path.write_text(dump_profile(profile()))
    done = twofold("verify", tiny_model_dir("llama"), "--profile", path, *flags)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_a_profile_that_cannot_be_written_is_refused_first(twofold, tiny_model_dir, tmp_path):
    done = twofold("calibrate", "live", tiny_model_dir("llama"), "-o", tmp_path / "no" / "host.yaml")
    assert done.code == 2
    assert "cannot be written" in done.err


def test_a_calibration_records_the_threads_that_services_have(twofold, tiny_model_dir, tmp_path, monkeypatch):
    """With or without `OMP_NUM_THREADS`, a calibration records the number of threads that a service's workers have."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cli, "measure", lambda *_: None)
    monkeypatch.setattr(cli, "calibrate", lambda *_, cores, threads, **__: profile(cores=cores, threads=threads))
    path, model = tmp_path / "host.yaml", tiny_model_dir("llama")
    for limit, threads in (("3", 3), ("", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert twofold("calibrate", "live", model, "-o", path).code == 0
        found = load_profile(path)
        assert found.host.threads == threads
        sizes = {"kv_capacity_tokens": 64_000, "max_num_seqs": 64}
        SimulatedService(ServiceDesign(prefill=1, decode=1), found, tmp_path, load_catalog(), **sizes).cluster(path)
