"""Tests of `twofold characterize`."""

import msgspec
import pytest

from support.running_service import running_service
from support.scripted_endpoint import Refuse, endpoint, well_behaved
from support.traces import find_data
from twofold.cli.plan.query import read_problem, with_profile_machines
from twofold.cli.plan.settings import PlanSettings
from twofold.performance.fitting.profile import read_profile
from twofold.performance.profile import load_profile

BRIEF = ("--budget", 12)
SMALL = ("--kv-cache-memory-bytes", "64MiB", "--max-num-batched-tokens", 256, "--max-num-seqs", 16)


@pytest.fixture(scope="module")
def paper():
    return find_data("profiles/splitwise-perf-model.csv")


def test_a_model_is_measured(twofold, model, tmp_path):
    """`twofold plan` accepts the profile of a measured model."""
    path = tmp_path / "mine.yaml"
    done = twofold("characterize", model, "-o", path, *BRIEF, *SMALL, "--threads", 1)
    assert done.code == 0, done.err
    found = load_profile(path)
    assert None not in (found.times.prefill_error, found.times.decode_error, found.times.mixed_error)
    assert found.times.seconds(256, 256**2, 0, 0) > found.times.seconds(16, 16**2, 0, 0) > 0
    assert (found.max_num_batched_tokens, found.max_num_seqs, found.machine) == (256, 16, "host")
    assert found.engine.startswith("twofold")
    assert len(read_profile(path.with_suffix(".csv"))) >= found.times.iterations
    assert "median held-out error" in done.out
    small = ("--length-scale", 0.05, "--duration", 2, "--min-requests", 100, "--max-machines", 1, "--no-split")
    planned = twofold("plan", "azure-conv", *small, "--profile", path, "--slo", "ttft=5,tpot=1", "--json")
    assert planned.code == 0, planned.err
    assert "host" in planned.out


def test_a_service_is_measured_over_http(twofold, model, tmp_path):
    path = tmp_path / "served.yaml"
    with running_service(model, "--colocated", "1", "--kv-cache-memory-bytes", "64MiB") as (_, url):
        common = ("characterize", url, "-o", path, *BRIEF, "--model-sizes", model)
        assert "give --kv-capacity-tokens" in twofold(*common).err
        done = twofold(*common, "--kv-capacity-tokens", 10_000, "--html", tmp_path / "report.html")
    assert done.code == 0, done.err
    found = load_profile(path)
    assert found.kv_capacity_tokens == 10_000
    assert found.times.prefill_error is not None
    assert "Insights of Splitwise" in (tmp_path / "report.html").read_text()


def test_measurements_before_a_refusal_are_kept(twofold, model, tmp_path):
    """If the server rejects long prompts, earlier measurements are kept."""

    def script(body):
        return [Refuse(400)] if len(body["prompt"]) > 100 else well_behaved(body)

    path = tmp_path / "p.yaml"
    with endpoint(script) as server:
        done = twofold("characterize", server.url, "-o", path, "--model-sizes", model, "--kv-capacity-tokens", 9000)
    assert done.code == 2
    assert "failed on a prompt of" in done.err
    assert f"measurements are kept in {path.with_suffix('.csv')}" in done.err
    assert read_profile(path.with_suffix(".csv"))
    assert not path.exists()


def test_a_server_that_ignores_ignore_eos_is_one_sentence(twofold, model, tmp_path):
    with endpoint(lambda body: well_behaved({**body, "max_tokens": 1})) as server:
        done = twofold(
            "characterize", server.url, "-o", tmp_path / "p.yaml", "--model-sizes", model, "--kv-capacity-tokens", 9000
        )
    assert done.code == 2
    assert "it must honour ignore_eos" in done.err


def test_the_profile_of_the_paper_is_analysed(twofold, paper, tmp_path):
    """Splitwise's insights hold for the measurements in the paper."""
    page = tmp_path / "paper.html"
    done = twofold("characterize", paper, "--model", "bloom-176b", "--html", page)
    assert done.code == 0, done.err
    text = page.read_text()
    h100 = text.split("Insights of Splitwise: bloom-176b on h100-80gb TP8")[1].split("</table>")[0]
    assert h100.count('class="met"') == 7
    assert "does not hold here" not in text


def test_measured_machines_are_combined(twofold, paper, refused, tmp_path):
    """Simulations and plans accept several `--profile` files together with machines of the catalog."""
    paths = {hardware: tmp_path / f"{hardware}.yaml" for hardware in ("h100-80gb", "a100-80gb")}
    for hardware, path in paths.items():
        chosen = ("--model", "llama2-70b", "--hardware", hardware, "--tp", 8)
        done = twofold("characterize", paper, *chosen, "-o", path)
        assert done.code == 0, done.err
    flags = [part for path in paths.values() for part in ("--profile", path)]
    sent = ("azure-conv", "--rate", 2, "--num-requests", 20, "--json")
    run = twofold("simulate", *sent, "--cluster", "1xh100-80gb:prefill,1xa100-80gb:decode,1xdgx-a100:decode", *flags)
    assert run.code == 0, run.err
    bases = [pool["error"]["basis"].split()[0] for pool in msgspec.json.decode(run.out)["pools"]]
    assert bases == ["measured", "measured", "a"]
    settings = PlanSettings(workload="azure-conv", profiles=tuple(paths.values()))
    assert set(paths) < set(read_problem(settings).catalog.machines)
    assert with_profile_machines(settings).machines == "h100-80gb,a100-80gb"
    assert "two profiles measured h100-80gb" in refused("simulate", *sent, *flags[:2], *flags[:2])


def test_one_pair_of_a_csv_becomes_a_profile(twofold, paper, refused, tmp_path):
    path = tmp_path / "h100.yaml"
    chosen = ("--model", "llama2-70b", "--hardware", "h100-80gb", "--tp", 8)
    done = twofold("characterize", paper, *chosen, "-o", path)
    assert done.code == 0, done.err
    found = load_profile(path)
    assert (found.machine, found.tensor_parallel, found.costs.price_per_h) == ("h100-80gb", 8, 38.0)
    sent = ("azure-conv", "--rate", 2, "--num-requests", 50, "--json")
    simulated = twofold("simulate", *sent, "--model", "llama2-70b", "--cluster", "1xh100-80gb:mixed", "--profile", path)
    assert (simulated.code, "no slowdowns" in simulated.err) == (0, False), simulated.err
    assert msgspec.json.decode(simulated.out)["counts"]["completed"] == 50
    assert "--output is one profile" in refused("characterize", paper, "--model", "llama2-70b", "-o", path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("http://127.0.0.1:9", "-o", "p.yaml"), "no OpenAI endpoint can be reached"),
        (("nowhere", "-o", "p.yaml"), "nowhere"),
        (("nowhere.csv",), "cannot read profile nowhere.csv"),
        (("nowhere",), "give --output FILE"),
        (("nowhere", "-o", "missing/p.yaml"), "missing is no directory"),
        (("nowhere", "-o", "p.yaml", "--budget", "0"), "--budget"),
    ],
)
def test_bad_targets_are_one_sentence(refused, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused("characterize", *arguments)


def test_a_running_service_is_verified(twofold, model, tmp_path):
    """`twofold verify URL` compares a running service with its simulation."""
    path = tmp_path / "served.yaml"
    with running_service(model, "--colocated", "1", "--kv-cache-memory-bytes", "64MiB") as (_, url):
        measured = twofold(
            "characterize", url, "-o", path, *BRIEF, "--model-sizes", model, "--kv-capacity-tokens", 10_000
        )
        assert measured.code == 0, measured.err
        flags = ("--colocated", 1, "--num-requests", 12, "--rate", 5, "--max-model-len", 256, "--replays", 1, "--json")
        done = twofold("verify", url, "--profile", path, *flags)
    assert done.code in {0, 1}, done.err
    (load,) = msgspec.json.decode(done.out)
    assert (load["design"], load["live"][0]["completed"], load["simulated"][0]["completed"]) == ("colocated 1", 12, 12)


class Dial:
    """Fake power meter that reads 60 W, and rejects power caps below 10 W."""

    name, tdp_w = "a dial", 100.0

    def __init__(self):
        self.limits = []

    def watts(self):
        return 60.0

    def limit(self, watts):
        if watts < 10:
            raise OSError("out of range")
        self.limits.append(watts)


def test_each_power_cap_has_a_profile(twofold, model, tmp_path, monkeypatch):
    """A model is measured without and with power caps."""
    dial = Dial()
    monkeypatch.setattr("twofold.cli.characterize.measure.find_power", lambda _device: dial)
    path = tmp_path / "mine.yaml"
    flags = ("--power-caps", "70", "--tdp-w", 400, "--budget", 0.1, "--threads", 1)
    done = twofold("characterize", model, "-o", path, *flags, *SMALL)
    assert done.code == 0, done.err
    assert dial.limits == [70, 100] * 2, "each cap is tried before anything is measured"
    found = {each: load_profile(tmp_path / f"mine{each}.yaml") for each in ("", "-70w")}
    assert [each.machine for each in found.values()] == ["host", "host-70w"]
    assert [each.costs.tdp_w for each in found.values()] == [400, 370]
    assert found[""].power.decode_share == 0.6


def test_refuses_power_caps_that_cannot_be_set(twofold, model, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    flags = ("--budget", 0.1, "--threads", 1, *SMALL)
    assert "write watts as in 300,400" in twofold("characterize", model, "-o", path, "--power-caps", "low").err
    assert "needs a model directory" in twofold("characterize", "http://127.0.0.1:9", "--power-caps", "50").err
    monkeypatch.setattr("twofold.cli.characterize.measure.find_power", lambda _device: None)
    assert "needs NVML or RAPL" in twofold("characterize", model, "-o", path, "--power-caps", "50", *flags).err
    monkeypatch.setattr("twofold.cli.characterize.measure.find_power", lambda _device: Dial())
    done = twofold("characterize", model, "-o", path, "--power-caps", "5", *flags)
    assert done.code == 2
    assert "cannot cap the power at 5 W (a dial): out of range" in done.err
