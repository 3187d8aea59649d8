"""Reasoning and tool calls in the answers of each family, in one piece and in pieces of any size."""

import json
import random

import pytest

from twofold.serving.gateway.tools.families import FAMILIES, family_of
from twofold.serving.gateway.tools.message_parser import MessageParser, together

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ROME = ("get_weather", {"city": "Rome", "days": 2})
OSLO = ("get_weather", {"city": "Oslo"})
_ROME, _OSLO = (json.dumps(arguments) for _, arguments in (ROME, OSLO))
_CALL_ROME, _CALL_OSLO = (f'{{"name": "get_weather", "arguments": {arguments}}}' for arguments in (_ROME, _OSLO))
_TAGGED_ROME, _TAGGED_OSLO = (f"<tool_call>\n{call}\n</tool_call>" for call in (_CALL_ROME, _CALL_OSLO))
_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS_BEGIN, _CALLS_END, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
_ANALYSIS = "<|channel|>analysis<|message|>"
_NEXT = "<|end|><|start|>assistant<|channel|>"

# Family, end of the prompt, answer, content, reasoning, calls.
ANSWERS = {
    "hermes": (
        "hermes",
        "<|im_start|>assistant\n",
        f"<think>\nRome?\n</think>Let me look.\n{_TAGGED_ROME}\n{_TAGGED_OSLO}",
        "Let me look.\n",
        "\nRome?\n",
        [ROME, OSLO],
    ),
    "hermes, thinking begun by the prompt": (
        "hermes",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "A greeting.</think>Hello!",
        "Hello!",
        "A greeting.",
        [],
    ),
    "glm": (
        "glm",
        "<|assistant|>\n",
        "Wait.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "Wait.",
        "",
        [ROME],
    ),
    "llama3": (
        "llama3",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"<|python_tag|>{_CALL_ROME}; {_CALL_OSLO}".replace("arguments", "parameters"),
        "",
        "",
        [ROME, OSLO],
    ),
    "mistral": ("mistral", "[/INST]", f"[TOOL_CALLS] [{_CALL_ROME}, {_CALL_OSLO}]", "", "", [ROME, OSLO]),
    "mistral-args": (
        "mistral-args",
        "[/INST]",
        f"[TOOL_CALLS]get_weather[ARGS]{_ROME}[TOOL_CALLS]get_weather[ARGS]{_OSLO}",
        "",
        "",
        [ROME, OSLO],
    ),
    "deepseek": (
        "deepseek",
        "<｜Assistant｜><think>\n",
        f"Two.</think>Look:{_CALLS_BEGIN}{_BEGIN}function{_SEP}get_weather\n```json\n{_ROME}\n```{_END}\n{_BEGIN}get_weather{_SEP}{_OSLO}{_END}{_CALLS_END}",
        "Look:",
        "Two.",
        [ROME, OSLO],
    ),
    "gemma": (
        "gemma",
        "<start_of_turn>model\n",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
        "",
        "",
        [ROME],
    ),
    "qwen3-coder": (
        "qwen3-coder",
        "<|im_start|>assistant\n",
        (
            "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        "I look.\n",
        "",
        [ROME, OSLO],
    ),
    "qwen3-coder with code": (
        "qwen3-coder",
        "<|im_start|>assistant\n<think>\n",
        (
            'Hm.\n</think><function=get_weather>\n<parameter=city>\n{"a": 1}\n\nif a < 2 > 1:\n    <b>\n\n'
            "</parameter>\n</function>"
        ),
        "",
        "Hm.\n",
        [("get_weather", {"city": '{"a": 1}\n\nif a < 2 > 1:\n    <b>\n'})],
    ),
    "minimax": (
        "minimax",
        "]~b]ai\n<think>\n",
        (
            'Two.</think>Look:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome'
            '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">\n'
            '<parameter name="city">Oslo</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
        "Look:\n",
        "Two.",
        [ROME, OSLO],
    ),
    "kimi": (
        "kimi",
        "<|im_assistant|>assistant<|im_middle|>",
        f"<think>Two.</think>Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_ROME}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{_OSLO}<|tool_call_end|><|tool_calls_section_end|>",
        "Look:",
        "Two.",
        [ROME, OSLO],
    ),
    "gpt-oss": (
        "gpt-oss",
        "<|start|>assistant",
        f"{_ANALYSIS}Weather.{_NEXT}commentary to=functions.get_weather <|constrain|>json<|message|>{_ROME}<|call|>",
        "",
        "Weather.",
        [ROME],
    ),
    "gpt-oss without a call": (
        "gpt-oss",
        "<|start|>assistant",
        f"{_ANALYSIS}Easy.{_NEXT}final<|message|>Four.",
        "Four.",
        "Easy.",
        [],
    ),
    "gpt-oss with a preamble": (
        "gpt-oss",
        "<|start|>assistant",
        (
            f"{_ANALYSIS}One.{_NEXT}analysis<|message|>Two.{_NEXT}commentary<|message|>Look:<|end|><|start|>assistant "
            f"to=functions.get_weather<|channel|>commentary json<|message|>{_ROME}"
        ),
        "Look:",
        "One.\nTwo.",
        [ROME],
    ),
    "gpt-oss with structured output": (
        "gpt-oss",
        "<|start|>assistant",
        f"<|channel|>commentary<|message|>Here:{_NEXT}final <|constrain|>json<|message|>{_ROME}",
        f"Here:\n{_ROME}",
        "",
        [],
    ),
    "gpt-oss with a call that is no JSON after a preamble": (
        "gpt-oss",
        "<|start|>assistant",
        (
            f"<|channel|>commentary<|message|>One.{_NEXT}commentary<|message|>Two.{_NEXT}commentary "
            "to=functions.get_weather<|message|>oops<|end|>"
        ),
        "One.\nTwo.",
        "",
        [],
    ),
    "no call": ("hermes", "<|im_start|>assistant\n", "1 < 2 and <tool> is text", "1 < 2 and <tool> is text", "", []),
    "a call that is no JSON": (
        "hermes",
        "<|im_start|>assistant\n",
        f"Yes.<tool_call>{_CALL_ROME}</tool_call>So <tool_call>oops</tool_call> it is.",
        "Yes.So <tool_call>oops</tool_call> it is.",
        "",
        [ROME],
    ),
    "a call that is cut off": (
        "hermes",
        "<|im_start|>assistant\n",
        'Yes.<tool_call>{"name": "get_weather", "argu',
        'Yes.<tool_call>{"name": "get_weather", "argu',
        "",
        [],
    ),
}


def parse(family, prompt_end, pieces, tools=TOOLS, *, forced=False):
    """Return content, reasoning and calls of an answer. Its calls in parts are the same."""
    pieces = list(pieces)
    whole, in_parts = (parts_of(family, prompt_end, pieces, tools, forced, each) for each in (False, True))
    calls = [call for part in whole for call in part.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    streamed = together(in_parts)
    assert [(each.index, each.name, each.arguments) for each in streamed.calls] == [
        (each.index, each.name, each.arguments) for each in calls
    ]
    text, reasoning = ("".join(each) for each in zip(*((part.content, part.reasoning) for part in whole), strict=True))
    assert (streamed.content, streamed.reasoning) == (text, reasoning)
    return text, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]


def parts_of(family, prompt_end, pieces, tools=TOOLS, forced=False, in_parts=True):
    """Return what each piece of an answer and its end add."""
    parser = MessageParser(FAMILIES[family].template, prompt_end, tools, forced=forced, in_parts=in_parts)
    return [*map(parser.feed, pieces), parser.finish()]


def cut(text, draw):
    """Cut a text into pieces of random lengths."""
    while text:
        size = draw.choice((1, 1, 2, 3, 7, 40))
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_split_into_their_parts(name):
    family, prompt_end, answer, *wanted = ANSWERS[name]
    draw = random.Random(name)
    for pieces in ([answer], list(answer), *(list(cut(answer, draw)) for _ in range(50))):
        assert parse(family, prompt_end, pieces) == tuple(wanted), pieces


CODE = ("if (x) { y(); } [z]", "};", "} ; {", "}; {x: 1}", '{"a": "b"}', "]", "[1]\n```\n", "a < b > c", "} \n[TOOL]")


def written(family, calls):
    """Return calls as a model of the family writes them."""
    form = FAMILIES[family].calls
    each = [
        f"{form.name}{json.dumps(name) if form.quotes else name}{form.arguments}{json.dumps(arguments)}{form.end}"
        for name, arguments in calls
    ]
    return form.before + form.between.join(each) + form.after


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.calls.pair is None])
def test_arguments_may_be_code(family):
    draw = random.Random(family)
    for _ in range(200):
        several = draw.randint(1, 2) if FAMILIES[family].calls.several else 1
        calls = [("get_weather", {"city": "".join(draw.choices(CODE, k=3))}) for _ in range(several)]
        prompt_end = FAMILIES[family].template["start_anchor"]
        text, _, found = parse(family, prompt_end, cut(written(family, calls), draw), forced=family == "gemma")
        assert (text, found) == ("", calls)


XML_CALLS = {
    "glm": "<tool_call>get_weather\n{}</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n{}</invoke>\n</minimax:tool_call>',
}
XML_PARAMETERS = {
    "glm": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen3-coder": "<parameter={}>\n{}\n</parameter>\n",
    "minimax": '<parameter name="{}">{}</parameter>\n',
}
# Parameter, text, value.
XML_VALUES = (
    ("city", "Rome", "Rome"),
    ("city", '"Rome"', '"Rome"'),
    ("city", "10115", "10115"),
    ("city", '{"a":  1}', '{"a":  1}'),
    ("city", "null", "null"),
    ("days", "2", 2),
    ("days", "two", "two"),
    ("maybe", "null", None),
    ("maybe", "7", "7"),
    ("place", '{"lat": [1]}', {"lat": [1]}),
    ("unknown", "[1]", [1]),
    ("unknown", "a [1]", "a [1]"),
    ("odd", "5", 5),
    ("flag", "True", True),
    ("flag", "0", False),
    ("flag", "maybe", "maybe"),
    ("days", "3.0", 3),
    ("days", "None", "None"),
    ("either", "7", 7),
    ("either", "seven", "seven"),
)
XML_PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "place": {"$ref": "#/$defs/Place"},
    "odd": 1,
    "flag": {"type": "boolean"},
    "either": {"type": ["integer", "string"]},
}


@pytest.mark.parametrize("family", XML_CALLS)
@pytest.mark.parametrize(("name", "text", "value"), XML_VALUES)
def test_the_values_of_xml_calls_follow_the_schema(family, name, text, value):
    parameters = {"type": "object", "properties": XML_PROPERTIES}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    answer = XML_CALLS[family].format(XML_PARAMETERS[family].format(name, text))
    prompt_end = FAMILIES[family].template["start_anchor"]
    assert parse(family, prompt_end, [answer], tools) == ("", "", [("get_weather", {name: value})])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("mistral", "gemma")])
def test_arguments_arrive_while_they_are_written(family):
    city = f"{CODE[0]} \\ 'b' \n" + "word " * 40
    if family in XML_CALLS:
        pairs = [XML_PARAMETERS[family].format(name, value) for name, value in (("city", city), ("days", 2))]
        answer = XML_CALLS[family].format("".join(pairs))
    else:
        answer = written(family, [("get_weather", {"city": city, "days": 2})])
    first, *more = [part for part in parts_of(family, FAMILIES[family].template["start_anchor"], answer) if part.calls]
    assert (first.calls[0].name, first.calls[0].id[:5]) == ("get_weather", "call_")
    assert all((call.index, call.id, call.name) == (0, "", "") for part in more for call in part.calls)
    assert sum("d" in call.arguments for part in more for call in part.calls) > 40
    (call,) = together([first, *more]).calls
    assert json.loads(call.arguments) == {"city": city, "days": 2}


# Text after the name in a call of hermes, and the arguments of all streamed calls. A complete call follows the text.
IN_PARTS = (
    ('"arguments": {"city": "Rome"}} really</tool_call>', ['{"city": "Rome"}', _OSLO]),
    ('"arguments": {"city": }}</tool_call>', ['{"city": }', _OSLO]),
    ('"parameters": {"city": "Rome"}}</tool_call>', None),
    ('"arguments": "Rome"}</tool_call>', None),
    ('"arguments": [1]}</tool_call>', None),
    ('"arguments": "{\\"city\\": 1}"}</tool_call>', ['{"city": 1}', _OSLO]),
    ('"id": 1, "arguments": {"city": "Rome"}}</tool_call>', ['{"city":"Rome"}', _OSLO]),
    ('"arguments": {"city": "Rome", "days": 2}, "id": "}"}</tool_call>', ['{"city": "Rome", "days": 2}', _OSLO]),
    ('"arguments": {"city": "Ro', [f'{{"city": "Ro{_TAGGED_OSLO[: -len("</tool_call>")]}']),
)


@pytest.mark.parametrize(("rest", "arguments"), IN_PARTS)
def test_calls_of_other_forms_in_parts(rest, arguments):
    answer = f'<tool_call>{{"name": "get_weather", {rest}{_TAGGED_OSLO}'
    found = together(parts_of("hermes", "<|im_start|>assistant\n", answer))
    assert [call.arguments for call in found.calls] == (arguments or [])
    assert found.content == ("" if arguments else answer)


@pytest.mark.parametrize("cut_off", ['{"city": "Ro', '{"city": "', '{"city": "Rome"', "{"])
def test_arguments_that_the_answer_cuts_off_stay_so(cut_off):
    answer = f'<tool_call>{{"name": "get_weather", "arguments": {cut_off}'
    for more in ("", "\\"):  # of a backslash, the next character is unknown
        found = together(parts_of("hermes", "<|im_start|>assistant\n", answer + more))
        assert ([call.arguments for call in found.calls], found.content) == ([cut_off], "")


def test_a_name_of_no_tool_comes_with_the_whole_call():
    answer = '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>'
    (part,) = [part for part in parts_of("hermes", "<|im_start|>assistant\n", answer) if part.calls]
    assert [(call.name, call.arguments) for call in part.calls] == [("get_time", '{"city":"Rome"}')]


def test_a_wrong_name_in_json_is_text_in_parts_too():
    answer = 'Hm.<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'
    (content,) = {
        together(parts_of("hermes", "<|im_start|>assistant\n", answer, in_parts=each)).content for each in (0, 1)
    }
    assert content == answer


def test_a_string_that_the_answer_cuts_off_stays_open():
    answer = XML_CALLS["glm"].partition("{")[0] + "<arg_key>city</arg_key><arg_value>Ro"
    assert [call.arguments for call in together(parts_of("glm", "<|assistant|>", answer)).calls] == ['{"city":"Ro']


def test_the_first_of_two_values_of_an_argument_counts():
    for value in ("Oslo", "2"):
        pairs = [XML_PARAMETERS["glm"].format(name, each) for name, each in (("city", "Rome"), ("city", value))]
        answer = XML_CALLS["glm"].format("".join(pairs))
        assert parse("glm", "<|assistant|>", answer) == ("", "", [("get_weather", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("family", "begin", "piece"),
    [
        ("qwen3-coder", "<tool_call>\n<function=get_weather>\n", "<parameter=a>"),
        ("glm", "<tool_call>get_weather\n", "<arg_key>"),
        ("glm", "<tool_call>get_weather\n", "<arg_key>a</arg_key>\n"),
        ("minimax", '<minimax:tool_call>\n<invoke name="get_weather">\n', '<parameter name="a">'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": ', "["),
        ("hermes", "<tool_call>", '{"name": '),
    ],
)
def test_the_work_for_repeated_openings_is_not_quadratic(family, begin, piece):
    # Then, this test would take minutes.
    prompt_end = FAMILIES[family].template["start_anchor"]
    parts = parts_of(family, prompt_end, [begin, *[piece] * 20_000], in_parts=False)
    assert together(parts).calls == () or together(parts).calls[0].arguments == "{}"


def test_the_strings_of_forced_xml_calls_are_json():
    answer = XML_CALLS["glm"].format(XML_PARAMETERS["glm"].format("city", '"a \\"b\\""'))
    assert parse("glm", "<|assistant|>", [answer], forced=True) == ("", "", [("get_weather", {"city": 'a "b"'})])


@pytest.mark.parametrize("forced", [True, False])
def test_templates_of_checkpoints_may_have_less(forced):
    transform = {"type": "function", "function": {"name": "{name}", "arguments": {"city": "{content}"}}}
    call = {"open_pattern": "<call (?P<name>[a-z_]+)>", "close": "</call>", "repeats": True, "transform": transform}
    template = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": call}}
    parser = MessageParser(template, "<a>", TOOLS, forced=forced)
    (made,) = parser.feed("<call get_weather>Rome</call>").calls
    assert (made.name, json.loads(made.arguments)) == ("get_weather", {"city": "Rome"})
    plain = MessageParser({"start_anchor": "<a>", "fields": {"content": {}}}, "<a>", TOOLS, forced=forced)
    assert plain.feed("Hello. ").content + plain.finish().content == "Hello. "


def test_without_tools_calls_are_text():
    answer = '<think>Hm.</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text, reasoning, calls = parse("hermes", "<|im_start|>assistant\n", [answer], tools=[])
    assert (text, reasoning, calls) == ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', "Hm.", [])


def test_both_families_of_deepseek_are_read_alike():
    assert FAMILIES["deepseek-v31"].template == FAMILIES["deepseek"].template


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_found_by_their_chat_templates(name):
    family = FAMILIES[name]
    assert family_of(f"{{% if tools %}}{' '.join(family.marks)}{{% endif %}}") is family


def test_other_chat_templates_have_no_family():
    assert family_of("{{ messages[0].content }}") is None
