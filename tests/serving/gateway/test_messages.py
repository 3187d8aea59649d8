"""Anthropic's Messages API, with Anthropic's client: answers, streams, tools, and errors."""

import anthropic
import pytest

from support.asked import Asked, ids_of
from twofold.request import FinishReason, TokenOutput

WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HI = [{"role": "user", "content": "Hi"}]


class AskedForMessages(Asked):
    def connect(self, url):
        return anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=600)

    def create(self, **fields):
        return self.client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": HI, **fields})


def test_an_answer():
    with AskedForMessages("Hello there.") as asked:
        message = asked.create(system="Be kind.", extra_body={"temperature": 0.5, "top_k": 7})
        counted = asked.client.messages.count_tokens(model="tiny", messages=HI, system="Be kind.")
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello there.")]
    assert message.usage.input_tokens == counted.input_tokens == len(asked.service.started[0].prompt_token_ids)
    assert message.usage.output_tokens == len(ids_of("Hello there.")) + 1
    assert "<|im_start|>system\nBe kind.<|im_end|>" in asked.prompt
    sampling = asked.service.started[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)


def test_reasons_to_stop():
    with AskedForMessages("one two three") as asked:
        stopped = asked.create(stop_sequences=["two"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
    cut = [TokenOutput(index=0, token_id=ids_of("x")[0], finish_reason=FinishReason.LENGTH)]
    with AskedForMessages("", cut) as asked:
        assert asked.create(max_tokens=1).stop_reason == "max_tokens"


def test_thinking_and_tools():
    with AskedForMessages(f"<think>Hm.</think>Look.{CALL}") as asked:
        message = asked.create(tools=[WEATHER])
        thinking, text, call = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "Look.")
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
        assert message.stop_reason == "tool_use"
        turns = [
            *HI,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
        asked.create(messages=turns, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    prompt = asked.prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>" in prompt
    assert prompt.endswith("<think>\n")


def test_choices_of_tools():
    with AskedForMessages(CALL) as asked:
        for choice, constrained in (("any", True), ("auto", False), ("none", False)):
            asked.create(tools=[WEATHER], tool_choice={"type": choice})
            assert (asked.service.started[-1].sampling.constraint is not None) is constrained
        asked.create(tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    assert "get_weather" in asked.service.started[-1].sampling.constraint.text


def test_a_stream_adds_up_to_the_answer():
    with AskedForMessages(f"<think>Hm.</think>Look.{CALL}") as asked:
        whole = asked.create(tools=[WEATHER])
        with asked.client.messages.stream(model="tiny", max_tokens=500, messages=HI, tools=[WEATHER]) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_message()
    assert events.count("input_json") > 10  # one token has one character
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    for one, other in zip(whole.content, streamed.content, strict=True):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 10_000}, "context"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "other"),
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
    ],
)
def test_wrong_requests_are_refused(fields, says):
    with AskedForMessages("ok") as asked, pytest.raises(anthropic.BadRequestError, match=says) as caught:
        asked.create(**fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_their_status():
    with AskedForMessages("ok") as asked:
        with pytest.raises(anthropic.NotFoundError):
            asked.create(model="other")
        wrong = asked.client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(model="tiny", max_tokens=5, messages=HI)


def test_an_error_in_a_stream_is_an_event():
    with (
        AskedForMessages("ok", [RuntimeError("broken")]) as asked,
        pytest.raises(anthropic.APIStatusError, match="unexpected error"),
        asked.client.messages.stream(model="tiny", max_tokens=5, messages=HI) as stream,
    ):
        stream.until_done()


@pytest.mark.parametrize(("arguments", "given"), [("NaN", None), ("1e999", None), ('"\\u0041"', "A")])
def test_arguments_as_pythons_json_reads_them(arguments, given):
    call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {arguments}}}}}</tool_call>'
    with AskedForMessages(call) as asked:
        (used,) = asked.create(tools=[WEATHER]).content
    assert (used.type, used.input) == ("tool_use", {"city": given})
