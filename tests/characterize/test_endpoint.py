"""Tests of performance measurements through an OpenAI API."""

import pytest

from support.scripted_endpoint import Drop, Refuse, Send, chunk, endpoint, usage, well_behaved
from twofold.characterize.endpoint import EndpointTarget
from twofold.characterize.target import ProbeStream, TargetError
from twofold.errors import ConfigurationError


def stream(prompt=20, output=3, **more):
    return ProbeStream(prompt_tokens=prompt, output_tokens=output, **more)


def test_times_of_all_tokens_are_returned():
    with endpoint() as server:
        times = EndpointTarget(server.url).run([stream(), stream(output=5)])
    assert [len(each.token_times_s) for each in times] == [3, 5]
    assert all(each.token_times_s == sorted(each.token_times_s) for each in times)
    assert all(each.ttft_s > 0 for each in times)


def test_no_prompt_is_sent_twice():
    """All prompts differ, so the server's prefix cache has no hits."""
    with endpoint() as server:
        for _ in range(2):
            EndpointTarget(server.url).run([stream(), stream()])
        prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len({prompt[:4] for prompt in prompts}) == 4


def test_equal_numbers_are_equal_prompts():
    with endpoint() as server:
        again = ProbeStream(prompt_tokens=20, output_tokens=1, after_tokens=1, prompt=0)
        first = ProbeStream(prompt_tokens=20, output_tokens=1, prompt=0)
        one, other = EndpointTarget(server.url).run([first, again])
        assert server.bodies[0]["prompt"] == server.bodies[1]["prompt"]
    assert other.sent_s >= one.token_times_s[0]


def test_a_stream_waits_for_the_others():
    with endpoint() as server:
        late, early = EndpointTarget(server.url).run([stream(output=1, after_tokens=4), stream(output=6)])
    assert late.sent_s >= early.token_times_s[3]


def test_an_unreachable_server_is_one_sentence():
    with pytest.raises(ConfigurationError, match="no OpenAI endpoint can be reached"):
        EndpointTarget("http://127.0.0.1:9")


def test_a_wrong_key_is_one_sentence():
    with endpoint(models_status=401) as server, pytest.raises(ConfigurationError, match="refuses the API key"):
        EndpointTarget(server.url, api_key="wrong")


def test_a_server_that_refuses_prompts_is_one_sentence():
    refusal = Refuse(400, b'{"error": {"message": "at most 16 tokens"}}')
    with (
        endpoint(lambda _: [refusal]) as server,
        pytest.raises(TargetError, match=r"failed on a prompt of 20 tokens: .*at most 16 tokens"),
    ):
        EndpointTarget(server.url).run([stream()])


def test_a_server_that_dies_is_one_sentence():
    with (
        endpoint(lambda _: [Send(chunk()), Drop()]) as server,
        pytest.raises(TargetError, match="failed on a prompt of 20 tokens"),
    ):
        EndpointTarget(server.url).run([stream()])


def test_the_context_of_the_server_is_the_limit():
    with endpoint(models=[{"id": "m", "max_model_len": 512, "root": "/models/m"}]) as server:
        target = EndpointTarget(server.url)
    assert (target.limits.max_model_len, target.limits.remote) == (512, True)
    assert target.endpoint.root == "/models/m"


def test_a_server_that_ends_outputs_early_is_noticed():

    def short(body):
        return [Send(chunk("x", "stop")), Send(usage(20, 1)), *well_behaved(body)[-1:]]

    with endpoint(short) as server, pytest.raises(TargetError, match="ended an output after 1 of 3 tokens"):
        EndpointTarget(server.url).run([stream(output=3), stream(output=1, after_tokens=2)])
