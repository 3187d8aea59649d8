"""The fault suite on servers that violate the API, each in one way."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner

from support.scripted_endpoint import DONE, Drop, Hang, Refuse, Send, endpoint, event, usage
from twofold.cli.torture import torture
from twofold.errors import UserError

SHORT = ("--num-prompts", 4, "--max-prompt-tokens", 60, "--max-tokens", 8, "--concurrency", 4)
SHORT += ("--duration", 0.5, "--settle", 0, "--longest-prompt", 100)


def run(*arguments):
    app = typer.Typer()
    app.command()(torture)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def report_of(scripted, path, *flags):
    """Run a short fault suite; return the exit status and the report."""
    result = run(scripted.url, *SHORT, "--json", path / "report.json", *flags)
    assert result.exit_code in {0, 1}, result.exception
    return result.exit_code, json.loads((path / "report.json").read_text())


def token_ids(body):
    return [(sum(body["prompt"]) + 7 * place) % 500 for place in range(body["max_tokens"])]


def chunks(ids, finish_reason=None):
    """Return a step for each token; the last one has the finish reason."""
    reasons = [None] * (len(ids) - 1) + [finish_reason]
    return [
        Send(event(choices=[{"index": 0, "text": f" {each}", "token_ids": [each], "finish_reason": reason}]))
        for each, reason in zip(ids, reasons, strict=True)
    ]


def right(body, finish_reason="length", more=0):
    ids = token_ids(body)
    return [*chunks(ids, finish_reason), Send(usage(len(body["prompt"]), len(ids) + more) + DONE)]


def wrong_token(body):
    ids = [each + (place == 5) for place, each in enumerate(token_ids(body))]
    return [*chunks(ids, "length"), Send(usage(len(body["prompt"]), len(ids)) + DONE)]


def cut(body):
    return [*chunks(token_ids(body)[:5]), Send(usage(len(body["prompt"]), 5) + DONE)]


FAULTS = {
    "wrong tokens": wrong_token,
    "cut answer": cut,
    "broken stream": lambda body: [*chunks(token_ids(body)[:5]), Drop()],
    "refused request": lambda _: [Refuse(503)],
    "hung stream": lambda body: [*chunks(token_ids(body)[:5]), Hang()],
    "wrong usage": lambda body: right(body, more=1),
    "wrong finish reason": lambda body: right(body, "stop"),
}


class FaultyScript:
    """Script of a server with right reference answers: `fault` answers from the third request with a prompt."""

    def __init__(self, fault):
        self.fault, self.asked = fault, Counter()

    def __call__(self, body):
        prompt = tuple(body["prompt"])
        self.asked[prompt] += 1
        return (right if self.asked[prompt] <= 2 else self.fault)(body)


@pytest.mark.parametrize("kind", FAULTS)
def test_every_kind_of_violation_is_reported(kind, tmp_path):
    hang = ("--hang", 1) if kind == "hung stream" else ()
    with endpoint(FaultyScript(FAULTS[kind])) as scripted:
        code, report = report_of(scripted, tmp_path, *hang)
    assert code == 1
    assert {violation["kind"] for violation in report["violations"]} == {kind}
    assert any(failure.startswith(kind) for failure in report["failures"])
    positions = {violation["position"] for violation in report["violations"]}
    assert positions == ({5} if kind == "wrong tokens" else {None})


def test_a_service_with_right_answers_passes(tmp_path):
    page = tmp_path / "report.html"
    with endpoint(right) as scripted:
        code, report = report_of(scripted, tmp_path, "--html", page, "--api-key", "secret")
        assert {body["seed"] for body in scripted.bodies} == {0}
    assert (code, report["violations"], report["failures"]) == (0, [], [])
    assert (report["unreproducible"], report["idle_prefills"]) == (0, None)
    assert report["streams"]["burst"] == 16
    assert report["after"]["tokens_per_s"] > 0
    text = page.read_text()
    places = [text.index(part) for part in ("no failure", 'id="tokens"', "<h2>Capacity<", "<h2>Configuration<")]
    assert places == sorted(places)
    assert "secret" not in (tmp_path / "report.json").read_text() + page.read_text()


def test_text_is_compared_without_token_ids(tmp_path):
    def worded(body):
        texts = ["a", "b", "c", "d"]
        if len(scripted.bodies) > 8:
            texts[3] = "x"
        return [Send(event(choices=[{"index": 0, "text": each}])) for each in texts] + right(body)[-1:]

    with endpoint(worded) as scripted:
        code, report = report_of(scripted, tmp_path)
    assert code == 1
    assert not report["compares_tokens"]
    assert {each["position"] for each in report["violations"] if each["kind"] == "wrong tokens"} == {3}


def test_answers_that_differ_alone_are_not_compared(tmp_path):
    asked = Counter()

    def unsteady(body):
        first = scripted.bodies[0]["prompt"] == body["prompt"]
        asked[first] += 1
        return wrong_token(body) if first and asked[first] % 2 else right(body)

    with endpoint(unsteady) as scripted:
        code, report = report_of(scripted, tmp_path)
    assert (code, report["unreproducible"], report["violations"]) == (0, 1, [])


def test_broken_streams_may_be_allowed(tmp_path):
    def breaks(body):
        return FAULTS["broken stream"](body) if len(scripted.bodies) % 5 == 0 else right(body)

    def script(body):
        return right(body) if len(scripted.bodies) <= 8 or body["max_tokens"] == 1 else breaks(body)

    with endpoint(script) as scripted:
        code, report = report_of(scripted, tmp_path, "--allow-broken")
    assert (code, report["failures"]) == (0, [])
    assert {violation["kind"] for violation in report["violations"]} == {"broken stream"}


def test_answers_are_compared_with_those_of_another_service(tmp_path):
    with endpoint(right) as reference, endpoint(wrong_token) as scripted:
        code, report = report_of(scripted, tmp_path, "--reference", reference.url)
    assert code == 1
    assert {violation["position"] for violation in report["violations"]} == {5}


def test_commands_take_turns_and_their_failures_are_reported(tmp_path):
    with endpoint(right) as scripted:
        flags = ("--kill", "pause=true", "--kill", "false", "--every", 0.2, "--duration", 1)
        code, report = report_of(scripted, tmp_path, *flags)
    assert [fault["name"] for fault in report["faults"]] == ["pause", "false", "pause", "false"]
    assert [fault["error"] for fault in report["faults"]] == [None, "exit status 1"] * 2
    assert (code, report["failures"]) == (1, ["every run of the command false failed"])


def test_the_longest_accepted_prompt_is_found(tmp_path):
    def script(body):
        return right(body) if len(body["prompt"]) <= 700 else [Refuse(400)]

    with endpoint(script, models=[{"id": "scripted", "max_model_len": 2048}]) as scripted:
        code, report = report_of(scripted, tmp_path, "--longest-prompt", 4096)
    assert code == 0
    assert 700 - 2048 // 64 <= report["before"]["longest_prompt"] <= 700
    assert report["after"]["longest_prompt"] == report["before"]["longest_prompt"]


class GrowingGauge(BaseHTTPRequestHandler):
    """Metrics of a server with one more running request at each reading, and no new prompts."""

    readings: ClassVar = Counter()

    def do_GET(self):
        self.readings[self.server] += 1
        text = f'vllm:num_requests_running{{engine="0"}} {self.readings[self.server]}\nvllm:prompt_tokens_total 5\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_gauges_above_their_idle_value_are_leaks(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), GrowingGauge) as server, endpoint(right) as scripted:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        code, report = report_of(scripted, tmp_path, "--metrics", f"http://{place}")
        server.shutdown()
    assert code == 1
    assert report["leaks"] == [{"gauge": f"running requests of {place}", "before": 2.0, "after": 3.0}]
    assert report["idle_prefills"] == [place]


def test_mistakes_are_one_sentence(tmp_path):
    with endpoint() as ended:
        pass
    with endpoint(right) as scripted, endpoint(models_status=401) as closed:
        for arguments, said in (
            (("localhost",), "'localhost' is not an HTTP address"),
            ((ended.url,), "no OpenAI endpoint can be reached"),
            ((closed.url,), "refuses the API key"),
            ((scripted.url, "--model", "other"), "serves scripted, not other"),
            ((scripted.url, "--json", tmp_path / "nowhere" / "report.json"), "cannot be written"),
            ((scripted.url, "--kill", "true", "--every", 60), "--every must be shorter than --duration"),
            ((scripted.url, "--kill", "name="), "has no command"),
            ((scripted.url, "--max-prompt-tokens", 16), "has no room for a block of 16 tokens"),
            ((scripted.url, "--metrics", f"{scripted.url}/nowhere"), "answers with HTTP 404"),
        ):
            error = run(*arguments).exception
            assert isinstance(error, UserError), (arguments, error)
            assert said in str(error)
            assert "\n" not in str(error)


def test_a_reference_that_fails_is_one_sentence():
    with endpoint(lambda _: [Refuse(400, b'{"error": {"message": "text only"}}')]) as scripted:
        error = run(scripted.url, *SHORT).exception
    assert isinstance(error, UserError)
    assert "tokens alone: HTTP 400: text only" in str(error)
