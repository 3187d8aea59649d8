"""The load generator sends the turns of a session in order, with the answers to earlier turns."""

import asyncio
from itertools import pairwise

import pytest

from support.scripted_endpoint import DONE, Refuse, Send, endpoint, event, well_behaved
from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import Endpoint
from twofold.bench.load import LoadConfig, run_load
from twofold.bench.prompts import PromptForm, PromptMaker
from twofold.errors import ConfigurationError
from twofold.request import Request

TURNS, ANSWER = 4, 3


def session(name, think_s=0.0):
    return [
        Request(
            id=f"{name}-{turn}",
            arrival_s=0.0,
            prompt_tokens=20 + 10 * turn,
            output_tokens=ANSWER,
            session=name,
            think_s=think_s,
            shared_tokens=12,
        )
        for turn in range(TURNS)
    ]


def answering(body):
    """Return a script that answers with as many token ids, or words, as there are prompts of the session so far."""
    said = body.get("prompt") or [message["content"] for message in body["messages"]]
    size = len(said)
    choices = [{"index": 0, "text": f"t{size}", "token_ids": [size] * ANSWER, "finish_reason": "length"}]
    if "messages" in body:
        choices = [{"index": 0, "delta": {"role": "assistant", "content": f"t{size}"}, "finish_reason": "length"}]
    counts = {"prompt_tokens": size, "completion_tokens": ANSWER, "prompt_tokens_details": {"cached_tokens": size // 2}}
    return [Send(event(choices=choices)), Send(event(choices=[], usage=counts)), Send(DONE)]


def load(scripted, requests, **settings):
    config = LoadConfig(endpoint=Endpoint(base_url=scripted.url, model="scripted"), **settings)
    return asyncio.run(run_load(config, requests))


def test_token_prompts_contain_the_answers():
    with endpoint(answering) as scripted:
        result = load(scripted, session("a"))
    prompts = [body["prompt"] for body in scripted.bodies]
    assert [len(prompt) for prompt in prompts] == [20, 30, 40, 50]
    for before, prompt in pairwise(prompts):
        assert prompt[: len(before) + ANSWER] == before + [len(before)] * ANSWER
    assert all(body["return_token_ids"] for body in scripted.bodies)
    assert result.errors == {}
    assert result.cached_share == pytest.approx(0.5)


def test_sessions_share_their_beginning_only():
    with endpoint(answering) as scripted:
        load(scripted, [session("a")[0], session("b")[0]])
    one, other = (body["prompt"] for body in scripted.bodies)
    assert one[:12] == other[:12]
    assert one[12:] != other[12:]


def test_turns_wait_for_the_answer_and_the_think_time():
    with endpoint(answering) as scripted:
        result = load(scripted, [*session("a", think_s=0.05), *session("b", think_s=0.05)])
    ended_s, sent_s = {}, {}
    for timeline in result.timelines:
        ended_s[timeline.request.id] = timeline.token_times_s[-1]
        sent_s[timeline.request.id] = timeline.token_times_s[0] - timeline.ttft_s
    for name in "ab":
        for turn in range(1, TURNS):
            assert sent_s[f"{name}-{turn}"] >= ended_s[f"{name}-{turn - 1}"] + 0.05


def test_chats_and_texts_contain_the_answers():
    maker = PromptMaker(form=PromptForm.TEXT)
    with endpoint(answering) as scripted:
        load(scripted, session("a"), prompts=maker, client=ClientConfig(chat=True))
        chats = [body["messages"] for body in scripted.bodies]
        load(scripted, session("a"), prompts=maker)
    assert [[message["role"] for message in chat] for chat in chats] == [
        ["user", *["assistant", "user"] * turn] for turn in range(TURNS)
    ]
    for before, chat in pairwise(chats):
        assert chat[: len(before) + 1] == [*before, {"role": "assistant", "content": f"t{len(before)}"}]
    texts = [body["prompt"] for body in scripted.bodies[TURNS:]]
    for before, text in pairwise(texts):
        assert text.startswith(f"{before} t{len(before)} ")


def test_a_failed_turn_does_not_end_the_session():
    def fails_once(body):
        return [Refuse(500)] if len(body["prompt"]) == 30 else answering(body)

    with endpoint(fails_once) as scripted:
        result = load(scripted, session("a"))
    assert result.errors == {"a-1": "HTTP 500"}
    assert [len(body["prompt"]) for body in scripted.bodies] == [20, 30, 40, 50]


def test_an_endpoint_without_token_ids_is_refused():
    with endpoint(well_behaved) as scripted, pytest.raises(ConfigurationError, match="use --prompt-form text"):
        load(scripted, session("a"))
