"""`twofold route` in front of servers that have OpenAI's API alone: they take and return text."""

import json
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from support.api_client import metric
from support.running_service import ROUTE, running_service
from support.scripted_endpoint import DONE, Drop, Refuse, Send, endpoint, event
from twofold.serving.upstream.client import ServerError, UpstreamChoice

CARD = ({"id": "tiny", "object": "model", "owned_by": "me"},)  # as llama-cpp-python lists its model
STANDARD = {
    *(
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "stream",
        "seed",
    )
}


def texts(*pieces, finish="stop"):
    """Return the chunks of a stream, of which the last one has no text, as llama.cpp sends them."""
    chunks = [{"index": 0, "text": piece, "logprobs": None, "finish_reason": None} for piece in pieces]
    chunks.append({"index": 0, "text": "", "logprobs": None, "finish_reason": finish})
    return [Send(event(id="c", object="text_completion", created=1, model="m", choices=[each])) for each in chunks]


@contextmanager
def routed(model, *scripts):
    """Run scripted servers and a gateway in front of them. Yield its URL and the servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(endpoint(script, models=CARD)) for script in scripts]
        flags = [flag for server in servers for flag in ("--colocated", server.url)]
        route = ("--model", str(model), "--served-model-name", "tiny", "--probe-timeout", "600", *flags)
        _, url = stack.enter_context(running_service(None, *route, program=ROUTE))
        while metric(url, "instance_state") and not all(
            metric(url, f'instance_state{{instance="mixed-{number}",state="up"}}') for number in range(len(servers))
        ):
            pass
        yield url, servers


def post(url, **fields):
    body = {"model": "tiny", "prompt": "Say hello.", "max_tokens": 8, "temperature": 0, **fields}
    path = "chat/completions" if "messages" in fields else "completions"
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=600)


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    with routed(tiny_model_dir("llama"), lambda _: [*texts("Hel", "lo", "."), Send(DONE)]) as made:
        yield made


def test_servers_get_standard_fields_only(plain):
    url, (server,) = plain
    answer = post(url).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Hello.", "stop")
    assert server.bodies[-1].keys() <= STANDARD
    assert server.bodies[-1]["prompt"] == "Say hello."


def test_fields_that_a_request_sets_are_sent(plain):
    url, (server,) = plain
    assert post(url, top_k=3, min_p=0.1).status_code == 200
    assert (server.bodies[-1]["top_k"], server.bodies[-1]["min_p"]) == (3, 0.1)


def test_prompts_of_token_ids_are_refused(plain):
    url, _ = plain
    answer = post(url, prompt=[5, 6, 7])
    assert answer.status_code == 400
    assert "takes no token ids" in answer.json()["error"]["message"]


def test_chats_without_a_limit_are_answered(plain):
    url, (server,) = plain
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()
    assert answer["choices"][0]["message"]["content"] == "Hello."
    assert "Hi" in server.bodies[-1]["prompt"]


def test_stop_strings_are_found(plain):
    url, _ = plain
    assert post(url, stop=["lo"]).json()["choices"][0]["text"] == "Hel"


@pytest.mark.parametrize(
    "field", [{"return_token_ids": True}, {"logprobs": 1}, {"response_format": {"type": "json_object"}}]
)
def test_requests_for_more_than_text_go_to_a_server_as_they_are(plain, field):
    url, (server,) = plain
    post(url, stream=True, **field)
    assert server.bodies[-1].items() >= field.items()


def lost_once(then):
    """Return a script for two servers: the first request is lost after two chunks, the next one gets `then`."""
    asked = []

    def script(_):
        asked.append(1)
        return [*texts("Hel", "lo")[:2], Drop()] if len(asked) == 1 else then

    return script


def test_an_output_that_another_server_repeats_goes_on(tiny_model_dir):
    script = lost_once([*texts("Hel", "lo", "."), Send(DONE)])
    with routed(tiny_model_dir("llama"), script, script) as (url, servers):
        assert post(url).json()["choices"][0]["text"] == "Hello."
        assert [len(server.bodies) for server in servers] == [1, 1]


def test_an_output_that_another_server_does_not_repeat_is_an_error(tiny_model_dir):
    script = lost_once([*texts("Good", " day"), Send(DONE)])
    with routed(tiny_model_dir("llama"), script, script) as (url, _):
        answer = post(url)
        assert answer.status_code == 502
        assert "a different output" in answer.json()["error"]["message"]


def test_a_refusal_is_the_clients(tiny_model_dir):
    refusal = Refuse(422, json.dumps({"error": {"message": "extra fields not permitted"}}).encode())
    with routed(tiny_model_dir("llama"), lambda _: [refusal]) as (url, _):
        answer = post(url, top_k=3)
        assert (answer.status_code, answer.json()["error"]["message"]) == (422, "extra fields not permitted")


def test_text_counts_as_one_output():
    assert UpstreamChoice(text="").text_outputs(0) == []
    (one,) = UpstreamChoice(text="ab", finish_reason="stop").text_outputs(3)
    (again,) = UpstreamChoice(text="ab").text_outputs(7)
    assert (one.index, one.text, one.finish_reason) == (3, "ab", "stop")
    assert one.token_id == again.token_id < 0
    with pytest.raises(ServerError, match="content_filter"):
        UpstreamChoice(text="", finish_reason="content_filter").text_outputs(0)
