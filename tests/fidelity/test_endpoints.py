"""`SimulatedEndpoint`, the simulation with which a running service is compared."""

from functools import partial

import msgspec
import pytest

from support.hosts import profile
from support.paced import TIMES
from support.scripted_endpoint import endpoint
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import OfferedLoad, compare_endpoint, fidelity_table, replay_on
from twofold.fidelity.service import Clients, ServiceDesign, SimulatedEndpoint
from twofold.fidelity.worker_log import Slowness
from twofold.hardware.catalog import load_catalog
from twofold.performance.profile import KvLink
from twofold.request import Request
from twofold.slo import Slo

SLO = Slo(ttft_s=5.0, tpot_s=1.0)


def twin(directory, design, **changes):
    """Return a simulated service with known iteration times."""
    made = msgspec.structs.replace(
        profile(), host=None, machine="box", kv_capacity_tokens=50_000, **{"times": TIMES, "link": None, **changes}
    )
    return SimulatedEndpoint(design, made, directory, load_catalog())


def one(prompt=100, output=3):
    return [Request(id="r", arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)]


def test_a_request_reaches_its_instance_later(tmp_path):
    """The time that a request spends outside the engine is added to its TTFT."""
    plain = twin(tmp_path, ServiceDesign(colocated=1)).timelines(one())[0]
    served = twin(tmp_path, ServiceDesign(colocated=1), request_s=0.05).timelines(one())[0]
    assert plain.ttft_s == pytest.approx(TIMES.seconds(100, 100**2, 0, 0))
    assert served.ttft_s == pytest.approx(plain.ttft_s + 0.05)
    assert served.e2e_s == pytest.approx(plain.e2e_s + 0.05)


def test_an_iteration_after_an_idle_time_takes_longer(tmp_path):
    """A decode iteration that follows the prefill at once does not."""
    times = msgspec.structs.replace(TIMES, cold_s=0.2, cold_half_s=2.0)
    cold = twin(tmp_path, ServiceDesign(colocated=1), times=times)
    twice = [*one(), msgspec.structs.replace(one()[0], id="s", arrival_s=6.0)]
    first, second = cold.timelines(twice)
    plain = TIMES.seconds(100, 100**2, 0, 0)
    assert first.ttft_s == pytest.approx(plain + 0.2, rel=0.01)
    assert second.ttft_s == pytest.approx(plain + times.cold_start_s(6.0 - first.e2e_s), rel=0.01)
    assert second.tpot_s == pytest.approx(first.tpot_s)


def test_instances_that_run_at_the_same_time_slow_each_other_down(tmp_path):
    """Prefills by the first factor of the contention, decodes by the second; an instance alone is as fast as before."""
    made = twin(tmp_path, ServiceDesign(colocated=2), request_s=0.05)
    crowded = msgspec.structs.replace(made.profile, host=None).contending(2, 1.5, 1.2)
    (tmp_path / "slowed").mkdir()
    slowed = SimulatedEndpoint(made.design, crowded, tmp_path / "slowed", made.catalog)
    alone, plain = slowed.timelines(one())[0], made.timelines(one())[0]
    assert alone.ttft_s == pytest.approx(plain.ttft_s)
    both = slowed.timelines([*one(), msgspec.structs.replace(one()[0], id="s")])
    assert [each.ttft_s for each in both] == pytest.approx([0.05 + 1.5 * (plain.ttft_s - 0.05)] * 2)
    assert [each.tpot_s for each in both] == pytest.approx([1.2 * plain.tpot_s] * 2)


def test_a_transfer_measured_by_clients_is_all_visible(tmp_path):
    """The KV transfer delays the second token by its whole duration."""
    design = ServiceDesign(prefill=1, decode=1)
    slow, instant = (
        twin(tmp_path, design, link=KvLink(bytes_per_s=speed, latency_s=latency_s, layer_wise=False)).timelines(one())[
            0
        ]
        for speed, latency_s in ((1e7, 0.02), (1e18, 0.0))
    )
    moved_s = 0.02 + 100 * profile().model.kv_bytes_per_token / 1e7
    assert slow.ttft_s == instant.ttft_s
    assert slow.e2e_s - instant.e2e_s == pytest.approx(moved_s, rel=0.05)


def test_prompts_are_chunked_as_in_the_profile(tmp_path):
    chunked = twin(tmp_path, ServiceDesign(colocated=1), max_num_batched_tokens=512)
    (timeline,) = chunked.timelines(one(1000))
    seconds = TIMES.seconds(512, 512**2, 0, 0) + TIMES.seconds(488, 1000**2 - 512**2, 0, 0)
    assert timeline.ttft_s == pytest.approx(seconds, rel=0.01)


def test_a_running_service_is_compared(tmp_path):
    simulated = twin(tmp_path, ServiceDesign(colocated=1))
    with endpoint() as server:
        (found,) = compare_endpoint(
            partial(replay_on, server.url),
            simulated,
            [OfferedLoad(requests=one(), rate=2.0)],
            slo=SLO,
            replays=2,
            on_load=lambda _: None,
        )
    assert [live.completed for live in found.live] == [1, 1]
    assert found.simulated[0].ttft_s.p50 == pytest.approx(TIMES.seconds(100, 100**2, 0, 0))
    assert next(found.figures()).live == (1.0, 1.0)


def test_a_replay_is_simulated_at_the_speed_of_its_host(tmp_path):
    """The speed of the host is measured before the first replay and after each."""
    simulated = twin(tmp_path, ServiceDesign(colocated=1))
    speeds = iter([Slowness(1.0, 1.0), Slowness(2.0, 1.0), Slowness(4.0, 2.0)])
    with endpoint() as server:
        (found,) = compare_endpoint(
            partial(replay_on, server.url),
            simulated,
            [OfferedLoad(requests=one(), rate=2.0)],
            slo=SLO,
            replays=2,
            on_load=lambda _: None,
            slowdowns=lambda: next(speeds),
        )
    assert found.slowness == (Slowness(1.5, 1.0), Slowness(3.0, 1.5))
    plain_s, (first, second) = TIMES.seconds(100, 100**2, 0, 0), found.simulated
    assert found.calibrated.ttft_s.p50 == pytest.approx(plain_s)
    assert (first.ttft_s.p50, second.ttft_s.p50) == pytest.approx((1.5 * plain_s, 3 * plain_s))
    assert second.tpot_s.p50 == pytest.approx(1.5 * first.tpot_s.p50)


@pytest.mark.parametrize(
    ("speeds", "tries", "kept"),
    [
        ([1.0, 1.5, 1.5], 3, 1.5),  # the second load has a steady host
        ([1.0, 1.5, 1.2], 2, 1.35),  # none has, and the second has the smaller change
        ([1.0, 1.5], 1, 1.25),
    ],
)
def test_a_load_on_an_unsteady_host_is_repeated(tmp_path, speeds, tries, kept):
    left = iter(speeds)
    with endpoint() as server:
        (found,) = compare_endpoint(
            partial(replay_on, server.url),
            twin(tmp_path, ServiceDesign(colocated=1)),
            [OfferedLoad(requests=one(), rate=2.0)],
            slo=SLO,
            replays=1,
            on_load=lambda _: None,
            slowdowns=lambda: Slowness(1.0, next(left)),
            tries=tries,
        )
    assert [each.decodes for each in found.slowness] == [pytest.approx(kept)]
    assert next(left, None) is None, "all loads and probes ran"


def test_clients_of_a_closed_loop_wait_for_their_replies(tmp_path):
    """Arrival times have no effect; a client thinks before its next request."""
    simulated = twin(tmp_path, ServiceDesign(colocated=1))
    requests = [*one(), msgspec.structs.replace(one()[0], id="s", arrival_s=50.0)]
    first, second = simulated.timelines(requests, clients=Clients(1, 2.0))
    assert second.request.arrival_s == pytest.approx(first.e2e_s + 2.0)
    assert second.ttft_s == pytest.approx(first.ttft_s)
    both = simulated.timelines(requests, clients=Clients(2))
    assert [each.request.arrival_s for each in both] == [0.0, 0.0]


def test_a_closed_loop_is_compared(tmp_path):
    simulated = twin(tmp_path, ServiceDesign(colocated=1))
    requests = [msgspec.structs.replace(one()[0], id=str(number), arrival_s=1e6 * number) for number in range(4)]
    load = OfferedLoad(requests=requests, clients=Clients(2))
    with endpoint() as server:
        (found,) = compare_endpoint(
            partial(replay_on, server.url), simulated, [load], slo=SLO, replays=1, on_load=lambda _: None
        )
    assert (found.rate, found.concurrency, found.requests) == (None, 2, 4)
    assert found.live[0].completed == found.simulated[0].completed == 4
    alike = msgspec.structs.replace(found, live=found.simulated)
    assert fidelity_table([alike]).columns[0].header == "concurrency"


def test_an_unreachable_service_is_one_sentence(tmp_path):
    simulated = twin(tmp_path, ServiceDesign(colocated=1))
    with pytest.raises(ConfigurationError, match="no OpenAI endpoint can be reached"):
        compare_endpoint(
            partial(replay_on, "http://127.0.0.1:9"),
            simulated,
            [OfferedLoad(requests=one(), rate=2.0)],
            slo=SLO,
            replays=1,
            on_load=lambda _: None,
        )
