"""Script that prints the outputs of models split over tensor- and pipeline-parallel ranks."""

# Arguments: a temporary directory; then for each model its directory and a list of degrees such as 2x1,1x2 (tensor x
# pipeline). Reads prompts from stdin as JSON; prints a JSON line per model, with its outputs at each degree.

import json
import os
import queue
import sys
from pathlib import Path

import torch

from support.engine_driver import drive
from twofold.engine.base import SequenceStep
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.engine.torch.pool import KvPool
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.request import SamplingParams
from twofold.serving.config import WorkerConfig
from twofold.serving.launch.memory_plan import MemoryPlan
from twofold.serving.worker.engines import RankPipes
from twofold.serving.worker.torch_parts import TorchFactory

OUTPUT, BLOCKS = 6, 96
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, logprobs=1)


def main(files, *models):
    torch.set_num_threads(1)
    prompts = json.load(sys.stdin)
    for directory, splits in zip(models[::2], models[1::2], strict=True):
        model = load_model(directory)
        degrees = [Sharding(*map(int, split.split("x"))) for split in splits.split(",")]
        print(json.dumps([of_split(model, files, split, prompts) for split in degrees]), flush=True)


def of_split(model, files, split, prompts):
    """Run a model with one forked process per rank, and return its outputs."""
    plan = MemoryPlan(layout=model.layout(16), num_blocks=BLOCKS, max_model_len=model.max_model_len)
    factory = TorchFactory(model, "", plan, {"w": ("cpu",) * split.ranks}, None, None, Path())
    spec = WorkerConfig(instance="w", role=Role.MIXED, batcher="mixed", max_num_batched_tokens=512, split=split)
    pipes = RankPipes(split.ranks, f"{files}/store")
    read, write = os.pipe()

    def first():
        engine = TorchEngine(model, KvPool(plan.layout, BLOCKS))
        if split != UNSHARDED:
            engine = factory.parts(spec, 1, pipes).engine
        os.write(write, json.dumps(driven(engine, prompts)).encode())

    # The first rank is forked, too: a rank shards the model in place, and the next split needs the whole model.
    others = [lambda rank=rank: factory.run_rank(spec, rank, pipes) for rank in range(1, split.ranks)]
    pids = [fork(run) for run in (first, *others)]
    pipes.close()
    os.close(write)
    with os.fdopen(read) as pipe:
        said = json.load(pipe)
    for pid in pids:
        os.waitpid(pid, 0)
    return said


def fork(run):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return pid


def driven(engine, prompts):
    """Return engine results that must be equal for every degree of parallelism."""
    sizes = iter([40, 200, 3] * 1000)
    outputs = drive(engine, prompts, GREEDY, chunk=lambda: next(sizes), max_batch=3)
    layers = []
    engine.run([SequenceStep("a", [5, 6, 7], 0, [0], None)], layers.append)
    tokens = [[(s.token_id, s.logprob) for s in output] for output in outputs]
    return [tokens, layers, first_tokens(engine, prompts)]


def first_tokens(engine, prompts):
    """Return the first output token of each prompt; chunks of the prompts run on several pipeline stages at once."""
    begin = getattr(engine, "begin", lambda steps, on_layer, ended: ended(engine.run(steps, on_layer)))
    ended, begun, block = queue.SimpleQueue(), 0, 0
    for prompt in prompts:
        table = list(range(block, block - (-len(prompt) // 16)))
        block += len(table)
        for start in range(0, len(prompt), 40):
            chunk = prompt[start : start + 40]
            sampling = GREEDY if start + len(chunk) == len(prompt) else None
            begin([SequenceStep("a", chunk, start, table, sampling)], None, ended.put)
            begun += 1
    results = [ended.get(timeout=600) for _ in range(begun)]
    return [sampled.token_id for (sampled,) in results if sampled is not None]


if __name__ == "__main__":
    main(*sys.argv[1:])
