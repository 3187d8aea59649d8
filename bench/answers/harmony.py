"""Compare the gateway's parser with openai-harmony's, on random answers of gpt-oss.

    pip install openai-harmony
    TIKTOKEN_ENCODINGS_BASE=DIR python bench/answers/harmony.py

DIR has the vocabulary `o200k_base.tiktoken`; without the variable, openai-harmony downloads it. openai-harmony renders
the answers: messages of analysis, preambles, final text or JSON, and a tool call, in the orders that gpt-oss writes.
Content, reasoning and calls must be what it parses from their tokens. Exits with 1 after a difference.
"""

import argparse
import json
import random
import sys

import openai_harmony as harmony
from gateway_parser import Calls, parsed

PROMPT_END = "<|start|>assistant"
ENDS = ("<|call|>", "<|return|>", "<|end|>")  # the engine ends an output before them
SHAPES = (
    ("final",),
    ("json",),
    ("analysis", "final"),
    ("analysis", "json"),
    ("analysis", "analysis", "final"),
    ("call",),
    ("preamble", "call"),
    ("preamble", "final"),
    ("analysis", "call"),
    ("analysis", "preamble", "call"),
    ("analysis", "preamble", "analysis", "call"),
)
WORDS = ("Let me see.", 'It is 5 < 6, said "he".', "x\n\ny", " <tag> ", 'a {"b": 1}', "é漢字🙂", "to=functions.f", "1")
NAMES = ("get_weather", "get-time", "a.b", "f")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
KINDS = ("<|constrain|>json", "json", None)  # of the arguments of a call


def message(kind: str, draw: random.Random) -> harmony.Message:
    """Return a random message of the assistant."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))
    arguments = draw.choice([{}, {"city": text}, {"n": 3, "city": "Rome"}, {"city": {"x": [1, 2, {"y": "}"}]}}])
    written = json.dumps(arguments, ensure_ascii=draw.random() < 0.5)
    body = written if kind in ("call", "json") else text
    channel = {"analysis": "analysis", "final": "final", "json": "final"}.get(kind, "commentary")
    made = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, body).with_channel(channel)
    if kind == "call":
        made = made.with_recipient(f"functions.{draw.choice(NAMES)}")
    content_type = {"call": draw.choice(KINDS), "json": "<|constrain|>json"}.get(kind)
    return made if content_type is None else made.with_content_type(content_type)


def expected(encoding: harmony.HarmonyEncoding, tokens: list[int]) -> tuple[str, str, Calls]:
    """Return content, reasoning and calls that openai-harmony parses from the tokens of an answer."""
    content, reasoning, calls = list[str](), list[str](), Calls()
    for each in encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT):
        text = each.content[0].text
        if (each.recipient or "").startswith("functions."):  # it also reads the type of JSON text as a recipient
            calls.append((each.recipient.removeprefix("functions."), json.loads(text)))
        else:
            (reasoning if each.channel == "analysis" else content).append(text)
    return "\n".join(content), "\n".join(reasoning), calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    begun = encoding.encode(PROMPT_END, allowed_special="all")
    for number in range(given.answers):
        tokens = [token for kind in SHAPES[number % len(SHAPES)] for token in encoding.render(message(kind, draw))]
        text = encoding.decode(tokens).removeprefix(PROMPT_END)
        for end in ENDS:
            text = text.removesuffix(end)
        wanted, found = expected(encoding, tokens[len(begun) :]), parsed("gpt-oss", TOOLS, text, draw)
        if found != wanted:
            sys.exit(f"answer {number}: {text!r}\n  openai-harmony: {wanted}\n  the gateway:    {found}")
    print(f"{given.answers} answers of {len(SHAPES)} shapes: content, reasoning and calls are those of openai-harmony")


if __name__ == "__main__":
    main()
