"""A simulated service whose gateway and workers share the CPU cores of a host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hosts import profile
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.performance.profile import HOST, ContentionFactors, GatewayTimes, dump_profile
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate

CATALOG = load_catalog()


class Ends(Observer):
    def __init__(self):
        self.timelines = []

    def ended(self, timeline, now):
        self.timelines.append(timeline)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that simulates requests on one host and returns their TTFTs and E2E latencies."""

    def run(one, requests, *, prefill=1, decode=1, colocated=0, **settings):
        path = tmp_path_factory.mktemp("host") / "host.yaml"
        path.write_text(dump_profile(one))
        counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: 0}
        if colocated:
            counts = {Role.MIXED: colocated}
        pools = tuple(PoolSpec(machines=count, machine=HOST, role=role) for role, count in counts.items() if count)
        spec = ClusterSpec(
            pools=pools, model="small", router="jsq", handoff="layer-wise", profiles=(str(path),), **settings
        )
        made = [
            Request(id=str(number), arrival_s=at, prompt_tokens=prompt, output_tokens=output)
            for number, (at, prompt, output) in enumerate(requests)
        ]
        ends = Ends()
        result = simulate(spec, made, catalog=CATALOG, observers=[ends])
        assert result.completed == len(made)
        assert result.unfinished == 0
        found = sorted(ends.timelines, key=lambda timeline: int(timeline.request.id))
        return [(timeline.ttft_s, timeline.e2e_s) for timeline in found]

    return run


def near(*seconds):
    return pytest.approx(seconds, abs=1e-6)


def test_single_request_takes_the_engine_time(run):
    """On an idle host, the latencies are those of the engine alone."""
    # An iteration takes 10 ms plus 1 ms per token.
    assert run(profile(), [(0.0, 100, 3)]) == [near(0.110, 0.132)]


def test_gateway_adds_time_before_and_after(run):
    """The gateway adds time before the prefill and after each iteration."""
    front = GatewayTimes(
        request_s=0.002, prompt_token_s=1e-5, request_delay_s=0.0005, step_s=0.0002, token_s=0.0005, step_delay_s=0.0008
    )
    ((ttft, e2e),) = run(profile(front=front), [(0.0, 100, 3)])
    assert ttft == pytest.approx(0.0035 + 0.110 + 0.0015)
    # The gateway sends the first token from the core of the prefill worker, so decode is not slowed down.
    assert e2e == pytest.approx(0.0035 + 0.110 + 2 * 0.011 + 0.0015)


def test_workers_on_one_core_take_turns(run):
    """Two workers on one core take twice as long while both run."""
    one, two = run(profile(), [(0.0, 100, 2), (0.110, 50, 2)], prefill=2)
    # prefill-0 and decode-0 are on core 0: the decode of the first request takes turns with the second's prefill.
    assert one == near(0.110, 0.132)
    assert two == near(0.071, 0.082)


def test_sharing_with_the_other_phase_costs_extra(run):
    """The contention factor `shared` slows down a decode that shares a CPU core with a prefill."""
    slower = ContentionFactors(shared=1.1)
    one, _ = run(profile(decode=slower), [(0.0, 100, 2), (0.110, 50, 2)], prefill=2)
    assert one == near(0.110, 0.1342)


def test_busy_neighbour_slows_a_worker_down(run):
    """The contention factor `crowded` slows down two workers that run at the same time on separate cores."""
    slower = ContentionFactors(crowded=1.1, shared=3.0)
    one, two = run(profile(prefill=slower), [(0.0, 100, 1), (0.0, 100, 1)], colocated=2)
    assert one == near(0.121, 0.121)
    assert two == near(0.121, 0.121)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=12))
def test_no_request_is_faster_than_alone(run_many, requests):
    requests = sorted(requests)
    for (_, prompt, output), (ttft, e2e) in zip(requests, run_many(requests), strict=True):
        prefill = 0.010 + prompt * 0.001
        assert ttft >= prefill - 1e-9
        assert e2e >= prefill + (output - 1) * 0.011 - 1e-9


@pytest.fixture(scope="module")
def run_many(run):
    front = GatewayTimes(
        request_s=0.002, prompt_token_s=1e-5, request_delay_s=0.0005, step_s=0.0002, token_s=0.0005, step_delay_s=0.0008
    )
    slower = ContentionFactors(crowded=1.2, shared=1.1)
    one = profile(front=front, prefill=slower, decode=slower)
    return lambda requests: run(one, requests, decode=2)
