"""Comparison of a live service with its simulation."""

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from support.hosts import profile
from twofold.batch import Batch, BatchItem
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import ATTAINMENT, Figure, OfferedLoad, compare_replays, knee
from twofold.fidelity.service import ServiceDesign, SimulatedService
from twofold.fidelity.worker_log import Slowness, WorkerLog
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import dump_profile
from twofold.reporting.summary import summarize
from twofold.request import Phase, Request
from twofold.serving.telemetry.journal import JournalEntry
from twofold.slo import Slo
from twofold.timeline import Moment

CATALOG = load_catalog()
SLO = Slo(ttft_s=0.5, tpot_s=0.1)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return the performance profile of a host with two cores, and the path of the profile's file."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    path = tmp_path / "host.yaml"
    path.write_text(dump_profile(profile()))
    return profile(), path


def figure(name, simulated, live, limit):
    return Figure(name=name, calibrated=simulated, simulated=simulated, live=live, limit=limit)


def twin(design, one, directory):
    return SimulatedService(design, one, directory, kv_capacity_tokens=64_000, max_num_seqs=64, catalog=CATALOG)


def regular(rate):
    """Return 200 equal requests, `rate` per second."""
    # Each request takes a prefill of 0.11 s and nine decode iterations.
    return [Request(id=str(i), arrival_s=i / rate, prompt_tokens=100, output_tokens=10) for i in range(200)]


def test_accepts_errors_up_to_limit_plus_spread():
    """Live and simulated values may differ by the error limit plus the spread between live replays."""
    close = figure("TTFT P50", 1.2, (0.95, 1.05), 0.1)
    assert (close.error, close.spread, close.holds) == (pytest.approx(0.2), pytest.approx(0.1), True)
    assert not figure("TTFT P50", 1.21, (0.95, 1.05), 0.1).holds
    assert not figure("TTFT P50", 0.79, (0.95, 1.05), 0.1).holds


def test_spread_does_not_grow_with_the_number_of_replays():
    """The spread is the mean absolute difference between pairs of replays, divided by the mean of the replays."""
    assert figure("E2E P50", 1.0, (0.9, 1.1), 0.1).spread == pytest.approx(0.2)
    assert figure("E2E P50", 1.0, (0.9, 1.0, 1.1), 0.1).spread == pytest.approx(0.4 / 3)
    assert figure("E2E P50", 1.0, (1.0,), 0.1).spread == 0.0


def test_attainment_errors_are_absolute():
    """An SLO attainment of 10% instead of 14% is an error of four percentage points."""
    attained = figure(ATTAINMENT, 0.10, (0.14, 0.14), 0.05)
    assert (attained.error, attained.holds) == (pytest.approx(-0.04), True)


def test_knee_is_at_least_the_throughput_of_the_prefill_worker(host):
    one, path = host
    split = twin(ServiceDesign(prefill=1, decode=1), one, path.parent)
    found = knee(split, regular, SLO)
    assert found >= 1 / 0.11
    kept = summarize(split.timelines(regular(found)), slo=SLO)
    beyond = summarize(split.timelines(regular(found * 1.1)), slo=SLO)
    assert kept.slo_attainment >= 0.9 > beyond.slo_attainment


def test_rejects_an_slo_that_no_rate_meets(host):
    one, path = host
    with pytest.raises(ConfigurationError, match="widen it"):
        knee(twin(ServiceDesign(colocated=2), one, path.parent), regular, Slo(ttft_s=0.01))


def test_simulates_a_slow_host_at_its_measured_speed(host):
    one, path = host
    slow = twin(ServiceDesign(prefill=1, decode=1), one, path.parent)
    requests = regular(4.0)
    live = slow.timelines(requests, Slowness(1.5, 1.5))
    logs = {name: WorkerLog(entries) for name, entries in journals(live, slower=1.5).items()}
    found = compare_replays(slow, OfferedLoad(requests=requests, rate=4.0), [live, live], logs, SLO)
    assert found.slowness == (pytest.approx((1.5, 1.5), rel=0.01),) * 2
    assert found.holds
    assert not all(replace(each, simulated=each.calibrated).holds for each in found.figures())


def test_each_replay_is_simulated_at_its_own_speed(host):
    """The simulation of each live replay models the host speed measured during the replay."""
    one, path = host
    split = twin(ServiceDesign(prefill=1, decode=1), one, path.parent)
    requests = regular(4.0)
    quick, slow = split.timelines(requests), split.timelines(requests, Slowness(1.5, 1.5))
    later = 2 * max(timeline.moments[Moment.LAST_TOKEN] for timeline in slow)
    slow_later = [moved(timeline, later) for timeline in slow]
    logs = {"prefill-0": [], "decode-0": []}
    for timelines, slower in ((quick, 1.0), (slow_later, 1.5)):
        for name, entries in journals(timelines, slower=slower).items():
            logs[name] += entries
    logs = {name: WorkerLog(entries) for name, entries in logs.items()}
    found = compare_replays(split, OfferedLoad(requests=requests, rate=4.0), [quick, slow_later], logs, SLO)
    assert [each.prompts for each in found.slowness] == pytest.approx([1.0, 1.5], rel=0.01)
    assert max(abs(each.error) for each in found.figures()) < 0.02


def moved(timeline, by):
    moments = {moment: at + by for moment, at in timeline.moments.items()}
    return dataclasses.replace(timeline, moments=moments)


def journals(timelines, *, slower):
    """Return the journals of a prefill worker and of an idle decode worker."""
    found = {"prefill-0": [], "decode-0": []}
    for number, timeline in enumerate(timelines):
        prompt = timeline.request.prompt_tokens
        first = timeline.moments[Moment.FIRST_TOKEN]
        began = first - slower * (0.010 + 0.001 * prompt)
        batch = Batch(number, (BatchItem(timeline.request.id, Phase.PREFILL, prompt, 0, True),))
        found["prefill-0"] += iteration(began, first, batch)
    return found


def iteration(start, end, batch):
    return [JournalEntry(start, "next_batch", {}, msgspec.to_builtins(batch)), JournalEntry(end, "complete", {}, [])]


def test_rejects_a_profile_with_other_core_counts(host):
    _, path = host
    with pytest.raises(ConfigurationError, match="4 of 8 cores per worker"):
        twin(ServiceDesign(prefill=1, decode=1), profile(cores=8, threads=4), path.parent).cluster(path)


def test_designs_have_names_and_flags():
    assert (ServiceDesign(prefill=2, decode=1).name, ServiceDesign(colocated=2).name) == ("2P+1D", "colocated 2")
    cold = "--no-enable-prefix-caching"  # as in the simulation
    assert ServiceDesign(prefill=2, decode=1).flags == ["--prefill", "2", "--decode", "1", cold]


def test_simulated_twin_uses_the_batchers_of_the_service(host):
    """A colocated service is simulated with chunked prefill."""
    one, path = host
    design = ServiceDesign(colocated=2)
    made = SimulatedService(design, one, path.parent, CATALOG, kv_capacity_tokens=1600, max_num_seqs=8)
    spec = made.cluster(path)
    assert [(pool.machines, pool.batcher) for pool in spec.pools] == [(2, "chunked-prefill")]
    assert (spec.max_num_batched_tokens, spec.max_num_seqs, spec.kv_capacity_tokens) == (512, 8, 1600)
