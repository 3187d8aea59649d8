"""`/v1/completions` over a real socket."""

import json

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import byte_level
from twofold.errors import InstanceLostError, RequestError
from twofold.request import FinishReason, TokenOutput
from twofold.serving.gateway.gateway import RequestLimits


def ids_of(text):
    return byte_level().backend.encode(text).ids


def say(text, more=()):
    """Return a script for the stub service: the tokens of `text`, then the token ids `more`."""
    return lambda _: [*ids_of(text), *more]


def ask(client, **fields):
    return client.post("/v1/completions", json={"model": "tiny", "prompt": "The fox", **fields})


def test_answer_has_openais_form(complete):
    answer = complete().json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt_tokens = len(ids_of("The fox"))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        # The default of `max_tokens`.
        "completion_tokens": 16,
        "total_tokens": prompt_tokens + 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_servers_tokenize_and_detokenize():
    """A text goes to such servers as it is, unless the answer needs the gateway's own tokens."""
    last = TokenOutput(index=1, token_id=6, text="c", finish_reason=FinishReason.LENGTH)
    service = ScriptedService(lambda _: [TokenOutput(index=0, token_id=5, text="ab", prompt_tokens=7), last])
    service.takes_text = True
    with running_gateway(service) as client:
        answer = ask(client, max_tokens=2).json()
        assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == ("abc", 7)
        assert ask(client, max_tokens=2, stop="bc").json()["choices"][0]["text"] == "a"
        ask(client, max_tokens=2, logprobs=1)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "The fox"}]}
        for limit in ({"max_tokens": 2}, {}):
            client.post("/v1/chat/completions", json=chat | limit)
    sent = [None if each.prompt_text is None else json.loads(each.prompt_text.json) for each in service.started]
    assert sent == ["The fox", "The fox", None, "<|user|>The fox</s><|assistant|>", None]
    assert [bool(each.prompt_token_ids) for each in service.started] == [each is None for each in sent]


def test_servers_get_a_text_as_it_came():
    """Unless its length in characters, which may be fewer than its bytes, decides whether it is within a limit."""
    service = ScriptedService(lambda _: [TokenOutput(index=0, token_id=5, text="a", finish_reason=FinishReason.STOP)])
    service.takes_text = True
    fits = rb'"\u0041\n\" \ud83d\ude00 ' + "é".encode() + b'"'
    escaped, letters = b'"' + rb"\u0041" * 250 + b'"', b'"' + b"A" * 250 + b'"'
    good, bad = (fits, escaped, b'["a","b"]'), (b'"\xff"', rb'"\x"', b"[")
    head = {"content-type": "application/json"}
    with running_gateway(service, limits=RequestLimits(prompt_characters=300)) as client:
        for text in (*good, *bad):
            body = b'{"model":"tiny","max_tokens":2,"prompt":%b}' % text
            answer = client.post("/v1/completions", content=body, headers=head)
            assert answer.status_code == (200 if text in good else 400)
            assert text in good or answer.json()["error"]["code"] == "invalid_json"
    assert [each.prompt_text.json for each in service.started] == [fits, letters, b'"a"', b'"b"']


def test_default_max_tokens_is_clipped_to_the_context(complete):
    assert complete(prompt=[5] * 250).json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"stop": ["e", " t"]}, {"return_token_ids": True}],
)
def test_stream_equals_the_whole_answer(complete, events, fields):
    fields = {"max_tokens": 60, "seed": 5, "prompt": ["The", "fox"], **fields}
    whole = complete(**fields).json()
    *chunks, usage, done = events(complete(**fields, stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert [each for part in mine for each in part.get("token_ids", [])] == choice.get("token_ids", [])
        for key in choice["logprobs"] or {}:
            assert [each for part in mine for each in part["logprobs"][key]] == choice["logprobs"][key]


def test_streams_one_chunk_per_token(complete, events):
    """Each chunk has the usage so far if the request asks for it."""
    options = {"continuous_usage_stats": True}
    chunks = events(complete(max_tokens=9, stream=True, stream_options=options))[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 10))
    assert "usage" not in events(complete(stream=True))[0]


def test_cached_tokens_count_once_per_prompt(events):
    """The cached tokens of a prompt are counted once, not once per choice."""
    reused = [4, 3, 2, 5]

    def script(generation):
        choice = int(generation.request.id.split("-")[-2])
        first = TokenOutput(index=0, token_id=5, reused_tokens=reused[choice])
        return [first, TokenOutput(index=1, token_id=6, finish_reason=FinishReason.LENGTH)]

    with running_gateway(ScriptedService(script)) as client:
        fields = {"prompt": ["The fox", "The dog"], "n": 2}
        whole = ask(client, **fields).json()
        stream = ask(client, **fields, stream=True, stream_options={"include_usage": True})
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3 + 2}
        assert events(stream)[-2]["usage"] == whole["usage"]


def test_choices_do_not_depend_on_other_prompts(complete):
    """The answer to a prompt in a list equals the answer to this prompt alone."""
    fields = {"seed": 7, "max_tokens": 20, "n": 2}
    listed = complete(prompt=["The", "fox"], **fields).json()
    assert [choice["index"] for choice in listed["choices"]] == [0, 1, 2, 3]
    # Choice i of a prompt has seed + i.
    alone = [
        complete(prompt=prompt, seed=seed, max_tokens=20).json()["choices"][0]["text"]
        for prompt in ("The", "fox")
        for seed in (7, 8)
    ]
    assert [choice["text"] for choice in listed["choices"]] == alone
    prompt_tokens = len(ids_of("The")) + len(ids_of("fox"))
    assert listed["usage"]["prompt_tokens"] == prompt_tokens


def test_text_and_token_ids_are_the_same_prompt(complete):
    ids = ids_of("The fox")
    texts = {
        complete(prompt=prompt, seed=1).json()["choices"][0]["text"] for prompt in ("The fox", ["The fox"], ids, [ids])
    }
    assert len(texts) == 1


def test_random_seeds_per_prompt():
    """Prompts without a seed get different random seeds."""
    service = ScriptedService()
    with running_gateway(service) as client:
        ask(client, prompt=[[5], [5]])
        ask(client, seed=-1, n=2)
    first, second, minus_one, wrapped = (each.sampling.seed for each in service.started)
    assert first != second
    # Given seeds are reduced to 63 bits.
    assert (minus_one, wrapped) == (2**63 - 1, 0)


def test_passes_every_sampling_field_to_the_service():
    service = ScriptedService()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_tokens": 2, "ignore_eos": True}
    with running_gateway(service) as client:
        ask(client, **fields, seed=3, stop_token_ids=[9], logprobs=4, max_tokens=5)
        ask(client, prompt="")
    sampling, request = service.started[0].sampling, service.started[0].request
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_tokens) == (0.0, 0.5, 0, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids, sampling.logprobs) == (True, (9,), 4)
    assert (sampling.max_tokens, request.output_tokens, sampling.seed) == (5, 5, 3)
    assert request.prompt_tokens == len(service.started[0].prompt_token_ids)
    assert service.started[1].prompt_token_ids == [byte_level().bos_token_id]


def test_passes_penalties_and_excluded_words_to_the_service():
    service = ScriptedService()
    values = {"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    with running_gateway(service) as client:
        ask(client, **values, logit_bias={"7": -100, "9": 2.5}, bad_words=["fox", " dog"])
        ask(client, **dict.fromkeys((*values, "logit_bias", "bad_words")))
    sampling, plain = (each.sampling for each in service.started)
    assert {name: getattr(sampling, name) for name in values} == values
    assert sampling.logit_bias == ((7, -100.0), (9, 2.5))
    # At the start of a text, and after a space.
    assert {byte_level().decode(ids, skip_special_tokens=False) for ids in sampling.bad_word_ids} == {
        "fox",
        " fox",
        " dog",
    }
    assert not plain.needs_history
    assert (plain.logit_bias, plain.min_p) == ((), 0.0)


def test_best_of_returns_the_likeliest():
    """The answers of each prompt with the highest mean log probability are returned, and usage counts all of them."""
    likely = {0: -3.0, 1: -1.0, 2: -2.0, 3: -4.0, 4: -5.0, 5: -0.5}

    def script(generation):
        number = int(generation.request.id.rsplit("-", 2)[1])
        token = ids_of("abcdef"[number])[0]
        return [TokenOutput(index=0, token_id=token, logprob=likely[number], finish_reason=FinishReason.LENGTH)]

    with running_gateway(ScriptedService(script)) as client:
        answer = ask(client, prompt=["x", "y"], n=2, best_of=3, max_tokens=1).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "b"),
        (1, "c"),
        (2, "f"),
        (3, "d"),
    ]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 6


def test_an_echo_alone_has_no_output():
    with running_gateway(ScriptedService()) as client:
        answer = ask(client, echo=True, max_tokens=0, n=1, best_of=2).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The fox", "length")
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "fields", [{"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}, {"best_of": 129}, {"max_tokens": 0}]
)
def test_refuses_contradictions(fields):
    with running_gateway(ScriptedService()) as client:
        answer = ask(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("best_of", "max_tokens")


def test_stop_strings_match_across_tokens():
    """The text ends before the stop string, but usage includes the stop string's tokens."""
    service = ScriptedService(say("The quick brown fox jumps over the lazy dog.", [5] * 50))
    with running_gateway(service) as client:
        answer = ask(client, stop=["fox ju", "zzz"], max_tokens=100).json()
        service.wait_until(lambda service: service.finished)
        assert not service.aborted, "a stop string is an end, not an abort"
        kept = ask(client, stop="fox ju", max_tokens=100, include_stop_str_in_output=True).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The quick brown ", "stop")
    assert kept["choices"][0]["text"] == "The quick brown fox ju"
    counted = ids_of("The quick brown fox jumps")[: answer["usage"]["completion_tokens"]]
    said = byte_level().decode(counted, skip_special_tokens=True)
    assert "fox ju" not in byte_level().decode(counted[:-1], skip_special_tokens=True)
    assert "fox ju" in said


def test_min_tokens_delays_stop_strings():
    """A stop string within the first `min_tokens` tokens is ignored."""
    with running_gateway(ScriptedService(say("the the the", [EOS]))) as client:
        tokens = len(ids_of("the"))
        answer = ask(client, stop="the", min_tokens=tokens).json()
    assert answer["choices"][0]["text"] == "the "


def test_the_stop_token_is_counted_but_not_shown():
    with running_gateway(ScriptedService(say("the dog", [EOS]))) as client:
        answer = ask(client, skip_special_tokens=False).json()
        shown = ask(client, skip_special_tokens=False, include_stop_str_in_output=True).json()
        stopped = ask(client, stop_token_ids=[ids_of("the dog")[-1]]).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("the dog", "stop")
    assert answer["usage"]["completion_tokens"] == len(ids_of("the dog")) + 1
    assert shown["choices"][0]["text"] == "the dog</s>"
    assert stopped["choices"][0]["text"] == byte_level().decode(ids_of("the dog")[:-1], skip_special_tokens=True)


def test_completion_logprobs():
    """The log probabilities of a completion have one entry per output token."""
    script = [
        TokenOutput(index=0, token_id=ids_of("the")[0], logprob=-0.5, top_logprobs=((3, -0.1), (4, float("-inf")))),
        TokenOutput(index=1, token_id=ids_of("😀")[0], logprob=-1.5, top_logprobs=((3, -0.1),)),
        TokenOutput(index=2, token_id=EOS, logprob=float("nan"), finish_reason=FinishReason.STOP),
    ]
    with running_gateway(ScriptedService(lambda _: script)) as client:
        logprobs = ask(client, logprobs=2).json()["choices"][0]["logprobs"]
    names = byte_level().bytes.name_of
    first = names(script[0].token_id)
    half = names(script[1].token_id)
    assert half.startswith("bytes:\\xf0")
    assert logprobs["tokens"] == [first, half, "</s>"]
    assert logprobs["token_logprobs"] == [-0.5, -1.5, -9999.0]
    assert logprobs["text_offset"] == [0, len(first), len(first)]
    assert logprobs["top_logprobs"][0] == {names(3): -0.1, names(4): -9999.0, first: -0.5}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("too long", param="prompt"), 400, "invalid_request_error"),
        (RequestError("overloaded", status=429), 429, "rate_limit_error"),
        (InstanceLostError("gone"), 503, "server_error"),
        (OSError("secret detail"), 500, "server_error"),
    ],
)
def test_errors_before_the_first_token_are_http_errors(stream, error, status, kind, caplog):
    """The error status is the same with and without streaming."""
    with running_gateway(ScriptedService(lambda _: [error])) as client:
        response = ask(client, stream=stream, n=2)
        assert client.get("/health").status_code == 200
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert ("secret detail" in caplog.text) == (status == 500)


@pytest.mark.parametrize("error", [InstanceLostError("gone"), OSError("secret detail")])
def test_errors_after_the_first_token_end_the_stream(error, events, caplog):
    """The stream ends with an error event and without [DONE]."""
    with running_gateway(ScriptedService(lambda _: [5, 6, error])) as client:
        *chunks, last = events(ask(client, stream=True))
        assert ask(client).status_code in (500, 503)
    assert len(chunks) == 2
    assert last["error"]["type"] == "server_error"


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_truncated_generation_is_an_error(reason):
    script = [5, TokenOutput(index=1, token_id=5, finish_reason=reason)]
    with running_gateway(ScriptedService(lambda _: script)) as client:
        assert ask(client).status_code == 503


def test_token_ids_without_a_tokenizer():
    with running_gateway(ScriptedService(model=served_model(vocab_size=10)), tokenizer=False) as client:
        answer = ask(client, prompt=[1, 2], return_token_ids=True, logprobs=0, max_tokens=3).json()["choices"][0]
        refused = [ask(client), ask(client, prompt=[1], stop="a")]
    assert answer["text"] == ""
    assert answer["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in answer["token_ids"]]
    assert [response.json()["error"]["param"] for response in refused] == ["prompt", "stop"]
