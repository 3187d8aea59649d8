"""Workloads for simulations of designs."""

import pytest

from support.traces import ask
from twofold.errors import ConfigurationError
from twofold.planning.workload import WorkloadArguments, WorkloadShape
from twofold.workload.trace import FORMATS, write_trace


def test_rates_share_their_random_numbers():
    """Doubling the rate halves the arrival times and keeps prompt and output lengths."""
    arguments = WorkloadArguments(workload="azure-conv", duration_s=20.0, min_requests=1)
    slow, fast = arguments.requests(4.0), arguments.requests(8.0)
    for one, other in zip(slow, fast, strict=False):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert one.arrival_s == pytest.approx(2 * other.arrival_s)


def test_small_rates_are_simulated_for_longer():
    """At low rates, the simulated time is extended until about `min_requests` requests have arrived."""
    arguments = WorkloadArguments(workload="azure-conv", duration_s=10.0, min_requests=300)
    assert len(arguments.requests(0.1)) > 200


def test_the_shape_is_the_mean_of_each():
    shape = WorkloadShape.of([ask(0, 0.0, 10, 3), ask(1, 1.0, 20, 1)])
    assert (shape.prompt_tokens, shape.decode_tokens, shape.context_tokens) == (15.0, 1.0, 11.5)
    assert shape.context == 11.5
    with pytest.raises(ConfigurationError, match="no requests"):
        WorkloadShape.of([])


def test_a_trace_has_a_fingerprint(tmp_path):
    """The digest of a trace file depends on its contents; generated workloads have no digest."""
    path, other = tmp_path / "trace.jsonl", tmp_path / "other.jsonl"
    write_trace([ask(index, index * 0.5) for index in range(10)], path, FORMATS["twofold"])
    write_trace([ask(index, index * 0.6) for index in range(10)], other, FORMATS["twofold"])
    digests = {WorkloadArguments(workload=str(each)).digest() for each in (path, other)}
    assert len(digests) == 2
    assert WorkloadArguments(workload="azure-conv").digest() == ""
