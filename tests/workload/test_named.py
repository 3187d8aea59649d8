"""`workload()` builds requests from named workloads and traces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.traces import ask
from twofold.errors import ConfigurationError, WorkloadError
from twofold.workload.rescale import mean_rate
from twofold.workload.source import LENGTHS, generate, workload
from twofold.workload.trace import FORMATS, write_trace


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "ten.jsonl"
    requests = [ask(index, float(index), 100 + index, 10) for index in range(10)]
    write_trace(requests, path, FORMATS["twofold"])
    return str(path)


@given(
    name=st.sampled_from(LENGTHS),
    seed=st.integers(0, 2**32),
    rate=st.floats(0.1, 1000),
    arrival=st.sampled_from([None, "poisson", "gamma", "constant"]),
)
def test_same_seed_gives_the_same_requests(name, seed, rate, arrival):
    """Equal seeds give equal requests; arrival times never decrease, and ids are consecutive."""
    one, two = (list(workload(name, rate=rate, num_requests=20, arrival=arrival, seed=seed)) for _ in range(2))
    assert one == two
    assert [request.id for request in one] == [str(index) for index in range(20)]
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(one))


def test_lengths_do_not_depend_on_arrivals():
    lengths = [
        [(r.prompt_tokens, r.output_tokens) for r in workload("azure-conv", num_requests=50, seed=3, **options)]
        for options in ({"rate": 1.0}, {"rate": 9.0, "arrival": "constant"}, {"rate": 1.0, "burstiness": 0.5})
    ]
    assert lengths[0] == lengths[1] == lengths[2]


def test_duration_ends_a_generated_workload():
    """All requests arrive in less than `duration_s` seconds."""
    requests = list(workload("azure-code", rate=4.0, duration_s=10.0, arrival="constant"))
    assert len(requests) == 40
    assert all(request.arrival_s < 10.0 for request in workload("azure-code", rate=4.0, duration_s=10.0))


def test_burstiness_implies_gamma_arrivals():
    """With the option `burstiness`, arrivals are gamma-distributed by default, as in vLLM's benchmark."""
    options = {"rate": 2.0, "num_requests": 30, "burstiness": 0.3}
    assert list(workload("azure-code", **options)) == list(workload("azure-code", arrival="gamma", **options))


def test_lengths_are_scaled_and_clipped_to_the_context(trace):
    """Prompt plus output tokens stay within `max_model_len` for a named workload and for a trace."""
    for spec, rate in (("azure-conv", 1.0), (trace, None)):
        requests = list(workload(spec, rate=rate, num_requests=10, length_scale=0.5, max_model_len=64))
        assert all(request.prompt_tokens + request.output_tokens <= 64 for request in requests)


def test_trace_is_replayed_at_its_own_times(trace):
    assert [request.arrival_s for request in workload(trace)] == [float(index) for index in range(10)]


def test_trace_is_rescaled_to_a_rate(trace):
    """With the option `rate`, all arrival times of a trace are scaled by one factor to reach this rate."""
    requests = list(workload(trace, rate=4.0, start_s=2.0))
    assert [request.id for request in requests] == list("23456789")
    assert mean_rate(requests) == pytest.approx(4.0)


def test_trace_lengths_combine_with_an_arrival_process(trace):
    """With the option `arrival`, requests of a trace keep their lengths and get new arrival times."""
    own = list(workload(trace, arrival="constant"))
    assert [request.arrival_s for request in own] == [float(index) for index in range(10)]
    faster = list(workload(trace, arrival="constant", rate=2.0, start_s=1.0, duration_s=2.0))
    assert [(r.arrival_s, r.prompt_tokens) for r in faster] == [(0.0, 101), (0.5, 102), (1.0, 103), (1.5, 104)]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("azure-cod", {}, r"nor lengths as in 512\+64 nor one of azure-code, .*\(did you mean azure-code\?\)"),
        ("zebra", {}, "'zebra' is neither a trace file nor lengths .*, distserve-summaries, agent$"),
        ("", {}, "'' is neither a trace file"),
        ("azure-code", {"num_requests": 1}, r"azure-code needs a rate .* \(its trace has 2.57\)"),
        ("azure-code", {"rate": 1.0}, "give a number of requests or a duration"),
        ("azure-code", {"rate": 1.0, "num_requests": 1, "arrival": "trace"}, "has no arrival times"),
        ("azure-code", {"rate": 1.0, "num_requests": 1, "arrival": "pareto"}, "'pareto' is not one of"),
        ("azure-code", {"rate": 1.0, "num_requests": 1, "start_s": 5.0}, "only trace files take a start"),
        ("azure-code", {"rate": 1.0, "num_requests": 1, "seed": -1}, "the seed must be at least 0, not -1"),
        ("azure-code", {"rate": 1.0, "num_requests": 0}, "the number of requests must be at least 1, not 0"),
        ("azure-code", {"rate": 1.0, "duration_s": -1.0}, "the duration must be a positive number, not -1"),
        (
            "azure-code",
            {"rate": 1.0, "num_requests": 1, "length_scale": 0.0},
            "the length scale must be a positive number, not 0",
        ),
        (
            "azure-code",
            {"rate": 1.0, "num_requests": 1, "max_model_len": 0},
            "the context must be at least 2 tokens, not 0",
        ),
    ],
)
def test_rejects_invalid_arguments_at_the_call(spec, options, message):
    with pytest.raises(ConfigurationError, match=message):
        workload(spec, **options)


def test_rejects_invalid_trace_arguments_at_the_call(trace):
    with pytest.raises(WorkloadError, match=r"none\.csv: no such file"):
        workload("none.csv")
    with pytest.raises(ConfigurationError, match="trace, poisson, gamma, constant"):
        workload(trace, arrival="pareto")
    with pytest.raises(ConfigurationError, match="needs gamma arrivals, not the trace's own"):
        workload(trace, burstiness=0.5)
    with pytest.raises(ConfigurationError, match="the duration must be a positive number, not 0"):
        workload(trace, arrival="poisson", duration_s=0.0)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match=r"unknown workload 'azure-convs' \(did you mean azure-conv\?\)"):
        generate("azure-convs", rate=1.0, num_requests=1)
