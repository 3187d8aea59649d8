"""`twofold route` in front of servers with SGLang's protocol (`support.sglang_server`, which is no SGLang)."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from support import sglang_server
from support.api_client import metric
from support.running_service import ROUTE, running_service
from twofold.bench.services import free_port
from twofold.request import Constraint, ConstraintKind, Generation, Request, SamplingParams
from twofold.serving.upstream.client import RejectedError, StatusError
from twofold.serving.upstream.sglang import SglangKind, sglang_metrics

PROMPT = [5, 6, 7] * 10
SERVER = (sglang_server.__file__,)


def expected(prompt, count):
    """Return the tokens that the servers generate."""
    output = []
    while len(output) < count:
        output.append(sglang_server.next_token([*prompt, *output], 200))
    return output


@contextmanager
def running(model, prefills=1, decodes=1, step_s=0.0, prefill_s=0.0):
    """Run servers and a gateway. Yield its URL and the servers as (process, URL) pairs by role."""
    times = ("--step-s", str(step_s), "--prefill-s", str(prefill_s))
    with ExitStack() as stack:
        servers = {"prefill": [], "decode": []}
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for _ in range(count):
                flags = ("--role", role, "--bootstrap-port", str(free_port()), *times)
                servers[role].append(stack.enter_context(running_service(model, *flags, program=SERVER)))
        flags = [flag for role, made in servers.items() for _, url in made for flag in (f"--{role}", url)]
        route = ("--model", str(model), "--served-model-name", "tiny", "--probe-timeout", "600", *flags)
        yield stack.enter_context(running_service(None, *route, program=ROUTE))[1], servers


@pytest.fixture(scope="module")
def fleet(tiny_model_dir):
    with running(tiny_model_dir("llama")) as made:
        yield made


def post(url, **fields):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=600)


def asked(server):
    return httpx.get(f"{server[1]}/asked", timeout=600).json()


def until(condition):
    deadline_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_both_servers_get_a_request_at_the_same_time(fleet):
    """The prefill server answers only after the decode server has joined the room."""
    url, servers = fleet
    (choice,) = post(url).json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (expected(PROMPT, 8), "length")
    prefill, decode = (asked(servers[role][0])[-1] for role in ("prefill", "decode"))
    meetings = [{name: body[f"bootstrap_{name}"] for name in ("host", "port", "room")} for body in (prefill, decode)]
    assert meetings[0] == meetings[1]
    assert 0 <= meetings[0]["room"] < 2**63
    assert prefill["rid"] == decode["rid"]
    assert prefill["max_tokens"] == decode["max_tokens"] == 8


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"temperature": 1.0, "seed": 3, "top_k": 5}])
def test_other_requests_use_both_servers_too(fleet, fields):
    url, servers = fleet
    before = len(asked(servers["prefill"][0]))
    (choice,) = post(url, **fields).json()["choices"]
    assert choice["token_ids"] == expected(PROMPT, fields.get("max_tokens", 8))
    assert len(asked(servers["prefill"][0])) == before + 1


def test_texts_are_tokenized_by_the_servers(fleet):
    url, _ = fleet
    answer = post(url, prompt="Return the names of all files.", return_token_ids=False).json()
    assert answer["usage"]["prompt_tokens"] > 0
    assert answer["usage"]["completion_tokens"] == 8


def test_metrics_count_as_for_vllm(fleet):
    url, _ = fleet
    before = metric(url, "time_to_first_token_seconds_count")
    timings = post(url, return_timings=True).json()["usage"]["timings"][0]
    assert metric(url, "time_to_first_token_seconds_count") == before + 1
    assert timings["kv_transfer_visible_s"] is None, "the servers do not tell it"
    assert metric(url, "kv_transfer_seconds_count") == 0


def test_a_client_that_leaves_ends_the_work_on_both_servers(tiny_model_dir):
    with running(tiny_model_dir("llama"), step_s=0.05) as (url, servers):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
            next(answer.iter_lines())
        for role in servers:
            until(lambda role=role: " 0\n" in httpx.get(f"{servers[role][0][1]}/metrics", timeout=600).text)


@pytest.mark.parametrize(("role", "tokens"), [("prefill", 0), ("decode", 3)])
def test_a_lost_server_is_replayed(tiny_model_dir, role, tokens):
    """The output goes on after the known tokens, on another server."""
    timing = {"prefill": {"prefill_s": 3.0}, "decode": {"step_s": 0.1}}[role]
    with running(tiny_model_dir("llama"), **{f"{role}s": 2}, **timing) as (url, servers), ThreadPoolExecutor() as pool:

        def begun():
            live = httpx.get(f"{url}/dashboard/data", timeout=600).json()["requests"]
            return any(map(asked, servers[role])) and live and live[0]["output_tokens"] >= tokens

        answer = pool.submit(post, url, max_tokens=40)
        until(begun)
        next(server for server in servers[role] if asked(server))[0].kill()
        assert answer.result().json()["choices"][0]["token_ids"] == expected(PROMPT, 40)
        assert sum(metric(url, f'request_replays_total{{stage="{stage}"}}') for stage in ("prompt", "decode")) == 1


def generation(**sampled):
    request = Request(id="a~0", arrival_s=0.0, prompt_tokens=1, output_tokens=4)
    return Generation(request=request, prompt_token_ids=[5], sampling=SamplingParams(max_tokens=4, **sampled))


@pytest.mark.parametrize(
    ("kind", "text", "field", "value"),
    [
        (ConstraintKind.JSON, '{"type":"object"}', "json_schema", '{"type":"object"}'),
        (ConstraintKind.REGEX, "a+", "regex", "a+"),
        (ConstraintKind.CHOICE, '["a.b","c"]', "regex", r"a\.b|c"),
        (ConstraintKind.GRAMMAR, 'root ::= "a"', "ebnf", 'root ::= "a"'),
    ],
)
def test_constraints_have_sglangs_names(kind, text, field, value):
    fields = SglangKind().fields(generation(constraint=Constraint(kind, text)), "m", 5)
    assert fields[field] == value
    assert "structured_outputs" not in fields


@pytest.mark.parametrize(
    "sampled", [{"bad_words": ("a",)}, {"logprobs": 2}, {"constraint": Constraint(ConstraintKind.LARK, "start: /a/")}]
)
def test_requests_that_sglang_cannot_run_are_refused(sampled):
    with pytest.raises(RejectedError, match=r"SGLang"):
        SglangKind().fields(generation(**sampled), "m", 5)


def test_metrics_of_a_server():
    text = "".join(
        f'sglang:{name}{{engine_type="unified",model_name="m"}} {value}\n'
        for name, value in (
            *(("num_running_reqs", 3.0), ("num_queue_reqs", 2.0), ("token_usage", 0.5)),
            *(("max_total_num_tokens", 1000.0), ("prompt_tokens_total", 70.0), ("generation_tokens_total", 7.0)),
        )
    )
    found = sglang_metrics(text)
    assert (found.running, found.waiting, found.capacity_tokens, found.used_tokens) == (3, 2, 1000, 500)
    assert found.steps == 77


class WithoutMetrics:
    """Client of a healthy server that has no metrics."""

    async def get(self, path, timeout_s):
        return b""

    async def metrics(self, timeout_s):
        raise StatusError(404, "not found")


def test_a_server_without_metrics_has_no_load():
    assert asyncio.run(SglangKind().metrics(WithoutMetrics(), 600)).running == 0
