"""Compare the tokens of every kind of sampling and constraint: colocated, split, and after the loss of a decode worker.

    python bench/same_tokens.py smollm2 my-model
    python bench/same_tokens.py smollm2 --shapes llama qwen3 --engine vllm

A shape is a model of that architecture with random weights and SmolLM2's tokenizer, whose chat template has tools.
Each kind of request runs greedily and sampled. For the third way, the script kills the decode worker of the split
service while it streams the output. It exits with 1 if a token differs, or if an answer in JSON is not valid.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from twofold.bench.services import ServedProcess, metrics, served_process
from twofold.engine.model_package import PACKAGED, get_packaged
from twofold.reporting.output import json_text

CITIES = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "coastal": {"type": "boolean"}},
        "required": ["name", "coastal"],
        "additionalProperties": False,
    },
}
LONG = [f"The answer is {colour}, because all other colours were taken by somebody else." for colour in ("red", "blue")]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
        },
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logit bias": {"logit_bias": {"17": 4.0, "30": -50.0}},
    "min-p": {"min_p": 0.1},
    "bad words": {"bad_words": ["the", "a"]},
    "JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "cities", "schema": CITIES}}},
    "regex": {"structured_outputs": {"regex": r"([A-Z][a-z]{2,9}, ){8}and [A-Z][a-z]{2,9}\."}},
    "choice": {"structured_outputs": {"choice": LONG}},
    "grammar": {
        "structured_outputs": {"grammar": 'start: sum ("=" sum){3,5}\nsum: /[1-9][0-9]{2}/ ("+" /[1-9][0-9]{2}/){2,3}'}
    },
    "tools": {"tools": [TOOL], "tool_choice": "required"},
}
TEMPERATURES = (0.0, 0.8)
KILLED_AFTER = 4  # tokens
MESSAGES = [{"role": "user", "content": "Which cities in Europe should I visit, and why?"}]


SHAPES = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "mixtral": "MixtralConfig"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 2048}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# Tools and calls as in the models of Nous Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_shape(name: str, folder: Path) -> Path:
    """Write a model with random weights to a directory, and return it."""
    import torch  # noqa: PLC0415  (slow)
    import transformers  # noqa: PLC0415

    tokenizer = transformers.AutoTokenizer.from_pretrained(get_packaged("smollm2"))
    tokenizer.chat_template = TEMPLATE
    special = {kind: getattr(tokenizer, kind) for kind in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = getattr(transformers, SHAPES[name])(vocab_size=len(tokenizer), **SIZES, **HEADS, **special)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for part in (model, tokenizer):
        part.save_pretrained(folder / name)
    return folder / name


class Answer(msgspec.Struct, frozen=True):
    """Tokens and text of a streamed answer, or the reason why the service refused it."""

    tokens: list[int] = []
    text: str = ""
    ended: str | None = None
    refused: str | None = None


class Service:
    """Client of a running service."""

    def __init__(self, process: ServedProcess, session: aiohttp.ClientSession, tokens: int) -> None:
        self._process, self._session, self._tokens = process, session, tokens

    async def answer(self, kind: str, temperature: float, *, kill: bool) -> Answer:
        """Stream the answer to one request. With `kill`, kill the decode worker after a few tokens."""
        body = {
            "model": "model",
            "messages": MESSAGES,
            "max_tokens": self._tokens,
            "temperature": temperature,
            "seed": 11,
            "stream": True,
            "return_token_ids": True,
            **KINDS[kind],
        }
        tokens, text, ended = list[int](), "", None
        async with self._session.post(f"{self._process.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return Answer(refused=json.loads(await response.text())["error"]["message"])
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    text += choice["delta"].get("content") or ""
                    ended = choice["finish_reason"] or ended
                if kill and len(tokens) >= KILLED_AFTER:
                    kill = False
                    self._kill_decoder()
        return Answer(tokens, text, ended)

    @property
    def replays(self) -> int:
        lines = metrics(self._process.url).splitlines()
        return round(sum(float(line.split()[-1]) for line in lines if line.startswith("twofold:request_replays_total")))

    def _kill_decoder(self) -> None:
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if child.name().startswith("decode"):
                os.kill(child.pid, signal.SIGKILL)


async def answers(process: ServedProcess, tokens: int, *, kill: bool) -> tuple[dict[tuple[str, float], Answer], int]:
    """Return the answer to each request, and the number of requests that were replayed."""
    found = dict[tuple[str, float], Answer]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        service = Service(process, session, tokens)
        before = service.replays
        for kind in KINDS:
            for temperature in TEMPERATURES:
                found[kind, temperature] = await service.answer(kind, temperature, kill=kill)
        return found, service.replays - before


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one model: number of a way, the replays, and what is wrong."""

    model: str
    answers: int
    replays: int
    wrong: list[str]


def compare(model: Path, flags: Sequence[str], tokens: int) -> tuple[Table, Compared]:
    """Run all ways of serving a model. Return a table, and the result."""
    ways: dict[str, tuple[dict[tuple[str, float], Answer], int]] = {}
    flags = [*flags, "--served-model-name", "model", "--dtype", "float32", "--max-restart-delay", "1"]
    with served_process(model, [*flags, "--colocated", "1"]) as process:
        ways["colocated"] = asyncio.run(answers(process, tokens, kill=False))
    with served_process(model, [*flags, "--prefill", "1", "--decode", "1"]) as process:
        ways["split"] = asyncio.run(answers(process, tokens, kill=False))
        ways["killed"] = asyncio.run(answers(process, tokens, kill=True))
    table = Table("kind", "tokens, greedy", "tokens, sampled", *ways, title=model.name)
    wrong: list[str] = []
    reference = ways["colocated"][0]
    for kind in KINDS:
        wanted = [reference[kind, temperature] for temperature in TEMPERATURES]
        same = [[way[0][kind, temperature] for temperature in TEMPERATURES] == wanted for way in ways.values()]
        if wanted[0].refused is not None:
            table.add_row(kind, wanted[0].refused, "", *("" if each else "differs" for each in same))
        else:
            counts = [str(len(each.tokens)) for each in wanted]
            table.add_row(kind, *counts, *("same" if each else "differs" for each in same))
        wrong += [f"{model.name}, {kind}: {name} differs" for name, each in zip(ways, same, strict=True) if not each]
    wrong += invalid(model.name, reference)
    table.caption = f"{ways['killed'][1]} requests were replayed after the death of their decode worker"
    served = sum(each.refused is None for each in reference.values())
    return table, Compared(model=model.name, answers=served, replays=ways["killed"][1], wrong=wrong)


def invalid(model: str, found: Mapping[tuple[str, float], Answer]) -> list[str]:
    """Return the finished answers in JSON that are not valid."""
    wrong = []
    for temperature in TEMPERATURES:
        answer = found["JSON schema", temperature]
        if answer.ended == "stop":
            try:
                jsonschema.validate(json.loads(answer.text), CITIES)
            except (json.JSONDecodeError, jsonschema.ValidationError) as error:
                wrong.append(f"{model}, temperature {temperature}: {error}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"model directories, or {', '.join(PACKAGED)}")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=(), help="architectures with random weights")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--tokens", type=int, default=96, help="longest output")
    parser.add_argument("--json", type=Path, help="file for all results")
    given = parser.parse_args()
    console, found = Console(), list[Compared]()
    with tempfile.TemporaryDirectory() as folder:
        models = [get_packaged(name) if name in PACKAGED else Path(name) for name in given.models]
        for model in [*models, *(make_shape(name, Path(folder)) for name in given.shapes)]:
            table, compared = compare(model, ["--engine", given.engine], given.tokens)
            console.print(table)
            found.append(compared)
    wrong = [each for compared in found for each in compared.wrong]
    for each in wrong:
        console.print(f"✗ {each}", markup=False)
    if given.json is not None:
        given.json.write_text(json_text(found), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
