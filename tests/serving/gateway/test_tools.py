"""Tools in chat requests: prompts, answers, forced calls, and what is refused."""

import json

import numpy as np
import pytest

from serving.gateway.test_validation import refused
from support.running_gateway import running_gateway
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import byte_level, byte_level_with, tool_caller
from twofold.engine.grammar import GrammarMatchers, allowed_tokens
from twofold.errors import RequestError
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


@pytest.mark.covers(feature="tools")
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
    named = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in named] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    for index in (0, 1):
        arguments = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert json.loads("".join(arguments)) == {"city": "Rome"}
        assert len(arguments) > 10  # one token has one character
    assert all(call.keys() == {"index", "function"} for call in calls if call not in named)
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


ROME, NOTHING = '{"city": "Rome"}', "{}"
HERMES_ROME = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
LLAMA_ROME = f'{{"name": "get_weather", "parameters": {ROME}}}'
MISTRAL_ROME = f'{{"name": "get_weather", "arguments": {ROME}}}'
GLM_ROME = '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"Rome"</arg_value>\n</tool_call>'
GEMMA_ROME = f"<start_function_call>call:get_weather{ROME}<end_function_call>"
QWEN_ROME = '<tool_call>\n<function=get_weather>\n<parameter=city>\n"Rome"\n</parameter>\n</function>\n</tool_call>'
MINIMAX_ROME = '<invoke name="get_weather">\n<parameter name="city">"Rome"</parameter>\n</invoke>'
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3_ROME = f"{BEGIN}function{SEP}get_weather\n```json\n{ROME}\n```{END}"
V3_TIME = f"{BEGIN}function{SEP}get_time\n```json\n{NOTHING}\n```{END}"
V31_ROME, V31_TIME = f"{BEGIN}get_weather{SEP}{ROME}{END}", f"{BEGIN}get_time{SEP}{NOTHING}{END}"
# One call, and two calls, as the chat templates write them.
FORMS = {
    "hermes": (
        HERMES_ROME,
        f'{HERMES_ROME}\n<tool_call>\n{{"name": "get_time", "arguments": {NOTHING}}}\n</tool_call>',
    ),
    "llama3": (LLAMA_ROME, f'{LLAMA_ROME}; {{"name": "get_time", "parameters": {NOTHING}}}'),
    "mistral": (
        f"[TOOL_CALLS] [{MISTRAL_ROME}]",
        f'[TOOL_CALLS] [{MISTRAL_ROME}, {{"name": "get_time", "arguments": {NOTHING}}}]',
    ),
    "mistral-args": (
        f"[TOOL_CALLS]get_weather[ARGS]{ROME}",
        f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_time[ARGS]{NOTHING}",
    ),
    "deepseek": (f"{ALL_BEGIN}{V3_ROME}{ALL_END}", f"{ALL_BEGIN}{V3_ROME}\n{V3_TIME}{ALL_END}"),
    "deepseek-v31": (f"{ALL_BEGIN}{V31_ROME}{ALL_END}", f"{ALL_BEGIN}{V31_ROME}{V31_TIME}{ALL_END}"),
    "gpt-oss": (f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}", None),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_calls_section_end|>",
        None,
    ),
    "glm": (GLM_ROME, f"{GLM_ROME}\n<tool_call>get_time\n</tool_call>"),
    "gemma": (GEMMA_ROME, f"{GEMMA_ROME}<start_function_call>call:get_time{NOTHING}<end_function_call>"),
    "qwen3-coder": (QWEN_ROME, f"{QWEN_ROME}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),
    "minimax": (
        f"<minimax:tool_call>\n{MINIMAX_ROME}\n</minimax:tool_call>",
        f'<minimax:tool_call>\n{MINIMAX_ROME}\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    ),
}
MARKERS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</think>"),
    *("[TOOL_CALLS]", "[ARGS]", ALL_BEGIN, ALL_END, BEGIN, SEP, END),
    *("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
# Markers are text, tokens, or special tokens of the vocabulary.
TOKENIZERS = {
    "text": byte_level,
    "tokens": lambda: byte_level_with(*MARKERS, special=False),
    "special": lambda: byte_level_with(*MARKERS, special=True),
}
OFFERED = [
    FunctionTool(function=ToolFunction(name="get_weather", parameters=CITY)),
    FunctionTool(function=ToolFunction(name="get_time")),
]


class Forced:
    """The constraint of an answer that must call tools, and how it is read."""

    def __init__(self, family, *, tools=OFFERED, tokenizer=byte_level, ends=(EOS,), reasoning_end=None, **fields):
        self.family, self.tools, self.tokenizer = FAMILIES[family], tools, tokenizer()
        fields = ChatFields(model="", messages=[], **{"tool_choice": "required", **fields})
        self.constraint = forced_calls(fields, tools, self.family, self.tokenizer, reasoning_end).constraint
        backend = self.tokenizer.backend
        self._size = backend.get_vocab_size()
        self._grammars, self._ends = GrammarMatchers(backend.to_str, self._size, ends), set(ends)

    def allowed(self, ids):
        """Return the tokens that may follow."""
        mask = self._grammars.allowed("", self.constraint, ids)
        return set(allowed_tokens(mask, self._size).nonzero()[0])

    def accepts(self, text):
        """Whether a model may write a text and end there."""
        ids = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert self.tokenizer.backend.decode(ids, skip_special_tokens=False) == text
        if not all(token in self.allowed(ids[:place]) for place, token in enumerate(ids)):
            return False
        return self.allowed(ids) >= self._ends

    def calls(self, text, prompt_end=""):
        """Return the calls of an answer, which has nothing else but reasoning."""
        parser = MessageParser(self.family.template, prompt_end, template_tools(self.tools), forced=True)
        parts = [*map(parser.feed, text), parser.finish()]
        assert not "".join(part.content for part in parts)
        return [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]


WEATHER_CALL, TIME_CALL = ("get_weather", {"city": "Rome"}), ("get_time", {})


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_form_of_each_family_is_forced_and_read(family, tokenizer):
    one, two = FORMS[family]
    named = NamedTool(function=ChosenFunction(name="get_weather"))
    several = Forced(family, tokenizer=TOKENIZERS[tokenizer])
    single = Forced(family, tokenizer=TOKENIZERS[tokenizer], parallel_tool_calls=False)
    weather = Forced(family, tokenizer=TOKENIZERS[tokenizer], tools=OFFERED[:1], tool_choice=named)
    for forced in (several, single, weather):
        assert forced.accepts(one)
        assert not forced.accepts(one[:-1])
        assert not forced.accepts(one.replace("get_weather", "get_whether"))
        assert not forced.accepts(one.replace("Rome", "Bonn"))
        assert not forced.accepts(f"Look. {one}")
        assert not forced.accepts("")
    assert several.calls(one) == [WEATHER_CALL]
    if two is not None:
        assert several.accepts(two)
        assert several.calls(two) == [WEATHER_CALL, TIME_CALL]
        assert not single.accepts(two)
        assert not weather.accepts(two)


def test_white_space_in_arguments_is_limited():
    forced = Forced("hermes")
    assert forced.accepts(HERMES_ROME.replace(ROME, f"{{{' ' * 32}{ROME[1:]}"))
    assert not forced.accepts(HERMES_ROME.replace(ROME, f"{{{' ' * 33}{ROME[1:]}"))


def test_all_families_are_tested():
    assert FORMS.keys() == FAMILIES.keys()


def test_a_gpt_oss_answer_has_one_call_and_ends_with_any_end_token():
    backend = TOKENIZERS["special"]().backend
    call_end, (one, _) = backend.token_to_id("<|call|>"), FORMS["gpt-oss"]
    ids = backend.encode(one, add_special_tokens=False).ids
    assert Forced("gpt-oss", tokenizer=TOKENIZERS["special"]).allowed(ids) == {EOS}
    forced = Forced("gpt-oss", tokenizer=TOKENIZERS["special"], ends=(EOS, call_end))
    assert forced.accepts(one)
    assert forced.allowed(ids) == {EOS, call_end}
    assert call_end not in forced.allowed(ids[:-1])
    assert forced.calls(f"{one}<|call|>") == [WEATHER_CALL]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_calls_follow_the_reasoning_that_the_prompt_has_begun(tokenizer):
    prompt_end, answer = "<｜Assistant｜><think>\n", f"Rome?\nCall <it>.</think>{FORMS['deepseek'][0]}"
    end = MessageParser(FAMILIES["deepseek"].template, prompt_end, template_tools(OFFERED)).reasoning_end
    forced = Forced("deepseek", tokenizer=TOKENIZERS[tokenizer], reasoning_end=end)
    assert forced.accepts(answer)
    assert forced.calls(answer, prompt_end) == [WEATHER_CALL]
    assert not forced.accepts(FORMS["deepseek"][0])
    assert not forced.accepts("Rome?</think>Sunny.")


@pytest.mark.parametrize(
    "prompt_end", ["<｜Assistant｜>", "<｜Assistant｜></think>", "<｜Assistant｜><think></think>", ""]
)
def test_calls_come_first_if_the_prompt_has_begun_no_reasoning(prompt_end):
    parser = MessageParser(FAMILIES["deepseek"].template, prompt_end, template_tools(OFFERED))
    assert parser.reasoning_end is None


TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
    },
    "required": ["city"],
    "$defs": {"stop": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}},
}


class TestArgumentsInPairs:
    """GLM writes arguments as pairs of keys and values."""

    def forced(self, parameters, tokenizer="text"):
        tool = FunctionTool(function=ToolFunction(name="trip", parameters=parameters))
        return Forced("glm", tools=[tool], tokenizer=TOKENIZERS[tokenizer])

    @pytest.mark.parametrize("line", ["", "\n"])
    @pytest.mark.parametrize("tokenizer", TOKENIZERS)
    def test_values_are_json(self, line, tokenizer):
        def pair(key, value):
            return f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"

        forced = self.forced(TRIP, tokenizer)
        city, days, stops = pair("city", '"12"'), pair("days", 2), pair("stops", '[{"at": "a, b:c"}]')
        answers = {
            city: {"city": "12"},
            city + days: {"city": "12", "days": 2},
            city + stops: {"city": "12", "stops": [{"at": "a, b:c"}]},
            city + days + stops: {"city": "12", "days": 2, "stops": [{"at": "a, b:c"}]},
        }
        for written, arguments in answers.items():
            answer = f"<tool_call>trip{line}{written}</tool_call>"
            assert forced.accepts(answer)
            assert forced.calls(answer) == [("trip", arguments)]
        wrong = (pair("days", '"2"'), pair("stops", "[{}]"), city)
        for written in ("", days, pair("city", 1), *(city + each for each in wrong)):
            assert not forced.accepts(f"<tool_call>trip{line}{written}</tool_call>")

    @pytest.mark.parametrize(
        "parameters",
        [
            {**TRIP, "anyOf": [{"required": ["days"]}]},
            {**TRIP, "required": ["country"]},
            {"type": "object", "properties": {"city": False}},
            {"type": "object", "properties": ["city"]},
            {"type": "array"},
        ],
    )
    def test_other_schemas_are_refused(self, parameters):
        with pytest.raises(RequestError, match=r"^tool_choice: calls of trip cannot be forced"):
            self.forced(parameters)


def test_reasoning_and_forced_calls_in_a_chat():
    asked = service(f"Hm.</think>{CALL}")
    with running_gateway(asked, tokenizer=tool_caller()) as client:
        answers = [ask(client, tool_choice="required", reasoning_effort=effort) for effort in ("high", "none")]
    thought, called = (each.sampling.constraint.text for each in asked.started)
    assert "</think>" in thought
    assert "</think>" not in called
    (choice,) = answers[0].json()["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


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
