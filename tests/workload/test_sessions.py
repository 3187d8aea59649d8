"""Sessions: the workload `agent`, and traces with sessions."""

from itertools import groupby, pairwise

import msgspec
import pytest

from support.traces import ask
from twofold.errors import WorkloadError
from twofold.workload.blocks import session_keys
from twofold.workload.sessions import CONTEXT, SHARED_TOKENS, mean_turns
from twofold.workload.source import workload
from twofold.workload.trace import FORMATS, open_trace, write_trace


def agents(**how):
    return list(workload("agent", **{"rate": 3.0, "num_requests": 500, "seed": 2, **how}))


def sessions_of(requests):
    return [list(turns) for _, turns in groupby(requests, key=lambda request: request.session)]


def test_each_turn_extends_the_turn_before_it():
    requests = agents()
    assert requests == agents()
    assert requests != agents(seed=3)
    assert len({request.id for request in requests}) == 500
    for turns in sessions_of(requests):
        assert turns[0].think_s == 0.0
        for before, turn in pairwise(turns):
            assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert turn.think_s > 0.0
            assert turn.arrival_s == before.arrival_s, "no earlier than its session"
        assert all(turn.shared_tokens == SHARED_TOKENS < turn.prompt_tokens <= CONTEXT for turn in turns)


def test_the_rate_counts_turns():
    requests = agents(num_requests=None, duration_s=10_000.0)
    assert len(requests) / 10_000.0 == pytest.approx(3.0, rel=0.1)
    assert len(requests) / len(sessions_of(requests)) == pytest.approx(mean_turns(), rel=0.05)
    assert 10 < mean_turns() < 25


def test_lengths_can_be_scaled_and_turns_beyond_the_context_are_left_out():
    requests = agents(length_scale=0.01, max_model_len=1024)
    assert requests
    assert all(request.prompt_tokens + request.output_tokens <= 1024 for request in requests)
    assert all(request.shared_tokens == 320 for request in requests)
    for turns in sessions_of(requests):
        assert all(b.prompt_tokens >= a.prompt_tokens + a.output_tokens for a, b in pairwise(turns))


def test_keys_of_a_session_continue():
    first, second = agents()[:2]
    other = agents()[-1]
    keys = session_keys(second, second.prompt_tokens, 512)
    assert keys[: first.prompt_tokens // 512] == session_keys(first, first.prompt_tokens, 512)
    assert len(set(keys)) == len(keys) == second.prompt_tokens // 512
    shared = SHARED_TOKENS // 512
    assert session_keys(other, other.prompt_tokens, 512)[:shared] == keys[:shared]
    assert not set(session_keys(other, other.prompt_tokens, 512)[shared:]) & set(keys)


def test_a_trace_keeps_sessions(tmp_path):
    requests = agents(num_requests=50)
    path = tmp_path / "agents.jsonl"
    assert write_trace(requests, path, FORMATS["twofold"]).losses(FORMATS["twofold"]) == []
    assert list(open_trace(path)) == requests
    lost = write_trace(requests, tmp_path / "other.jsonl", FORMATS["mooncake"]).losses(FORMATS["mooncake"])
    assert "the mooncake format has no sessions: 50 requests lost theirs" in lost


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"session": ""}, "either every request of a trace belongs to a session, or none"),
        ({"think_s": -1.0}, "think_s is -1"),
        ({"shared_tokens": 1000}, "shared_tokens is 1000"),
    ],
)
def test_wrong_sessions_are_one_sentence(change, says, tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [msgspec.structs.replace(ask(number), session="a") for number in range(3)]
    requests[1] = msgspec.structs.replace(requests[1], **change)
    write_trace(requests, path, FORMATS["twofold"])
    with pytest.raises(WorkloadError, match=says) as refused:
        list(open_trace(path))
    assert ":2: " in str(refused.value)
