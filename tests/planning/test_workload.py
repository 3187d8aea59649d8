"""Workloads for simulations of designs."""

from itertools import pairwise
from statistics import median

import pytest
from msgspec.structs import replace

from support.traces import ask
from twofold.errors import ConfigurationError
from twofold.planning.workload import WHOLE, WorkloadArguments, WorkloadShape
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


def test_an_infinite_cache_leaves_the_tokens_of_new_blocks(tmp_path):
    """Blocks of 512 tokens: the second prompt shares two; a session's second turn shares its first turn."""
    trace, sessions = tmp_path / "blocks.jsonl", tmp_path / "sessions.jsonl"
    asked = [(1, 2, 3), (1, 2, 9)]
    requests = [replace(ask(n, float(n), 1546, 4), prefix_blocks=blocks) for n, blocks in enumerate(asked)]
    write_trace(requests, trace, FORMATS["twofold"])
    assert WorkloadArguments(workload=str(trace)).computed_tokens(512) == (1546 + 1546 - 1024) / 2
    turns = [replace(ask(n, float(n), tokens, 101), session="s") for n, tokens in enumerate((1000, 1300))]
    write_trace(turns, sessions, FORMATS["twofold"])
    assert WorkloadArguments(workload=str(sessions)).computed_tokens(10) == (1000 + 1300 - 1100) / 2


@pytest.fixture(scope="module")
def bursty(tmp_path_factory):
    """Return a trace of 100 requests: 10 in each of 10 minutes, all in the first second of the minute."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    requests = [ask(n, 60.0 * (n // 10) + 0.1 * (n % 10), 100 + n, 10) for n in range(100)]
    write_trace(requests, path, FORMATS["twofold"])
    return WorkloadArguments(workload=str(path), duration_s=11.0, min_requests=1)


def test_parts_of_a_trace_keep_its_bursts_at_every_rate(bursty):
    """A rate scales all times of a trace by one factor."""
    own = 99 / 540.9
    whole = bursty.drawn(WHOLE).requests(10 * own)
    assert [request.arrival_s for request in whole[:11]] == pytest.approx([0.01 * n for n in range(10)] + [6.0])


def test_a_search_uses_a_busy_window(tmp_path):
    """Draw 0 has a high load, of prefill or of decode."""
    path = tmp_path / "trace.jsonl"
    busy = {40: (500, 10), 80: (100, 40)}  # of 100 minutes with a request each second: one with long prompts or outputs
    lengths = [busy.get(second // 60, (100, 10)) for second in range(6000)]
    write_trace([ask(n, float(n), *each) for n, each in enumerate(lengths)], path, FORMATS["twofold"])
    arguments = WorkloadArguments(workload=str(path), duration_s=600.0)
    busy, whole = (WorkloadShape.of(arguments.drawn(draw).requests(1.0)) for draw in (0, WHOLE))
    assert max(busy.prompt_tokens / whole.prompt_tokens, busy.decode_tokens / whole.decode_tokens) > 1.2


def test_a_window_goes_on_at_the_start_of_the_trace(bursty):
    found = replace(bursty, duration_s=1000.0).requests(1.0)
    assert sorted(request.prompt_tokens for request in found) == [100 + n for n in range(100)]
    times = [request.arrival_s for request in found]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] < 100.0


@pytest.mark.parametrize(("count", "parts"), [(2_400, 3), (24_000, 5), (100_000, 12)])
def test_draws_divide_a_trace(tmp_path, count, parts):
    """Each draw has a third of the trace, or less of a long trace, three times; successive ones differ."""
    path = tmp_path / "trace.jsonl"
    write_trace([ask(n, 0.5 * n, 1 + n, 10) for n in range(count)], path, FORMATS["twofold"])
    arguments = WorkloadArguments(workload=str(path))
    drawn = [arguments.drawn(draw).requests(4.0) for draw in range(1, 2 * parts + 1)]
    for first in (0, parts):
        found = sorted(each.prompt_tokens for part in drawn[first : first + parts] for each in part)
        assert found == [1 + n for n in range(count) for _ in range(3)]
    for part in drawn:
        gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(part)]
        assert median(gaps) == pytest.approx(0.25)
        assert 0.0 <= min(gaps) <= max(gaps) <= 0.5  # between blocks
        assert 0.0 <= part[0].arrival_s <= 0.25
        assert len({each.id for each in part}) == len(part)
    assert drawn[0] != drawn[parts]


def test_repeated_requests_of_a_draw_share_no_kv(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [replace(ask(n, 0.5 * n, 900, 10), prefix_blocks=(0, 1 + n)) for n in range(60)]
    write_trace(requests, path, FORMATS["twofold"])
    drawn = WorkloadArguments(workload=str(path)).drawn(1).requests(2.0)
    third = len(drawn) // 3
    keys = [
        {key for each in drawn[at : at + third] for key in each.prefix_blocks} for at in range(0, len(drawn), third)
    ]
    assert len(keys) == 3
    assert all(len(each) == 1 + third for each in keys)
    assert len(set.union(*keys)) == sum(map(len, keys))


def test_draws_of_a_generated_workload_are_seeds():
    assert WorkloadArguments(workload="azure-conv", seed=3).drawn(4).seed == 7


def test_a_trace_has_a_fingerprint(tmp_path):
    """The digest of a trace file depends on its contents; generated workloads have no digest."""
    path, other = tmp_path / "trace.jsonl", tmp_path / "other.jsonl"
    write_trace([ask(index, index * 0.5) for index in range(10)], path, FORMATS["twofold"])
    write_trace([ask(index, index * 0.6) for index in range(10)], other, FORMATS["twofold"])
    digests = {WorkloadArguments(workload=str(each)).digest() for each in (path, other)}
    assert len(digests) == 2
    assert WorkloadArguments(workload="azure-conv").digest() == ""
