"""How figures of both worlds are compared, and where the knee of a service is."""

import pytest

from support.hosts import profile
from twofold.errors import ConfigurationError
from twofold.fidelity.service import Design, cluster_of
from twofold.fidelity.verify import ATTAINMENT, Figure, knee, simulated
from twofold.hardware.catalog import load_catalog
from twofold.performance.host_profile import dump_host_profile
from twofold.request import Request
from twofold.slo import Slo

CATALOG = load_catalog()
SLO = Slo(ttft_s=0.5, tpot_s=0.1)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A profile of two cores, and its file; this machine has two cores as well."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    path = tmp_path / "host.yaml"
    path.write_text(dump_host_profile(profile()))
    return profile(), path


def regular(rate):
    """Requests that are all alike: a prefill of 0.11 s, and nine decodes."""
    return [Request(id=str(i), arrival_s=i / rate, prompt_tokens=100, output_tokens=10) for i in range(200)]


def test_an_error_is_let_pass_up_to_its_limit_beyond_the_spread():
    """Replays 10% apart let a simulation be 10% more off than its limit."""
    close = Figure(name="TTFT P50", simulated=1.2, live=(0.95, 1.05), limit=0.1)
    assert (close.error, close.spread, close.holds) == (pytest.approx(0.2), pytest.approx(0.1), True)
    assert not Figure(name="TTFT P50", simulated=1.21, live=(0.95, 1.05), limit=0.1).holds
    assert not Figure(name="TTFT P50", simulated=0.79, live=(0.95, 1.05), limit=0.1).holds


def test_attainment_is_compared_in_points():
    """Not relatively: 10% instead of 14% is four points off."""
    figure = Figure(name=ATTAINMENT, simulated=0.10, live=(0.14, 0.14), limit=0.05)
    assert (figure.error, figure.holds) == (pytest.approx(-0.04), True)


def test_the_knee_is_what_one_prefill_worker_can_do(host):
    """A prompt takes 0.11 s, so that up to 1/0.11 of them a second are answered in time."""
    one, path = host
    spec = cluster_of(Design(prefill=1, decode=1), one, path, kv_capacity_tokens=64_000, max_num_seqs=64)
    found = knee(spec, regular, CATALOG, SLO)
    assert found >= 1 / 0.11
    kept = simulated(spec, regular(found), CATALOG, SLO)
    beyond = simulated(spec, regular(found * 1.1), CATALOG, SLO)
    assert kept.slo_attainment >= 0.9 > beyond.slo_attainment


def test_an_slo_that_cannot_be_kept_has_no_knee(host):
    """One sentence instead of a search without end."""
    one, path = host
    spec = cluster_of(Design(colocated=2), one, path, kv_capacity_tokens=64_000, max_num_seqs=64)
    with pytest.raises(ConfigurationError, match="widen it"):
        knee(spec, regular, CATALOG, Slo(ttft_s=0.01))


def test_a_profile_of_other_workers_is_refused(host):
    """Workers with other cores compute at another speed."""
    _, path = host
    with pytest.raises(ConfigurationError, match="4 of 8 cores each"):
        cluster_of(
            Design(prefill=1, decode=1),
            profile(cores=8, threads=4),
            path,
            kv_capacity_tokens=64_000,
            max_num_seqs=64,
        )


def test_designs_have_names_and_flags():
    """Those of `twofold serve`."""
    assert (Design(prefill=2, decode=1).name, Design(colocated=2).name) == ("2P+1D", "colocated 2")
    assert Design(prefill=2, decode=1).flags == ["--prefill", "2", "--decode", "1"]


def test_the_twin_has_the_batchers_of_the_service(host):
    """Colocated workers chunk their prompts, and split ones do not."""
    one, path = host
    twin = cluster_of(Design(colocated=2), one, path, kv_capacity_tokens=1600, max_num_seqs=8)
    assert [(pool.machines, pool.batcher) for pool in twin.pools] == [(2, "chunked-prefill")]
    assert (twin.token_budget, twin.max_seqs, twin.kv_capacity_tokens) == (512, 8, 1600)
