"""Measure the overhead of the torch engine over transformers' own forward pass, for the same model in one process.

Cases are decode steps of 1 and 16 sequences with about 512 tokens of context each, and a prefill of 1,024 tokens.
Transformers runs with `sdpa` attention, a DynamicCache, `logits_to_keep=1` and argmax. The result is the median over
rounds of the engine's time divided by transformers' time.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from twofold.engine.base import SequenceStep
from twofold.engine.model_factory import create_model
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model, no_progress_bars
from twofold.engine.torch.pool import KvPool
from twofold.request import SamplingParams

CONTEXT = 512
PREFILL = 1024
BLOCK_SIZE = 16

T = TypeVar("T")
Timed = Callable[[], float]  # runs the work once and returns its seconds


class Case(msgspec.Struct, frozen=True):
    """Result of one case: median times of the torch engine and of transformers, and the median of their ratio."""

    name: str
    engine_ms: float
    transformers_ms: float
    ratio: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of a run, with machine, torch version and model."""

    cpu: str
    cores: int
    threads: int
    torch: str
    model: str
    load_s: float
    first_run_s: float
    cases: list[Case]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or _make_model(Path(scratch) / "model")
        result = measure(model, arguments.threads, arguments.rounds)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    print(f"{result.cpu}, {result.cores} cores, {result.threads} thread(s), torch {result.torch}")
    print(f"load {result.load_s:.2f} s, first run {result.first_run_s * 1e3:.0f} ms")
    for case in result.cases:
        times = f"engine {case.engine_ms:8.2f} ms   transformers {case.transformers_ms:8.2f} ms"
        print(f"{case.name:<22}{times}   ratio {case.ratio:.3f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model directory (default: created by `twofold model create`)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


def _make_model(directory: Path) -> Path:
    print("creating a model with `twofold model create` …", file=sys.stderr)
    create_model(directory)
    return directory


def measure(directory: Path, threads: int, rounds: int) -> Result:
    """Load the model into the torch engine and into transformers, and compare their times for prefill and decode."""
    torch.set_num_threads(threads)
    loaded, load_s = _timed(lambda: load_model(directory))
    blocks = 16 * (CONTEXT + PREFILL) // BLOCK_SIZE
    engine = TorchEngine(loaded, KvPool(loaded.layout(BLOCK_SIZE), blocks))
    _, first_run_s = _timed(_engine_decode(engine, loaded.vocab_size, 1))
    with no_progress_bars():
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa")
    theirs.eval()
    pairs = {
        "decode, batch 1": (_engine_decode, _reference_decode, 1),
        "decode, batch 16": (_engine_decode, _reference_decode, 16),
        "prefill, 1,024 tokens": (_engine_prefill, _reference_prefill, PREFILL),
    }
    return Result(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=threads,
        torch=str(torch.__version__),
        model=str(directory),
        load_s=load_s,
        first_run_s=first_run_s,
        cases=[
            _compare(name, ours(engine, loaded.vocab_size, size), reference(theirs, size), rounds)
            for name, (ours, reference, size) in pairs.items()
        ],
    )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _compare(name: str, ours: Timed, theirs: Timed, rounds: int) -> Case:
    for warm_up in (ours, theirs) * 2:
        warm_up()
    times = [(ours(), theirs()) for _ in range(rounds)]
    engine_ms, transformers_ms = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
    ratio = statistics.median(engine / transformers for engine, transformers in times)
    return Case(name, engine_ms, transformers_ms, ratio)


def _engine_decode(engine: TorchEngine, vocab_size: int, batch: int) -> Timed:
    rng = random.Random(0)
    blocks = rng.sample(range(engine.num_blocks), engine.num_blocks)
    greedy = SamplingParams(max_tokens=PREFILL, temperature=0.0)
    steps = []
    for i in range(batch):
        context = CONTEXT + 2 * i - (batch - 1)
        table = [blocks.pop() for _ in range(context // BLOCK_SIZE + 1)]
        steps.append(SequenceStep(str(i), [rng.randrange(vocab_size)], context, table, greedy, 1))
    return lambda: _timed(lambda: engine.run(steps))[1]


def _engine_prefill(engine: TorchEngine, vocab_size: int, tokens: int) -> Timed:
    rng = random.Random(0)
    table = rng.sample(range(engine.num_blocks), tokens // BLOCK_SIZE)
    prompt = [rng.randrange(vocab_size) for _ in range(tokens)]
    steps = [SequenceStep("0", prompt, 0, table, SamplingParams(max_tokens=1, temperature=0.0))]
    return lambda: _timed(lambda: engine.run(steps))[1]


def _reference_decode(model: PreTrainedModel, batch: int) -> Timed:
    cache = DynamicCache(config=model.config)
    context = torch.randint(model.config.vocab_size, (batch, CONTEXT))
    with torch.inference_mode():
        model(input_ids=context, past_key_values=cache, logits_to_keep=1)

    def step() -> float:
        seconds = _timed(lambda: _forward(model, context[:, :1], cache))[1]
        cache.crop(-1)
        return seconds

    return step


def _reference_prefill(model: PreTrainedModel, tokens: int) -> Timed:
    prompt = torch.randint(model.config.vocab_size, (1, tokens))
    return lambda: _timed(lambda: _forward(model, prompt, DynamicCache(config=model.config)))[1]


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: object) -> list[int]:
    with torch.inference_mode():
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
    return tokens


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown CPU"


if __name__ == "__main__":
    main()
