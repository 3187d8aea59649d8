"""The real OpenAI client against the gateway.

Nothing here knows what the model says: any service whose greedy output is repeatable, whose vocabulary is the
tokenizer's and whose context holds a few hundred tokens passes. `openai_base_url` decides which one it is.
"""

import asyncio

import openai
import pytest

from support.flags import COLOCATED, SPLIT
from support.running_gateway import running_app
from support.scripted_service import ScriptedService
from support.tokenizers_for_tests import byte_level
from twofold.serving.gateway.app import create_app

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Say something."}]
# The same tokens every time, and as many as asked for.
FIXED = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module", params=["split", "colocated", "scripted"])
def openai_base_url(request, service):
    """The address of the API, with its /v1: two real services, and the gateway in front of a scripted one."""
    if request.param == "scripted":
        with running_app(create_app(ScriptedService(), byte_level(), keys=None)) as url:
            yield f"{url}/v1"
    else:
        yield f"{service('llama', SPLIT if request.param == 'split' else COLOCATED)}/v1"


@pytest.fixture(scope="module")
def client(openai_base_url):
    with openai.OpenAI(base_url=openai_base_url, api_key="none", max_retries=0, timeout=300) as client:
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
    return lambda **fields: client.chat.completions.create(
        **{"model": model, "messages": MESSAGES, **FIXED, **fields}
    )


def counts(usage):
    """What an answer used; whether its prompt was in a cache depends on who asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_models(client, model):
    """The served model can be looked up by its name."""
    assert client.models.retrieve(model).id == model


def test_completion(complete):
    """A whole completion with its usage."""
    answer = complete()
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert complete().choices[0].text == answer.choices[0].text


def test_completion_stream(complete):
    """A stream says what the whole answer says, and ends with the usage."""
    *chunks, last = complete(stream=True, stream_options={"include_usage": True})
    whole = complete()
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert counts(last.usage) == counts(whole.usage)


def test_chat(chat):
    """A whole chat answer."""
    answer = chat()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24


def test_chat_stream(chat):
    """A streamed chat answer begins with the role and says what the whole one says."""
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    whole = chat()
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert counts(last.usage) == counts(whole.usage)


def test_max_completion_tokens(chat):
    """The newer name of max_tokens counts where both are given."""
    assert chat(max_completion_tokens=5).usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop(complete, stream):
    """The text ends before the stop string, wherever in a token it begins."""
    whole = complete().choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    answer = complete(stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_seeded_choices(complete):
    """n=2 gives two choices; choice i is what the seed + i gives alone."""
    fields = {"temperature": 1, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    both = complete(n=2, seed=11, **fields)
    alone = [complete(seed=seed, **fields).choices[0].text for seed in (11, 12)]
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens == 48


def test_lists_of_prompts(complete):
    """Prompts in a list are answered as they are alone."""
    prompts = [PROMPT, "Prefill reads"]
    together = complete(prompt=prompts).choices
    assert [choice.text for choice in together] == [
        complete(prompt=prompt).choices[0].text for prompt in prompts
    ]


def test_completion_logprobs(complete):
    """Log probabilities per token, in parallel lists."""
    logprobs = complete(logprobs=3).choices[0].logprobs
    assert {len(each) for each in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)} == {24}
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_chat_logprobs(chat):
    """Log probabilities per token, with bytes that join to the text."""
    choice = chat(logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert len(content) == 24
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    said = b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace")
    # The text leaves special tokens out; the log probabilities have them.
    if not any(entry.token.startswith("<") for entry in content):
        assert said == choice.message.content


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "nonsense"}, openai.NotFoundError, "model"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 10**7}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"echo": True}, openai.BadRequestError, "echo"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(complete, fields, kind, param, stream):
    """The client raises the exception that belongs to the mistake, and its message helps."""
    with pytest.raises(kind) as raised:
        complete(stream=stream, **fields)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_async_client(openai_base_url, model):
    """Many streams at once through the asynchronous client, each whole and alike."""

    async def text(client):
        stream = await client.completions.create(model=model, prompt=PROMPT, stream=True, **FIXED)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario():
        async with openai.AsyncOpenAI(base_url=openai_base_url, api_key="none", timeout=300) as client:
            return await asyncio.gather(*(text(client) for _ in range(8)))

    assert len(set(asyncio.run(scenario()))) == 1


def test_a_stream_that_is_closed(complete):
    """A client that closes a stream leaves the service ready for the next."""
    stream = complete(stream=True, max_tokens=100)
    next(iter(stream))
    stream.close()
    assert complete().choices[0].finish_reason == "length"
