"""How figures of both worlds are compared, and where the knee of a service is."""

import dataclasses

import msgspec
import pytest

from support.hosts import profile
from twofold.batch import Batch, BatchItem
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import ATTAINMENT, Figure, compared, knee, summarised
from twofold.fidelity.service import ServiceDesign, SimulatedService, cluster_of
from twofold.fidelity.worker_log import Slowness, WorkerLog
from twofold.hardware.catalog import load_catalog
from twofold.performance.host_profile import dump_host_profile
from twofold.request import Phase, Request
from twofold.serving.telemetry.journal import JournalEntry
from twofold.slo import Slo
from twofold.timeline import Moment

CATALOG = load_catalog()
SLO = Slo(ttft_s=0.5, tpot_s=0.1)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A profile of two cores, and its file; this machine has two cores as well."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    path = tmp_path / "host.yaml"
    path.write_text(dump_host_profile(profile()))
    return profile(), path


def figure(name, simulated, live, limit):
    return Figure(name=name, calibrated=simulated, simulated=simulated, live=live, limit=limit)


def twin(design, one, directory):
    return SimulatedService(
        design, one, directory, kv_capacity_tokens=64_000, max_num_seqs=64, catalog=CATALOG
    )


def regular(rate):
    """Requests that are all alike: a prefill of 0.11 s, and nine decodes."""
    return [Request(id=str(i), arrival_s=i / rate, prompt_tokens=100, output_tokens=10) for i in range(200)]


def test_an_error_is_let_pass_up_to_its_limit_beyond_the_spread():
    """Replays 10% apart let a simulation be 10% more off than its limit."""
    close = figure("TTFT P50", 1.2, (0.95, 1.05), 0.1)
    assert (close.error, close.spread, close.holds) == (pytest.approx(0.2), pytest.approx(0.1), True)
    assert not figure("TTFT P50", 1.21, (0.95, 1.05), 0.1).holds
    assert not figure("TTFT P50", 0.79, (0.95, 1.05), 0.1).holds


def test_the_spread_is_that_of_two_replays_however_many_there_are():
    """The mean over all pairs: a third replay does not make it wider."""
    assert figure("E2E P50", 1.0, (0.9, 1.1), 0.1).spread == pytest.approx(0.2)
    assert figure("E2E P50", 1.0, (0.9, 1.0, 1.1), 0.1).spread == pytest.approx(0.4 / 3)
    assert figure("E2E P50", 1.0, (1.0,), 0.1).spread == 0.0


def test_attainment_is_compared_in_points():
    """Not relatively: 10% instead of 14% is four points off."""
    attained = figure(ATTAINMENT, 0.10, (0.14, 0.14), 0.05)
    assert (attained.error, attained.holds) == (pytest.approx(-0.04), True)


def test_the_knee_is_what_one_prefill_worker_can_do(host):
    """A prompt takes 0.11 s, so that up to 1/0.11 of them a second are answered in time."""
    one, path = host
    split = twin(ServiceDesign(prefill=1, decode=1), one, path.parent)
    found = knee(split, regular, SLO)
    assert found >= 1 / 0.11
    kept = summarised(split.timelines(regular(found)), SLO)
    beyond = summarised(split.timelines(regular(found * 1.1)), SLO)
    assert kept.slo_attainment >= 0.9 > beyond.slo_attainment


def test_an_slo_that_cannot_be_kept_has_no_knee(host):
    """One sentence instead of a search without end."""
    one, path = host
    with pytest.raises(ConfigurationError, match="widen it"):
        knee(twin(ServiceDesign(colocated=2), one, path.parent), regular, Slo(ttft_s=0.01))


def test_a_service_on_a_slow_host_is_compared_with_its_twin_on_one(host):
    """All that the twin says of a host at two thirds of its speed is met by one that knows the speed, and is not by one
    that does not."""
    one, path = host
    slow = twin(ServiceDesign(prefill=1, decode=1), one, path.parent)
    requests = regular(4.0)
    live = slow.timelines(requests, Slowness(1.5, 1.5))
    logs = {name: WorkerLog(entries) for name, entries in journals(live, slower=1.5).items()}
    found = compared(slow, 4.0, requests, [live, live], logs, SLO)
    assert found.slowness == (pytest.approx((1.5, 1.5), rel=0.01),) * 2
    assert found.holds
    assert not all(each.calibrated_holds for each in found.figures())


def test_each_replay_is_simulated_at_its_own_speed(host):
    """One on a quick host and one on a slow host: the mean of two simulations, not one of a host in between."""
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
    found = compared(split, 4.0, requests, [quick, slow_later], logs, SLO)
    assert [each.prompts for each in found.slowness] == pytest.approx([1.0, 1.5], rel=0.01)
    assert max(abs(each.error) for each in found.figures()) < 0.02


def moved(timeline, by):
    """The same later."""
    moments = {moment: at + by for moment, at in timeline.moments.items()}
    return dataclasses.replace(timeline, moments=moments)


def journals(timelines, *, slower):
    """Those of a prefill and a decode worker that answered these requests one by one, as their clients saw it."""
    found = {"prefill-0": [], "decode-0": []}
    for number, timeline in enumerate(timelines):
        prompt = timeline.request.prompt_tokens
        first = timeline.moments[Moment.FIRST_TOKEN]
        began = first - slower * (0.010 + 0.001 * prompt)
        batch = Batch(number, (BatchItem(timeline.request.id, Phase.PREFILL, prompt, 0, True),))
        found["prefill-0"] += iteration(began, first, batch)
    return found


def iteration(start, end, batch):
    return [
        JournalEntry(start, "next_batch", {}, msgspec.to_builtins(batch)),
        JournalEntry(end, "complete", {}, []),
    ]


def test_a_profile_of_other_workers_is_refused(host):
    """Workers with other cores compute at another speed."""
    _, path = host
    with pytest.raises(ConfigurationError, match="4 of 8 cores each"):
        cluster_of(
            ServiceDesign(prefill=1, decode=1),
            profile(cores=8, threads=4),
            path,
            kv_capacity_tokens=64_000,
            max_num_seqs=64,
        )


def test_designs_have_names_and_flags():
    """Those of `twofold serve`."""
    assert (ServiceDesign(prefill=2, decode=1).name, ServiceDesign(colocated=2).name) == (
        "2P+1D",
        "colocated 2",
    )
    cold = "--no-enable-prefix-caching"  # as in the simulation
    assert ServiceDesign(prefill=2, decode=1).flags == ["--prefill", "2", "--decode", "1", cold]


def test_the_twin_has_the_batchers_of_the_service(host):
    """Colocated workers chunk their prompts, and split ones do not."""
    one, path = host
    twin = cluster_of(ServiceDesign(colocated=2), one, path, kv_capacity_tokens=1600, max_num_seqs=8)
    assert [(pool.machines, pool.batcher) for pool in twin.pools] == [(2, "chunked-prefill")]
    assert (twin.max_num_batched_tokens, twin.max_num_seqs, twin.kv_capacity_tokens) == (512, 8, 1600)
