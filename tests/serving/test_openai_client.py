"""Tests of the gateway with the OpenAI Python client."""

import asyncio

import openai
import pytest

from support.flags import COLOCATED, SPLIT
from support.running_gateway import running_app
from support.scripted_service import ScriptedService
from support.tokenizers_for_tests import byte_level
from twofold.serving.gateway.app import GatewaySettings, create_app

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Say something."}]
# Deterministic output of the requested length.
FIXED = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


# Any service with deterministic greedy output and a context of a few hundred tokens can take its place.
@pytest.fixture(scope="module", params=["split", "colocated", "scripted"])
def openai_base_url(request, service):
    """Yield the base URL of a service with separate prefill and decode, of a colocated service, or of a stub."""
    if request.param == "scripted":
        with running_app(create_app(ScriptedService(), byte_level(), GatewaySettings())) as url:
            yield f"{url}/v1"
    else:
        yield f"{service('llama', SPLIT if request.param == 'split' else COLOCATED)}/v1"


@pytest.fixture(scope="module")
def client(openai_base_url):
    with openai.OpenAI(base_url=openai_base_url, api_key="none", max_retries=0, timeout=600) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    (card,) = client.models.list().data
    return card.id


@pytest.fixture(scope="module")
def complete(client, model):
    return lambda **fields: client.completions.create(**{"model": model, "prompt": PROMPT, **FIXED, **fields})


@pytest.fixture(scope="module")
def chat(client, model):
    return lambda **fields: client.chat.completions.create(**{"model": model, "messages": MESSAGES, **FIXED, **fields})


@pytest.fixture
def refusal():
    """Return the type of the error for a field that the service does not support."""
    return "invalid_request_error"


def counts(usage):
    """Return the token usage without the number of cached tokens."""
    # The number of cached tokens depends on earlier requests.
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_served_model_is_listed(client, model):
    assert client.models.retrieve(model).id == model


def test_completion_with_usage(complete):
    answer = complete()
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert complete().choices[0].text == answer.choices[0].text


def test_a_streamed_completion_equals_the_whole_one(complete):
    *chunks, last = complete(stream=True, stream_options={"include_usage": True})
    whole = complete()
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert counts(last.usage) == counts(whole.usage)


def test_chat_completion(chat):
    answer = chat()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24


def test_a_streamed_chat_answer_equals_the_whole_one(chat):
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    whole = chat()
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert counts(last.usage) == counts(whole.usage)


def test_max_completion_tokens_takes_precedence(chat):
    assert chat(max_completion_tokens=5).usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_the_stop_string(complete, stream):
    whole = complete().choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    answer = complete(stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_choice_i_equals_seed_plus_i(complete):
    fields = {"temperature": 1, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    both = complete(n=2, seed=11, **fields)
    alone = [complete(seed=seed, **fields).choices[0].text for seed in (11, 12)]
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens == 48


def test_batched_prompts_equal_single_prompts(complete):
    prompts = [PROMPT, "Prefill reads"]
    together = complete(prompt=prompts).choices
    assert [choice.text for choice in together] == [complete(prompt=prompt).choices[0].text for prompt in prompts]


def test_completion_logprobs_are_parallel_lists(complete):
    logprobs = complete(logprobs=3).choices[0].logprobs
    assert {len(each) for each in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)} == {24}
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_chat_logprobs_bytes_join_to_the_text(chat):
    choice = chat(logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert len(content) == 24
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    said = b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace")
    # The text omits special tokens, the log probabilities include them.
    if not any(entry.token.startswith("<") for entry in content):
        assert said == choice.message.content


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "nonsense"}, openai.NotFoundError, "model"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**7}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_raise_the_clients_exceptions(complete, fields, kind, param, stream):
    with pytest.raises(kind) as raised:
        complete(stream=stream, **fields)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsupported_field_is_refused(complete, refusal, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(stream=stream, suffix="end")
    assert (raised.value.param, raised.value.type) == ("suffix", refusal)


def test_concurrent_streams_are_complete_and_equal(openai_base_url, model):

    async def text(client):
        stream = await client.completions.create(model=model, prompt=PROMPT, stream=True, **FIXED)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario():
        async with openai.AsyncOpenAI(base_url=openai_base_url, api_key="none", timeout=600) as client:
            return await asyncio.gather(*(text(client) for _ in range(8)))

    assert len(set(asyncio.run(scenario()))) == 1


def test_the_service_is_usable_after_a_closed_stream(complete):
    stream = complete(stream=True, max_tokens=100)
    next(iter(stream))
    stream.close()
    assert complete().choices[0].finish_reason == "length"
