"""Execution of one request on a prefill and a decode server, both scripted."""

import asyncio
import json
import time
from contextlib import ExitStack

import msgspec
import pytest

from support.scripted_endpoint import DONE, Drop, Hang, Refuse, Send, endpoint, event
from twofold.instance import Role
from twofold.request import Constraint, ConstraintKind, FinishReason, Generation, PromptText, Request, SamplingParams
from twofold.serving.upstream.client import RejectedError, ServerModel, VllmClient
from twofold.serving.upstream.config import ServerConfig
from twofold.serving.upstream.requests import AttemptLostError, UpstreamRequest, seed_of
from twofold.serving.upstream.servers import Server

KV = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_prefill_cached_tokens": 2}


def whole(*tokens, finish="length", kv=KV):
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}
    return [Send(json.dumps({"choices": [choice], "kv_transfer_params": kv}).encode())]


def chunk(*tokens, finish=None):
    return Send(event(choices=[{"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}]))


def stream(*chunks):
    return [*chunks, Send(DONE)]


class Events:
    """Stub of the controller that records the events of a request."""

    def __init__(self):
        self.tokens, self.reused, self.arrivals = [], 0, 0
        self.prompt, self.texts, self.runs = None, [], []

    def tokenized(self, attempt_id, prompt_ids, tokens):
        assert not self.tokens, "before the first token"
        self.prompt = (json.loads(bytes(prompt_ids) or b'""'), tokens)

    def prefill_started(self, attempt_id, at_s):
        self.started_s = at_s

    def token(self, attempt_id, output, instance, started_s, now):
        self.tokens.append((output.index, output.token_id, instance))
        self.reused += output.reused_tokens
        self.texts.append((output.text, output.prompt_tokens))
        self.finish = output.finish_reason

    def token_run(self, attempt_id, run, instance, started_s, now):
        self.runs.append(len(run.token_ids))
        for output in run.outputs():
            self.token(attempt_id, output, instance, started_s, now)

    def handed_off(self, attempt_id, started_s, ended_s):
        assert started_s <= ended_s
        self.arrivals += 1


@pytest.fixture
def attempt():
    """Return a function that runs one LLM request on scripted servers. The function returns the events of
    the request, the raised error or None, and the HTTP request bodies that each server received.
    """

    def run(prefill, decode=None, max_tokens=4, seed=0, known=(), server_fields=None, text=None, **sampled):
        heard, raised = Events(), None

        async def scenario(urls):
            prompt = [5, 6, *known]
            request = Request(id="a~0", arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=max_tokens)
            sampling = SamplingParams(max_tokens=max_tokens, seed=seed, resumed_tokens=len(known), **sampled)
            generation = Generation(
                request=request,
                prompt_token_ids=[] if text else prompt,
                prompt_text=text,
                sampling=sampling,
                server_fields=server_fields or {},
            )
            later = set()
            servers = []
            for name, url in zip(("p", "d"), urls, strict=False):
                config = ServerConfig(instance=name, role=Role.MIXED, url=url)
                servers.append(Server(config, VllmClient(url), 1.0))
                servers[-1].card = ServerModel("m", 100)
            begin = lambda what: later.add(asyncio.ensure_future(what))  # noqa: E731
            exchange = UpstreamRequest(generation, len(known), servers[0], servers[-1], heard, begin)
            try:
                await exchange.run()
            finally:
                await asyncio.gather(*later)
                for server in servers:
                    server.client.close()

        with ExitStack() as running:
            scripts = (prefill,) if decode is None else (prefill, decode)
            made = [running.enter_context(endpoint(lambda _, steps=steps: steps)) for steps in scripts]
            try:
                asyncio.run(scenario([each.url for each in made]))
            except (AttemptLostError, RejectedError) as error:
                raised = error
            return heard, raised, [each.bodies for each in made]

    return run


def test_the_first_token_comes_from_the_prefill(attempt):
    heard, raised, (asked, fetched) = attempt(whole(7), stream(chunk(7), chunk(8, 9), chunk(10, finish="length")))
    assert raised is None
    assert heard.tokens == [(0, 7, "p"), (1, 8, "d"), (2, 9, "d"), (3, 10, "d")]
    assert (heard.finish, heard.reused, heard.arrivals) == (FinishReason.LENGTH, 2, 1)
    assert (asked[0]["max_tokens"], asked[0]["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert (fetched[0]["max_tokens"], fetched[0]["kv_transfer_params"]) == (4, KV)
    assert asked[0]["seed"] == fetched[0]["seed"], "so that both draw the same token"


def test_a_prefill_requests_one_token(attempt):
    """A prefill request sets both `max_tokens` and `min_tokens` to 1."""
    _, _, (asked, fetched) = attempt(whole(7), stream(chunk(7), chunk(8, 9), chunk(10, finish="length")), min_tokens=3)
    assert (asked[0]["max_tokens"], asked[0]["min_tokens"]) == (1, 1)  # vLLM requires min_tokens <= max_tokens
    assert asked[0]["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert fetched[0]["min_tokens"] == 3


def test_a_prefill_server_reports_its_queue(attempt):
    """The prefill begins after the time in the queue that vLLM reports with --enable-per-request-metrics."""
    answer = json.loads(whole(7)[0].data) | {"metrics": {"queue_time_ms": 5e8, "speculative_decoding": None}}
    heard, raised, _ = attempt(
        [Send(json.dumps(answer).encode())], stream(chunk(7), chunk(8, 9), chunk(10, finish="length"))
    )
    assert raised is None
    assert heard.started_s - time.monotonic() > 4e5


def test_a_different_first_token_on_decode_loses_the_attempt(attempt):
    """It is an error if the prefill and the decode server generate different first tokens."""
    heard, raised, _ = attempt(whole(7), stream(chunk(8), chunk(9)))
    assert heard.tokens == [(0, 7, "p")]
    assert not raised.unavailable  # both servers stay available
    assert "another first token" in str(raised)


def test_one_output_token_needs_no_handoff(attempt):
    heard, raised, (asked, fetched) = attempt(stream(chunk(7, finish="length")), [], max_tokens=1)
    assert (heard.tokens, raised, fetched) == ([(0, 7, "p")], None, [])
    assert "kv_transfer_params" not in asked[0]


def test_an_output_that_ends_at_the_first_token_releases_the_kv(attempt):
    heard, raised, (_, refused) = attempt(whole(7, finish="stop"), [Refuse(400)])
    assert (heard.tokens, heard.finish, raised) == ([(0, 7, "p")], FinishReason.STOP, None)
    assert refused[0]["kv_transfer_params"] == KV
    assert refused[0]["max_tokens"] > 10**6


def test_one_server_for_both_phases(attempt):
    """If one server runs both phases, it gets a single request, without KV transfer parameters."""
    heard, raised, (asked,) = attempt(stream(chunk(7), chunk(8, finish="stop")))
    assert (heard.tokens, raised) == ([(0, 7, "p"), (1, 8, "p")], None)
    assert "kv_transfer_params" not in asked[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "where", "unavailable", "status"),
    [
        ([Drop()], [], "p", True, 502),
        ([Refuse(500)], [], "p", False, 500),
        ([Refuse(429)], [], "p", False, 429),
        ([Refuse(307)], [], "p", False, 307),
        (whole(7, kv=None), [], "p", False, 502),
        (whole(), [], "p", False, 502),
        (whole(7), [chunk(7), chunk(8), Drop()], "d", True, 502),
        (whole(7), [chunk(7), chunk(8)], "d", True, 502),
        (whole(7), stream(chunk(7), chunk(8)), "d", False, 502),
        (whole(7), stream(Send(event(error={"message": "KV lost"}))), "d", False, 502),
        (whole(7), stream(chunk(7), chunk(8, finish="abort")), "d", False, 502),
        (whole(7), [Refuse(503)], "d", False, 503),
        (whole(-7), [], "p", False, 502),
        (whole(1 << 32), [], "p", False, 502),
        (whole(7), stream(chunk(7), chunk(-8)), "d", False, 502),
    ],
)
def test_errors_lose_the_attempt(attempt, prefill, decode, where, unavailable, status):
    """Every failure of a server raises AttemptLostError. A status alone does not make the server unavailable."""
    _, raised, _ = attempt(prefill, decode)
    assert isinstance(raised, AttemptLostError)
    assert (raised.instance, raised.unavailable, raised.status) == (where, unavailable, status)


def test_a_disconnect_after_the_last_token_is_ignored(attempt):
    heard, raised, _ = attempt([chunk(7), chunk(8, finish="length"), Drop()], max_tokens=2)
    assert ([token for _, token, _ in heard.tokens], raised) == ([7, 8], None)


@pytest.mark.parametrize(
    "steps",
    [
        [chunk(7), chunk(8), chunk(9), Hang()],
        [chunk(7, 8, 9, 10), Hang()],
        [chunk(7), chunk(8), Hang()],
        [chunk(7), chunk(8), Drop()],
    ],
)
def test_a_server_that_exceeds_max_tokens_is_cut_off(attempt, steps):
    for scripts in ((steps,), (whole(7), steps)):
        heard, raised, _ = attempt(*scripts, max_tokens=2)
        assert ([token for _, token, _ in heard.tokens], heard.finish, raised) == ([7, 8], FinishReason.LENGTH, None)


def test_tokens_after_the_last_one_are_ignored(attempt):
    heard, raised, _ = attempt([chunk(7), chunk(8, finish="stop"), chunk(9), Hang()])
    assert ([token for _, token, _ in heard.tokens], heard.finish, raised) == ([7, 8], FinishReason.STOP, None)


def test_a_rejected_request_is_not_retried(attempt):
    """A server's 400 response raises RejectedError."""
    _, raised, _ = attempt([Refuse(400)], [])
    assert isinstance(raised, RejectedError)
    assert (raised.status, str(raised)) == (400, "refused by the script")


PENALIZED = {"presence_penalty": 1.0}
CONSTRAINED = {"constraint": Constraint(ConstraintKind.REGEX, "[a-z]+")}
UNKNOWN = {"server_fields": {"vllm_xargs": msgspec.Raw(b'{"a":1}')}}


@pytest.mark.parametrize("fields", [PENALIZED, CONSTRAINED, UNKNOWN])
def test_outputs_that_depend_on_their_beginning_are_generated_again(attempt, fields):
    """A server cannot continue such an output after tokens in its prompt, so it generates them once more."""
    decoded = stream(chunk(7), chunk(8, 9), chunk(10, finish="length"))
    heard, raised, (asked, fetched) = attempt(whole(7), decoded, max_tokens=2, seed=3, known=(7, 8), **fields)
    assert raised is None
    assert heard.tokens == [(0, 9, "d"), (1, 10, "d")]
    assert [each["prompt"] for each in (asked[0], fetched[0])] == [[5, 6]] * 2
    assert fetched[0]["max_tokens"] == 4
    assert asked[0]["seed"] == fetched[0]["seed"] == 3, "the same tokens are drawn"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(whole(6), [Refuse(400)]), (whole(7), stream(chunk(7, 6))), (whole(7), stream(chunk(7), chunk(8, finish="stop")))],
)
def test_another_output_than_before_ends_the_request(attempt, prefill, decode):
    heard, raised, _ = attempt(prefill, decode, known=(7, 8), **PENALIZED)
    assert isinstance(raised, RejectedError)
    assert (raised.status, heard.tokens) == (502, [])


def test_other_outputs_continue_after_their_tokens(attempt):
    fields = {"allowed_token_ids": msgspec.Raw(b"[9,10]"), "user": msgspec.Raw(b'"me"')}
    decoded = stream(chunk(9), chunk(10, finish="stop"))
    heard, raised, (asked, _) = attempt(whole(9), decoded, known=(7, 8), server_fields=fields)
    assert (heard.tokens, raised) == ([(0, 9, "p"), (1, 10, "d")], None)
    assert (asked[0]["prompt"], asked[0]["allowed_token_ids"], asked[0]["user"]) == ([5, 6, 7, 8], [9, 10], "me")


TEXT = PromptText(json=b'"he is"', add_special_tokens=True, skip_special_tokens=False)


def said(text, *tokens, prompt=None, finish=None):
    choice = {"index": 0, "text": text, "token_ids": tokens, "prompt_token_ids": prompt, "finish_reason": finish}
    return {"choices": [choice]}


def test_a_server_tokenizes_a_text(attempt):
    """The server's text goes to the client, and the token ids of the prompt are known for a replay."""
    events = said("a", 7, prompt=[3, 4, 5]), said("bc", 8, 9), said("d", 10, finish="length")
    heard, raised, (asked,) = attempt([*(Send(event(**each)) for each in events), Send(DONE)], text=TEXT)
    assert raised is None
    assert asked[0]["prompt"] == "he is"
    assert (asked[0]["add_special_tokens"], asked[0]["skip_special_tokens"]) == (True, False)
    assert heard.prompt == ([3, 4, 5], 3)
    assert heard.texts == [("a", 3), ("", 0), ("bc", 0), ("d", 0)]


def test_a_server_that_ends_a_text_with_one_token_tells_no_token_ids(attempt):
    """They would only serve to continue the output on another server."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    answer = Send(json.dumps({**said("a", finish="length"), "usage": usage}).encode())
    heard, raised, (asked,) = attempt([answer], text=TEXT, max_tokens=1)
    assert (raised, heard.texts, heard.finish) == (None, [("a", 3)], FinishReason.LENGTH)
    assert (asked[0]["stream"], asked[0]["return_token_ids"]) == (False, False)
    assert heard.prompt == ("", 3)
    for wrong in ({"choices": []}, {**said("a b", finish="stop"), "usage": {"completion_tokens": 2}}):
        heard, raised, _ = attempt([Send(json.dumps(wrong).encode())], text=TEXT, max_tokens=1)
        assert isinstance(raised, AttemptLostError)
        assert not heard.tokens


def together(*events):
    """Return a stream that sends all events at once."""
    return [Send(b"".join(event(**each) for each in events) + DONE)]


def test_tokens_that_arrive_together_are_passed_on_together(attempt):
    """The first and the last token pass alone, and so do tokens of one event."""
    middle = [said(text, 8 + place) for place, text in enumerate("bcd")]
    events = said("a", 7, prompt=[3, 4, 5]), *middle, said("ef", 11, 12), said("g", 13), said("h", 14, finish="stop")
    heard, raised, _ = attempt(together(*events), text=TEXT, max_tokens=20)
    assert (raised, heard.runs) == (None, [3, 1])
    assert [token for _, token, _ in heard.tokens] == list(range(7, 15))
    assert [index for index, _, _ in heard.tokens] == list(range(8))
    assert "".join(text for text, _ in heard.texts) == "abcdefgh"
    assert heard.finish is FinishReason.STOP


@pytest.mark.parametrize("most", [2, 3, 5])
def test_tokens_beyond_the_limit_are_cut_from_those_that_arrive_together(attempt, most):
    events = said("a", 7, prompt=[3, 4, 5]), *(said("b", 8) for _ in range(8))
    heard, raised, _ = attempt(together(*events), text=TEXT, max_tokens=most)
    assert raised is None
    assert [token for _, token, _ in heard.tokens] == [7, *[8] * (most - 1)]
    assert heard.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    "invalid",
    [
        event(choices=[{"text": "c", "token_ids": [-3]}]),
        b'data: {"choices":[{"text":"\xff","token_ids":[3]}]}\n\n',
        b'data: {"kv_transfer_params":' + b'{"a":' * 100_000 + b"\n\n",
        event(error={"message": "broken"}),
    ],
)
def test_tokens_before_an_invalid_event_are_passed_on(attempt, invalid):
    before = [event(**each) for each in (said("a", 7, prompt=[3, 4, 5]), said("b", 8), said("b", 9))]
    sent = b": a comment\n\n".join([*before, invalid, event(**said("d", 10))])
    heard, raised, _ = attempt([Send(sent + DONE)], text=TEXT, max_tokens=20)
    assert isinstance(raised, AttemptLostError)
    assert [token for _, token, _ in heard.tokens] == [7, 8, 9]


def test_tokens_that_arrive_together_must_equal_the_known_ones(attempt):
    """Penalties depend on the whole output, so a replay begins anew; the gateway has no prompt as text then."""
    events = [said("x", token) for token in (7, 8, 9, 10)]
    heard, raised, _ = attempt(together(*events, said("", 11, finish="stop")), known=(7, 8), presence_penalty=1.0)
    assert (raised, heard.runs) == (None, [])
    assert [token for _, token, _ in heard.tokens] == [9, 10, 11]
    assert [text for text, _ in heard.texts] == [None, None, None], "the gateway detokenizes"
    _, raised, _ = attempt(together(*events), known=(7, 6), presence_penalty=1.0)
    assert isinstance(raised, RejectedError)


def test_the_decode_server_gets_the_token_ids_of_a_text(attempt):
    prefill = Send(json.dumps({**said("a", 7, prompt=[3, 4, 5], finish="length"), "kv_transfer_params": KV}).encode())
    decode = [said("a", 7, prompt=[3, 4, 5]), said("b", 8, finish="stop")]
    heard, raised, (asked, fetched) = attempt(
        [prefill], [*(Send(event(**each)) for each in decode), Send(DONE)], text=TEXT
    )
    assert raised is None
    assert (asked[0]["prompt"], fetched[0]["prompt"]) == ("he is", [3, 4, 5])
    assert heard.texts == [(None, 3), ("b", 0)], "the first text may end within a character"


def test_the_text_of_an_event_is_not_sent_twice(attempt):
    """An event may join the first token, which the client has, with later ones: their text is not known apart."""
    prefill = Send(json.dumps({**said("a", 7, prompt=[3, 4, 5], finish="length"), "kv_transfer_params": KV}).encode())
    decode = [said("ab", 7, 8, prompt=[3, 4, 5]), said("cd", 9, 10, finish="stop")]
    heard, raised, _ = attempt([prefill], [*(Send(event(**each)) for each in decode), Send(DONE)], text=TEXT)
    assert raised is None
    assert [token for _, token, _ in heard.tokens] == [7, 8, 9, 10]
    assert heard.texts == [(None, 3), (None, 0), ("", 0), ("cd", 0)], "the gateway detokenizes the second token"


def test_the_text_of_an_event_is_cut_at_max_tokens(attempt):
    events = said("a", 7, prompt=[3, 4, 5]), said("bcd", 8, 9, 10)
    heard, raised, _ = attempt([*(Send(event(**each)) for each in events), Hang()], text=TEXT, max_tokens=3)
    assert (raised, heard.finish) == (None, FinishReason.LENGTH)
    assert heard.texts == [("a", 3), (None, 0), (None, 0)], "the gateway detokenizes what is left of the event"


def test_a_text_needs_a_server_that_returns_its_token_ids(attempt):
    _, raised, _ = attempt(stream(chunk(7), chunk(8)), text=TEXT)
    assert "returned no token ids of the prompt" in str(raised)


def test_resumed_attempts_have_their_own_seed():
    """The seed of a resumed request depends on its original seed and the position of the next token."""
    assert seed_of(9, 0) == 9
    assert seed_of(9, 5) == seed_of(9, 5)
    assert len({seed_of(seed, index) for seed in (8, 9) for index in range(50)}) == 100
    assert all(0 <= seed_of(9, index) < 2**63 for index in range(50))
