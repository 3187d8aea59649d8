"""Schemas, expressions and tools that are made to cost time end in a 400 or cost none, and others are answered."""

import json
import threading

import pytest

from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService, served_model
from support.tokenizers_for_tests import tool_caller

HI = [{"role": "user", "content": "Hi"}]


def nested(depth):
    """Return the JSON of a schema of lists within lists."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def schema(text):
    return f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{text}}}}}'


def regex(text):
    return f'"structured_outputs":{{"regex":{json.dumps(text)}}}'


def tools(parameters, count=1):
    one = f'{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}'
    return f'"tools":[{",".join([one] * count)}],"tool_choice":"required"'


LARGE = json.dumps({"enum": [f"{number:050}" for number in range(100_000)]})  # 5 MB
# Constraints that compile at once, because their states are computed as they are needed.
HARMLESS = {"exponential states", "nested repetitions", "schema that refers to itself", "reference without an end"}
HOSTILE = {
    "deep schema": schema(nested(10_000)),
    "deeper than the parser of JSON": schema(nested(200_000)),
    "deep tool": tools(nested(10_000)),
    "large schema": schema(LARGE),
    "large tool": tools(LARGE),
    "many tools": tools(nested(3), count=20_000),
    "nested repetitions": regex("((((a{1,999}){1,999}){1,999}){1,999}){1,999}"),
    "exponential states": regex("(a|b)*a(a|b){200}" * 20),
    "unbalanced": regex("(" * 10_000),
    "schema that refers to itself": schema('{"$ref":"#"}'),
    "reference without an end": schema(
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'
    ),
    "remote reference": schema('{"$ref":"http://127.0.0.1:1/schema.json"}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_stop_nobody(name):
    body = f'{{"model":"tiny","messages":{json.dumps(HI)},"max_tokens":4,{HOSTILE[name]}}}'
    service = ScriptedService(model=served_model(max_model_len=4096))
    with running_gateway(service, tokenizer=tool_caller()) as client:
        answers = []

        def ask_others():
            answers.extend(
                client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 2})
                for _ in range(3)
            )

        others = threading.Thread(target=ask_others)
        others.start()
        refused = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        others.join()
        assert refused.status_code == (200 if name in HARMLESS else 400), refused.text[:300]
        assert ("error" in refused.json()) is (name not in HARMLESS)
        assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize("depth", [100, 600, 900, 980])
@pytest.mark.parametrize("place", ["kwargs", "tools", "forced tools", "schema"])
def test_nested_values_are_accepted_or_refused(depth, place, caplog):
    """The decoder allows almost a thousand levels, templates and encoders allow fewer."""
    values = "[" * depth + "]" * depth
    fields = {
        "kwargs": f'"chat_template_kwargs":{{"enable_thinking":{values}}}',
        "tools": tools(f'{{"enum":{values}}}').replace("required", "auto"),
        "forced tools": tools(f'{{"enum":{values}}}'),
        "schema": schema(f'{{"enum":{values}}}'),
    }
    with running_gateway(ScriptedService(model=served_model(max_model_len=4096)), tokenizer=tool_caller()) as client:
        body = f'{{"model":"tiny","messages":{json.dumps(HI)},"max_tokens":1,{fields[place]}}}'
        answer = client.post("/v1/chat/completions", content=body)
    assert answer.status_code in (200, 400), answer.text[:300]
    assert caplog.records == []
