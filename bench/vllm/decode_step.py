"""Measure the time between tokens of a vLLM worker against plain `vllm serve`, with the same options, in alternation.

    .venv-vllm/bin/python bench/vllm/decode_step.py MODEL [--async]

Both services run at once. A round sends the same requests to one and then to the other; the result is the median over
the rounds of the ratio of the mean times between tokens, as clients see them: the gateways are included. vLLM turns
asynchronous scheduling off on a CPU; --async keeps it on, in both. Other load on the machine spoils the result.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from async_on_cpu import plugin_path  # bench/vllm
from started import Processes
from stock_vllm import VLLM, vllm_environment
from streamed import ask

from twofold.bench.services import free_port, served
from twofold.engine.registry import ENGINES

OPTIONS = {"dtype": "float32", "block-size": "32", "max-num-seqs": "16"}
CACHE_BYTES = 256 << 20


async def step_s(url: str, model: str, prompts: list[list[int]], tokens: int) -> float:
    """Return the mean seconds between two tokens of concurrent streams, without each stream's first token."""
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(url, model, prompt, tokens) for prompt in prompts))
    whole_s = time.perf_counter() - began_s
    return (whole_s - statistics.mean(answer.first_s for answer in answers)) / (tokens - 1)


def measure(model: Path, rounds: int, streams: int, tokens: int, *, overlapped: bool) -> list[float]:
    """Return the ratio of each round: the worker's decode step over that of `vllm serve`.

    `overlapped` turns asynchronous scheduling on.
    """
    prompts = [[10 + (number * 37 + place) % 400 for place in range(64)] for number in range(streams)]
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
    port = free_port()
    plain = f"http://127.0.0.1:{port}"
    with ExitStack() as running:
        logs = Path(running.enter_context(tempfile.TemporaryDirectory()))
        if overlapped:
            os.environ["PYTHONPATH"] = plugin_path(logs)
        scheduling = ("--async-scheduling" if overlapped else "--no-async-scheduling",)
        processes = running.enter_context(Processes(logs))
        command = [*VLLM, "serve", str(model), "--port", str(port), *options]
        command += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--enforce-eager", "--no-enable-prefix-caching"]
        command += scheduling
        environment = {**ENGINES["vllm"].environment, **vllm_environment(logs)}
        del environment["VLLM_CPU_KVCACHE_SPACE"]  # which overrides the size of the cache
        processes.start("vllm", command, environment)
        processes.wait(f"{plain}/health")
        flags = ("--engine", "vllm", "--colocated", "1", *options, "--kv-cache-memory-bytes", str(CACHE_BYTES))
        ours = running.enter_context(served(model, (*flags, "--", *scheduling)))
        ratios = []
        for number in range(rounds + 1):
            alone_s = asyncio.run(step_s(plain, str(model), prompts, tokens))
            worker_s = asyncio.run(step_s(ours, model.name, prompts, tokens))
            if number:  # the first round warms up
                ratios.append(worker_s / alone_s)
                print(f"round {number}: vllm serve {alone_s * 1e3:.2f} ms, worker {worker_s * 1e3:.2f} ms a token")
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of a model that vLLM serves")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--async", dest="overlapped", action="store_true", help="schedule asynchronously")
    asked = parser.parse_args()
    ratios = measure(asked.model, asked.rounds, asked.streams, asked.tokens, overlapped=asked.overlapped)
    print(f"time between tokens, worker / vllm serve: median {statistics.median(ratios):.3f} of {len(ratios)} rounds")


if __name__ == "__main__":
    main()
