"""Tools in chat requests: prompts, answers, forced calls, and what is refused."""

import json

import numpy as np
import pytest

from serving.gateway.test_validation import refused
from support.running_gateway import running_gateway
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import byte_level, tool_caller
from twofold.engine.grammar import GrammarMatchers, allowed_tokens
from twofold.serving.gateway.schemas import ChatFields, ChosenFunction, FunctionTool, NamedTool, ToolFunction
from twofold.serving.gateway.tools.families import AUTO, FAMILIES, NONE, PARSERS, AnswerParsers
from twofold.serving.gateway.tools.forced_calls import forced_calls, template_tools
from twofold.serving.gateway.tools.message_parser import MessageParser

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def say(text):
    return lambda _: [*tool_caller().backend.encode(text, add_special_tokens=False).ids, EOS]


def service(text="ok"):
    return ScriptedService(say(text), model=served_model(max_model_len=4096))


def ask(client, **fields):
    body = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, TIME], "max_tokens": 500, **fields}
    return client.post("/v1/chat/completions", json=body)


def prompt_of(started):
    return tool_caller().decode(started.prompt_token_ids, skip_special_tokens=False)


def test_an_answer_with_a_call():
    with running_gateway(service(f"<think>Hm.</think>Look. {CALL}"), tokenizer=tool_caller()) as client:
        (choice,) = ask(client).json()["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["reasoning_content"]) == (
        "tool_calls",
        "Look. ",
        "Hm.",
    )
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert call["id"].startswith("call_")


def test_a_call_alone_has_no_content():
    with running_gateway(service(CALL), tokenizer=tool_caller()) as client:
        message = ask(client).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


def test_streams_have_the_same_parts(events):
    text = f"<think>Hm.</think>Look.{CALL}\n{CALL}"
    with running_gateway(service(text), tokenizer=tool_caller()) as client:
        *chunks, done = events(ask(client, stream=True))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert all(json.loads(call["function"]["arguments"]) == {"city": "Rome"} for call in calls)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_the_prompt_has_tools_calls_and_results():
    asked, history = (
        service(),
        [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
    )
    with running_gateway(asked, tokenizer=tool_caller()) as client:
        assert ask(client, messages=history).status_code == 200
        assert ask(client, tool_choice="none").status_code == 200
        assert ask(client, tools=None, reasoning_effort="high").status_code == 200
    first, second, third = map(prompt_of, asked.started)
    assert '"get_weather"' in first
    assert '"get_time"' in first
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in first
    assert "<|im_start|>tool\nsunny" in first
    assert "get_weather" not in second
    assert third.endswith("<think>\n")


def test_without_tools_a_call_is_text():
    with running_gateway(service(CALL), tokenizer=tool_caller()) as client:
        choice = ask(client, tools=[]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


class TestForcedCalls:
    """Answers that must call tools match a grammar, and the parser reads them."""

    @pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.calls is not None])
    @pytest.mark.parametrize("choice", ["required", "named"])
    def test_every_answer_is_calls(self, family, choice):
        tools = [
            FunctionTool(function=ToolFunction(name="get_weather", parameters=CITY)),
            FunctionTool(function=ToolFunction(name="get_time")),
        ]
        named = NamedTool(function=ChosenFunction(name="get_weather"))
        fields = ChatFields(model="", messages=[], tool_choice=named if choice == "named" else "required")
        offered = tools[:1] if choice == "named" else tools
        given = forced_calls(fields, offered, FAMILIES[family], byte_level())
        backend = byte_level().backend
        grammars = GrammarMatchers(backend.to_str, backend.get_vocab_size(), [EOS])
        for seed in range(20):
            text = self._walk(grammars, given.constraint, backend, seed)
            parser = MessageParser(FAMILIES[family].template, "", template_tools(offered))
            parts = [parser.feed(text), parser.finish()]
            calls = [call for part in parts for call in part.calls]
            assert calls, text
            assert not "".join(part.content for part in parts)
            assert {call.name for call in calls} <= {tool.function.name for tool in offered}
            for call in calls:
                assert call.name != "get_weather" or json.loads(call.arguments)["city"] in ("Rome", "Oslo")
            assert choice == "required" or len(calls) == 1

    def _walk(self, grammars, constraint, backend, seed):
        draw, output = np.random.default_rng(seed), []
        while len(output) < 3000:
            mask = grammars.allowed(f"{constraint.text}{seed}", constraint, output)
            ids = allowed_tokens(mask, backend.get_vocab_size()).nonzero()[0]
            token = EOS if EOS in ids and draw.random() < 0.7 else int(draw.choice(ids))
            if token == EOS:
                return backend.decode(output)
            output.append(token)
        raise AssertionError("the answer does not end")

    def test_the_service_gets_the_constraint(self):
        asked = service(CALL)
        with running_gateway(asked, tokenizer=tool_caller()) as client:
            for choice in ("required", {"type": "function", "function": {"name": "get_time"}}, "auto"):
                assert ask(client, tool_choice=choice).status_code == 200
        several, one, none = (each.sampling.constraint for each in asked.started)
        assert "get_weather" in several.text
        assert "get_time" in one.text
        assert "get_weather" not in one.text
        assert none is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools"),
        ({"tools": [{"function": {"name": "with space"}}]}, "tools"),
        ({"tools": [{"function": {}}]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "wrong"}}}], "tool_choice": "required"},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
            "messages",
        ),
    ],
)
def test_wrong_tools_are_refused(fields, param):
    with running_gateway(service(), tokenizer=tool_caller()) as client:
        refused(ask(client, **fields), param=param)


def test_models_without_tools_refuse_them():
    with running_gateway(ScriptedService()) as client:
        assert refused(ask(client), param="tools")["code"] == "unsupported_parameter"


def test_parsers_can_be_named():
    text = f"<think>Hm.</think>Look. {CALL}"
    cases = [
        (AnswerParsers(), ("Look. ", "Hm.", 1)),
        (AnswerParsers(reasoning="none"), ("<think>Hm.</think>Look. ", None, 1)),
        (AnswerParsers(tools="hermes", reasoning="glm"), ("Look. ", "Hm.", 1)),
        (AnswerParsers(tools="llama3"), (f"Look. {CALL}", "Hm.", 0)),
    ]
    for parsers, (content, reasoning, calls) in cases:
        with running_gateway(service(text), tokenizer=tool_caller(), parsers=parsers) as client:
            (choice,) = ask(client).json()["choices"]
        message = choice["message"]
        found = (message["content"], message.get("reasoning_content"), len(message.get("tool_calls", ())))
        assert found == (content, reasoning, calls), parsers
    with running_gateway(service(text), tokenizer=tool_caller(), parsers=AnswerParsers(tools="none")) as client:
        refused(ask(client), param="tools")
        message = ask(client, tools=None).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."


def test_a_named_parser_serves_an_unknown_template():
    parsers = AnswerParsers(tools="hermes")
    assert AnswerParsers().template("a template", None) is None
    assert parsers.template("a template", None) == FAMILIES["hermes"].template
    assert parsers.family("a template") is FAMILIES["hermes"]
    assert AnswerParsers(reasoning="deepseek").template("a template", None)["fields"].keys() >= {"reasoning_content"}
    own = {"start_anchor": "x", "fields": {"content": {}}}
    assert AnswerParsers().template("a template", own) is own


def test_every_family_can_be_named():
    assert list(PARSERS) == [AUTO, NONE, *FAMILIES]
