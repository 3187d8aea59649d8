"""OpenAI's Responses API, with OpenAI's client: answers, state, streams, tools, structured output, and errors."""

import openai
import pydantic
import pytest

from support.asked import Asked, ids_of
from twofold.request import FinishReason, TokenOutput
from twofold.serving.gateway.response_store import ResponseStore, StoredResponse

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class AskedForResponses(Asked):
    def connect(self, url):
        return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=600)

    def create(self, **fields):
        return self.client.responses.create(**{"model": "tiny", "input": "Hi", **fields})


def test_an_answer():
    with AskedForResponses("Hello there.") as asked:
        response = asked.create(instructions="Be kind.", temperature=0.5, top_p=0.9, metadata={"a": "b"})
    assert (response.object, response.status, response.output_text) == ("response", "completed", "Hello there.")
    assert response.output[0].content[0].type == "output_text"
    assert response.usage.input_tokens == len(asked.service.started[0].prompt_token_ids)
    assert response.usage.output_tokens == len(ids_of("Hello there.")) + 1
    assert response.metadata == {"a": "b"}
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in asked.prompt
    sampling = asked.service.started[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)


def test_a_cut_answer_is_incomplete():
    cut = [TokenOutput(index=0, token_id=ids_of("x")[0], finish_reason=FinishReason.LENGTH)]
    with AskedForResponses("", cut) as asked:
        response = asked.create(max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_call_that_the_limit_cuts_off_is_incomplete_and_no_part_of_the_conversation():
    *ids, last = ids_of('<tool_call>{"name": "get_weather", "arguments": {"city": "Ro')
    cut = [TokenOutput(index=index, token_id=token_id) for index, token_id in enumerate(ids)]
    cut.append(TokenOutput(index=len(ids), token_id=last, finish_reason=FinishReason.LENGTH))
    with AskedForResponses("", cut) as asked:
        with asked.client.responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
            response = next(event.response for event in stream if event.type == "response.incomplete")
        asked.create(previous_response_id=response.id)
    (call,) = response.output
    assert (call.name, call.arguments, call.status) == ("get_weather", '{"city": "Ro', "incomplete")
    assert "get_weather" not in asked.prompt


def test_a_response_is_continued():
    with AskedForResponses(f"<think>Hm.</think>Look.{CALL}") as asked:
        first = asked.create(instructions="Be kind.", tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "sunny"}
        second = asked.create(previous_response_id=first.id, input=[output], tools=[WEATHER])
        prompt = asked.prompt
        stateless = [
            {"role": "user", "content": "Hi"},
            *[item.model_dump(exclude_none=True) for item in first.output],
            output,
        ]
        asked.create(input=stateless, tools=[WEATHER], store=False)
        assert asked.prompt == prompt, "items sent again mean the same as the stored response"
    assert second.previous_response_id == first.id
    assert "Be kind." not in prompt, "instructions hold for one response"
    assert "<|im_start|>user\nHi<|im_end|>" in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_a_conversation_is_a_session():
    with AskedForResponses("ok") as asked:
        first = asked.create()
        second = asked.create(previous_response_id=first.id)
        asked.create(previous_response_id=second.id)
        asked.create()
        asked.create(previous_response_id=second.id, prompt_cache_key="mine")
        *same, other, named = [each.request.session for each in asked.service.started]
    assert same == [f"me {first.id}"] * 3
    assert other not in (*same, "")
    assert named == "me mine"


def test_stored_responses_can_be_read_and_deleted():
    with AskedForResponses("ok") as asked:
        response, loose = asked.create(), asked.create(store=False)
        assert asked.client.responses.retrieve(response.id) == response
        (item,) = asked.client.responses.input_items.list(response.id).data
        assert (item.role, item.content[0].text) == ("user", "Hi")
        others = asked.client.with_options(api_key="other")
        for client, response_id in ((others, response.id), (asked.client, loose.id), (asked.client, "resp_x")):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
        asked.client.responses.delete(response.id)
        with pytest.raises(openai.BadRequestError, match="there is no stored response"):
            asked.create(previous_response_id=response.id)


def test_the_store_keeps_the_latest_for_a_time():
    now = 0.0
    store = ResponseStore(100, 60.0, lambda: now)
    for number in range(3):
        store.put("me", StoredResponse({"id": f"r{number}"}, [], [], "", 40))
    assert [name for _, name in store._responses] == ["r1", "r2"]
    assert store.get("me", "r2", "x").body == {"id": "r2"}
    with pytest.raises(Exception, match="no stored response 'r0'"):
        store.get("me", "r0", "x")
    now = 60.0
    with pytest.raises(Exception, match="no stored response 'r2'"):
        store.get("me", "r2", "x")
    store.put("me", StoredResponse({"id": "r3"}, [], [], "", 40))
    assert [name for _, name in store._responses] == ["r3"]
    store.delete("me", "r3")
    assert not store._responses


def test_tools_and_reasoning():
    with AskedForResponses(f"<think>Hm.</think>Look.{CALL}") as asked:
        response = asked.create(tools=[WEATHER])
        reasoning, message, call = response.output
        for choice, constrained in (
            ("required", True),
            ("auto", False),
            ({"type": "function", "name": "get_weather"}, True),
        ):
            asked.create(tools=[WEATHER], tool_choice=choice)
            assert (asked.service.started[-1].sampling.constraint is not None) is constrained
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert message.content[0].text == "Look."
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Rome"}')
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_structured_output_is_parsed():
    class City(pydantic.BaseModel):
        name: str

    with AskedForResponses('{"name": "Rome"}') as asked:
        parsed = asked.client.responses.parse(model="tiny", input="Where?", text_format=City)
        asked.create(text={"format": {"type": "json_object"}})
        assert asked.service.started[1].sampling.constraint.text == '{"type":"object"}'
    assert parsed.output_parsed == City(name="Rome")
    assert "name" in asked.service.started[0].sampling.constraint.text


def test_a_stream_adds_up_to_the_answer():
    with AskedForResponses(f"<think>Hm.</think>Look.{CALL}") as asked:
        whole = asked.create(tools=[WEATHER])
        with asked.client.responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        following = asked.create(previous_response_id=streamed.id)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Look."
    assert kinds.count("response.function_call_arguments.delta") > 10  # one token has one character
    assert kinds.count("response.function_call_arguments.done") == 1
    opened = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert opened == [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2]
    for one, other in zip(whole.output, streamed.output, strict=True):
        assert (
            one.model_dump(exclude={"id", "call_id", "parsed_arguments"})
            == other.model_dump(exclude={"id", "call_id", "parsed_arguments"})
            or one.type == "message"
        )
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage
    assert following.previous_response_id == streamed.id


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": []}, "messages"),
        ({"max_output_tokens": 10_000}, "context"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "other"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_x"}, "resp_x"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
    ],
)
def test_wrong_requests_are_refused(fields, says):
    with AskedForResponses("ok") as asked, pytest.raises(openai.BadRequestError, match=says):
        asked.create(**fields)


def test_an_error_in_a_stream_is_an_event():
    with AskedForResponses("ok", [RuntimeError("broken")]) as asked:
        events = list(asked.create(stream=True))
    assert events[-1].type == "error"
    assert "unexpected error" in events[-1].message
