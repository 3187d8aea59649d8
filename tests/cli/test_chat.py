"""`twofold chat` against a scripted endpoint."""

import pytest
from typer.testing import CliRunner

from support.scripted_endpoint import DONE, Pause, Refuse, Send, endpoint, event
from twofold.cli.main import app
from twofold.errors import ConfigurationError


def chunk(**delta):
    return Send(event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]))


def answering(body):
    """Return a script that thinks, and then says how many messages it got."""
    counts = {"prompt_tokens": 7, "completion_tokens": 3}
    words = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="Hm."),
        chunk(content="Got "),
        Pause(0.05),
        chunk(content=str(len(body["messages"]))),
    ]
    return [*words, Send(event(choices=[], usage=counts)), Send(DONE)]


def chat(script, *flags, said=None):
    with endpoint(script) as scripted:
        result = CliRunner().invoke(app, ["chat", *flags, "--base-url", scripted.url], input=said)
    return result, scripted.bodies


def test_one_message():
    result, bodies = chat(answering, "Hello?", "--system", "Be kind.", "--max-tokens", "9", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Got 2\n"
    assert "TTFT" in result.stderr
    assert "tokens/s, 7 + 3 tokens" in result.stderr
    assert "Hm." in result.stderr
    (body,) = bodies
    assert [message["content"] for message in body["messages"]] == ["Be kind.", "Hello?"]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("scripted", 9, 0.0, True)


def test_messages_of_a_dialogue_are_kept():
    result, bodies = chat(answering, said="Hello?\n\nAnd now?\n/exit\nnot sent\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "Got 1\nGot 3\n"
    assert [message["content"] for message in bodies[1]["messages"]] == ["Hello?", "Got 1", "And now?"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (lambda _: [Refuse(400)], "HTTP 400: refused by the script"),
        (lambda _: [Send(event(error={"message": "broken"}))], "broken"),
        (lambda _: [Send(b"data: {\n\n")], "truncated"),
    ],
)
def test_errors_are_one_sentence(script, says):
    result, _ = chat(script, "Hello?")
    assert isinstance(result.exception, ConfigurationError)
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)
