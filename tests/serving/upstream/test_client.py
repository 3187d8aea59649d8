"""Requests to vLLM and responses from vLLM; the response bytes were recorded from vLLM 0.32."""

import asyncio
import json

import msgspec
import pytest

from twofold.request import FinishReason, Generation, Request, SamplingParams
from twofold.serving.upstream.client import ServerError, UnavailableError, UpstreamChoice, VllmClient, read_completion
from twofold.serving.upstream.vllm import VllmKind

FIRST = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" POP","logprobs":'
    b'{"text_offset":[0],"token_logprobs":[-2.7],"tokens":["token_id:5377"],"top_logprobs":[{"token_id:5377":-2.7,'
    b'"token_id:3202":-2.9}]},"finish_reason":"length","stop_reason":null,"token_ids":[5377]}],"kv_transfer_params":'
    b'{"do_remote_prefill":true,"remote_block_ids":[[8,9]],"remote_prefill_cached_tokens":128}}'
)
STOPPED = (
    b'{"id":"c","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":5834,'
    b'"prompt_token_ids":[1,2],"token_ids":[17,5834]}]}'
)


def generation(**sampling):
    params = SamplingParams(**{"max_tokens": 8, "seed": 3, **sampling})
    request = Request(id="a~0", arrival_s=0.0, prompt_tokens=3, output_tokens=8)
    return Generation(request=request, prompt_token_ids=[1, 2, 3], sampling=params)


def asked(sampling=None):
    return json.loads(msgspec.json.encode(VllmKind().fields(generation(**(sampling or {})), "m", 5)))


def test_reads_a_prefill_response():
    answer = read_completion(FIRST)
    (token,) = answer.choices[0].outputs(0)
    assert (token.token_id, token.logprob, token.finish_reason) == (5377, -2.7, FinishReason.LENGTH)
    assert token.top_logprobs == ((5377, -2.7), (3202, -2.9))
    assert answer.reused_tokens == 128
    assert answer.kv_transfer_params["remote_block_ids"] == [[8, 9]]


def test_reads_several_tokens_in_an_event():
    """If an event has several tokens, only the last one gets the finish reason."""
    tokens = read_completion(STOPPED).choices[0].outputs(4)
    assert [(token.index, token.token_id, token.finish_reason) for token in tokens] == [
        (4, 17, None),
        (5, 5834, FinishReason.STOP),
    ]


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"prompt_token_ids": [1, 20, 3], "token_ids": [7]}, [1, 20, 3]),
        ({"token_ids": [7], "prompt_token_ids": [5], "text": "]"}, [5]),
        (
            {"text": '"prompt_token_ids":[1,2]', "token_ids": [7], "prompt_token_ids": list(range(9000))},
            list(range(9000)),
        ),
        ({"prompt_token_ids": None, "token_ids": [7]}, None),
        ({"token_ids": [7]}, None),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_reads_the_token_ids_of_a_prompt(choice, ids, separators):
    answer = read_completion(json.dumps({"choices": [choice]}, separators=separators).encode())
    assert answer.choices[0].token_ids == [7]
    assert answer.choices[0].text == choice.get("text")
    assert answer.prompt_tokens == (0 if ids is None else len(ids))
    assert ids is None or json.loads(bytes(answer.prompt_ids)) == ids


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"error":{"message":"KV could not be loaded","type":"x","code":500}}', "KV could not be loaded"),
        (b"<html>", "not a completion"),
        (b'{"choices": 3}', "not a completion"),
    ],
)
def test_rejects_malformed_responses(data, says):
    with pytest.raises(ServerError, match=says):
        read_completion(data)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_rejects_unknown_finish_reasons(reason):
    with pytest.raises(ServerError, match=reason):
        UpstreamChoice(token_ids=[1], finish_reason=reason).outputs(0)


def test_ignores_alternatives_without_a_token_id():
    """The tokenizer of the gateway could not name them."""
    names = ["token_id:7", "token_id:-1", "token_id:x", "token_id:" + "9" * 30, " POP"]
    choice = {"token_ids": [7], "logprobs": {"top_logprobs": [dict.fromkeys(names, -1.0)]}}
    (token,) = read_completion(json.dumps({"choices": [choice]}).encode()).choices[0].outputs(0)
    assert token.top_logprobs == ((7, -1.0),)


def test_every_sampling_field_is_explicit():
    """Requests set every sampling field, because vLLM fills in omitted ones from the model's generation_config.json."""
    fields = asked()
    assert (fields["prompt"], fields["max_tokens"], fields["temperature"]) == ([1, 2, 3], 8, 1.0)
    assert (fields["top_p"], fields["top_k"], fields["min_p"], fields["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert fields["return_token_ids"]
    assert "kv_transfer_params" not in fields


def test_penalties_and_excluded_words_are_passed_on():
    values = {"min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "repetition_penalty": 1.4}
    fields = asked(values | {"logit_bias": ((7, -5.0),), "bad_words": ("no", "never")})
    assert {name: fields[name] for name in values} == values
    assert fields["logit_bias"] == {"7": -5.0}
    assert fields["bad_words"] == ["no", "never"]


def test_seed_is_sent_for_sampled_output_only():
    """Only sampled requests have a seed, because vLLM is faster without a seed."""
    assert asked()["seed"] == 5
    assert "seed" not in asked({"temperature": 0.0})


def test_logprobs_are_requested_by_token_id():
    """Log probabilities are requested by token id, because different tokens can have the same text."""
    fields = asked({"logprobs": 2})
    assert (fields["logprobs"], fields["return_tokens_as_token_ids"]) == (2, True)
    assert "logprobs" not in asked()


@pytest.mark.parametrize("stream", [False, True])
def test_repeats_a_request_on_a_new_connection_when_an_idle_one_was_closed(stream):
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        for number in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
            if number:
                writer.transport.abort()
                return
            data = b"data: " + STOPPED + b"\n\ndata: [DONE]\n\n" if stream else STOPPED
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))

    async def ask(client):
        if stream:
            events = []
            await client.stream(b"{}", events.append)
            return events
        return [await client.complete(b"{}")]

    async def answers():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = VllmClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            answers = [await ask(client) for _ in range(2)]
            client.close()
            for connection in connections:
                connection.transport.abort()
            await asyncio.sleep(0)
            return answers

    assert asyncio.run(answers()) == [[read_completion(STOPPED)]] * 2
    assert len(connections) == 2


def test_redirects_are_not_followed():
    """A redirect would take prompts and the API key to an unknown server."""

    async def scenario():
        visits = []

        async def elsewhere(reader, writer):
            visits.append(writer)
            writer.close()

        async def redirect(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            port = other.sockets[0].getsockname()[1]
            writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\n")
            writer.write(b"Location: http://127.0.0.1:%d/\r\n\r\n" % port)
            writer.close()

        async with (
            await asyncio.start_server(elsewhere, "127.0.0.1", 0) as other,
            await asyncio.start_server(redirect, "127.0.0.1", 0) as server,
        ):
            client = VllmClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(UnavailableError, match="HTTP 307"):
                await client.complete(b"{}")
            with pytest.raises(UnavailableError, match="HTTP 307"):
                await client.get("/health", 600)
        return visits

    assert asyncio.run(scenario()) == []
